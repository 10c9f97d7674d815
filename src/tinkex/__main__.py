"""`python -m tinkex` is the command line, where no script `tinkex` is on the path."""

from tinkex.cli import main

main()
