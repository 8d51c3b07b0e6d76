"""`python -m jaxbench.report results/`."""

import sys

from jaxbench.report.command import main

if __name__ == "__main__":
    sys.exit(main())
