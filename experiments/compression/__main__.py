"""`python -m experiments.compression`."""

from experiments.compression.run import main

main()
