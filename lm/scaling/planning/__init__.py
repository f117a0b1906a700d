"""From a fit to the next run."""
