"""`jaxbench`: its commands, their help and reference, and what it says of mistyped words."""

import argparse
import io
import re
import shlex
import signal
import textwrap

import pytest
from commands import ROOT
from mistakes import assert_mistake
from rich.console import Console

import jaxbench.base.terminal
from jaxbench.__main__ import COMMANDS, main, options_of
from jaxbench.base.errors import RecipeError
from jaxbench.recipe import listing, recipes

REFERENCE = """# Commands

`jaxbench COMMAND`, or `python -m jaxbench COMMAND`. `pytest --write-golden` rewrites this file from
the commands' parsers (`tests/test_main.py`).
"""


@pytest.fixture(autouse=True)
def pipes():
    """A command that prints lets SIGPIPE end its process; this one is the tests'."""
    before = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "did you mean 'list'?"),
        (["trian", "--config", "x"], "did you mean 'train'?"),
        (["train", "--confg", "x"], "unrecognized arguments: --confg x; did you mean '--config'?"),
        (["report", "--format", "htlm", "x"], "did you mean 'html'?"),
        (["calibrate", "--ouput=x"], "--ouput=x; did you mean '--output'?"),
        (["calibrate"], "the following arguments are required: --output"),
        (["plan", "--gpu", "gb20"], "; did you mean 'gb200'?"),
        (["plan", "--gpu", "a100"], "is not one of h100, h200, b200, b300, gb200, gb300, nor a"),
    ],
)
def test_a_mistake_says_what_was_meant(words, message, capsys):
    assert_mistake(main, words, message, capsys)


@pytest.mark.parametrize("words", [[], ["help"]])
def test_help_lists_the_commands(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(words)
    text = capsys.readouterr().out
    assert all(re.search(rf"\n    {name}\s", text) for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxbench 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_what_the_options_allow(name):
    """In groups, none of them argparse's own but that of --help."""
    parser = options_of(COMMANDS[name])
    assert parser.prog == f"jaxbench {name}"
    titles = [group.title for group in parser._action_groups if group._group_actions]
    assert len(titles) > 1 or name == "calibrate"
    assert titles[0] == "options"
    text = parser.epilog.replace("\\\n", "")
    examples = re.findall(r"^  jaxbench (.*?)(?:   .*)?$", text, re.MULTILINE)
    assert examples
    for command, *words in map(shlex.split, examples):
        args = options_of(COMMANDS[command]).parse_args(words)
        if config := getattr(args, "config", None):
            configs = config if isinstance(config, list) else [config]
            models = {recipe.rpartition("_")[0] for recipe in recipes.names()}
            assert {*configs} <= {*recipes.names(), *(models if name == "compare" else [])}


def test_list_shows_every_row(capsys):
    assert main(["list", "--all"]) == 0
    table, _, legend = capsys.readouterr().out.partition("\n\n")
    heading, *lines = table.splitlines()
    assert heading.split()[:3] == ["recipe", "GPU", "GPUs"]
    loaded = recipes.load_all()
    tables = [table for recipe in loaded for table in (recipe.rows, *recipe.gpu_rows.values())]
    known = sum(row != recipes.SMOKE for table in tables for row in table)
    assert len(lines) == known
    assert legend.startswith(f"{known} rows of {len(loaded)} recipes.")
    # A forecast is the table's; the ratio is of it and of the published step on the same GPU.
    step_s, interval = listing.forecasts()["llama2_70b_bf16", "h100", 64]
    within = "{:.3g} to {:.3g}".format(*interval)
    forecast, published = 128 * 4096 / 64 / step_s, 128 * 4096 / 64 / 6.999
    expected = rf"{forecast:,.0f} +{published:,.0f} +{6.999 / step_s:.2f} +{step_s:.3f} +{within}"
    assert re.search(rf"(?m)^llama2_70b_bf16 +H100 +64 +{expected} *fsdp 64 +80 +128$", table)
    assert re.search(r"(?m)^llama2_70b_bf16 +B200 +64 .* 1,170 \(H100\) +\d+\.\d+ .* fsdp", table)


def test_every_listed_gpu_multiplies_in_the_format_of_its_row():
    assert [row for row in listing.rows() if not row.gpu.multiplies(row.run.precision.dtype)] == []


def test_list_without_options_is_a_line_for_each_model(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    assert len(lines) == len({recipe.name.rpartition("_")[0] for recipe in recipes.load_all()})
    (line,) = (line for line in lines if line.startswith("llama31_8b "))
    assert re.search(r" bf16 fp8 mxfp8 nvfp4 +H100 4-128, B200 8, GB200 8, GB300 8", line)


def test_list_has_no_row_for_0_gpus(capsys):
    assert_mistake(main, ["list", "--gpus", "0"], "0", capsys)


def test_list_says_what_it_leaves_out(capsys):
    assert main(["list", "llama31_8b_bf16"]) == 0
    assert "\n1 row for one GPU: --all" in capsys.readouterr().out
    lines = [line for line in listing.rows() if line.recipe == "llama31_8b_bf16"]
    assert listing.table(lines, 140)[1] == ()
    narrow, left_out = listing.table(lines, 80)
    assert left_out == ("90 % interval", "mesh", "layers", "batch")
    assert [column.header for column in narrow.columns][-1] == "step s"


def test_list_shows_intervals_and_says_how_far_forecasts_were_off(monkeypatch, capsys):
    lines = [line | {"low s": "7.5", "high s": "10.8"} for line in listing.planned.read()[1]]
    said = f"{listing.planned.ERRORS}9 % at worst in bf16"
    monkeypatch.setattr(listing.planned, "read", lambda: (["2026-11-26", said], lines))
    monkeypatch.setenv("COLUMNS", "180")
    listing.forecasts.cache_clear()
    assert listing.main(["8b", "fp8", "--gpu", "h100", "--gpus", "8"]) == 0
    listing.forecasts.cache_clear()
    shown = capsys.readouterr().out
    assert re.search(r"^llama31_8b_fp8 +H100 +8 .* [\d.]+ +7\.5 to 10\.8 +fsdp 8 ", shown, re.M)
    assert f"{said}\n" in shown


def test_list_is_filtered():
    lines = [*listing.rows()]
    names = [line.recipe for line in listing.select(lines, ["llama", "405B"], "gb200", 256)]
    assert names == [f"llama31_405b_{dtype}" for dtype in ("bf16", "fp8", "mxfp8", "nvfp4")]
    for words, gpu, gpus, message in (
        (["qwen", "mamba"], None, None, "no recipe has 'qwen' and 'mamba' in its name"),
        (["nemotrom4"], None, None, "; did you mean 'nemotron4'?"),
        (["qwen3", "bf16"], "h200", None, "these recipes have rows for gb200, h100"),
        (["qwen3", "bf16"], None, 17, "these recipes have rows for 1, 16, 256 GPUs"),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            listing.select(lines, words, gpu, gpus)


def test_long_lines_are_folded_in_a_terminal_alone(monkeypatch):
    lines = ["  step       1 s", "bound       5.9 s: matmuls 4.9, others 1.0"]
    text = "\n".join([*lines, "   +2.7 %  attention: slower by"])
    monkeypatch.setattr(jaxbench.base.terminal, "Console", lambda: Console(width=30))
    assert jaxbench.base.terminal.folded(text) == text
    console = Console(width=30, force_terminal=True)
    monkeypatch.setattr(jaxbench.base.terminal, "Console", lambda: console)
    assert jaxbench.base.terminal.folded(text).splitlines() == [
        "  step       1 s",
        "bound       5.9 s: matmuls",
        "            4.9, others 1.0",
        "   +2.7 %  attention: slower",
        "       by",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_being_done_is_shown_in_a_terminal_alone(terminal, monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal)
    monkeypatch.setattr(jaxbench.base.terminal, "Console", lambda stderr: console)
    with jaxbench.base.terminal.live("reading") as say:
        say("reading: 3")
    assert ("reading: 3" in shown.getvalue()) == terminal
    assert bool(shown.getvalue()) == terminal


def reference() -> str:
    """The text of docs/reference/commands.md: a table of each group of options."""
    parts = [REFERENCE]
    for name, command in COMMANDS.items():
        parser = options_of(command)
        parts.append(f"## jaxbench {name}\n\n{' '.join(parser.description.split())}\n")
        for group in parser._action_groups:
            if actions := [a for a in group._group_actions if "--help" not in a.option_strings]:
                parts.append(f"| {group.title} | meaning |\n|---|---|")
                parts += [f"| {written(action)} | {meaning(action)} |" for action in actions]
                parts.append("")
        examples = parser.epilog.partition("\n")[2]
        parts.append(f"```text\n{textwrap.dedent(examples)}\n```\n")
    return "\n".join(parts)


def written(action):
    """An option as it is typed, with what its values are."""
    names = action.option_strings or [""]
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [f"{names[0]}, {names[1]}"]
    values = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices:
        values = "{" + ",".join(map(str, action.choices)) + "}"
    values = " ".join(values) if isinstance(values, tuple) else values
    return f"`{f'{names[0]} {values}'.strip()}`"


def meaning(action):
    """Its help, as Markdown."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    text = re.sub(r"(?<![\w`=-])(--[a-z][\w-]*)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


def test_the_reference_of_commands_is_current(request):
    file, text = ROOT / "docs/reference/commands.md", reference()
    if request.config.getoption("--write-golden"):
        file.write_text(text)
    assert file.read_text() == text, "pytest --write-golden rewrites it"
