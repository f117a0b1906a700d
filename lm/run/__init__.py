"""The run folder: configuration, records, checkpoints, lock."""
