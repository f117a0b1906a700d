"""Checkpoints of other houses in and out: Hugging Face folders, without PyTorch."""
