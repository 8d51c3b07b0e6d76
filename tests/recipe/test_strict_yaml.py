"""YAML 1.2 without duplicate keys, in recipes, settings and sweeps."""

import math

import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import recipes, strict_yaml

LLAMA = (recipes.config_folder() / "llama31_8b_bf16.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0100", 100), ("0064", 64), ("+12", 12), ("0x10", 16), ("0o17", 15),
        ("1e3", 1000.0), ("1e-5", 1e-5), ("-.5", -0.5), ("1.", 1.0), ("-.Inf", -math.inf),
        ("1:30", "1:30"), ("1_000", "1_000"), ("0b11", "0b11"), ("2026-11-26", "2026-11-26"),
        ("yes", "yes"), ("No", "No"), ("on", "on"), ("off", "off"), ("TRUE", True),
        ("~", None), ("", None), ("=", "="), ("{064: a}", {64: "a"}), ("'0100'", "0100"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    loaded = strict_yaml.load(text)
    assert (loaded, type(loaded)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"line 3: the key 'a' occurs twice"),
        ("{a: {b: 1, 'b': 1}}", r"line 1: the key 'b' occurs twice"),
        ("64: {}\n064: {}\n", r"line 2: the key 64 occurs twice"),
        ("- {x: 1}\n- {x: 1, x: 1}\n", r"line 2: the key 'x' occurs twice"),
        ("a: [1\nb: 2", r"^line 2: .*"),
        ("{[1]: 2}", r"line 1: found unhashable key"),
        ("!!bool maybe", r"line 1: 'maybe' is no bool"),
        ("!!int 1:30", r"line 1: '1:30' is no int"),
        ("&a [*a]", "it contains itself"),
    ],
)
def test_an_error_is_one_line_that_says_where(text, message):
    with pytest.raises(ValueError, match=message) as error:
        strict_yaml.load(text)
    assert "\n" not in str(error.value)


def test_aliases_of_aliases_take_no_time():
    """A dozen lines can stand for a million millions of values."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 13)),
    ]
    assert len(strict_yaml.load("\n".join(lines))) == 13


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("warmup: 2000, ", "warmup: 2000, warmup: 20, ", "'warmup'"),
        ("\nrows:", "\noptimizer: {}\nrows:", "'optimizer'"),
        ("\n  16:", "\n  8: {}\n  16:", "8"),
    ],
)
def test_a_recipe_with_a_key_twice_names_file_line_and_key(old, new, key, tmp_path):
    path = tmp_path / "twice.yaml"
    assert old in LLAMA
    path.write_text(LLAMA.replace(old, new, 1))
    with pytest.raises(RecipeError, match=rf"twice.yaml: .*line \d+: the key {key} occurs twice"):
        recipes.load(path)


def test_a_setting_with_a_key_twice_is_refused():
    with pytest.raises(RecipeError, match=r"model.attention: .*the key 'heads' occurs twice"):
        recipes.parse_overrides(["model.attention={heads: 8, heads: 4}"])


def test_a_setting_of_a_row_with_its_section_and_without_is_refused():
    recipe = recipes.load("llama31_8b_bf16")
    recipe.rows[8] |= {"fsdp": 8, "parallelism": {"fsdp": 4}}
    with pytest.raises(RecipeError, match=r"row 8: fsdp and parallelism.fsdp are one setting"):
        recipes.resolve(recipe, 8)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.learning_rate=1:30", "'1:30': expected float, got str"),
        ("optimizer.learning_rate=1_0", "'1_0': expected float, got str"),
        ("batch.global_batch=1_000", "'1_000': expected int, got str"),
        ("model.attention.biases=yes", "'yes': expected true or false, got str"),
    ],
)
def test_a_refused_number_is_quoted_as_it_was_typed(setting, message):
    recipe, overrides = recipes.load("llama31_8b_bf16"), recipes.parse_overrides([setting])
    with pytest.raises(RecipeError, match=message):
        recipes.resolve(recipe, 8, overrides=overrides)


def test_a_batch_with_a_leading_zero_is_decimal():
    overrides = recipes.parse_overrides(["batch.global_batch=0128"])
    run = recipes.resolve(recipes.load("llama31_8b_bf16"), 8, overrides=overrides)
    assert run.batch.global_batch == 128
