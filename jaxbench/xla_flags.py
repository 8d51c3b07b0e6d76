"""XLA options for GPUs, passed to the compiler with each program: an unknown one is an error there,
never an abort."""

TUNED: dict[str, bool | int | str] = {
    # Matrix products by cuBLASLt: autotuning them against Triton needs the GPU at compile time and
    # varies from run to run.
    "xla_gpu_enable_triton_gemm": False,
    # Fusing the slice that stacks a saved activation with the product that makes it runs that
    # product twice.
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # Remat is the recipe's choice; the compiler's own pass would gather weights a second time.
    "xla_disable_hlo_passes": "rematerialization",
    # One reduce-scatter per gradient as soon as it is there, instead of all of a layer's at its
    # end.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
}


def options(name: str, platform: str) -> dict[str, bool | int | str]:
    """Compiler options of the set `tuned` or `default`; CPUs always take the compiler's
    defaults."""
    return dict(TUNED) if name == "tuned" and platform == "gpu" else {}
