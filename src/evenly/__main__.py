"""`python -m evenly` is the command line."""

from evenly.cli import main

main()
