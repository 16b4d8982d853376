"""Program of a rank that serves a model: two passes and a step, then what the whole model holds."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from host_requests import ADAM, datums, offer, several

from regress.engine.local_tensor import local
from regress.parallel.distributed_ranks import opened_world
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import (
    LoraSpec,
    ModelSpec,
    PassRequest,
    SamplingRequest,
    SaveKind,
    ServiceError,
)


def served(folder: str, layout: list[str], lora: LoraSpec | None = None) -> dict[str, Any]:
    """Run the same requests on every rank; return replies, and what a save of the model holds is in the folder."""
    config = offer("model.dtype=float64", *layout)
    variables = {"WEAVER_DEBUG_DUMP_ENABLED": "1", "WEAVER_DEBUG_DUMP_DIR": f"{folder}/dump"}
    with opened_world(config) as world:
        host = EngineHost({"tiny": config}, world, Path(folder), environ=variables)
        host.create("m0", ModelSpec("tiny", lora))
        whole = datums([9, 5, 12, 7, 3])
        first = host.run_pass("m0", PassRequest(whole[:3], "importance_sampling"), {"seq_id": 1})
        broken = type(whole[0])(
            whole[4].tokens, {**whole[4].inputs, "logprobs": whole[4].inputs["logprobs"] - 1e30}
        )
        failed = ""
        try:
            host.run_pass("m0", PassRequest([*whole[:2], broken], "importance_sampling"), {"seq_id": 2})
        except ServiceError as error:
            failed = error.code
        forward = host.run_pass("m0", PassRequest(whole[3:], "cispo", forward_only=True), {"seq_id": 3})
        second = host.run_pass("m0", PassRequest(whole[3:], "cispo", {"entropy_coeff": 0.1}), {"seq_id": 4})
        step = host.optim_step("m0", ADAM, {"seq_id": 5})
        host.save("m0", f"{folder}/state", SaveKind.STATE)
        host.create_from("m1", f"{folder}/state", optimizer=True)
        for model_id in ("m0", "m1"):
            host.run_pass(model_id, PassRequest(whole[1:], "ppo"), {"seq_id": 6})
            host.optim_step(model_id, ADAM, {"seq_id": 7})
            host.save(model_id, f"{folder}/{model_id}", SaveKind.STATE)
        host.open_sampler("s", f"{folder}/m0", None)
        sampled = host.sample("s", SamplingRequest(whole[0].tokens, count=2, max_tokens=6, seed=3))
        return {
            "outputs": [dict(row) for row in (*first.outputs, *second.outputs)],
            "forward": [dict(row) for row in forward.outputs],
            "metrics": [dict(first.metrics), dict(second.metrics)],
            "norm": step.grad_norm,
            "failed": failed,
            "tokens": [one.tokens.tolist() for one in sampled.sequences],
        }


CUTS = {"whole": (0, 5), "chunks": (0, 2, 3, 5), "one by one": (0, 1, 2, 3, 4, 5)}


def cut(layout: list[str]) -> dict[str, Any]:
    """Send the same datums in one request and in several; return replies and weights of each by the way of cutting."""
    config = offer(*layout)
    found = {}
    with opened_world(config) as world, tempfile.TemporaryDirectory() as folder:
        host = EngineHost({"tiny": config}, world, Path(folder), environ={})
        whole = datums([9, 5, 12, 7, 3])
        for name, marks in CUTS.items():
            model_id = name.replace(" ", "-")
            host.create(model_id, ModelSpec("tiny"))
            replies = []
            for step in range(2):
                other = host.run_pass(
                    model_id, PassRequest(several(whole[:2]), "cross_entropy"), {"seq_id": 1}
                )
                replies += [row["logprobs"] for row in other.outputs]
                for start, stop in pairwise(marks):
                    request = PassRequest(whole[start:stop], "importance_sampling")
                    reply = host.run_pass(model_id, request, {"seq_id": 2})
                    replies += [row["logprobs"] for row in reply.outputs]
                made = host.optim_step(model_id, ADAM, {"seq_id": 3 + step})
                replies.append(np.asarray(made.grad_norm))
            policy = host._models[model_id].policy
            weights = {key: local(value.detach()).clone().numpy() for key, value in policy.named_parameters()}
            found[name] = {"replies": replies, "weights": weights}
    return found
