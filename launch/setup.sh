#!/usr/bin/env bash
# Installs jaxbench for launch/submit.sh, on a login node, into folders that all nodes share:
#   launch/setup.sh                        a virtual environment, .venv in the source tree or JAXBENCH_VENV
#   RUN_CONF_IMAGE=x.sqsh launch/setup.sh  a container image for enroot and pyxis, on IMAGE (docker://python:3.12)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if [ -n "${RUN_CONF_IMAGE:-}" ]; then
  [ ! -e "$RUN_CONF_IMAGE" ] || { echo "error: $RUN_CONF_IMAGE is there already" >&2; exit 2; }
  command -v enroot > /dev/null || { echo "error: enroot is not installed here" >&2; exit 2; }
  box=jaxbench-$$ base=$RUN_CONF_IMAGE.base
  trap 'rm -f "$base"; enroot remove --force "$box" > /dev/null 2>&1 || true' EXIT
  enroot import --output "$base" "${IMAGE:-docker://python:3.12}"
  enroot create --name "$box" "$base"
  enroot start --root --rw --mount "$root:$root" "$box" \
    python3 -m pip install --constraint "$root/constraints.txt" "$root[${EXTRAS:-gpu}]"
  enroot export --output "$RUN_CONF_IMAGE" "$box"
  echo "export RUN_CONF_IMAGE=$RUN_CONF_IMAGE before launch/submit.sh"
  exit
fi

venv=${JAXBENCH_VENV:-$root/.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $python is older than 3.11; set PYTHON" >&2; exit 2; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --constraint constraints.txt --editable ".[${EXTRAS:-gpu}]"
"$venv/bin/python" -m jaxbench list > /dev/null
echo "jaxbench is installed in $venv"
