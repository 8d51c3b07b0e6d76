"""`site.yaml`: what all jobs of a cluster have in common, instead of variables."""

import pytest
from launching import job, refused, site_file

SITE = """
account: physics
partition: batch
gpu_type: gb200
gres_gpus: 4
exclude: [n7, n9]
system: {system}
"""
WORDS = ("llama31_70b_bf16", "--gpus", "64")


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """A stage folder with a site file, next to a machine without one."""
    monkeypatch.setattr(site_file, "EVERYWHERE", tmp_path / "etc" / "site.yaml")
    system = next((site_file.Path(__file__).parents[2] / "launch" / "env").glob("*.sh")).stem
    (tmp_path / "site.yaml").write_text(SITE.format(system=system))
    return {"STAGE_PATH": str(tmp_path)}


def test_a_job_has_what_the_site_file_says(stage, tmp_path):
    made = job(*WORDS, **stage)
    options = {name: made.options[name] for name in ("account", "partition", "gres", "exclude")}
    assert options == {
        "account": "physics", "partition": "batch", "gres": "gpu:4", "exclude": "n7,n9",
    }  # fmt: skip
    assert made.gpu.name == "GB200"
    assert made.options["nodes"] == "16"
    assert made.settings["JAXBENCH_SYSTEM"]
    site_file.EVERYWHERE.parent.mkdir()
    (tmp_path / "site.yaml").rename(site_file.EVERYWHERE)
    assert job(*WORDS, **stage).options == made.options


def test_variables_and_options_replace_it(stage):
    made = job(*WORDS, "--sbatch", "exclude=n1", **stage, SLURM_ACCOUNT="biology", GPU_TYPE="h100")
    assert made.options["account"] == "biology"
    assert made.options["exclude"] == "n7,n9,n1"  # no job uses the first two
    assert made.gpu.name == "H100"


@pytest.mark.parametrize("text", ["# nothing yet", "account:", "exclude: []"])
def test_what_is_left_out_is_not_set(text, stage, tmp_path):
    (tmp_path / "site.yaml").write_text(text)
    options = job(*WORDS, **stage).options
    assert "account" not in options
    assert "exclude" not in options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acount: x", "'acount' is not one of account, partition, "),
        ("partition: [a, b]", "partition: expected a word or a number, not ['a', 'b']"),
        ("system: ../../other", "system: expected a word or a number, not '../../other'"),
        ('account: "a\\nb"', "account: expected a word or a number, not 'a\\nb'"),
        ("batch", "expected lines such as partition: batch"),
        ("a: [", "line 2: did not find expected node content"),
    ],
)
def test_a_mistake_is_one_line(text, message, stage, tmp_path, monkeypatch, capsys):
    (tmp_path / "site.yaml").write_text(text)
    refused(list(WORDS), stage, f"{tmp_path}/site.yaml: {message}", monkeypatch, capsys)
