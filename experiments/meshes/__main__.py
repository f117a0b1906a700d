"""`python -m experiments.meshes`."""

from experiments.meshes.run import main

main()
