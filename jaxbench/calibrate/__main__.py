"""`python -m jaxbench.calibrate --output mine.csv`."""

import sys

from jaxbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
