# Eight H100 to a node, NVLink switches inside, one InfiniBand adapter per GPU between nodes.

# Collectives and matmuls run at the same time on the GPU's hardware queues. With a single queue they would run in the
# order in which the host launched them. Tensor parallelism that is overlapped by hand needs this order; XLA does not.
unset CUDA_DEVICE_MAX_CONNECTIONS

# NVLink SHARP takes GPU memory for its buffers and was switched off in the published runs.
export NCCL_NVLS_ENABLE=0

# An InfiniBand service level with adaptive routing, as in the published Llama 2 run.
export NCCL_IB_SL=1

# A transfer that meets a broken link gives up after about 4 s x 7 retries instead of one: long enough for a link flap.
export NCCL_IB_TIMEOUT=20
