"""Batches and a model to a finished run."""
