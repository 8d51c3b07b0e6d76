"""The site file: what every job on a cluster has in common, such as account, partition and GPU."""

import re
from collections.abc import Mapping
from pathlib import Path

from sbatch import SITE

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import strict_yaml

EVERYWHERE = Path("/etc/jaxbench/site.yaml")

VARIABLES = {
    **{name: (f"SBATCH_{name.upper()}",) for name in SITE},
    "account": ("SBATCH_ACCOUNT", "SLURM_ACCOUNT"),
    "partition": ("SBATCH_PARTITION", "SLURM_PARTITION"),
    "gpu_type": ("GPU_TYPE",),
    "gpus_per_node": ("GPUS_PER_NODE", "RUN_CONF_GPU_PER_NODE"),
    "gres_gpus": ("SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE"),
}
"""The variables that the launcher reads for a key, all with the same meaning. Any of them replaces
the key."""

KEYS = (*VARIABLES, "exclude", "system")


def read(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the site file: `site.yaml` in the folder STAGE_PATH, else `EVERYWHERE`; none
    if there is neither. Raises RecipeError for a file that cannot be used."""
    stage = environment.get("STAGE_PATH")
    paths = [*([Path(stage, "site.yaml")] if stage else []), EVERYWHERE]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return {}
    try:
        content = strict_yaml.load(path.read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected lines such as partition: batch")
    for key, value in content.items():
        if key not in KEYS:
            raise RecipeError(f"{path}: {key!r} is not one of {', '.join(KEYS)}")
        if key == "exclude" and isinstance(value, list):
            content[key] = value = ",".join(map(str, value))
        if value in (None, ""):
            continue
        pattern = r"[\w.-]+" if key == "system" else r"[^\n]+"
        if isinstance(value, dict | list | bool) or not re.fullmatch(pattern, str(value)):
            raise RecipeError(f"{path}: {key}: expected a word or a number, not {value!r}")
    return {key: str(value) for key, value in content.items() if value not in (None, "")}


def completed(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment with the variables that a site's settings stand for. What is set in the
    environment stays."""
    added = {
        names[0]: settings[key]
        for key, names in VARIABLES.items()
        if key in settings and not any(environment.get(name) for name in names)
    }
    return {**environment, **added}
