"""`python -m jaxbench.report results/`."""

import sys

from jaxbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
