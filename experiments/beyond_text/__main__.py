"""`python -m experiments.beyond_text`."""

from experiments.beyond_text.run import main

main()
