"""From text to scaling laws: train a grid of language models, fit their loss, predict the next run."""

__version__ = "0.1.0"
