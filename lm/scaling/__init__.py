"""A run table to laws to a plan. Works on anybody's table; loads neither flax nor orbax."""
