"""`tap_batch`: the explicit form for values that no hook can see, or for a trainer without hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from regress.capture.forward_inputs import as_ids
from regress.capture.forward_pass import contents_of, inputs_of, on_tokens
from regress.capture.layout_inference import Arrangement, infer_layout, predicted
from regress.capture.microbatch_records import Naming
from regress.capture.recording_session import Session
from regress.capture.recording_settings import as_keys
from regress.dump.recorder import Collector
from regress.dump.taps import active_recorder, current, tap
from regress.errors import CaptureError

sessions: list[Session] = []
"""Active recordings by hooks, the innermost last."""

_named: WeakKeyDictionary[Collector, dict[tuple[int, int], Naming]] = WeakKeyDictionary()

VALUES = ("log_probs", "entropy")
SHARES = ("loss", "pg_loss", "kl_loss", "entropy_loss")


def tap_batch(
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    cu_seq_lens: Any = None,
    pad_token_id: int | None = None,
    samples: Sequence[Any] | None = None,
    loss_mask: Any = None,
    log_probs: Any = None,
    entropy: Any = None,
    advantages: Any = None,
    rewards: Any = None,
    old_log_probs: Any = None,
    ref_log_probs: Any = None,
    loss: Any = None,
    **others: Any,
) -> None:
    """Record the values of one microbatch under a layout inferred from its inputs.

    Inside of `recording(...)` and `at(step=..., micro=...)` it takes ``input_ids`` and what tells the layout, and
    writes ordinary records. Inside of `record`, without ``input_ids``, it adds to the forward pass that ran last, or
    to the next one if none has run since the last step. Without a recorder it does nothing.

    Args:
        input_ids: ``[B, T]`` token ids; one packed row may be ``[T]``.
        attention_mask: ``[B, T]``, 1 where a token lies; position_ids, cu_seq_lens: as for a packed row.
        pad_token_id: id that would be padding at the end of rows without a mask.
        samples: an id, or ``(group_id, run_id)``, for each sample by row and column; by default made of the tokens.
        loss_mask: ``[B, T]``, not 0 at tokens that the loss counts, each at its own place.
        log_probs, entropy, advantages, old_log_probs, ref_log_probs, others: ``[B, T]`` values of tokens, each at its
            own place and not at that of the token before; fewer columns count from the right; advantages may be one
            for each sample.
        rewards: one for each sample.
        loss: the microbatch's share of the loss.

    Raises:
        CaptureError: if the batch can be read in two ways or a value does not fit it.
        DumpError: outside of `at(step=...)`.
    """
    given = _present(
        loss_mask=loss_mask,
        advantages=advantages,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        **others,
    )
    forward = _present(log_probs=log_probs, entropy=entropy)
    if input_ids is None:
        fields = _present(samples=samples, rewards=rewards)
        _add_to_pass({**given, **fields}, [*forward, *_present(loss=loss)])
        return
    recorder = active_recorder()
    if recorder is None:
        return
    layout = {"attention_mask": attention_mask, "position_ids": position_ids, "cu_seq_lens": cu_seq_lens}
    _write(recorder, _arrangement(input_ids, layout, pad_token_id), given, forward, loss, samples)


def _arrangement(input_ids: Any, layout: Mapping[str, Any], pad_token_id: int | None) -> Arrangement:
    known = {name: None if value is None else as_ids(value, name) for name, value in layout.items()}
    borders = known["cu_seq_lens"]
    return Arrangement(
        as_ids(input_ids, "input_ids"),
        known["attention_mask"],
        known["position_ids"],
        None if borders is None else borders.reshape(-1),
        pad_token_id,
    )


def _present(**values: Any) -> dict[str, Any]:
    """Return the values that were given."""
    return {name: value for name, value in values.items() if value is not None}


def _add_to_pass(values: Mapping[str, Any], known: Sequence[str]) -> None:
    session = sessions[-1] if sessions else None
    if session is None:
        if active_recorder() is not None:
            raise CaptureError("""tap_batch without input_ids adds to a forward pass that record(...) sees, and none
            records here: give input_ids, or enclose training in record(...)""")
        return
    if known:
        raise CaptureError(f"""tap_batch({known[0]}=...) would contradict what record(...) computes of the same forward
        pass: leave it out, or give input_ids outside of record(...)""")
    session.hold(values)


def _write(
    recorder: Collector,
    found: Arrangement,
    values: Mapping[str, Any],
    forward: Mapping[str, Any],
    loss: Any,
    samples: Sequence[Any] | None,
) -> None:
    layout = infer_layout(found)
    targets = predicted(layout)
    where = current()
    place = (0, 0) if where is None else (where.step, where.rank or 0)
    naming = _named.setdefault(recorder, {}).setdefault(place, Naming(place[1]))
    inputs = inputs_of(found, layout, False)
    if samples is None:
        keys = [naming.new(content) for content in contents_of(inputs["input_ids"], layout)]
    else:
        keys = as_keys(samples, len(layout.segments))
    at_tokens = {"samples": [keys[s.sample] for s in layout.segments]}
    at_targets = {"samples": [keys[s.sample] for s in targets.segments]}
    placed = {name: on_tokens(name, value, layout) for name, value in values.items()}
    mask = placed.pop("loss_mask", None)
    masks = {} if mask is None else {"response_mask": mask != 0}
    tap("batch_inputs", {**inputs, **masks}, layout=layout, meta=at_tokens)
    if forward:
        ids = {"input_ids": np.where(targets.attention_mask, inputs["input_ids"], 0)}
        known = {name: on_tokens(name, value, layout) for name, value in forward.items()}
        tap("forward_data", {**known, **masks, **ids}, layout=targets, meta=at_targets)
    if placed:
        valid = {"effective_valid": masks["response_mask"]} if masks else {}
        tap("is_loss_debug", {**placed, **valid}, layout=targets, meta=at_targets)
    if loss is not None:
        tap("loss", {"loss": loss}, layout=targets, meta=at_targets)
