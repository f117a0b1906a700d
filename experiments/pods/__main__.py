"""`python -m experiments.pods`."""

from experiments.pods.run import main

main()
