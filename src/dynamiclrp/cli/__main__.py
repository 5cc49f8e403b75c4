"""`python -m dynamiclrp.cli` is the command `dynamiclrp`."""

from . import main

main()
