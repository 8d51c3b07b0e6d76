"""Compiler flags of tests on CPUs: a third of the time, the same results."""

from importlib.metadata import version

FLAGS = "--xla_backend_optimization_level=0"
if version("jax").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
elif version("jax").startswith("0.11."):
    FLAGS += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
