"""Names of the public API that are called with what they cannot take: one plain sentence of an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import regress
from regress.errors import CaptureError, ConfigError, DumpError, GoldenError

GOLDEN = Path(__file__).parents[2] / "golden"
Call = Callable[[Any, Path], Any]


def compared(**options: Any) -> Call:
    return lambda api, folder: api.compare_sources(folder, folder, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (compared(steps=0), ConfigError, "steps=0 is not a range"),
        (compared(steps="0"), ConfigError, "steps='0' is not a range"),
        (compared(steps=(3, 1)), ConfigError, r"steps=\(3, 1\) is not a range"),
        (compared(only=[3]), ConfigError, "is not a pattern"),
        (compared(only=None), ConfigError, "only=None is not a pattern"),
        (compared(rtol="1e-3"), ConfigError, "rtol=1e-3 is not a bound"),
        (compared(rtol=float("nan")), ConfigError, "rtol=nan is not a bound"),
        (lambda api, folder: api.Tolerance(float("nan")), ConfigError, "relative=nan is not a bound"),
        (lambda api, folder: api.Tolerance(0.0, -1.0), ConfigError, "absolute=-1.0 is not a bound"),
        (lambda api, folder: api.export_case("dense", folder), GoldenError, "'dense' is not a GoldenCase"),
        (
            lambda api, folder: api.record(folder, "gpt2").__enter__(),
            CaptureError,
            "is not torch.nn.Module",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, call: Call, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(regress, tmp_path)


def test_the_golden_directory_may_be_a_text(tmp_path: Path) -> None:
    api: Any = regress
    with pytest.raises(GoldenError, match="there is no case 'none'"):
        api.compare_sources("golden:none", tmp_path, golden_dir=str(GOLDEN))


@pytest.mark.parametrize(
    ("revision", "words"), [("", "'dense@' is not a name of a golden case"), ("foo", "git has no .* of foo")]
)
def test_a_revision_that_no_case_has(tmp_path: Path, revision: str, words: str) -> None:
    with pytest.raises(GoldenError, match=words):
        regress.compare_sources(f"golden:dense@{revision}", tmp_path, golden_dir=GOLDEN)


def recorded(**options: Any) -> Call:
    return lambda api, folder: api.record(
        **{"folder": folder / "dump", "model": nn.Linear(2, 2), **options}
    ).__enter__()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": None}, "folder=None.*give the path of a folder"),
        ({"folder": 5}, "folder=5"),
        ({"token_gradient": "yes"}, "token_gradient='yes'.*give True or False"),
        ({"activations": 5}, "activations=5.*a regular expression"),
        ({"gradient": "("}, r"gradient=\.\.\.\) '\(' is not a regular expression"),
        ({"param": None}, "param=None"),
        ({"temperature": 0}, "temperature=0.*greater than 0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"samples": [1, 2]}, r"samples=\[1, 2\].*a function of all of them"),
        ({"classify": "old"}, "classify='old'"),
        ({"every_n_steps": 1.5}, "every_n_steps=1.5.*whole number"),
        ({"decoder": 5}, "decoder=5"),
        ({"head": 5}, "head=5"),
        ({"input_ids": 5}, "input_ids=5"),
        ({"pad_token_id": "x"}, "pad_token_id='x'"),
        ({"mesh": {"dp": "2"}}, "mesh=.*extent of each dimension"),
        ({"sequence_group": 5}, "sequence_group=5.*a process group"),
        ({"backward_scale": 0}, "backward_scale=0"),
        ({"system": 5}, "system=5"),
        ({"overwrite": "x"}, "overwrite='x'"),
    ],
)
def test_arguments_of_record_that_cannot_be_meant(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=rf"record\({words}"):
        recorded(**options)(regress, tmp_path)


@pytest.mark.parametrize(
    ("tap", "words"),
    [
        (lambda api: api.tap(5, x=1), "tap\\(5\\) names no type of record"),
        (lambda api: api.tap("forward_data", 5), "tensors that are not a mapping"),
        (lambda api: api.tap("forward_data", {"x": 1}, meta=5), "meta that are not a mapping"),
        (lambda api: api.tap("forward_data", {"x": 1}, layout=5), "a layout that is none"),
        (lambda api: api.tap("forward_data", {5: 1}), "tensor name 5"),
        (lambda api: api.tap_trajectories("x"), "takes trajectories only"),
        (lambda api: api.tap_trajectories([5]), "takes trajectories only"),
        (lambda api: api.at(step="x").__enter__(), r"at\(step='x'\) is not a number"),
        (lambda api: api.at(step=0, rank=-1).__enter__(), r"at\(rank=-1\) is not a number"),
        (lambda api: api.at(stp=0).__enter__(), r"at\(stp=...\) is not a coordinate"),
    ],
)
def test_taps_that_cannot_be_meant(tmp_path: Path, tap: Any, words: str) -> None:
    options = {"forward_data": True, "trajectory": True}
    with regress.recording(regress.Recorder(str(tmp_path / "dump"), options=options)), regress.at(step=0):
        with pytest.raises(DumpError, match=words):
            tap(regress)
        regress.tap("forward_data", x=1.0)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": "x"}, "input_ids is not an array of integers"),
        ({"input_ids": 5}, r"input_ids has the shape \[\].*give \[B, T\]"),
        ({"input_ids": [[1, 2], [3]]}, "lists of equal length"),
        ({"input_ids": [[[1]]]}, r"input_ids has the shape \[1, 1, 1\]"),
        ({"attention_mask": "x"}, "attention_mask is not an array of integers"),
        ({"cu_seq_lens": []}, "are not rising borders"),
        ({"samples": 5}, "give a list of ids"),
        ({"samples": "ab"}, "give a list of ids"),
        ({"samples": [None, None]}, "tells the id None"),
        ({"samples": [("a", "q"), ("b", 1)]}, r"tells the id \('a', 'q'\)"),
        ({"advantages": [[1.0], [1.0, 2.0]]}, "advantages is not an array of numbers"),
    ],
)
def test_batches_that_cannot_be_meant(tmp_path: Path, batch: Any, words: str) -> None:
    options = {"batch_inputs": True, "is_loss_debug": True}
    given = {"input_ids": [[3, 4, 5], [6, 7, 8]], "attention_mask": [[1] * 3] * 2, **batch}
    with (
        regress.recording(regress.Recorder(str(tmp_path / "dump"), options=options)),
        regress.at(step=0, rank=0, micro=0),
    ):
        regress.tap("is_loss_debug", x=1.0)
        with pytest.raises(CaptureError, match=words):
            regress.tap_batch(**given)
