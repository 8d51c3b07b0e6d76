"""`python -m jaxbench.check`."""

import sys

from jaxbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
