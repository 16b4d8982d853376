"""The table of variants: what a row may say, and rows of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.engine.config import load_config
from regress.errors import ConfigError
from regress.golden.golden_directory import GoldenStore
from regress.replay.replay_configuration import overlaid
from regress.replay.variant import Extent, Precision, Variant
from regress.replay.variant_names import select
from regress.replay.variant_table import VARIANTS, flat, parse_variants, project_variants
from regress.service.replay.remote_variants import REMOTE
from tests.as_subtests import as_subtests

GOLDEN = Path(__file__).parents[3] / "golden"


@as_subtests("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_a_built_in_variant_is_a_configuration_of_the_engine(variant: Variant, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(overlaid({}, variant.overrides)))
    config = load_config(config_path=str(path), environ={}).config
    for key, value in variant.overrides.items():
        found: object = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value
    assert variant.why
    assert (Precision.BITWISE in variant.precisions) == (variant.bitwise_reference is not None)


def test_rows_of_a_project_are_added_and_replace(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.regress.variants.wide]\nwhy = "wide rows"\noverrides.batching.pad_to_length = 3\n'
        '[tool.regress.variants.left]\nwhy = "mine"\nprecisions = ["float64"]\n'
        'overrides."batching.padding_side" = "left"\n'
    )
    table = project_variants(tmp_path, [Variant("hooked", "from conftest.py", {"threads": 2})])
    assert table["wide"].overrides == {"batching.pad_to_length": 3}
    assert table["left"].precisions == (Precision.FLOAT64,)
    assert table["left"].overrides == {"batching.padding_side": "left"}
    assert table["hooked"].overrides == {"threads": 2}
    assert table["packed"] is VARIANTS["packed"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"overrides": {}}, "does not say why it exists; add why"),
        (
            {"why": "x", "override": {}},
            "has the key 'override'; choose from why, overrides, precisions, cases, bitwise_reference",
        ),
        (
            {"why": "x", "precisions": ["fp32"]},
            "choose from float64, float32, bfloat16, mixed, bitwise, each once",
        ),
        (
            {"why": "x", "precisions": [["float32"]]},
            "choose from float64, float32, bfloat16, mixed, bitwise, each once",
        ),
        ({"why": "x", "precisions": []}, "has the precisions []; choose from"),
        ({"why": "x", "precisions": ["float32", "float32"]}, "each once"),
        ({"why": "x", "cases": [3]}, "has the cases [3]; give names of cases, or patterns of them"),
        ({"why": "x", "cases": []}, "has the cases []; give names of cases"),
        (
            {"why": "x", "precisions": ["bitwise"]},
            "precision bitwise and bitwise_reference (whose bytes to reproduce) go together",
        ),
        ({"why": "x", "bitwise_reference": "base"}, "go together; give both"),
        ({"why": "x", "overrides": 3}, "give a table of dotted keys and values"),
        ("packed", "must be a table with keys of"),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(row: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_variants({"mine": row}, "pyproject.toml")
    assert "pyproject.toml: variant 'mine'" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name", ["a/b", "a[b", "..", "", "a b", "base.lock", "a,b", "pack*", "\u00fcber", "-x"]
)
def test_a_name_that_would_break_an_id_a_pattern_or_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a test id; choose letters, digits and dashes"):
        parse_variants({name: {"why": "x"}}, "conftest.py")


@pytest.mark.parametrize("name", ["base-fp32", "packed-bf16", "fsdp2-mixed", "mine-bitwise"])
def test_a_name_that_reads_as_a_precision_is_refused(name: str) -> None:
    """Two replays of one name would share one outcome."""
    with pytest.raises(ConfigError, match="which test ids add for the precision"):
        parse_variants({name: {"why": "x"}}, "conftest.py")


def test_a_name_that_spells_out_its_settings_needs_no_overrides() -> None:
    rows = {"fsdp2-mbs3": {"why": "x"}, "mine": {"why": "x"}, "mbs3": {"why": "x", "overrides": {}}}
    found = {name: variant.overrides for name, variant in parse_variants(rows, "x").items()}
    assert found["fsdp2-mbs3"] == {"parallel.fsdp": 2, "batching.micro_batch_size": 3}
    assert found["mine"] == found["mbs3"] == {}


def test_a_variant_of_the_full_matrix_alone() -> None:
    one = parse_variants({"mine": {"why": "x", "cases": [], "possible": ["dense"]}}, "x")["mine"]
    case = GoldenStore(GOLDEN).case("dense")
    assert not one.applies_to(case)
    assert one.applies_to(case, Extent.FULL)


def test_built_in_variants_pass_the_checks_of_others(tmp_path: Path) -> None:
    built_in = {**VARIANTS, **REMOTE}
    assert project_variants(tmp_path, built_in.values()) == built_in


def test_variants_of_a_hook_are_checked_and_completed(tmp_path: Path) -> None:
    table = project_variants(
        tmp_path, [Variant("mine", "x", {"batching": {"layout": "packed"}}, ("float32",))]
    )  # type: ignore[arg-type]  # as users write it
    assert table["mine"].precisions == (Precision.FLOAT32,)
    assert table["mine"].precisions[0].suffix == "-fp32"
    assert table["mine"].overrides == {"batching.layout": "packed"}
    with pytest.raises(ConfigError, match="pytest_regress_variants: variant 'mine' does not say why"):
        project_variants(tmp_path, [Variant("mine", "")])


def test_a_misspelt_section_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.regress.variant.mine]\nwhy = "x"\n')
    with pytest.raises(
        ConfigError,
        match="holds variant, which nothing reads; its keys are variants, tolerances, replay, allow_code",
    ):
        project_variants(tmp_path)


def test_a_bitwise_reference_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.regress.variants.mine]\nwhy = "x"\nprecisions = ["bitwise"]\nbitwise_reference = "bse"\n'
    )
    with pytest.raises(
        ConfigError, match="variant 'mine' has the bitwise_reference 'bse', which is not a variant"
    ):
        project_variants(tmp_path)


def test_broken_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.regress")
    with pytest.raises(ConfigError, match=r"pyproject\.toml is not valid TOML"):
        project_variants(tmp_path)


def test_patterns_select_in_the_order_of_the_table() -> None:
    assert select(["a", "ab", "b"], "b, a*") == ["a", "ab", "b"]
    with pytest.raises(ConfigError, match="'c' matches none of a, b"):
        select(["a", "b"], "c")


def test_nested_tables_are_dotted_keys() -> None:
    assert dict(flat({"batching": {"layout": "packed"}, "optimizer.eps": 1, "task": {"rewards": {}}})) == {
        "batching.layout": "packed",
        "optimizer.eps": 1,
        "task.rewards": {},
    }
