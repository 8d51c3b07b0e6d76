# bind_near LOCAL_ID PROCESSES [ROOT]: keeps this shell, and what it starts, on the CPUs of the NUMA node of its GPU. What a
# process copies from and to a GPU of another node crosses the link between them, and its memory is where it first runs.
# Does nothing unless the processes are as many as the GPUs of the host: else only Slurm knows which GPU is whose.
bind_near() {
  local local_id=$1 processes=$2 root=${3:-} gpus cpus
  gpus=("$root"/proc/driver/nvidia/gpus/*) # named by PCI addresses, and so in their order
  if [ "${#gpus[@]}" != "$processes" ] || [ ! -d "${gpus[0]}" ]; then return; fi
  export CUDA_DEVICE_ORDER=PCI_BUS_ID
  cpus=$(cat "$root/sys/bus/pci/devices/$(basename "${gpus[$local_id]}")/local_cpulist" 2> /dev/null) || return 0
  taskset --cpu-list --pid "$cpus" $$ > /dev/null ||
    echo "warning: not bound to CPUs $cpus of GPU $local_id" >&2 # behind taskset's own words
}
