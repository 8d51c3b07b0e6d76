"""`python -m jaxbench.report results/`."""

import signal
import sys

from jaxbench.report.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report | head` ends quietly
    sys.exit(main())
