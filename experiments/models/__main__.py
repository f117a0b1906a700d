"""`python -m experiments.models`."""

from experiments.models.run import main

main()
