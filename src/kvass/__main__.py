"""`python -m kvass` is `kvass`."""

from kvass.cli import main

main()
