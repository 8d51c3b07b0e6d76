# bind_near LOCAL_ID PROCESSES [ROOT]: binds this shell and its children to the CPUs of the NUMA node of its GPU. Copies to a
# GPU of another node cross the link between them, and memory is allocated on the node where a process first runs.
# Does nothing unless each GPU of the host has one process, since otherwise only Slurm knows which process has which GPU.
bind_near() {
  local local_id=$1 processes=$2 root=${3:-} gpus cpus
  gpus=("$root"/proc/driver/nvidia/gpus/*) # their names are PCI addresses, so the list is in the order of these
  if [ "${#gpus[@]}" != "$processes" ] || [ ! -d "${gpus[0]}" ]; then return; fi
  export CUDA_DEVICE_ORDER=PCI_BUS_ID
  cpus=$(cat "$root/sys/bus/pci/devices/$(basename "${gpus[$local_id]}")/local_cpulist" 2> /dev/null) || return 0
  taskset --cpu-list --pid "$cpus" $$ > /dev/null ||
    echo "warning: not bound to CPUs $cpus of GPU $local_id" >&2 # taskset has printed why
}
# oom_kills [ROOT]: how many processes the kernel has killed because memory ran out, in this shell's control group or else on
# this host. Prints nothing if the kernel does not say.
oom_kills() {
  local group=${1:-}/sys/fs/cgroup$(sed -n 's/^0:://p' "${1:-}/proc/self/cgroup" 2> /dev/null)
  grep -h '^oom_kill ' "$group/memory.events" 2> /dev/null || grep -h '^oom_kill ' "${1:-}/proc/vmstat" 2> /dev/null || true
}
