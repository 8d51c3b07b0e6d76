#!/usr/bin/env bash
# launch/submit.sh configs/llama31_405b_fp8.yaml --gpus 512   (docs/launch.md)
# The published variables work too: WORKLOAD=llama31 MODEL_SIZE=405b DTYPE=fp8 JOB_TOTAL_GPUS=512 launch/submit.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${JAXBENCH_VENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$root/launch/submit.py" "$@"
