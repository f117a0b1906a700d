"""Ours, peers and the machine's own limits, measured in one run."""
