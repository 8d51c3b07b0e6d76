"""The system to plan for: a GPU that we know or that a file describes, with its network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError, meant
from jaxbench.base.hardware import PLANNED, Gpu
from jaxbench.forecast.tables import FORMATS, Tables, load
from jaxbench.recipe import strict_yaml

SETTINGS: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("nvlink", "nic", "host", "bandwidth", "power"), float),
    **dict.fromkeys(("oversubscription", "latency"), float),
    **dict.fromkeys(("node", "domain", "leaf"), int),
    **dict.fromkeys(("memory", "host_memory"), lambda text: int(float(text) * 2**30)),
    **dict.fromkeys(FORMATS, float),
}
"""Settings of `--system`, with what reads their values. Memory is in GiB. A format of matmuls is
the dense peak of the tensor cores in TFLOP/s."""

LARGEST = 1e6
"""The largest value of a setting, far above any hardware's."""


@dataclass(frozen=True)
class Target:
    """A system to plan for, and the options that select it: `--gpu`, `--system`, `--kernels`. `gpu`
    has all changes. `asked` is what `--gpu` says, if that is not the name: the path of a file."""

    gpu: Gpu
    name: str
    system: tuple[str, ...] = ()
    kernels: Path | None = None
    asked: str = ""

    def tables(self) -> Tables:
        """The measurements for this GPU: those of `kernels`, and the package's for the rest."""
        return load(self.gpu.name.lower(), self.kernels)

    def options(self) -> list[str]:
        """The options of the command line."""
        return ["--gpu", self.asked or self.name, *self.further_options()]

    def further_options(self) -> list[str]:
        """The options besides `--gpu`."""
        system = [part for text in self.system for part in ("--system", text)]
        kernels = ["--kernels", str(self.kernels)] if self.kernels else []
        return [*system, *kernels]

    def changed(self, settings: Sequence[str]) -> "Target":
        """The same GPU with further settings of `--system`. Raises RecipeError."""
        gpu = with_settings(self.gpu, settings)
        return replace(self, gpu=gpu, system=(*self.system, *settings))


def system(gpu: Gpu) -> dict[str, Any]:
    """The properties and links of the GPU that decide a plan."""
    names = ("device", "memory", "host_memory", "bandwidth", "nvlink", "nic", "host", "node",
             "domain", "leaf", "oversubscription", "latency")  # fmt: skip
    peaks = {f"{dtype} TFLOP/s": peak for dtype, peak in gpu.tflops.items()}
    return {name: getattr(gpu, name) for name in names} | peaks


def find(asked: str, kernels: Path | None = None) -> Target:
    """The system that `--gpu` describes. Raises RecipeError."""
    if not asked.endswith((".yaml", ".yml")):
        return Target(PLANNED[known(asked)], known(asked), kernels=kernels)
    return Target(read(Path(asked)), Path(asked).stem, kernels=kernels, asked=asked)


def named(asked: str) -> str:
    """The name of a GPU: in lower case if it is one of the package, else as it was asked for."""
    return asked.lower() if asked.lower() in PLANNED else asked


def known(name: str, option: str = "--gpu") -> str:
    """The name of a GPU in the package. Raises RecipeError for another one."""
    if name.lower() not in PLANNED:
        raise RecipeError(
            f"{option}: {name!r} is not one of {', '.join(PLANNED)}, nor a file.yaml"
            f"{meant(name, PLANNED, 0.8)}"
        )
    return name.lower()


def read(path: Path) -> Gpu:
    """The GPU of a file: settings of `--system`, and `like`, the GPU that we know and that it
    resembles most. It is compiled like that one, and measured kernels of that one are scaled by the
    peaks and the bandwidth. Raises RecipeError."""
    try:
        content = strict_yaml.load(path.read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"--gpu {path}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("like"), str):
        raise RecipeError(f"--gpu {path}: expected a line such as like: h100, and changes to it")
    like = PLANNED[known(content.pop("like"), f"--gpu {path}: like")]
    settings = [f"{name}={value}" for name, value in content.items()]
    gpu = with_settings(like, settings, f"--gpu {path}:")
    # `identify` knows a GPU by its words, so those of the file's name must not look like one.
    return replace(gpu, device=f"{gpu.device} ({path.stem.lower()})")


def with_settings(gpu: Gpu, settings: Sequence[str], option: str = "--system") -> Gpu:
    """The GPU, changed by settings such as `nic=25`. Raises RecipeError."""
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            number = SETTINGS[key](value)
        except (KeyError, ValueError, OverflowError):
            number = 0
        if not (number > 0 and float(value) <= LARGEST):
            names = ", ".join(f"{name}=N" for name in SETTINGS)
            allowed = f"with N above 0 and at most {LARGEST:,.0f}"
            raise RecipeError(f"{option} {setting}: expected one of {names}, {allowed}")
        if key in FORMATS and key not in gpu.tflops:
            raise RecipeError(f"{option} {setting}: {gpu.name} does not multiply in {key}")
        peaks = {"tflops": gpu.tflops | {key: number}}
        changes: dict[str, Any] = peaks if key in FORMATS else {key: number}
        gpu = replace(gpu, **changes)
    if gpu.oversubscription < 1 or (gpu.oversubscription > 1 and not gpu.leaf):
        raise RecipeError(f"{option}: oversubscription has to be at least 1, and needs leaf=N")
    if gpu.domain % gpu.node:
        raise RecipeError(
            f"{option}: a domain of {gpu.domain} GPUs does not consist of nodes of {gpu.node}"
        )
    return gpu
