#!/usr/bin/env bash
# launch/submit.sh llama31_405b_fp8 --gpus 512 -- --checkpoint   (docs/reference/launch.md; options after -- go to train)
# The published variables work too: WORKLOAD=llama3.1 MODEL_SIZE=405b DTYPE=fp8 JOB_TOTAL_GPUS=512 launch/submit.sh
# launch/sweep.sh is the same script. Its name decides what it runs.
set -euo pipefail
root=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=$(basename "${BASH_SOURCE[0]}" .sh)
venv=${JAXBENCH_VENV:-$root/.venv}
python=$venv/bin/python
if [ ! -x "$python" ]; then
  if [ -z "${RUN_CONF_IMAGE:-}" ]; then
    if [ -L "$python" ] || [ -e "$python" ]; then
      reason=$("$python" -c "" 2>&1) || true
      echo "error: $python ($(realpath -m "$python")) cannot be executed: ${reason##*: }" >&2
    else
      echo "error: there is no virtual environment in $venv: run launch/setup.sh, or name one in JAXBENCH_VENV, or an image in RUN_CONF_IMAGE" >&2
    fi
    exit 2
  fi
  python=python3 # for the checks on this machine; the image has its own
  if ! "$python" -E -c 'import sys, yaml; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
    echo "error: launch/$name.sh needs a python3 of 3.11 or newer with PyYAML here, or the virtual environment of launch/setup.sh" >&2
    exit 2
  fi
fi
exec "$python" -E "$root/launch/$name.py" "$@"
