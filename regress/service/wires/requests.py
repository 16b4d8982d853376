"""Parts of requests that the JSON dialects share: metadata, passes, steps, adapters, samplers and sampling.

Once a sequence number can be read, the request is executed or has failed, and no hole stops the later ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from regress.service.api import (
    AdamParams,
    Json,
    LoraSpec,
    Operation,
    PassRequest,
    SamplingRequest,
    SamplingRow,
    Service,
    ServiceError,
)
from regress.service.wires.fields import Fields
from regress.service.wires.names import Addresses
from regress.service.wires.settings import Limits
from regress.service.wires.tensors import check_total, datum_of_json, tokens_of_json
from regress.service.wires.wire import Call

_SEED = 2**2047
"""Bound of seeds: the stream of a completion of the engine has a seed of some hundred bits."""


def metadata_of(fields: Fields, call: Call, *names: str) -> Json:
    """Return what a client says about a session or a model, and whose it is.

    Raises:
        ServiceError: it is too large, or no text in UTF-8.
    """
    found = {name: fields.values[name] for name in names if name in fields}
    try:
        size = len(json.dumps(found, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ServiceError("the metadata has a lone surrogate; send text that UTF-8 can hold") from None
    if size > call.limits.metadata_bytes:
        raise ServiceError(
            f"the metadata has {size} bytes, more than {call.limits.metadata_bytes}", code="too_large"
        )
    return {**found, "owner": call.owner}


def loss_config(fields: Fields) -> dict[str, float | str | bool]:
    """Return the settings of a loss: numbers, texts, true or false."""
    config = fields.part("loss_fn_config", None)
    if config is None:
        return {}
    found: dict[str, float | str | bool] = {}
    for name, value in config.values.items():
        if isinstance(value, bool):
            found[name] = value
        elif isinstance(value, str):
            found[name] = config.text(name)
        elif value is not None:
            found[name] = config.number(name)
    return found


def pass_of(fields: Fields, limits: Limits, *, forward_only: bool, several: bool = False) -> PassRequest:
    """Return a pass.

    Args:
        several: True if the protocol has several targets at a position.

    Raises:
        ServiceError: a datum or a setting is refused.
    """
    parts = fields.parts("data", limit=limits.data)
    data = [datum_of_json(part, limits, several=several) for part in parts]
    check_total(data, limits)
    named = [datum.id for datum in data if datum.id is not None]
    if len(set(named)) != len(named):
        raise ServiceError("two datums have the same datum_id; give each its own")
    return PassRequest(data, fields.text("loss_fn"), loss_config(fields), forward_only)


def adam_of(params: Fields, defaults: AdamParams) -> AdamParams:
    """Return the settings of a step; those that are left out are the protocol's."""
    return AdamParams(
        **{name: params.number(name, default, low=0) for name, default in vars(defaults).items()}
    )


def lora_of(config: Fields, *, rank: int | None, train_unembed: bool) -> LoraSpec | None:
    """Return the adapter of a model, None for a rank of 0; what is left out is the protocol's."""
    chosen = config.integer("rank", high=4096) if rank is None else config.integer("rank", rank, high=4096)
    if chosen == 0:
        return None
    return LoraSpec(
        rank=chosen,
        seed=config.integer("seed", None, low=-(2**63), high=2**63 - 1),
        train_unembed=config.flag("train_unembed", train_unembed),
        train_mlp=config.flag("train_mlp", True),
        train_attn=config.flag("train_attn", True),
    )


def open_sampler(call: Call, session: str, fields: Fields, addresses: Addresses) -> str:
    """Return the id of a sampler of saved weights, or of a base model."""
    address = fields.text("model_path", None, limit=1024)
    return call.service.create_sampler(
        session,
        fields.integer("sampling_session_seq_id"),
        path=addresses.path(address, call) if address else None,
        base_model=None if address else fields.text("base_model"),
    )


def sampling_request(fields: Fields, limits: Limits, *, prompt_logprobs: bool) -> SamplingRequest:
    """Return a sampling request.

    Raises:
        ServiceError: a setting is out of bounds, or the completions are too many.
    """
    params = fields.part("sampling_params", Fields({}, "sampling_params"))
    prompt = tokens_of_json(fields.part("prompt"), limits)
    count = fields.integer("num_samples", 1, low=1, high=limits.samples)
    longest = params.integer("max_tokens", None, low=1)
    rows = [
        SamplingRow(
            tokens_of_json(row.part("prompt"), limits),
            row.integer("seed", low=-_SEED, high=_SEED - 1),
            row.integer("max_tokens", None, low=1),
        )
        for row in rows_of(fields, limits, limits.samples - count)
    ]
    tokens = count * (len(prompt) + (longest or 0))
    tokens += sum(len(row.prompt) + (row.max_tokens or 0) for row in rows)
    if tokens > limits.tokens:
        raise ServiceError(
            f"{count + len(rows)} completions with their prompts are {tokens} tokens, more than {limits.tokens}",
            code="too_large",
        )
    texts, ids = _stop(params)
    top_p = params.number("top_p", 1.0, low=0)
    if top_p > 1:
        params.refuse("top_p", "must be at most 1", top_p)
    return SamplingRequest(
        prompt=prompt,
        count=count,
        max_tokens=longest,
        temperature=params.number("temperature", 1.0, low=0),
        top_p=top_p,
        top_k=params.integer("top_k", -1, low=-1),
        stop=texts,
        stop_token_ids=(*ids, *_ids(params, "stop_token_ids")),
        seed=params.integer("seed", None, low=-_SEED, high=_SEED - 1),
        prompt_logprobs=prompt_logprobs,
        rows=rows,
    )


def rows_of(fields: Fields, limits: Limits, most: int) -> list[Fields]:
    """Return the further prompts of a request, which the protocols have not: our own clients send them."""
    return fields.parts("rows", limit=most) if "rows" in fields else []


def batch_limits(limits: Limits) -> dict[str, int]:
    """Return what a reply tells our own clients of the prompts that one request may hold."""
    return {"completions": limits.samples, "tokens": limits.tokens}


def _stop(params: Fields) -> tuple[list[str], list[int]]:
    """Return the texts and the token ids of ``stop``, which is a text, a list of texts, or a list of token ids."""
    stop = params.values.get("stop")
    if stop is None:
        return [], []
    if isinstance(stop, str):
        return [params.text("stop", limit=1024)], []
    values = params.items("stop", limit=64)
    if all(isinstance(value, str) for value in values):
        named = Fields({f"stop[{index}]": value for index, value in enumerate(values)}, params.where)
        return [named.text(name, limit=1024) for name in named.values], []
    return [], _ids(params, "stop")


def _ids(params: Fields, name: str) -> list[int]:
    values = params.items(name, [], limit=64)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            params.refuse(name, "must be a list of token ids", value)
    return list(values)


def spending(
    service: Service,
    model_id: str,
    seq_id: int | None,
    submit: Callable[[], Operation],
    problem: ServiceError | None = None,
) -> tuple[Operation | None, ServiceError | None]:
    """Submit a request, or spend its sequence number on the error that refuses it.

    Args:
        service: the service.
        model_id: model that the client owns.
        seq_id: number of the request, None if it has none.
        submit: reads the content of the request, and submits it.
        problem: why the request is refused whatever it holds.

    Returns:
        The operation, and the error if the request was refused; no operation if it has no number.

    Raises:
        ServiceError: the service is too busy, or the model does not exist: the number is not spent.
        Exception: the service itself has failed: the number is spent.
    """
    try:
        if problem is not None:
            raise problem
        return submit(), None
    except ServiceError as error:
        if error.retryable:
            raise
        if seq_id is None:
            return None, error
        return service.fail(model_id, seq_id, error), error  # raises, too, if there is no such model
    except Exception:
        if seq_id is not None:
            with suppress(ServiceError):
                service.fail(model_id, seq_id, _INTERNAL)
        raise


_INTERNAL = ServiceError(
    "the service has failed while it read the request; its log says why", code="internal", category="server"
)
