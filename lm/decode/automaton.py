"""A regular expression over a vocabulary of bytes: a table of the state that each token leads to.

The expression becomes an automaton over characters (interegular), then over the bytes of UTF-8, then over tokens. Most
tokens act alike in every state, so tokens are kept in classes: a table [states, classes] and each token's class.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import interegular
import numpy as np
from interegular.fsm import FSM, anything_else
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, dijkstra

from lm.base.errors import UsageError

DEAD, START = 0, 1
NEVER = np.iinfo(np.int32).max
LARGEST_TABLE = 1 << 26  # entries of int32: 256 MiB
LARGEST_COUNT = 1000


class Table(NamedTuple):
    """What each token does: from state s, token v leads to `next_SC[s, class_V[v]]`; `DEAD` is forbidden.

    `distance_S` int32 is how many tokens at least complete the text (0: it is complete, `NEVER`: nothing does);
    `last_S` marks states that nothing can follow.
    """

    next_SC: np.ndarray
    class_V: np.ndarray
    distance_S: np.ndarray
    last_S: np.ndarray


def over_tokens(pattern: str, pieces: Sequence[bytes]) -> Table:
    """The table of `pattern`, which the whole text must match, for tokens that stand for `pieces`.

    Tokens without bytes are always forbidden. Python's syntax; character classes such as `\\d` are those of ASCII.

    Raises:
      UsageError: not a regular expression, a construct that no automaton has, nothing or only the empty text matches,
        the tokens cannot write any match, or the table would have over `LARGEST_TABLE` entries.
    """
    byte_SK, class_of_byte, accepts_S = _over_bytes(_over_characters(pattern))
    next_SC, class_V = _composed(byte_SK, class_of_byte, pieces)
    distance_S = _distances(next_SC, accepts_S)
    if distance_S[START] == NEVER:
        raise UsageError("the vocabulary cannot write any text that matches", where=pattern)
    last_S = ~np.any(distance_S[next_SC] != NEVER, axis=1)
    if last_S[START]:
        raise UsageError("only the empty text matches", where=pattern)
    return Table(next_SC, class_V, distance_S, last_S)


def _over_characters(pattern: str) -> FSM:
    counts = [int(count) for braces in re.findall(r"\{([\d,]+)\}", pattern) for count in braces.split(",") if count]
    if max(counts, default=0) > LARGEST_COUNT:
        what = f"{max(counts)} repetitions are too many for an automaton"
        raise UsageError(what, where=_short(pattern), do=f"At most {LARGEST_COUNT} are supported.")
    try:
        machine = interegular.parse_pattern(pattern).to_fsm()
    except interegular.Unsupported as error:
        raise UsageError(f"a construct of it cannot be held: {error}", where=_short(pattern)) from error
    except Exception as error:
        detail = str(error).strip() or "it cannot be parsed"
        raise UsageError(f"not a regular expression: {detail}", where=_short(pattern)) from error
    if machine.empty():
        raise UsageError("no text matches", where=_short(pattern))
    return machine


def _short(pattern: str) -> str:
    return pattern if len(pattern) <= 80 else pattern[:77] + "..."


def _over_bytes(machine: FSM) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From characters to the bytes of UTF-8: next states [S, K], the class [256] of each byte, and who accepts [S].

    Between the bytes of a character the state is a pair: where in the encoding, and the state before the character.
    """
    states = sorted(machine.states, key=lambda state: state != machine.initial)
    number = {state: 1 + i for i, state in enumerate(states)}
    symbols = max(machine.alphabet._symbol_mapping.values(), default=-1) + 1
    step_SY = np.zeros((len(states) + 1, symbols + 1), np.int32)  # the last column: no character at all
    for state, moves in machine.map.items():
        for symbol, after in moves.items():
            step_SY[number[state], symbol] = number[after]
    lead_NK, class_of_byte = np.unique(_encoding(machine, symbols), axis=1, return_inverse=True)
    (N, K), S = lead_NK.shape, len(step_SY)
    # State n * S + s stands within node n, where the state before the character is s; the root is node 0.
    next_NSK = np.empty((N, S, K), np.int32)
    for n, k in np.ndindex(N, K):
        lead = lead_NK[n, k]
        next_NSK[n, :, k] = step_SY[:, lead] if lead <= symbols else (lead - symbols - 1) * S + np.arange(S)
    next_SK = next_NSK.reshape(N * S, K)
    next_SK[next_SK % S == DEAD] = DEAD
    accepts_S = np.zeros(N * S, bool)
    accepts_S[[number[state] for state in machine.finals]] = True
    kept = np.concatenate([[DEAD], _useful(next_SK, accepts_S)])
    renumber = np.zeros(N * S, np.int32)
    renumber[kept] = np.arange(len(kept))
    return renumber[next_SK[kept]], class_of_byte.reshape(-1), accepts_S[kept]


def _encoding(machine: FSM, symbols: int) -> np.ndarray:
    """A tree of UTF-8 whose leaves are the machine's symbols: nodes [N, 256], the root first.

    Entries up to `symbols` are symbols (`symbols` itself: no character), above stand 1 + symbols + a node. Equal nodes
    are one.
    """
    none = symbols
    mapping = machine.alphabet._symbol_mapping
    symbol_U = np.full(0x110000, mapping.get(anything_else, none), np.int64)
    for character, symbol in mapping.items():
        if isinstance(character, str):
            symbol_U[ord(character)] = symbol
    symbol_U[0xD800:0xE000] = none
    known = {np.full(64, none, np.int64).tobytes(): none}
    root = np.full(256, none, np.int64)
    rows = [root]

    def node(leads: np.ndarray) -> int:
        """The entry for a node whose bytes 0x80 to 0xBF lead to `leads`."""
        if (key := leads.tobytes()) not in known:
            known[key] = 1 + symbols + len(rows)
            rows.append(np.pad(leads, (0x80, 0x40), constant_values=none))
        return known[key]

    def fold(leads: np.ndarray) -> np.ndarray:
        return np.array([node(block) for block in leads.reshape(-1, 64)])

    two = fold(symbol_U)  # [17408]: a node for the last byte of each 64 characters
    short = two.copy()
    short[:32] = none  # characters that two bytes hold must not be written with three
    three = fold(short)  # [272]
    short = np.full(5 * 64, none, np.int64)
    short[16 : len(three)] = three[16:]  # and those of three bytes not with four
    four = fold(short)  # [5]
    root[:0x80] = symbol_U[:0x80]
    root[0xC2:0xE0] = two[2:32]
    root[0xE0:0xF0] = three[:16]
    root[0xF0:0xF5] = four
    return np.array(rows)


def _useful(next_SK: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """States that are reached from the start and from which a whole text is, the start first."""
    finite = _distances(next_SK, accepts_S) != NEVER
    reached = breadth_first_order(_edges(next_SK), START, return_predecessors=False)
    return np.array([state for state in reached if finite[state]])


def _edges(next_SK: np.ndarray) -> csr_array:
    S = len(next_SK)
    pairs = np.unique(np.arange(S)[:, None] * S + next_SK)
    before, after = pairs // S, pairs % S
    alive = after != DEAD
    return csr_array((np.ones(alive.sum(), np.int8), (before[alive], after[alive])), shape=(S, S))


def _distances(next_SK: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """Steps at least from each state to one that accepts."""
    ends = np.flatnonzero(accepts_S)
    steps = dijkstra(_edges(next_SK).T.tocsr(), indices=ends, unweighted=True, min_only=True)
    return np.where(np.isinf(steps), NEVER, steps).astype(np.int32)


def _composed(byte_SK: np.ndarray, class_of_byte: np.ndarray, pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Next states by class of token [S, C] and the class [V] of each token.

    A token is a function of the state; tokens with the same function are one class. Functions are composed byte by
    byte, each distinct composition once: a vocabulary has few of them, where states x tokens would be many.
    """
    S, K = byte_SK.shape
    lengths = np.array([len(piece) for piece in pieces])
    functions = [np.full(S, DEAD, np.int32), np.arange(S, dtype=np.int32)]  # of dead tokens; of no byte yet
    known = {function.tobytes(): i for i, function in enumerate(functions)}
    class_V = np.where(lengths == 0, 0, 1)
    for at in range(lengths.max(initial=0)):
        alive = np.flatnonzero((lengths > at) & (class_V != 0))
        byte = class_of_byte[[pieces[token][at] for token in alive.tolist()]]
        pairs, which = np.unique(class_V[alive] * K + byte, return_inverse=True)
        composed = np.empty(len(pairs), np.int64)
        for i, pair in enumerate(pairs):
            function = byte_SK[functions[pair // K], pair % K]
            composed[i] = known.setdefault(function.tobytes(), len(functions))
            if composed[i] == len(functions):
                functions.append(function)
        if len(functions) * S > LARGEST_TABLE:
            raise UsageError(
                f"the table of the constraint would be over {LARGEST_TABLE} entries ({S} states)",
                where="constraint",
                do="Lower its counts (lengths, numbers of items), or use a smaller vocabulary.",
            )
        class_V[alive] = composed[which.reshape(-1)]
    used, class_V = np.unique(class_V, return_inverse=True)
    return np.stack([functions[i] for i in used], axis=1), class_V.reshape(-1).astype(np.int32)
