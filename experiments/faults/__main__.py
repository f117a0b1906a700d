"""`python -m experiments.faults`."""

from experiments.faults.run import main

if __name__ == "__main__":  # the server that commands are forked from imports this file too
    main()
