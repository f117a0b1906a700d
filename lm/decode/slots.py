"""How many slots a cache gets: lengths are rounded up to compile few programs, and every token reads all slots."""

SMALLEST_BUCKET = 16
CHUNK = 512  # tokens of a prompt in one pass
STEP = 64  # slots come in multiples of it


def bucket(length: int) -> int:
    """The next power of two, above `CHUNK` the next multiple of it."""
    if length > CHUNK:
        return -(-length // CHUNK) * CHUNK
    return max(SMALLEST_BUCKET, 1 << max(length - 1, 0).bit_length())


def slots_for(tokens: int) -> int:
    """Slots that hold so many tokens."""
    return -(-tokens // STEP) * STEP


def more_slots(slots: int, tokens: int) -> int:
    """Half as many slots again, but no more than `tokens` will need."""
    return min(slots_for(slots + slots // 2), slots_for(tokens))
