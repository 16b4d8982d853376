"""A damaged golden is always named and never used, whichever file it is and whatever happened to it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, GoldenStore
from regress.golden.case_manifest import ToleranceEntry
from regress.golden.case_update import commit
from regress.golden.golden_verification import verify

KINDS = ("manifest", "yaml", "model", "optimizer", "trajectory", "truth")


@pytest.fixture
def case(recorded: Path, provenance: Any) -> Path:
    entry = ToleranceEntry(1e-6, 0.0, {"kappa": 4.0}, "measured")
    commit(recorded, tolerances={"loss": {"float32": entry}}, provenance=provenance)
    return recorded


def file_of(case: Path, kind: str) -> Path:
    return {
        "manifest": case / "manifest.json",
        "yaml": case / "case.yaml",
        "model": case / "model" / "model.safetensors",
        "optimizer": case / "optimizer.safetensors",
        "trajectory": case / "trajectories" / "step_000001.safetensors",
        "truth": next(case.glob("truth/step_000001/gradient.*")),
    }[kind]


def use(folder: Path) -> None:
    """Read a case as every replay does."""
    case = GoldenCase(folder)
    case.verify_inputs()
    case.trajectories()
    for where in case.wheres():
        case.truth(where)


def assert_named(path: Path, case: Path) -> None:
    with pytest.raises(GoldenError) as caught:
        use(case)
    assert str(path) in str(caught.value)
    findings = [finding for finding in verify(GoldenStore(case.parent)) if finding.damage]
    assert findings
    assert all(str(path) in finding.text for finding in findings)


def test_the_sound_case_can_be_used(case: Path) -> None:
    use(case)
    assert verify(GoldenStore(case.parent)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_truncation(case: Path, kind: str) -> None:
    path = file_of(case, kind)
    sound = path.read_bytes()
    ends = {len(sound) * third // 3 for third in range(3)} | {len(sound) - cut for cut in (2, 9, 65)}
    for end in sorted(ends):
        path.write_bytes(sound[:end])
        assert_named(path, case)
    if kind != "manifest":  # whose content counts, and not the white space around it
        path.write_bytes(sound + b"\n")
        assert_named(path, case)
    path.unlink()
    if kind == "manifest":
        assert GoldenCase(case).manifest is None, (
            "a case without a manifest is not recorded, and has no truth"
        )
        assert [f.text for f in verify(GoldenStore(case.parent)) if f.damage] == [
            f"{case / 'truth'} has no manifest beside it: restore it, or record the case"
        ]
        return
    assert_named(path, case)


@pytest.mark.parametrize("kind", KINDS)
def test_single_bit_flips(case: Path, kind: str) -> None:
    path = file_of(case, kind)
    sound = path.read_bytes()
    for bit in random.Random(kind).sample(range(8 * len(sound)), 20):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert_named(path, case)


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_by_another_valid_file(
    case: Path, kind: str, tmp_path: Path, make_inputs: Any, make_truth: Any
) -> None:
    """The same file of another case, of another update, or of another quantity."""
    other = make_inputs(tmp_path / "other")
    text = (other / "case.yaml").read_text()
    (other / "case.yaml").write_text(text.replace("seed: 3", "seed: 4"))
    (other / "model" / "model.safetensors").write_bytes(b"another" * 50)
    (other / "optimizer.safetensors").write_bytes(b"state.." * 9)
    commit(other, truth=make_truth(5.0), provenance={})
    path = file_of(case, kind)
    sound = path.read_bytes()
    others = {
        "manifest": [],  # that of another case is intact in itself; its files are not there
        "trajectory": [case / "trajectories" / "step_000000.safetensors"],
        "truth": [
            next(case.glob("truth/step_000000_update0/gradient.*")),
            next(case.glob("truth/step_000001/log_probs.*")),
            file_of(other, "truth"),
        ],
    }.get(kind, [file_of(other, kind)])
    for replacement in others:
        assert replacement.read_bytes() != sound
        path.write_bytes(replacement.read_bytes())
        assert_named(path, case)


def test_the_manifest_of_another_case(case: Path, tmp_path: Path, make_inputs: Any, make_truth: Any) -> None:
    other = make_inputs(tmp_path / "other")
    commit(other, truth=make_truth(5.0), provenance={})
    shutil.copy(other / "manifest.json", case / "manifest.json")
    with pytest.raises(
        GoldenError,
        match=r"truth/step_000000_update0/grad_norm\.safetensors does not match its recorded hash",
    ):
        use(case)


def test_an_older_manifest_whose_files_are_gone(case: Path, provenance: Any) -> None:
    old = (case / "manifest.json").read_bytes()
    commit(case, truth={"step_000001": {"grad_norm": {"grad_norm": 2.0}}}, provenance=provenance)
    (case / "manifest.json").write_bytes(old)
    with pytest.raises(GoldenError, match=r"grad_norm\.safetensors does not match"):
        use(case)


def forged(case: Path, change: Any) -> None:
    """A manifest that somebody edited, checksum and layout included."""
    from regress.golden.case_manifest import seal

    tree = json.loads((case / "manifest.json").read_text())
    del tree["sha256"]
    change(tree)
    (case / "manifest.json").write_text(seal(tree))


def entry(tree: Any) -> Any:
    return tree["truth"]["step_000001"]["gradient"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(extra=1), "it does not consist of inputs, provenance, tolerances, truth"),
        (lambda t: t.pop("inputs"), "it does not consist of"),
        (lambda t: t.update(provenance=[]), "its provenance is a list"),
        (
            lambda t: t["inputs"].update({"../../x": {"size": 0, "sha256": "0" * 64}}),
            "'../../x' is not a path of an input",
        ),
        (
            lambda t: t["inputs"].update({"/etc/passwd": {"size": 0, "sha256": "0" * 64}}),
            "is not a path of an input",
        ),
        (
            lambda t: t["inputs"].update({"model/x": {"size": -1, "sha256": "0" * 64}}),
            "a size is -1, not at least 0",
        ),
        (lambda t: t["inputs"].update({"model/x": {"size": 1}}), "does not consist of sha256, size"),
        (lambda t: t["inputs"].update({"model/x": 3}), "does not consist of sha256, size"),
        (lambda t: entry(t).update(size=True), "a size is True, not an integer"),
        (lambda t: entry(t).update(sha256="X" * 64), "not a SHA-256"),
        (lambda t: entry(t).update(tensors={}), "has no tensors"),
        (lambda t: entry(t).pop("tensors"), "does not consist of sha256, size, tensors"),
        (lambda t: entry(t)["tensors"]["lm_head.weight"].update(shape="4,3"), "not a shape such as"),
        (
            lambda t: entry(t)["tensors"]["lm_head.weight"].update(dtype="object"),
            "not a dtype",
        ),
        (lambda t: entry(t)["tensors"]["lm_head.weight"].update(mean="1"), "not a number or null"),
        (lambda t: entry(t)["tensors"]["lm_head.weight"].pop("mean"), "a tensor does not consist of"),
        (
            lambda t: t["truth"].update({"../../x": t["truth"]["step_000001"]}),
            "'../../x' is not an optimizer update",
        ),
        (
            lambda t: t["truth"].update({"step_000009": {}}),
            "'step_000009' is not an optimizer update with quantities",
        ),
        (lambda t: t["truth"]["step_000001"].update({"../x": entry(t)}), "'../x' is not a quantity"),
        (lambda t: t["tolerances"]["loss"].update({"a/b": {}}), "'a/b' is not a quantity or precision"),
        (lambda t: t["tolerances"]["loss"]["float32"].update(relative=-1), "has relative = -1"),
        (lambda t: t["tolerances"]["loss"]["float32"].update(reason=" "), "has no reason"),
        (lambda t: t["tolerances"]["loss"]["float32"].update(basis=3), "basis of a tolerance is 3"),
        (lambda t: t["tolerances"]["loss"]["float32"].pop("basis"), "does not consist of absolute"),
        (lambda t: t.update(truth=[1]), "damaged"),
        (lambda t: t.update(tolerances=3), "damaged"),
    ],
)
def test_forged_manifests(case: Path, change: Any, says: str) -> None:
    forged(case, change)
    with pytest.raises(GoldenError) as caught:
        GoldenCase(case)
    assert str(caught.value).startswith(f"{case / 'manifest.json'} is damaged (")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: entry(t)["tensors"]["lm_head.weight"].update(shape="3x4"),
            "holds other tensors than its manifest",
        ),
        (lambda t: entry(t)["tensors"]["lm_head.weight"].update(dtype="float32"), "holds other tensors than"),
        (lambda t: entry(t)["tensors"].pop("lm_head.weight"), "holds other tensors than its manifest says"),
    ],
)
def test_a_manifest_that_says_something_else_of_a_sound_file(case: Path, change: Any, says: str) -> None:
    forged(case, change)
    with pytest.raises(GoldenError, match=says):
        use(case)


@pytest.mark.parametrize("key", ["sha256", "mean", "l2"])
def test_verify_recomputes_hashes_and_statistics(case: Path, key: str) -> None:
    value = "0" * 64 if key == "sha256" else 7.0
    forged(case, lambda tree: entry(tree)["tensors"]["lm_head.weight"].update({key: value}))
    (finding,) = verify(GoldenStore(case.parent))
    assert finding.damage
    assert finding.text.endswith("lm_head.weight is not what the manifest says of it")


def test_a_valid_record_of_another_place_under_a_right_hash(case: Path) -> None:
    """Somebody puts one update's gradients in place of another's and mends all hashes."""
    source = next(case.glob("truth/step_000000_update0/gradient.*"))
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    shutil.copy(source, case / "truth/step_000001/gradient.safetensors")
    forged(case, lambda tree: entry(tree).update(sha256=sha256, size=source.stat().st_size))
    with pytest.raises(GoldenError, match=r"gradient\.safetensors holds step_000000_update0/gradient"):
        use(case)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"schema_version": NaN}',
        '{"schema_version": 1, "schema_version": 1}',
        '{"schema_version": {"$float": 3}}',
        "\ufeff{}",
        "\udcff",
    ],
)
def test_rubbish_in_place_of_the_manifest(case: Path, text: str) -> None:
    (case / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_named(case / "manifest.json", case)


def test_a_folder_in_place_of_a_file(case: Path) -> None:
    for kind in ("truth", "model", "manifest"):
        path = file_of(case, kind)
        path.unlink()
        path.mkdir()
        with pytest.raises(GoldenError, match=str(path)):
            use(case)


def test_links_to_nowhere(case: Path) -> None:
    path = file_of(case, "truth")
    path.unlink()
    path.symlink_to(case / "nowhere")
    assert_named(path, case)
