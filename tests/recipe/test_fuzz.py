"""Mutated recipes and settings: each is accepted, or refused in one line.

A few in every run of the suite; `pytest tests/recipe/test_fuzz.py --fuzz 3000` for many.
"""

import copy
import random

import pytest
import yaml

from jaxbench.base.errors import RecipeError
from jaxbench.recipe import flops, published, recipes
from jaxbench.results.throughput import throughput
from jaxbench.train.program_checks import check_run

TEXTS = {path: path.read_text() for path in sorted(recipes.config_folder().glob("*.yaml"))}
KEYS = recipes.settings()
VALUES = (
    "0", "-1", "1", "2", "3", "7", "16", "100000", "2147483648", "1e400", "-.inf", ".nan", "1e-400",
    "0x" + "f" * 6000, "9" * 5000, "true", "no", "null", "~", "''", "x", "é\u2028", "[]", "[1, 2]",
    "[[1]]", "{}", "{a: 1}", "{factor: 8, low: 1, high: 4, original_context: 8192}",
    "{heads: 8, head_dim: 8, state: 8, groups: 4}", "2026-11-21", "2026-99-99", "!!binary x",
    "&a {heads: *a}", "{ffn: 64}",
    "!!python/object:os.system x", "&a [*a]", "fp8", "bf16", "full", "none", "query:3", "query:",
    "query:²", "cudnn", "xla", "auto", "te", "tuned,xla_a=1", "*-", "M", "E", "*E-M", "-" * 2000,
    "silu", "relu2", "layer1p", "topk_softmax", "random", "1.5", "0.001", "[" * 500,
)  # fmt: skip


def mutated_bytes(rng, text):
    """A recipe file with bytes changed, removed, doubled or put elsewhere."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 8)):
        i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        j = min(j, i + rng.choice((1, 1, 3, 40)))
        match rng.randrange(4):
            case 0:
                data[i:j] = bytes(rng.randrange(256) for _ in range(j - i))
            case 1:
                del data[i:j]
            case 2:
                data[i:i] = data[i:j]
            case _:
                data[i:j] = rng.choice(b"{}[]:,#&*!|>'\"%@`-\t\n\x00\xff").to_bytes(1, "big")
    return bytes(data)


def places(node, path=()):
    """The paths of all values in a tree of mappings, to a depth that no recipe has: an alias may
    hold a mapping in itself."""
    yield path
    for key, value in node.items() if isinstance(node, dict) and len(path) < 9 else ():
        yield from places(value, (*path, key))


def mutated_structure(rng, text):
    """A recipe with values replaced, removed, renamed or moved."""
    tree = copy.deepcopy(yaml.safe_load(text))
    for _ in range(rng.randint(1, 3)):
        *above, key = rng.choice([path for path in places(tree) if path])
        node = tree
        for part in above:
            node = node[part]
        match rng.randrange(4):
            case 0:
                node[key] = value(rng)
            case 1:
                del node[key]
            case 2:
                node[rng.choice(KEYS).rpartition(".")[2]] = node.pop(key)
            case _:
                node[key] = rng.choice(([node[key]], {"a": node[key]}, str(node[key]), None))
        if not tree:
            break
    return yaml.safe_dump(tree).encode()


def value(rng):
    """A value of any type."""
    try:
        found = yaml.safe_load(rng.choice(VALUES))
    except (yaml.YAMLError, ValueError, RecursionError):
        return rng.choice((0, -1, 10**4000, float("nan"), "x", [], {}, None))
    return 10**4000 if isinstance(found, int) and found > 10**4000 else found


def mutated_settings(rng):
    """`--set` entries, most of them with known keys."""
    keys = [
        rng.choice((rng.choice(KEYS), rng.choice(KEYS), "a.b", "", "model", "=")) for _ in "abcd"
    ]
    return [f"{key}={rng.choice(VALUES)}" for key in keys[: rng.randint(1, 4)]]


def use(path, settings):
    """Everything that happens with a recipe before JAX."""
    recipe = recipes.load(path)
    overrides = recipes.parse_overrides(settings)
    for row in recipe.rows:
        for platform in ("cpu", "gpu"):
            run = recipes.resolve(recipe, row, devices=8, overrides=overrides)
            check_run(run, platform)
        recipes.describe(run)
        published.lookup(run)
        flops.parameters(run.model)
        throughput(run, 1.0, 989.0)


def test_every_mutation_is_accepted_or_refused_in_one_line(request, tmp_path):
    count = request.config.getoption("--fuzz")
    rng, accepted = random.Random(count), 0
    for number in range(count):
        source = rng.choice(list(TEXTS))
        path, settings = tmp_path / "recipe.yaml", []
        match number % 3:
            case 0:
                path.write_bytes(mutated_bytes(rng, TEXTS[source]))
            case 1:
                path.write_bytes(mutated_structure(rng, TEXTS[source]))
            case _:
                path.write_text(TEXTS[source])
                settings = mutated_settings(rng)
        refused = None
        try:
            use(path, settings)
        except RecipeError as error:
            refused = str(error)
        except Exception as error:
            pytest.fail(f"mutation {number}: {error!r}, --set {settings}, {path.read_bytes()!r}")
        accepted += refused is None
        assert refused is None or len(refused.splitlines()) == 1, (number, settings)
        assert refused is None or len(refused) < 2000, (number, settings)
    assert 0.05 * count < accepted < 0.95 * count
