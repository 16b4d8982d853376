"""User's own components in place of the engine's: functions that the configuration names, with checked results.

| key | takes | gives |
|---|---|---|
| ``model.patch`` | the built model | nothing, or another model |
| ``model.attention`` | what transformers' attention functions take | output ``[B, T, heads, d]`` and weights or None |
| ``algorithm.loss_function`` | what `regress.grpo.token_losses.token_loss` takes | a `TokenLoss` |
| ``optimizer.factory`` | named parameters, learning rate, ``betas eps weight_decay`` | a ``torch.optim.Optimizer`` |
| ``parallel.wrapper`` | model and process group | a module with ``no_sync()`` |
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from regress.engine.config.training_config import OptimizerConfig
from regress.errors import ConfigError, RegressError, reason
from regress.grpo.token_losses import TokenLoss
from regress.import_trust import named_code

LossFunction = Callable[..., TokenLoss]


def component(key: str, text: str, count: int, *keywords: str) -> Callable[..., Any]:
    """Import the function that a key names.

    Args:
        count: positional arguments that it is called with.
        keywords: names of the others.

    Raises:
        ConfigError: if it must not or cannot be imported, or takes other arguments.
    """
    stated = f"{key}={text}"
    found = named_code(text, stated)
    try:
        signature = inspect.signature(found)
    except ValueError:  # a builtin does not tell
        return found
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError as error:
        named = f" and {', '.join(keywords)} by name" if keywords else ""
        raise ConfigError(f"""{stated} is {text.partition(":")[2]}{signature}, but it is called with {count} positional
        argument{"s" * (count != 1)}{named} ({error}); give it these arguments""") from None
    return found


def patched(model: PreTrainedModel, text: str) -> PreTrainedModel:
    """Apply ``model.patch`` to the model, and return the result.

    Raises:
        ConfigError: if the function fails, or returns anything but a model or nothing.
    """
    stated = f"model.patch={text}"
    function = component("model.patch", text, 1)
    try:
        found = function(model)
    except Exception as error:
        raise ConfigError(f"{stated} failed on the model ({reason(error)}); correct it") from error
    if found is None:
        return model
    if not isinstance(found, PreTrainedModel):
        raise ConfigError(f"""{stated} returned a {type(found).__name__}; change the model in place and return nothing,
        or return a transformers.PreTrainedModel""")
    return found


def own_attention(text: str) -> str:
    """Register ``model.attention`` with transformers; return the name it is registered under."""
    function = component("model.attention", text, 5, "scaling", "dropout", "varlen")
    name = f"own_attention_{hashlib.sha256(text.encode()).hexdigest()[:12]}"  # colons would name a kernel of a hub
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def own_loss(text: str | None) -> LossFunction | None:
    """Return the token loss that ``algorithm.loss_function`` names, with a check of its results; None without one."""
    if text is None:
        return None
    stated = f"algorithm.loss_function={text}"
    keywords = "ref_log_probs_K", "sampler_log_probs_K", "entropy_K", "sum_over_context_parallel"
    function = component("algorithm.loss_function", text, 6, *keywords)

    def checked(log_probs_K: Tensor, *rest: Any, **named: Any) -> TokenLoss:
        found = function(log_probs_K, *rest, **named)
        if not isinstance(found, TokenLoss):
            raise RegressError(
                f"{stated} returned a {type(found).__name__}; return a regress.grpo.token_losses.TokenLoss"
            )
        if found.loss_K.shape != log_probs_K.shape:
            raise RegressError(f"""{stated} returned a loss of shape {list(found.loss_K.shape)} for {len(log_probs_K)}
            tokens; return one value a token""")
        return found

    return checked


def own_optimizer(
    named: Sequence[tuple[str, nn.Parameter]], text: str, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer that ``optimizer.factory`` makes.

    Raises:
        ConfigError: if the function fails, or returns anything but an optimizer of exactly these parameters.
    """
    stated = f"optimizer.factory={text}"
    function = component("optimizer.factory", text, 2, "betas", "eps", "weight_decay")
    numbers = {"eps": settings.eps, "weight_decay": settings.weight_decay}
    try:
        found = function(
            list(named), settings.learning_rate, betas=(settings.betas[0], settings.betas[1]), **numbers
        )
    except Exception as error:
        raise ConfigError(f"{stated} failed on the parameters ({reason(error)}); correct it") from error
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(f"{stated} returned a {type(found).__name__}; return a torch.optim.Optimizer")
    names = {id(parameter): name for name, parameter in named}
    known = [id(parameter) for group in found.param_groups for parameter in group["params"]]
    if sorted(known) != sorted(names):
        left = [name for key, name in names.items() if key not in known]
        what = f"leaves {left[0]} out" if left else "has parameters that are not the policy's"
        raise ConfigError(f"{stated}: the optimizer {what}; give it all that it is called with, each once")
    for group in found.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    return found


def own_wrapper(model: PreTrainedModel, group: object, text: str) -> nn.Module:
    """Return the module that ``parallel.wrapper`` makes of a model.

    Raises:
        ConfigError: if the function fails, or returns no module with ``no_sync``.
    """
    stated = f"parallel.wrapper={text}"
    function = component("parallel.wrapper", text, 2)
    try:
        found = function(model, group)
    except Exception as error:
        raise ConfigError(f"{stated} failed on the model ({reason(error)}); correct it") from error
    if not isinstance(found, nn.Module) or not callable(getattr(found, "no_sync", None)):
        raise ConfigError(
            f"{stated} returned a {type(found).__name__}; return a torch.nn.Module with a method no_sync()"
        )
    return found
