"""JSON messages that both protocols share, and the requests of the service that they become."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, SkipValidation

from regress.service.service_api import (
    AdamParams,
    Array,
    Datum,
    Json,
    LoraSpec,
    PassRequest,
    SamplingRequest,
    SamplingRow,
    ServiceError,
)
from regress.service.wires.app_settings import Limits
from regress.service.wires.json_message import (
    FEW,
    Count,
    LongText,
    Message,
    Numbers,
    Positive,
    Real,
    Seed,
    Setting,
    Stop,
    Text,
    at_most,
    between,
    refused,
)
from regress.service.wires.request_arrays import (
    DTYPES,
    check_total,
    datum_of,
    flat_from_list,
    from_list,
    from_rows,
    shape_size,
    tokens_of,
)
from regress.service.wires.save_names import Addresses
from regress.service.wires.wire_protocol import Call, shown_name


class Adam(Message):
    """Settings of a step; those that are left out are the protocol's."""

    learning_rate: Real | None = None
    beta1: Real | None = None
    beta2: Real | None = None
    eps: Real | None = None
    weight_decay: Real | None = None
    grad_clip_norm: Real | None = None

    def params(self, defaults: AdamParams) -> AdamParams:
        """Return the settings with the defaults of a protocol."""
        return AdamParams(**{**vars(defaults), **self.model_dump(exclude_none=True)})


class Lora(Message):
    """Adapter of a model; what is left out is the protocol's."""

    rank: Annotated[int, between(0, 4096)] | None = None
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    train_unembed: bool | None = None
    train_mlp: bool = True
    train_attn: bool = True

    def spec(self, *, rank: int | None, train_unembed: bool) -> LoraSpec | None:
        """Return the adapter, None for a rank of 0."""
        chosen = rank if self.rank is None else self.rank
        if chosen is None:
            raise ServiceError("lora_config.rank is missing")
        if chosen == 0:
            return None
        unembed = train_unembed if self.train_unembed is None else self.train_unembed
        return LoraSpec(chosen, self.seed, unembed, self.train_mlp, self.train_attn)


class Chunk(Message):
    """Token ids of a part of an input."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[Any], SkipValidation, at_most("tokens")]


class ModelInput(Message):
    """Chunks of token ids; those of images are not supported."""

    chunks: Annotated[list[Chunk], FailFast(), at_most("tokens")]

    def ids(self, where: str) -> Array:
        """Return the token ids ``[T]`` of all chunks."""
        ids = DTYPES["int64"]
        pieces = [
            flat_from_list(chunk.tokens, ids, f"{where}.chunks[{index}].tokens")
            for index, chunk in enumerate(self.chunks)
        ]
        return tokens_of(pieces, where)


class Tensor(Message):
    """Numbers as nested lists, as a flat list with a shape, or as sparse rows."""

    data: Numbers
    dtype: Literal["float32", "float64", "int32", "int64"] = "float32"
    shape: Annotated[list[int], at_most(8)] | None = None
    sparse_crow_indices: Numbers | None = None
    sparse_col_indices: Numbers | None = None

    def array(self, where: str, limits: Limits) -> Array:
        """Return the numbers as an array."""
        dtype, named = DTYPES[self.dtype], f"{where}.data"
        if self.shape is not None:
            shape_size(self.shape, where, limits)
        sparse = {name: getattr(self, name) for name in ("sparse_crow_indices", "sparse_col_indices")}
        if any(values is not None for values in sparse.values()):
            for name, values in sparse.items():
                if values is None:
                    raise ServiceError(f"{where}.{name} is missing")
            starts, columns = (
                flat_from_list(values, DTYPES["int64"], f"{where}.{name}") for name, values in sparse.items()
            )
            return from_rows(
                flat_from_list(self.data, dtype, named), starts, columns, self.shape or [], where, limits
            )
        array = from_list(self.data, dtype, named)
        if self.shape is None or self.shape == list(array.shape):
            return array
        if math.prod(self.shape) != array.size:
            raise ServiceError(f"{where} has {array.size} numbers, but its shape is {self.shape}")
        return array.reshape(self.shape)


class DatumMessage(Message):
    """Tokens, and the arrays of their loss."""

    model_input: ModelInput
    loss_fn_inputs: Annotated[dict[Text, Tensor], at_most("tensors", dict)]
    datum_id: Text | None = None

    def datum(self, where: str, limits: Limits, *, several: bool) -> Datum:
        """Return the datum, whose arrays have the length of its tokens."""
        inputs = {
            name: tensor.array(f"{where}.loss_fn_inputs.{shown_name(name)}", limits)
            for name, tensor in self.loss_fn_inputs.items()
        }
        ids = self.model_input.ids(f"{where}.model_input")
        return datum_of(ids, inputs, where, self.datum_id, several=several)


class Pass(Message):
    """Datums, and the loss that they are passed with."""

    data: Annotated[list[DatumMessage], FailFast(), at_most("data")]
    loss_fn: Text
    loss_fn_config: Annotated[dict[str, Setting], at_most(FEW, dict)] = Field(default_factory=dict)

    def request(
        self, where: str, limits: Limits, *, forward_only: bool, several: bool = False
    ) -> PassRequest:
        """Return the pass.

        Args:
            where: name of the message in its body.
            limits: bounds of a request.
            forward_only: False for a backward pass, too.
            several: True if the protocol has several targets at a position.

        Raises:
            ServiceError: a datum is refused.
        """
        data = [
            datum.datum(f"{where}.data[{index}]", limits, several=several)
            for index, datum in enumerate(self.data)
        ]
        check_total(data, limits)
        named = [datum.id for datum in data if datum.id is not None]
        if len(set(named)) != len(named):
            raise ServiceError("two datums have the same datum_id; give each its own")
        config = {name: value for name, value in self.loss_fn_config.items() if value is not None}
        return PassRequest(data, self.loss_fn, config, forward_only)


class SamplingParams(Message):
    """Settings of completions."""

    max_tokens: Positive | None = None
    temperature: Real = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, between(-1, 2**31 - 1)] = -1
    stop: Stop = ((), ())
    stop_token_ids: Annotated[list[Count], at_most(FEW)] = Field(default_factory=list)
    seed: Seed | None = None


class Prompt(Message):
    """Prompt of a request; the rows of one, which our own clients send, are not in the protocols."""

    prompt: ModelInput


class SamplingRowMessage(Prompt):
    """Further prompt of a request, of which one completion is drawn."""

    seed: Seed
    max_tokens: Positive | None = None


class Sampling(Prompt):
    """Prompt, and how it is completed."""

    num_samples: Positive = 1
    prompt_logprobs: bool = False
    sampling_params: SamplingParams = SamplingParams()
    rows: Annotated[list[SamplingRowMessage], FailFast(), at_most("samples")] = Field(default_factory=list)

    def request(self, limits: Limits) -> SamplingRequest:
        """Return the request.

        Raises:
            ServiceError: the completions are too many.
        """
        params, prompt, count = self.sampling_params, self.prompt.ids("prompt"), self.num_samples
        if count > limits.samples:
            raise refused("num_samples", f"must be at most {limits.samples}", count)
        if len(self.rows) > limits.samples - count:
            raise refused(
                "rows",
                f"must be a list of at most {limits.samples - count} values",
                self.rows,
                code="too_large",
            )
        rows = [
            SamplingRow(row.prompt.ids(f"rows[{index}].prompt"), row.seed, row.max_tokens)
            for index, row in enumerate(self.rows)
        ]
        tokens = count * (len(prompt) + (params.max_tokens or 0))
        tokens += sum(len(row.prompt) + (row.max_tokens or 0) for row in rows)
        if tokens > limits.tokens:
            raise ServiceError(
                f"{count + len(rows)} completions with their prompts are {tokens} tokens, more than {limits.tokens}",
                code="too_large",
            )
        texts, ids = params.stop
        return SamplingRequest(
            prompt=prompt,
            count=count,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=texts,
            stop_token_ids=(*ids, *params.stop_token_ids),
            seed=params.seed,
            prompt_logprobs=self.prompt_logprobs,
            rows=rows,
        )


class OpenSampler(Message):
    """Sampler of saved weights, or of a base model."""

    sampling_session_seq_id: Count
    model_path: LongText | None = None
    base_model: Text | None = None

    def open(self, call: Call, session: str, addresses: Addresses) -> str:
        """Open the sampler, and return its id."""
        if not self.model_path and self.base_model is None:
            raise ServiceError("base_model is missing")
        path = addresses.path(self.model_path, call) if self.model_path else None
        base_model = None if path else self.base_model
        return call.service.create_sampler(
            session, self.sampling_session_seq_id, path=path, base_model=base_model
        )


def metadata_of(message: Message, call: Call, *names: str) -> Json:
    """Return what a client says about a session or a model, and whose it is.

    Raises:
        ServiceError: it is too large, or no text in UTF-8.
    """
    found = {name: value for name in names if (value := getattr(message, name)) is not None}
    try:
        size = len(json.dumps(found, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ServiceError("the metadata has a lone surrogate; send text that UTF-8 can hold") from None
    if size > call.limits.metadata_bytes:
        raise ServiceError(
            f"the metadata has {size} bytes, more than {call.limits.metadata_bytes}", code="too_large"
        )
    return {**found, "owner": call.owner}
