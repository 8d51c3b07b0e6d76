#!/usr/bin/env bash
# One process of a job runs this: an srun task, or, without Slurm, the only process of a host:
#   launch/run.sh --config configs/llama31_8b_bf16.yaml --output results/first
# It works with any launcher that sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
set -euo pipefail
root=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -z "${JAXBENCH_SYSTEM:-}" ] || . "$root/launch/env/$JAXBENCH_SYSTEM.sh"

python=python3
if [ -n "${JAXBENCH_VENV:-}" ]; then
  python=$JAXBENCH_VENV/bin/python
elif [ -z "${RUN_CONF_IMAGE:-}" ] && [ -x "$root/.venv/bin/python" ]; then # an image has packages of its own
  python=$root/.venv/bin/python
fi
# Use only packages of the environment: none from PYTHONPATH, from the working directory, or from the user's home.
unset "${!PYTHON@}"
export PYTHONPATH=$root PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1

# JAX gives a Slurm task only the device of its local id, and a process without others every device that it sees. The only
# process of a node needs those of the job, which may be fewer than the node has.
if [ -n "${JAXBENCH_LOCAL_DEVICES:-}" ] && [ "${SLURM_NTASKS_PER_NODE:-0}" = 1 ]; then
  export JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((JAXBENCH_LOCAL_DEVICES - 1)))
fi

. "$root/launch/near.sh"
# In the shell of an allocation SLURM_NTASKS_PER_NODE is set too, but a process there is alone and has all GPUs.
[ "${SLURM_STEP_NUM_TASKS:-1}" = 1 ] || bind_near "${SLURM_LOCALID:-0}" "${SLURM_NTASKS_PER_NODE:-1}"

rank=${SLURM_PROCID:-${JAX_PROCESS_ID:-0}}
node=${SLURMD_NODENAME:-$(hostname)}
name=${JAXBENCH_COMMAND:-train} # check comes before train
command=("$python" -m "jaxbench.$name" "$@")
if [ "$name" = train ] && [[ ",${JAXBENCH_NSYS_RANKS:-}," == *",$rank,"* ]]; then
  nsys=(nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop --trace=cuda,nvtx --nic-metrics=true
    --cpuctxsw=none --kill=none --force-overwrite=true
    --output="$JAXBENCH_RESULTS/$SLURM_JOB_ID/nsys/${JAXBENCH_NAME}g_${SLURM_JOB_ID}_${SLURM_NODEID}_${SLURM_LOCALID}")
  if [ "${RUN_CONF_PROFILE_CPU:-false}" = true ]; then nsys+=(--sample=process-tree); else nsys+=(--sample=none); fi
  # Only one process of a node can read the counters of the GPUs.
  if [ "${RUN_CONF_PROFILE_GPU_METRICS:-false}" = true ] && [ "$SLURM_LOCALID" = 0 ]; then
    nsys+=(--gpu-metrics-devices=all)
  fi
  mkdir -p "$JAXBENCH_RESULTS/$SLURM_JOB_ID/nsys"
  command=("${nsys[@]}" "${command[@]}")
fi
[ -n "${JAXBENCH_MESSAGES:-}" ] || exec "${command[@]}"

# From here on we are in a job. Slurm's signals reach the process itself. Its last words and its exit status go to standard
# error, through srun's own connection. The first exit status there decides the verdict. Everything else is the rank's log.
trap : TERM INT USR1
exec 3>&2 2> /dev/null # otherwise the shell says there that a signal ended the process
export JAXBENCH_RANK="rank $rank on $node"
end() { # STATUS [ERROR]
  [ -z "${2:-}" ] || echo "$JAXBENCH_RANK: error: $2" >&3
  [ "$1" = 0 ] || echo "$JAXBENCH_RANK: exit $1" >&3
  exit "$1"
}
if [ -n "${JAXBENCH_LOGS:-}" ]; then
  own=$JAXBENCH_LOGS-$rank.log
  reason=$( { : >> "$own"; } 2>&1) || end 5 "its log $own cannot be written: ${reason##*: }; every node has to see STAGE_PATH"
  exec >> "$own"
fi
[ "$rank" = 0 ] || echo "start $((${SLURM_RESTART_COUNT:-0} + 1)), on $node" # marks where this start begins in the log
status=0
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("jax") is None)' || status=$?
[ "$status" -le 128 ] || end "$status" # a signal ended it
[ "$status" = 0 ] || end 2 "no Python with jax at $python; launch/setup.sh installs one into a folder that every node has to see"
before=$(oom_kills)
"${command[@]}" 2>&1 || status=$?
if [ "$status" = 137 ] && [ "$(oom_kills)" != "$before" ]; then
  end 4 "out of host memory: the kernel killed the process"
fi
end "$status"
