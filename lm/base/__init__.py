"""What every room stands on: strict configs, errors, whole-or-nothing files, progress."""
