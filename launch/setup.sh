#!/usr/bin/env bash
# Installs jaxbench for launch/submit.sh. --help says what it installs, and where.
set -euo pipefail
root=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat << 'END'
usage: launch/setup.sh

Installs jaxbench for launch/submit.sh, on a login node, into folders that all nodes share: a virtual environment, or
with RUN_CONF_IMAGE a container image. Environment variables:

  JAXBENCH_VENV   the virtual environment (default: .venv in the source tree); launch/submit.sh reads it too
  PYTHON          the Python that makes it, 3.11 or newer (default: python3)
  EXTRAS          extras of pyproject.toml to install: gpu (default), plan, te, dev, docs; several are separated by commas
  RUN_CONF_IMAGE  a container image for enroot and pyxis to make instead, such as /shared/jaxbench.sqsh
  IMAGE           what that image is built on (default: docker://python:3.12)
END
}

case ${1:-} in
  "") ;;
  -h | --help) usage && exit ;;
  *) echo "error: launch/setup.sh: unknown argument $1; --help names its environment variables" >&2 && exit 2 ;;
esac

image=${RUN_CONF_IMAGE:+$(realpath -ms -- "$RUN_CONF_IMAGE")}
venv=$(realpath -ms -- "${JAXBENCH_VENV:-$root/.venv}")
cd -- "$root"
unset PYTHONPATH PYTHONHOME # otherwise pip thinks that packages in these are installed

extras=${EXTRAS:-gpu}
[[ "$extras" =~ ^(gpu|plan|te|dev|docs)(,(gpu|plan|te|dev|docs))*$ ]] || {
  echo "error: EXTRAS=$extras: expected gpu, plan, te, dev or docs, separated by commas" >&2
  exit 2
}
size="few packages, none for GPUs"
[[ ",$extras," != *,plan,* ]] || size="XLA's compiler for GPUs, about 1.4 GB"
[[ ! ",$extras," =~ ,(gpu|te), ]] || size="JAX with CUDA, about 2.5 GB, 4.7 GB when unpacked"

if [ -n "$image" ]; then
  [ ! -e "$image" ] || { echo "error: $image is there already" >&2; exit 2; }
  command -v enroot > /dev/null || { echo "error: enroot is not installed here" >&2; exit 2; }
  box=jaxbench-$$ base=$image.base from=${IMAGE:-docker://python:3.12}
  trap 'rm -f "$base"; enroot remove --force "$box" > /dev/null 2>&1 || true' EXIT
  echo "1/3 fetching $from"
  enroot import --output "$base" "$from"
  enroot create --name "$box" "$base"
  echo "2/3 installing jaxbench's packages ($extras): $size; some minutes"
  enroot start --root --rw --mount "$root:$root" "$box" \
    python3 -m pip install --constraint "$root/constraints.txt" "$root[$extras]"
  echo "3/3 writing $image"
  enroot export --output "$image" "$box"
  echo "export RUN_CONF_IMAGE=$(printf %q "$image") before launch/submit.sh"
  exit
fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { echo "error: $python is missing or older than 3.11; set PYTHON" >&2; exit 2; }
echo "1/3 making a virtual environment in $venv with $("$python" --version)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "2/3 installing jaxbench and its packages ($extras): $size; some minutes"
"$venv/bin/pip" install --constraint constraints.txt --editable ".[$extras]"
echo "3/3 trying it"
"$venv/bin/python" -m jaxbench list > /dev/null
echo "jaxbench is installed in $venv"
