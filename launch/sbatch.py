"""Options of sbatch, checks before a submission, and the submission itself."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxbench.base.errors import RecipeError
from jaxbench.cluster.jobs import NO_SLURM, slurm

Options = dict[str, str | None]
"""Options of sbatch by their long names. The value is None for an option without a value."""

SAVE_SECONDS = 120
"""The seconds before the time limit at which Slurm sends a signal. They are long enough to save."""

SITE = ("account", "partition", "qos", "reservation", "constraint", "wckey")
"""Options that a user may also set with sbatch's own variables (`SBATCH_QOS`)."""

INSTEAD = {
    "time": "--time", "nodes": "--gpus", "ntasks-per-node": "--processes-per-node",
    "gres": "SBATCH_GPUS_PER_NODE", "output": "STAGE_PATH",
    **{name: f"SBATCH_{name.upper()}" for name in SITE},
}  # fmt: skip
"""For each option that the launcher sets, the way in which a user can change it."""
RESERVED = {
    "array": "one job is one run; launch/sweep.sh submits many",
    "chdir": "all paths are absolute",
    "clusters": "set SLURM_CLUSTERS, which jaxbench jobs and launch/sweep.sh need too",
    "distribution": "ranks are placed in blocks, so that the fastest links join neighbours",
    "export": "the job has the environment of launch/submit.sh",
    "export-file": "the job has the environment of launch/submit.sh",
    "no-requeue": "use --restarts 0",
    "ntasks": "use --gpus",
    "signal": "it is Slurm's notice before the time limit",
    "test-only": "use --dry-run",
    "wait": "use jaxbench jobs log JOB",
    "wrap": "the script is launch/slurm.sbatch",
}
"""Other options that would break a job, and the reason or what to do instead."""


def seconds(limit: str, source: str) -> int:
    """Parses a time limit of Slurm. Rounds it up to whole minutes, as Slurm does. Raises
    RecipeError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", limit, re.ASCII)
    days, clock = match.groups() if match else (None, "0")
    parts = [int(part) for part in clock.split(":")]
    if days is None and len(parts) < 3:
        parts = [0, *parts]  # M or M:S
    hours, minutes, rest = [*parts, 0, 0][:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest
    if total == 0:
        raise RecipeError(
            f"{source} {limit}: expected a time above 0 as M, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
        )
    return -(-total // 60) * 60


def directive(name: str, value: str | None) -> str:
    """A line of a batch script. sbatch reads backslash escapes only inside double quotes."""
    option = f"--{name}" if value is None else f"--{name}={value}"
    if not re.fullmatch(r"[\w./:=,@%+-]+", option):
        option = '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'
    return f"#SBATCH {option}"


def check_path(path: Path) -> None:
    """Raises RecipeError for a path that Slurm would change: it replaces %j and the like, and
    removes backslashes."""
    if re.search(r"[%\\\x00-\x1f]", str(path)):
        raise RecipeError(f"{str(path)!r}: Slurm cannot write to a path with %, \\ or a new line")


def parse(texts: Iterable[str], additional: str) -> Options:
    """Parses a user's options from `--sbatch` and from ADDITIONAL_SLURM_PARAMS. In the latter,
    semicolons separate them (or spaces, as published). Raises RecipeError."""
    sources = [("--sbatch", text) for text in texts]
    words = additional.split(";" if ";" in additional else None)
    sources += [("ADDITIONAL_SLURM_PARAMS:", word) for word in words if word.strip()]
    options: Options = {}
    for source, text in sources:
        key, equals, right = text.strip().removeprefix("--").partition("=")
        key, value = key.strip().replace("_", "-"), right.strip() if equals else None
        if not re.fullmatch(r"[a-z][a-z0-9-]+", key) or "\n" in right or value == "":
            raise RecipeError(
                f"{source} {text!r}: expected a long option of sbatch, such as qos=high"
            )
        if options.get(key, value) != value:
            raise RecipeError(
                f"{source} {text}: --{key}={options[key]} is given too; use one of them"
            )
        options[key] = value
    return options


def merge(launcher: Options, user: Options) -> Options:
    """Merges the launcher's options and a user's. Raises RecipeError if the user's options change
    the launcher's, even by an abbreviation, which sbatch would accept."""
    for key, value in user.items():
        if key in launcher and launcher[key] == value:
            continue
        names = (*launcher, *RESERVED)
        name = key if key in names else next((n for n in names if n.startswith(key)), None)
        if name is None:
            continue
        option = f"--{key}" if value is None else f"--{key}={value}"
        if name in RESERVED and name not in launcher:
            raise RecipeError(f"{option} would break the job: {RESERVED[name]}")
        instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
        raise RecipeError(f"{option} contradicts launch/submit.sh, which sets {name}{instead}")
    return launcher | user


def check(results: Path, settings: Mapping[str, str]) -> None:
    """Raises RecipeError if there is no Slurm, if the image cannot be used, or if the results
    cannot be written. Makes the folder of the results. `submit.sh` has checked the virtual
    environment."""
    if shutil.which("sbatch") is None:
        raise RecipeError(NO_SLURM.format("sbatch"))
    if image := settings.get("RUN_CONF_IMAGE"):
        check_image(image)
    try:
        results.mkdir(parents=True, exist_ok=True)
        writable = os.access(results, os.W_OK | os.X_OK)
        reason = "" if writable else "Permission denied"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise RecipeError(
            f"cannot write to {results}: {reason}; set STAGE_PATH (or LLMB_INSTALL) to a folder of "
            "yours that all nodes share"
        )


def container(image: str, needed: Iterable[Path]) -> dict[str, str]:
    """The settings of a job in a container: the image, in the form that pyxis takes (an absolute
    path, or a reference to a registry), and what the container needs of the host, at the same
    paths. Raises RecipeError if it cannot mount one of these."""
    is_file = Path(image).exists() or not ("://" in image or "#" in image)
    paths = set(needed)
    mounts = sorted(str(path) for path in paths if not paths & {*path.parents})
    for path in mounts:
        if re.search("[:,]", path):
            raise RecipeError(f"{path}: a container cannot mount a path with : or ,")
    return {
        "RUN_CONF_IMAGE": str(Path(image).absolute()) if is_file else image,
        "JAXBENCH_MOUNTS": ",".join(f"{path}:{path}" for path in mounts),
    }


def check_image(image: str) -> None:
    """Raises RecipeError if an image does not exist, or if srun cannot start it."""
    if image.startswith("/") and not Path(image).is_file():
        raise RecipeError(
            f"RUN_CONF_IMAGE: there is no file {image}; launch/setup.sh makes one, and an image of "
            "a registry is written docker://... or registry#image"
        )
    done = subprocess.run(["srun", "--help"], capture_output=True, text=True)
    if "--container-image" not in done.stdout + done.stderr:
        raise RecipeError(
            "RUN_CONF_IMAGE needs pyxis: srun has no option --container-image here; unset it to "
            "run in a virtual environment (launch/setup.sh)"
        )


def refusal(script: str) -> list[str]:
    """A warning if Slurm can start a job neither now nor later, for example because it has more
    nodes than a partition. This is no error, since none of the partition's nodes may be up now."""
    try:
        slurm("sbatch", "--test-only", script=script)
    except RecipeError as error:
        reason = str(error).removeprefix("sbatch: ")
        will_never = "with the nodes as they are, Slurm will never start this job"
        return [f"{will_never} ({reason}); scancel ends it"]
    return []


def submit(script: str) -> str:
    """Submits a batch script. Returns the job's id. Raises RecipeError with Slurm's message."""
    return slurm("sbatch", "--parsable", script=script).split(";")[0].strip()
