"""Recorded optimizer state as a starting point, so that the first update is not that of a fresh AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from regress.dump.dump_reader import read
from regress.dump.numpy_arrays import Array, to_numpy
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint.checkpoint_tensors import is_plain, read_tensors
from regress.errors import CheckpointError, ConfigError, DumpError

MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = ("step", *MOMENTS)


def load_state(optimizer: torch.optim.Optimizer, policy: LocalPolicy, path: str | Path) -> None:
    """Load the optimizer state (``<parameter>/<state>``) from a dump's file of type ``optimizer``, or a checkpoint's.

    Learning rate and the other settings stay those of the optimizer; the moments are converted to the dtype and
    device of their parameters.

    Args:
        policy: whose parameters the optimizer knows by name; of a policy on several ranks each takes its part.

    Raises:
        ConfigError: if the file cannot be read, or is not the whole state of exactly these parameters.
    """
    stated = f"optimizer.state_path={str(path)!r}"
    put_state(optimizer, policy, _read(Path(path), stated), stated)


def put_state(
    optimizer: torch.optim.Optimizer, policy: LocalPolicy, tensors: Mapping[str, Array], stated: str
) -> None:
    """Give the optimizer a state of the form ``<parameter>/<state>``; ``stated`` says where it is from.

    Raises:
        ConfigError: if it is not the whole state of exactly these parameters.
    """
    whole = dict(trained_parameters(policy.architecture))
    _check_names(tensors, whole, stated)
    state = {
        index: {
            key: policy.part(name, value) if value.dim() else value
            for key in STATES
            for value in [_state(tensors[f"{name}/{key}"], name, key, whole[name], stated)]
        }
        for index, name in enumerate(
            name for group in optimizer.param_groups for name in group.get("param_names", ())
        )
    }
    # load_state_dict moves the moments to the parameters, and the step counts to the device they belong
    # on
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _read(path: Path, stated: str) -> dict[str, Array]:
    try:
        if is_plain(path):
            return {name: to_numpy(value, name) for name, value in read_tensors(path)[0].items()}
        record = read(path)
    except (CheckpointError, DumpError) as error:
        raise ConfigError(f"{stated}: {error}") from error
    if record.type != "optimizer":
        raise ConfigError(f"""{stated}: the file holds {record.type}, not the state of an optimizer; give one of a dump
        with debug.dump_options.optimizer=true, or optimizer.safetensors of a checkpoint""")
    return record.tensors


def _check_names(tensors: Mapping[str, Array], parameters: dict[str, nn.Parameter], stated: str) -> None:
    expected = {f"{name}/{key}" for name in parameters for key in STATES}
    for verb, names in (("lacks", expected - tensors.keys()), ("has additional", tensors.keys() - expected)):
        if names:
            raise ConfigError(f"""{stated}: the file {verb} {min(names)} ({len(names)} in all), but it has to hold
            {", ".join(STATES)} of every parameter of the policy; give the state of the same model, dumped whole
            (debug.target_param_pattern=.*)""")


def _state(array: Array, name: str, key: str, parameter: nn.Parameter, stated: str) -> Tensor:
    shape = () if key == "step" else tuple(parameter.shape)
    if array.shape != shape:
        raise ConfigError(f"""{stated}: {name}/{key} has shape {list(array.shape)} and the policy asks for
        {list(shape)}; give the state of the same model""")
    wide = torch.from_numpy(array.astype("float64"))
    if not bool(wide.isfinite().all()) or (key != "exp_avg" and bool((wide < 0).any())):
        rule = "finite numbers" if key == "exp_avg" else "finite numbers that are not negative"
        raise ConfigError(f"{stated}: {name}/{key} holds {_worst(wide)}; give a state of {rule}")
    return wide.to(torch.float32 if key == "step" else parameter.dtype)


def _worst(values: Tensor) -> float:
    bad = values[~values.isfinite()]
    return float(bad[0]) if len(bad) else float(values.min())
