"""`python -m jaxbench.plan --config configs/llama2_70b_bf16.yaml --gpus 64`."""

import sys

from jaxbench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
