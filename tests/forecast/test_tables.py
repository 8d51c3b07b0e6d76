"""Tables of measured kernels, ours and a user's."""

import pytest

from jaxbench.base.errors import RecipeError
from jaxbench.base.hardware import PLANNED
from jaxbench.forecast import tables
from jaxbench.forecast.costs import share_of

OWN = """\
# gpu: h100
# product: measured here
kind,name,sizes,microseconds
product,bf16,1024x1024x1024,7.5
"""


@pytest.mark.parametrize("gpu", PLANNED)
def test_every_gpu_that_is_planned_has_tables(gpu):
    found = tables.load(gpu)
    missing = {"kept" if gpu == "h100" else "grouped_weights"}
    assert {kind for kind, _ in found.values} == tables.KINDS.keys() - missing
    blocks = {"mxfp8", "nvfp4"} & PLANNED[gpu].tflops.keys()
    assert found.names("product") == {"bf16", "fp8"} | blocks == found.names("sustained")
    assert found.names("grouped") == {"bf16", "fp8"} | blocks - {"mxfp8"}
    assert found.names("collective") == {
        "all-gather", "reduce-scatter", "all-reduce", "all-to-all",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*PLANNED, "network"])
def test_every_table_says_where_its_kinds_are_from(name):
    path = tables.FOLDER / f"{name}.csv"
    stated = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    kinds = {kind for kind, _ in tables.read(path)[1]}
    assert {k for k in kinds if any(line.startswith(f"# {k}") for line in stated)} == kinds


@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300"])
def test_products_without_quantization_are_below_the_peak(gpu):
    values = tables.load(gpu).values
    for name in ("mxfp8", "nvfp4"):
        peak = PLANNED[gpu].tflops[name]
        for (m, n, k), time in values["product", name].items():
            assert 2 * m * n * k / time / 1e6 < peak


def test_what_is_assumed_is_said_until_it_is_measured(tmp_path):
    """By the package for what its tables do not have; a user's own times need no assumption."""
    blocks = {"product mxfp8", "product nvfp4", "memory", "scan"}
    grouped = {f"grouped {name}" for name in tables.FORMATS} | {"grouped_weights"}
    for gpu, stated in (
        ("h100", {"attention 64x64", "grouped fp8"}),
        ("gb200", blocks | grouped | {"attention", "attention 64x64"}),
        ("b300", blocks | grouped | {"attention"}),
    ):
        assert tables.load(gpu).assumed.keys() == stated
        for line, known in (
            ("product,nvfp4,1024x1024x1024,7", "product nvfp4"),
            ("attention,forward,1x8x1024x128x128,7", "attention"),
            ("scan,forward,128x64,7", "scan"),
            ("grouped,bf16,8x1024x1024x1024,7", "grouped bf16"),
            ("grouped_weights,bf16,8x1024x1024x1024,7", "grouped_weights"),
        ):
            file = tmp_path / f"{gpu} {known}.csv"
            file.write_text(f"# gpu: {gpu}\nkind,name,sizes,microseconds\n{line}\n")
            left = {name for name in stated if not tables.within(name, known)}
            assert tables.load(gpu, file).assumed.keys() == left


def test_a_users_attention_stands_as_it_is(tmp_path):
    """Without what the package's attention loses in a step."""
    file = tmp_path / "own.csv"
    file.write_text(OWN.replace("product,bf16,1024x", "attention,forward,1x8x1024x128x"))
    file.write_text(file.read_text().replace("x1024x1024,7.5", "x128,7.5").replace("h100", "gb200"))
    found = tables.load("gb200", file).values
    assert found["attention", "forward"] == {(1, 8, 1024, 128, 128): 7.5}
    assert ("kept", "forward") not in found
    assert ("kept", "backward") in found


def test_a_users_table_comes_first(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    found = tables.load("h100", file)
    assert found.values["product", "bf16"] == {(1024, 1024, 1024): 7.5}
    assert found.sources["product bf16"] == "own.csv"
    assert found.sources["product fp8"] == "the package's h100.csv"
    assert len(found.values["product", "fp8"]) == len(tables.load("h100").values["product", "fp8"])


def test_a_users_ring_stands_next_to_the_packages(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("# gpu: h100\nkind,name,sizes,microseconds\nnetwork,ring,16,0.8\n")
    packaged, found = (tables.load("h100", *own).values["network", "ring"] for own in ((), (file,)))
    assert found == packaged | {(16,): 0.8}
    assert 0 < share_of(found, 4096) < 1


def test_an_unknown_gpu_says_which_are_known():
    with pytest.raises(
        RecipeError, match=r"we have no measured kernels of a100; .* b200, b300, gb200, gb300, h100"
    ):
        tables.load("a100")


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        tables.load("h100", tmp_path / "none.csv")


def test_what_a_user_did_not_measure_stays_the_packages(tmp_path):
    """Collectives among more GPUs than there were, and what a kernel takes to start."""
    file = tmp_path / "own.csv"
    own = ["collective,all-gather,2x131072,9.9", "memory,any,1000,0.5"]
    file.write_text("\n".join(["# gpu: h100", "kind,name,sizes,microseconds", *own]))
    packaged, found = tables.load("h100").values, tables.load("h100", file).values
    gathers = found["collective", "all-gather"]
    assert {sizes for sizes in gathers if sizes[0] == 2} == {(2, 131072)}
    assert {s: t for s, t in gathers.items() if s[0] > 2} == {
        s: t for s, t in packaged["collective", "all-gather"].items() if s[0] > 2
    }
    assert found["memory", "any"] == {(0,): 1.52, (1000,): 0.5}


def test_a_table_that_a_spreadsheet_saved_is_read(tmp_path):
    """With a byte order mark, other line ends, quotes, and as many cells in each line."""
    file = tmp_path / "saved.csv"
    lines = [
        "# gpu: h100,,,", '"# products, and attention",,,', ",,,", "kind,name,sizes,microseconds",
        '"product","bf16",1024x1024x1024,7.5', "product , bf16,2048x1024x1024,9,", "",
    ]  # fmt: skip
    file.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    found = tables.read(file)
    assert found == ("h100", {("product", "bf16"): {(1024,) * 3: 7.5, (2048, 1024, 1024): 9.0}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("h100", "h200"), "kernels of h200, but the plan is for h100"),
        (OWN.replace("# gpu: h100\n", ""), "no line '# gpu: NAME'"),
        (OWN.replace("7.5", "-1"), "product,bf16,1024x1024x1024,-1"),
        (OWN.replace("7.5", "nan"), "product,bf16,1024x1024x1024,nan"),
        (OWN.replace("1024x1024x1024", "1024"), "product,bf16,1024,7.5"),
        (OWN.replace("product,", "sausage,"), "sausage"),
        (OWN.replace("bf16", "bfloat16"), "product,bfloat16"),
        (OWN.replace("1024x1024x1024", "0x1024x1024"), "product,bf16,0x1024x1024"),
        (OWN + "product,bf16,512x2048x1024,8\n", "no line has the smallest m, n and k"),
        (OWN + "collective,all-gather,1x8,8\n", "collective,all-gather,1x8"),
        (OWN.replace(",", ";"), "expected kind,name,sizes,.. and got 'kind;name;sizes;"),
        (OWN.replace("7.5", "7,5"), "got 'product,bf16,1024x1024x1024,7,5'"),
        (OWN.replace(",7.5", ""), "line 4: expected values as product,bf16"),
        ("# gpu: h100\n", "not a table of kernels: no line kind,name,sizes"),
        ('{"a": 1}', "line 1: expected kind,name,sizes"),
        (OWN + "\0", "own.csv: not a table of kernels: "),
    ],
)
def test_a_file_that_is_no_table_is_one_line(tmp_path, text, message):
    file = tmp_path / "own.csv"
    file.write_text(text)
    with pytest.raises(RecipeError) as error:
        tables.load("h100", file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
