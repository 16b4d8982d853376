"""Which term of the objective each argument of somebody's loss function is, by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regress.errors import ConfigError

OF_TOKENS = ("log_probs", "old_log_probs", "ref_log_probs", "sampler_log_probs", "advantages", "entropy")
"""Terms with a value at each token."""
OF_SAMPLES = ("rewards", "groups")
BOUNDARIES = ("cu_seqlens", "position_ids", "sequence", "lengths")
"""Terms that tell where samples end in a packed row."""
COUNTS = ("tokens", "samples", "group_size", "microbatches")
"""Numbers of the whole batch, whatever microbatch the function is called on."""
TERMS = (*OF_TOKENS, "mask", *OF_SAMPLES, *BOUNDARIES, *COUNTS, "temperature")
_POLICIES = (
    ("ref_log_probs", r"ref|base"),
    ("old_log_probs", r"old|prev|behavio|(^|_)mu(_|$)"),
    ("sampler_log_probs", r"rollout|sampl|vllm|sglang|infer|generat|actor_gen"),
)
_NAMES: tuple[tuple[str, str], ...] = (
    ("cu_seqlens", r"cu_?seq|^offsets$"),
    ("position_ids", r"^position"),
    ("sequence", r"^(sample|seq|sequence|segment)(_?(ids?|index|indices))?$|^sequence_K$"),
    ("group_size", r"group_size|num_gen|n_rollouts|rollouts_per|^G$"),
    ("groups", r"group|^uids?$|prompt_?(ids?|index)|^index$"),
    ("microbatches", r"micro_?batches|accum|num_micro"),
    ("tokens", r"(num|n|total|global)_?(loss_)?(items|tokens)|denominator|token_count|normalizer"),
    ("samples", r"(num|n|total|global)_?(samples|seqs|sequences|prompts)|batch_size"),
    ("norm_length", r"max_?(completion|response|new|seq)?_?(len|tok)|norm_?len|constant_len|^L$"),
    ("lengths", r"lengths|seq_?lens|_lens$"),
    ("mask", r"mask"),
    ("advantages", r"adv|^A$|^gae$"),
    ("rewards", r"reward|score|^returns$"),
    ("temperature", r"^temp"),
    ("kl_coef", r"^(kl_?)?(beta|coef+|coeff|weight|alpha|scale)$|kl.*(coef|beta|weight|alpha)|^beta_kl$"),
    ("entropy_coef", r"ent.*(coef|weight|beta|bonus)"),
    ("entropy", r"entrop"),
    ("delta", r"^delta$"),
    ("dual_clip", r"dual|clip_ratio_c$|clip_c$"),
    ("clip_low", r"(clip|eps).*(low|lower|min|neg)|(low|lower|min)_?(clip|eps)"),
    ("clip_high", r"(clip|eps).*(high|upper|max|pos)|(high|upper|max)_?(clip|eps)"),
    ("clip", r"clip|epsilon|^eps$|^cliprange$"),
)


@dataclass(frozen=True)
class Argument:
    """An argument of the function.

    Attributes:
        term: what it is, one of `TERMS` or a field of the objective; ``clip`` is both clip constants.
        optional: True if the function has a default for it.
        default: that default.
    """

    name: str
    term: str | None
    optional: bool
    default: Any = None
    by_place: bool = False


def term_of(name: str) -> str | None:
    """Return the term that an argument's name stands for, None where it stands for none."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    plain = plain if len(plain) == 1 else plain.lower()
    if re.search(r"log_?(it)?_?p(rob)?s?(_|s|$|\d)|logprob|^lps?$|_lps?$", plain):
        return next((term for term, words in _POLICIES if re.search(words, plain)), "log_probs")
    if plain in ("per_token_logps", "logps"):
        return "log_probs"
    return next((term for term, words in _NAMES if re.search(words, plain)), None)


def arguments_of(
    function: Callable[..., Any], terms: Mapping[str, str], given: Mapping[str, Any]
) -> tuple[Argument, ...]:
    """Return the arguments that the function is called by, those of ``given`` left out.

    Args:
        terms: argument -> term, where its name does not tell.
        given: argument -> value that it is called with whatever the batch.

    Raises:
        ConfigError: for an argument that is not there, or that nothing tells the value of.
    """
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"""{name_of(function)} does not tell its arguments ({error}): wrap it in a function of
        log_probs, old_log_probs, advantages, mask and what else it takes""") from error
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in {*terms, *given} - {*parameters}:
        if not (takes_any and name in given):
            raise ConfigError(
                f"{name_of(function)} has no argument {name!r}: it takes {', '.join(parameters)}"
            )
    found = []
    for name, one in parameters.items():
        if name in given or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        optional = one.default is not one.empty
        by_place = one.kind is one.POSITIONAL_ONLY
        term = terms.get(name) or term_of(name)
        found.append(Argument(name, term, optional, one.default if optional else None, by_place))
    _check(function, found, terms)
    return _without_old(tuple(found))


def _check(function: Callable[..., Any], found: list[Argument], terms: Mapping[str, str]) -> None:
    from regress.grpo.fields import ObjectiveFields

    known = {*TERMS, "clip", *ObjectiveFields.__dataclass_fields__}
    for argument in found:
        given = terms.get(argument.name)
        if given is not None and given not in known:
            raise ConfigError(
                f"{given!r} is not a term: choose one of {', '.join(TERMS)}, or a field of an objective"
            )
        if argument.term is None and not argument.optional:
            what = "logits: give it log-probs in a function of your own" if "logit" in argument.name else ""
            raise ConfigError(
                f"{name_of(function)} needs {argument.name!r}, and nothing tells what that is: "
                + (
                    what
                    or f"say it by --term {argument.name}=TERM ({', '.join(TERMS)}, or a field of an objective), "
                    f"or give its value by --arg {argument.name}=VALUE"
                )
            )
    for term in TERMS:
        same = [argument.name for argument in found if argument.term == term]
        if len(same) > 1 and term in OF_TOKENS:
            raise ConfigError(f"""{name_of(function)} has {" and ".join(same)}, which both look like {term}: say what
            one of them is by --term {same[-1]}=TERM, or give its value by --arg {same[-1]}=VALUE""")
    if not any(argument.term == "log_probs" for argument in found):
        raise ConfigError(f"""{name_of(function)} takes no log-probs of the policy: say which argument they are by
        --term NAME=log_probs""")


def _without_old(found: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Take the sampler's log-probs for the old ones where the function has no others."""
    terms = {argument.term for argument in found}
    if "old_log_probs" in terms or "sampler_log_probs" not in terms:
        return found
    return tuple(
        Argument(one.name, "old_log_probs", one.optional, one.default, one.by_place)
        if one.term == "sampler_log_probs"
        else one
        for one in found
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, with its module."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}".lstrip(":")
