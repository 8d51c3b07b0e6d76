"""The GPUs that we know, one entry for each: its peaks, memory and links, and XLA's description of
it.

A new GPU is a new entry in `GPUS`. For entries without `chip` we know only the peaks: `train` runs
on them, but `plan` cannot compile for them.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxbench.base.errors import RecipeError

MEMORY_FRACTION = 0.92
"""Share of GPU memory that XLA's allocator takes. The rest is for NCCL's buffers, cuDNN, cuBLAS and
the CUDA context."""

ABSENT_FRACTION = 0.8
"""Share of an absent GPU's memory with which XLA's scheduler plans. With a real GPU it plans with
all that its allocator takes (openxla/xla, `GetSchedulerMemoryLimit` in
service/gpu/gpu_hlo_schedule.cc, `PyClient::Compile`)."""

HOST_FRACTION = 0.9
"""Share of a host's memory that offloaded activations may take."""

FREE_BYTES = 2 * 2**30
"""Bytes that we keep free inside that share, for fragmentation of the allocator and for buffers
that kernels take at run time."""

TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{device}"
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
device_description_str: "{device}"
"""
"""XLA's description of a GPU, a text proto (`GpuTargetConfigProto`). The values that are written
out here are the same on Hopper and Blackwell (openxla/xla,
xla/backends/gpu/target_config/specs)."""


Capability = tuple[int, int]
"""Major and minor version of a GPU's compute capability."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Properties of a chip that the compiler needs in addition to its memory and compute
    capability: the number of cores (streaming multiprocessors), the bytes of L2 cache, and the
    clock in GHz."""

    cores: int
    l2: int
    clock: float


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its node.

    `name` consists of words of the driver's name for the GPU. `capability` is its compute
    capability. `tflops` are dense peaks of the tensor cores by dtype. `fp32` is the peak of the
    CUDA cores, `fp64` and `int8` are the highest of any unit, also in TFLOP/s. `memory` is in
    bytes, as the driver reports it.

    Bandwidths are in GB/s (1e9 bytes), for links in one direction. `nvlink` joins the GPUs of a
    `domain`, and `nic` is each GPU's share of the network between domains. `host` is each GPU's
    link to its host's memory. If it is `host_shared`, the network adapter uses the same lanes.
    `host_memory` is in bytes, for a whole host.

    `latency` is of a step between domains, in microseconds. The default is the one by which NCCL
    chooses algorithms on InfiniBand (NVIDIA/nccl src/graph/tuning.cc). `leaf` domains are below one
    leaf switch, or all of them if it is 0. The GPUs below it send up to `oversubscription` times
    what its uplinks carry.

    `power` is the most watts that the GPU draws by itself, 0 if unknown.

    `node` is the number of GPUs of one host. A domain is one node (DGX) or many (18 in GB200
    NVL72).
    """

    name: str
    capability: Capability
    tflops: dict[str, float]
    fp32: float = 0.0
    fp64: float = 0.0
    int8: float = 0.0
    device: str = ""
    memory: int = 0
    bandwidth: float = 0.0
    nvlink: float = 0.0
    nic: float = 0.0
    latency: float = 14.0
    leaf: int = 0
    oversubscription: float = 1.0
    host: float = 0.0
    host_shared: bool = True
    host_memory: int = 0
    power: float = 0.0
    node: int = 8
    domain: int = 8
    chip: Chip | None = None

    @property
    def allocated(self) -> int:
        """Bytes that XLA's allocator takes."""
        return int(self.memory * MEMORY_FRACTION)

    @property
    def memory_limit(self) -> int:
        """Bytes that a program may use."""
        return self.allocated - FREE_BYTES

    @property
    def host_limit(self) -> int:
        """Bytes of the host's memory for each GPU."""
        return int(self.host_memory * HOST_FRACTION) // self.node

    def multiplies(self, dtype: str) -> bool:
        """True if the GPU's tensor cores can multiply in this `precision.dtype`."""
        return dtype in self.tflops or dtype == "fp32"

    @property
    def description(self) -> str:
        """`TARGET` filled in for this GPU. Its memory is such that the scheduler has the limit that
        it has on a real GPU."""
        assert self.chip is not None
        memory = round(self.allocated / ABSENT_FRACTION)
        bandwidth = round(self.bandwidth * 1e9)
        major, minor = self.capability
        return TARGET.format(
            device=self.device, memory=memory, bandwidth=bandwidth, major=major, minor=minor,
            **asdict(self.chip),
        )  # fmt: skip

    def spread(self, count: int) -> tuple[int, int, int] | None:
        """How a job of `count` GPUs is spread: (domains, nodes of each domain, GPUs of each node).
        None if the GPUs do not fill whole nodes, or do not fill domains evenly.

        A job that needs several domains takes the same number of nodes in each, as Slurm does with
        --segment, and as few domains as that allows. For example, 512 GPUs on NVL72 take 64 of the
        72 GPUs in each of 8 domains. If twice as many domains as would hold the GPUs, or more, were
        needed, the count is refused.
        """
        if count < self.node:
            return 1, 1, count
        nodes, rest = divmod(count, self.node)
        least = -(-count // self.domain)
        even = (n for n in range(least, 2 * least) if rest == 0 and nodes % n == 0)
        domains = next(even, None)
        return (domains, nodes // domains, self.node) if domains else None

    def nearest(self, count: int) -> list[int]:
        """The counts nearest to `count`, one below and one above, that can be `spread`."""
        below = (n for n in range(count - 1, 0, -1) if self.spread(n))
        above = (n for n in range(count + 1, count + self.domain + 1) if self.spread(n))
        return [n for n in (next(below, None), next(above, None)) if n]


H100 = Gpu(
    name="H100",
    capability=(9, 0),
    tflops={"bf16": 989.0, "fp8": 1979.0},
    fp32=67.0,
    fp64=67.0,
    int8=1979.0,
    device="NVIDIA H100 80GB HBM3",
    memory=84942979072,
    bandwidth=3352.32,
    nvlink=450.0,
    nic=50.0,
    host=55.0,
    host_memory=2048 * 2**30,
    power=700.0,
    chip=Chip(cores=132, l2=52428800, clock=1.98),
)
"""The GPU of most published rows."""

B200 = Gpu(
    name="B200",
    capability=(10, 0),
    tflops={"bf16": 2250.0, "fp8": 4500.0, "mxfp8": 4500.0, "nvfp4": 9000.0},
    fp32=75.0,
    fp64=37.0,
    int8=4500.0,
    device="NVIDIA B200",
    memory=191514411008,
    bandwidth=7672.32,
    nvlink=900.0,
    nic=50.0,
    host=55.0,
    host_memory=2048 * 2**30,
    power=1000.0,
    chip=Chip(cores=148, l2=132644864, clock=1.965),
)

GB200 = Gpu(
    name="GB200",
    capability=(10, 0),
    tflops={"bf16": 2450.0, "fp8": 4900.0, "mxfp8": 4900.0, "nvfp4": 9800.0},
    fp32=80.0,
    fp64=40.0,
    int8=5000.0,
    device="NVIDIA GB200",
    memory=197897748480,
    bandwidth=7928.064,
    nvlink=900.0,
    nic=50.0,
    host=170.0,
    host_shared=False,
    host_memory=960 * 10**9,
    power=1200.0,
    node=4,
    domain=72,
    chip=Chip(cores=152, l2=135528448, clock=2.062),
)

GPUS = (
    Gpu(name="A100", capability=(8, 0), tflops={"bf16": 312.0}),
    H100,
    replace(H100, name="H200", device="NVIDIA H200", memory=151397597184, bandwidth=4800.0),
    # The Hopper chips with less power, on cards. The published figures are not for them.
    Gpu(name="H100 PCIe", capability=(9, 0), tflops={"bf16": 756.5, "fp8": 1513.0}),
    Gpu(name="H100 NVL", capability=(9, 0), tflops={"bf16": 835.5, "fp8": 1670.5}),
    Gpu(name="H200 NVL", capability=(9, 0), tflops={"bf16": 835.5, "fp8": 1670.5}),
    B200,
    replace(
        B200,
        name="B300",
        capability=(10, 3),
        tflops={"bf16": 2250.0, "fp8": 4500.0, "mxfp8": 4500.0, "nvfp4": 13500.0},
        fp64=1.25,
        int8=165.0,
        device="NVIDIA B300",
        power=0.0,
        memory=297021865984,
        bandwidth=7936.0,
        nic=100.0,
        chip=Chip(cores=158, l2=135528448, clock=1.965),
    ),
    GB200,
    replace(
        GB200,
        name="GB300",
        capability=(10, 3),
        tflops={"bf16": 2450.0, "fp8": 4900.0, "mxfp8": 4900.0, "nvfp4": 14700.0},
        fp64=1.4,
        int8=165.0,
        device="NVIDIA GB300",
        power=1400.0,
        memory=297021079552,
        bandwidth=7928.064,
        nic=100.0,
        chip=Chip(cores=152, l2=135528448, clock=2.07),
    ),
)
"""Sources of the entries.

Peaks: for A100, H100 and H200 published benchmark documents and pytorch/torchtitan tools/utils.py.
For PCIe and NVL cards NVIDIA's H100 and H200 data sheets, half of what they print with sparsity.
For Blackwell NVIDIA/dgxc-benchmarking README.md v26.02 (torchtitan has 2500 for the GB200's bf16).

Peaks in fp32, fp64 and int8: NVIDIA's data sheets of the H100 and H200, HGX B200 (600, 296 and
36,000 TFLOP/s for 8 GPUs), GB200 NVL72, HGX B300 (600 and 10 for 8 GPUs) and GB300 NVL72 (100 in
fp64 and 12,000 in int8 for 72 GPUs). Blackwell Ultra has hardly any fp64 and int8; for the B300's
int8 we take the GB300's, which is higher than what the tables of HGX B300 say.

Chips, memory and bandwidth of Blackwell: openxla/xla,
xla/backends/gpu/target_config/specs/b200.txtpb and gb200.txtpb at 300ec95, b300.txtpb and
gb300.txtpb at 4336d12.

Links of H100 and H200 SXM in DGX nodes: NVLink 4 has 900 GB/s in both directions together, and each
GPU has one 400 Gb/s adapter (NVIDIA DGX H100 data sheet).

Links of Blackwell: NVLink 5 has 1800 GB/s in both directions together. It joins the 8 GPUs of a DGX
B200 or B300, and the 72 GPUs of a GB200 or GB300 NVL72, whose 18 compute trays are hosts with 4
GPUs each. With B200 and GB200 each GPU has one 400 Gb/s adapter (ConnectX-7; NVIDIA DGX B200 and
GB200 NVL72 data sheets). A GB200 with ConnectX-8 has 100 GB/s: `--system nic=100`. With B300 and
GB300 each GPU has one 800 Gb/s adapter (ConnectX-8; NVIDIA DGX B300 user guide; NVIDIA enterprise
reference architecture of the GB300 NVL72, components).

Links to the host: a B300 is joined to its adapter by PCIe 6, but reaches the host through the
adapter by PCIe 5, so this link is shared. A GB300 has NVLink-C2C like a GB200, two Grace CPUs with
480 GB each in a tray, and separate links for its adapters.

Power, at the highest setting: for H100, H200 and B200 NVIDIA's data sheets of the SXM modules, for
GB200 and GB300 NVIDIA's technical blog *Inside NVIDIA Blackwell Ultra*. For the B300 we found none.
"""

PLANNED = {gpu.name.lower(): gpu for gpu in GPUS if gpu.chip}
"""GPUs that programs can be compiled for on a machine without one, by the name that a user
gives."""


def placed(gpu: Gpu, count: int) -> Gpu:
    """The GPU with its `domain` reduced to the GPUs that a job of `count` GPUs has in each NVLink
    domain (`Gpu.spread`). Raises RecipeError if the GPUs do not fill nodes and domains evenly."""
    if (spread := gpu.spread(count)) is None:
        nearest = " and ".join(map(str, gpu.nearest(count)))
        raise RecipeError(
            f"{count} GPUs do not fill nodes of {gpu.node} in NVLink domains of {gpu.domain}; the "
            f"nearest that do: {nearest}"
        )
    _, nodes, devices = spread
    return replace(gpu, domain=nodes * devices)


def identify(device: str) -> Gpu | None:
    """The GPU that a driver calls `device`: the entry whose name has all its words in it, and of
    several the longest name. None for an unknown GPU."""
    words = set(device.replace("-", " ").split())
    known = [gpu for gpu in GPUS if words.issuperset(gpu.name.split())]
    return max(known, key=lambda gpu: len(gpu.name), default=None)


NULL = "null GPUs: nothing here is a measurement"
"""A remark on every figure of a device that `is_null`."""


def is_null(device: str) -> bool:
    """True for the GPU of a driver for tests, whose kernels compute nothing. Its name is like
    `NVIDIA H100 80GB HBM3 (null)`."""
    return "null" in device.lower()


def host_memory(field: str) -> int:
    """Bytes of this host's memory under the kernel's name, `MemTotal` or `MemAvailable`; 0 if the
    system does not say."""
    path = Path("/proc/meminfo")
    text = path.read_text() if path.is_file() else ""
    found = re.search(rf"^{field}: *(\d+) kB", text, re.M)
    return 1024 * int(found[1]) if found else 0


def peak_tflops(device: str, dtype: str) -> float | None:
    """Dense peak in TFLOP/s of one device, given the driver's name for it; None if we know no
    peak."""
    gpu = identify(device)
    return gpu.tflops.get(dtype) if gpu else None
