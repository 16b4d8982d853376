"""Judgement of recorded rollouts: a replay must repeat them exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from regress.compare.alignment.element_names import Locator
from regress.compare.verdicts.tensor_case import Locate
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.canonical_json import dumps
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import TokenFrame

QUANTITY, SAMPLER, MISMATCH = "trajectory", "sampler_log_probs", "mismatch"
REPEATED = Tolerance(0.0, bitwise=True, reason="a replay repeats its recorded rollouts byte for byte")


def judge_trajectories(
    record: Record | None, golden: Record, *, sampled: Tolerance | None = None, prefix: str = ""
) -> list[Verdict]:
    """Return verdicts on the rollouts of one step: every array byte for byte, and the metadata of each sample.

    Args:
        record: record of the replay; None where it recorded nothing.
        golden: the record of the rollouts that it had to repeat.
        sampled: tolerance of the sampler's log-probs in a replay that samples; all else must be the same.
        prefix: start of the names in verdicts.
    """
    place = Place(golden.step)
    if record is None:
        detail = f"the rollouts of step {golden.step} were not recorded"
        return [
            Verdict(Status.MISSING, QUANTITY, prefix + name, place, detail)
            for name in (*golden.tensors, "samples")
        ]
    locator = _locator(golden)
    names = dict.fromkeys([*record.tensors, *golden.tensors])
    found = []
    for name in names:
        expected = golden.tensors.get(name)
        drawn = sampled is not None and name == "log_probs"
        found.append(
            judge_tensor(
                record.tensors.get(name),
                expected,
                sampled if sampled is not None and drawn else REPEATED,
                quantity=SAMPLER if drawn else QUANTITY,
                name=prefix + (SAMPLER if drawn else name),
                place=place,
                locate=None if expected is None else words_of(expected, locator),
            )
        )
    samples = _judge_samples(record.meta.get("samples"), golden.meta.get("samples"), place)
    return [*found, replace(samples, name=prefix + samples.name)]


def judge_mismatch(
    sides: tuple[Record | None, Record], log_probs: tuple[Array, Array], tolerance: Tolerance
) -> Verdict:
    """Return the verdict on the sampler's log-probs less the trainer's, at the loss tokens of one step.

    Args:
        sides: rollouts of the replay, and the golden ones.
        log_probs: actual and golden log-probs of the trainer, flat over the tokens of the samples; NaN where the
            golden ones are not known.
    """
    actual, golden = sides
    place, words = Place(golden.step), _locator(golden)
    mask = golden.tensors["loss_mask"].astype(bool)
    if log_probs[1].shape == mask.shape:
        mask = mask & np.isfinite(log_probs[1])
    sampler = None if actual is None else actual.tensors.get("log_probs")
    if sampler is None or any(values.shape != mask.shape for values in (sampler, *log_probs)):
        detail = "the rollouts hold other tokens, so there is nothing to compare"
        return Verdict(Status.MISSING, MISMATCH, MISMATCH, place, detail)
    own, its = (
        np.where(mask, rolled.astype(np.float64) - trained.astype(np.float64), 0.0)
        for rolled, trained in zip((sampler, golden.tensors["log_probs"]), log_probs, strict=True)
    )
    return judge_tensor(
        own,
        its,
        tolerance,
        quantity=MISMATCH,
        name=MISMATCH,
        place=place,
        scale=float(np.abs(golden.tensors["log_probs"]).max(initial=0.0)),
        locate=None if words is None else words.token,
    )


def _locator(golden: Record) -> Locator | None:
    """Return words for the tokens of the golden rollouts."""
    samples: Any = golden.meta.get("samples")
    if not isinstance(samples, list) or not {"lengths", "run_id", "tokens"} <= golden.tensors.keys():
        return None
    groups = [sample.get("group_id") for sample in samples]
    keys = tuple(zip(map(str, groups), golden.tensors["run_id"].tolist(), strict=True))
    frame = TokenFrame(keys, tuple(golden.tensors["lengths"].tolist()))
    return Locator(frame, golden.tensors["tokens"])


def words_of(array: Array, locator: Locator | None) -> Locate | None:
    """Return words for elements: tokens in arrays of all tokens, samples in arrays of all samples."""
    if locator is None or array.ndim != 1:
        return None
    if len(array) == locator.frame.size:
        return locator.token
    if len(array) == len(locator.frame.samples):
        return lambda index: "sample {}/{}".format(*locator.frame.samples[index])
    return None


def _judge_samples(actual: Any, golden: Any, place: Place) -> Verdict:
    if not isinstance(actual, list) or not isinstance(golden, list):
        status = Status.MISSING if isinstance(golden, list) else Status.EXTRA
        return Verdict(status, QUANTITY, "samples", place, "only one side says what its samples are")
    if len(actual) != len(golden):
        return Verdict(
            Status.SHAPE, QUANTITY, "samples", place, f"golden {len(golden)} samples, actual {len(actual)}"
        )
    wrong = [*_differences(actual, golden)]
    status, detail = (Status.MASK, wrong[0]) if wrong else (Status.OK, "")
    return Verdict(
        status,
        QUANTITY,
        "samples",
        place,
        detail,
        multiple=math.inf if wrong else 0.0,
        over=len(wrong),
        count=len(golden),
        reason=REPEATED.reason,
    )


def _differences(actual: list[Any], golden: list[Any]) -> Iterator[str]:
    """Yield number and difference of each sample that differs; compared as text, in which a NaN is a NaN."""
    for index, (actual_sample, golden_sample) in enumerate(zip(actual, golden, strict=True)):
        fields = [
            key
            for key in {**golden_sample, **actual_sample}
            if dumps(actual_sample.get(key)) != dumps(golden_sample.get(key))
        ]
        if fields:
            yield f"sample {index} ({golden_sample.get('group_id')}): {', '.join(fields)} differ"
