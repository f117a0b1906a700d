"""`python -m experiments.coverage`."""

from experiments.coverage.run import main

main()
