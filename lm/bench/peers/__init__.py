"""Programs that ours are measured against; each runs in an interpreter of its own, which need not hold this package."""
