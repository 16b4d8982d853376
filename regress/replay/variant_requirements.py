"""Reasons why a case cannot be replayed under a variant, known before anything runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

from regress.dump.trajectory import Trajectory
from regress.engine.config.config_messages import DEFAULT, Origin
from regress.engine.config.config_schema import Config, conflicts
from regress.errors import ConfigError
from regress.parallel.split_requirements import (
    compile_refusal,
    divisor_refusal,
    experts_refusal,
    family_refusal,
    heads_refusal,
    microbatches_refusal,
    recurrent_refusal,
    stages_refusal,
    tensor_refusal,
)
from regress.replay.case_reads import trajectories_of
from regress.replay.case_traits import Facts, facts_of
from regress.replay.replay_plan import (
    FOLDED,
    PlannedUpdate,
    depends_on_microbatches,
    depends_on_ranks,
    plan_replay,
    same_microbatches,
    section,
    section_values,
)
from regress.replay.replay_request import Replay

if TYPE_CHECKING:
    from regress.replay.replay_request import Replay


def keeps_ties(replay: Replay) -> bool:
    """Return False if the best of a group may be another one only because equal samples are computed apart.

    Rewards that hold a divergence are as exact as log-probs. Those of equal samples are the same bit for bit where both
    lie at the same columns of one microbatch, and differ by rounding elsewhere.
    """
    algorithm = facts_of(replay.case).algorithm
    if algorithm.get("advantage") != "grpo_passk" or algorithm.get("kl_placement") != "reward":
        return True
    steps = trajectories_of(replay.case)
    return all(
        _places(update, one) == _places(update, other)
        for update in replay.plan
        for one, other in _equal(update, steps[update.step])
    )


def _equal(update: PlannedUpdate, trajectories: list[Trajectory]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of samples of an update that are equal, and of one group."""
    known = {one.key: one for one in trajectories}
    samples = [known[key] for key in update.frame.samples]
    for (first, one), (second, other) in combinations(enumerate(samples), 2):
        if (one.group_id, one.tokens, one.reward) == (other.group_id, other.tokens, other.reward):
            yield first, second


def _places(update: PlannedUpdate, sample: int) -> set[tuple[int, int, int, int]]:
    """Return the rank, microbatch, columns and first position of each piece of a sample."""
    return {
        (rank, micro, segment.col, segment.start)
        for rank, own in enumerate(update.layouts)
        for micro, layout in enumerate(own)
        for segment in layout.whole.segments
        if segment.sample == sample
    }


def keeps_microbatches(replay: Replay) -> bool:
    """Return True unless the values of a case depend on its microbatches, and the variant makes others.

    Those that its ranks make of their shares are no others.
    """
    if not depends_on_microbatches(facts_of(replay.case).algorithm):
        return True
    return same_microbatches(planned(replay, shares(replay)), replay.plan)


def has_other_values(replay: Replay) -> bool:
    """Return True if the stored values of a case are not those of the data-parallel ranks of a replay."""
    algorithm = facts_of(replay.case).algorithm
    if not depends_on_microbatches(algorithm):
        return False
    stored = planned(replay, {})
    same_ranks = stored[0].ranks.mesh.data_size == replay.plan[0].ranks.mesh.data_size
    return not same_microbatches(stored, replay.plan) or (depends_on_ranks(algorithm) and not same_ranks)


def shares(replay: Replay) -> dict[str, Any]:
    """Return the overrides that deal samples out as a replay does, and split nothing else."""
    ranks = replay.plan[0].ranks
    return {"parallel.dp": ranks.mesh.data_size, "parallel.sample_split": ranks.sample_split}


def planned(replay: Replay, overrides: Mapping[str, Any]) -> list[PlannedUpdate]:
    return plan_replay(trajectories_of(replay.case), replay.case.config, overrides)


def refusal(replay: Replay) -> str | None:
    """Return why a replay is not possible: the engine, or the recording, would refuse it; None if it is possible.

    Says nothing of what only the run itself can find.
    """
    facts = facts_of(replay.case)
    try:
        updates = len(replay.plan)
        for overrides in replay.processes:
            found = next(_reasons(facts, overrides, replay), None)
            if found is not None:
                return found
    except ConfigError as error:
        return str(error)
    at = replay.variant.resume_at
    if at is not None and at >= updates:
        return f"it resumes after {at} optimizer updates, and the case has {updates}"
    return None


def _reasons(facts: Facts, overrides: Mapping[str, Any], replay: Replay) -> Iterator[str]:
    prompts = (
        {"task.eval_size": 1} if replay.variant.program else {}
    )  # the program finds prompts to evaluate on
    here = {"trainer.type": "local"}  # what a service can compute is not known
    config = _config(facts.config, {**replay.precision.overrides, **prompts, **overrides, **here})
    found = list(_conflicts(config))
    own = {_culprit(sentence) for sentence in _conflicts(_config(facts.config, {}))} if found else ()
    yield from (
        sentence for sentence in found if _culprit(sentence) not in own
    )  # the case itself is possible
    yield from _of_sizes(facts, section(facts.config, overrides, "parallel"))
    backend = section(facts.config, overrides, "model").get("compile")
    if backend and facts.recurrent:
        yield compile_refusal("linear attention", str(backend))
    yield from _of_schedule(facts, section(facts.config, overrides, "parallel"), replay)


def _conflicts(config: Config) -> Iterator[str]:
    return conflicts(config, lambda path: Origin(DEFAULT))


def _culprit(sentence: str) -> str:
    """Return the key that a sentence begins with."""
    return sentence.partition("=")[0]


def _of_sizes(facts: Facts, parallel: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the sizes of the model refuse; those of an unknown model nothing."""
    tp, cp, ep, pp = (int(parallel.get(name, 1)) for name in ("tp", "cp", "ep", "pp"))
    found: list[str | None] = []
    if not facts.model:
        return
    if tp > 1 and parallel.get("tp_implementation", "torch") == "torch":
        found.append(tensor_refusal(facts.kind, facts.columns, tp))
    elif tp > 1:
        found.append(divisor_refusal(facts.kind, facts.attention, tp))
    if cp > 1 and facts.recurrent:
        found.append(recurrent_refusal("linear attention", facts.kind, cp))
    if cp > 1 and parallel.get("cp_method", "ulysses") == "ulysses":
        found.append(heads_refusal(facts.heads // tp, cp, tp))
    if ep > 1:
        found.append(experts_refusal("the model", facts.experts, ep))
    if pp > 1:
        stages = pp * int(parallel.get("pp_stages_per_rank", 1))
        found += [family_refusal(facts.kind), stages_refusal(facts.blocks, stages)]
    yield from (reason for reason in found if reason is not None)


def _of_schedule(facts: Facts, parallel: Mapping[str, Any], replay: Replay) -> Iterator[str]:
    """Yield what a pipeline schedule refuses: numbers of microbatches, and one rank for both ends of tied weights."""
    pp, schedule = int(parallel.get("pp", 1)), str(parallel.get("pp_schedule", "gpipe"))
    if pp == 1:
        return
    stages = pp * int(parallel.get("pp_stages_per_rank", 1))
    for update in replay.plan:
        micros = max(len(own) for own in update.layouts)
        reason = microbatches_refusal(schedule, micros, pp, stages)
        if reason is not None:
            yield reason
    if schedule in FOLDED and facts.tied and any(int(parallel.get(name, 1)) > 1 for name in ("fsdp", "tp")):
        yield (
            f"parallel.pp_schedule={schedule}: first and last stage lie on one rank, where fsdp and tp make two "
            "parameters of tied weights; choose another schedule or set model.tie_word_embeddings=false"
        )


def _config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return a configuration with overrides, without the files of a case, of which no rule here speaks."""
    sections, plain = _defaults()
    changed = {key.partition(".")[0] for key in overrides} | config.keys()
    given = {name: section_values(config, overrides, name) for name in changed & sections.keys()}
    return Config(
        **sections
        | {
            name: type(sections[name])(**{key: value for key, value in values.items() if key in plain[name]})
            for name, values in given.items()
        }
    )


@lru_cache(maxsize=1)
def _defaults() -> tuple[dict[str, Any], dict[str, frozenset[str]]]:
    """Return the default of every section, and the keys of each that are not sections of their own."""
    whole = Config()
    sections = {
        spec.name: found for spec in fields(Config) if is_dataclass(found := getattr(whole, spec.name))
    }
    plain = {
        name: frozenset(each.name for each in fields(found) if not is_dataclass(getattr(found, each.name)))
        for name, found in sections.items()
    }
    return sections, plain
