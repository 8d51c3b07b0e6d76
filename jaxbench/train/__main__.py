"""`python -m jaxbench.train --config configs/llama2_70b_bf16.yaml`: one benchmark run."""

import sys

from jaxbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
