"""Every rule fires on what it is about, and not on something else; what nobody knows is said to be unknown."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from regress.compare.diagnosis.common_patterns import Pattern
from regress.compare.diagnosis.dataflow import INPUTS
from regress.compare.diagnosis.diagnosis_rule import Rule
from regress.compare.diagnosis.first_divergence import Divergence, find_divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, Diagnosis, diagnose, matched, next_command
from regress.compare.diagnosis.rules.rule_table import CONDITIONS, RULES
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.sampled_tokens import SAMPLED
from regress.compare.quantities import QUANTITIES
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.replay.command_replays import spelled_out, variant_table
from regress.replay.variant_names import choose
from tests.as_subtests import as_subtests
from tests.unit.compare.diagnosis.synthetic_update import changes

NAMES = (
    *(
        "log_probs",
        "position_ids",
        "response_mask",
        "attention_mask",
        "input_ids",
        "model.layers.0",
        "model.layers.0.mlp.gate.weight",
        "lm_head",
        "temperature",
        "parts",
    ),
    *(
        "model.embed_tokens",
        "transformer.wpe",
        *("model.norm.weight/step", "model.norm.weight/exp_avg"),
        "model.layers.1.mlp.experts.0.weight",
    ),
)
SENTENCES = (
    "the prompt or an answer of the environment is another",
    "the tokens are the same and one counts as sampled and was not",
    "token 3 is drawn in place of 4; log-probs of 2 of the 4 tokens that were sampled before differ",
    "token 3 is drawn in place of 4; log-probs of 2 of the 4 tokens that were sampled before differ; those of the "
    "first token of each completion agree",
    "token 3 is drawn in place of 4; log-probs of the 4 tokens that were sampled before agree",
    "token 3 is drawn in place of 4; a token of lower probability is taken where the most probable one must be",
    "the completion ends earlier; every one of them by its end alone; log-probs of the 4 tokens that were sampled "
    "before agree",
    "token 3 is drawn in place of 4; no sampled token with a log-prob lies before it, so nothing tells whether the "
    "distributions agree",
)
DETAILS = (
    *("", "forward_data of rank 0 was not recorded", "no rank holds model.layers.1"),
    "golden float64 [3], and nothing of this name was recorded",
    *("sample g/0, position 0 was produced by no microbatch", "sample g/0, position 0 was produced twice"),
    *("x was recorded 2 times; only the first", "x was recorded, but is not part of the plan"),
    *("actual float64 [3], and no golden of this name", "x holds a tensor 'y' that belongs to no quantity"),
    "sample g/0 is in the golden dump only",
    "sample r/0 is in the actual dump only; sample r/0 of the actual dump is 2 samples, one behind the other "
    "(g/0, g/1)",
    *(
        f"{SAMPLED}: 1 of 2 samples differ, the first of them (g/0) at position 3 in turn 1, where {words}"
        for words in SENTENCES
    ),
    f"{SAMPLED}: tokens and masks repeat",
)
WORDS = (
    *("equal to log_probs", "equal to policy_loss", "equal to 1 everywhere", "rounded to bfloat16"),
    *("a sum in which the policy loss counts not at all", "a sum in which the policy loss counts twice"),
    *("a sum in which the KL term counts 0.5 times", "a sum in which the gradient counts 2 times"),
    *("equal to the gradient plus that of the last update", "the gradient of the last update"),
    *("equal to the gradient plus its parameters times 0.1", "equal to the gradient after it was clipped"),
    *("one scaled by 2", "equal to the 2 parts of the tensor added up"),
)
"""Words of patterns whose changes have no ids."""
MESH = {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 2}
CONFIG = {"algorithm": {"importance_level": "sequence"}}
SCENE = RunContext(world_size=4, micros=3, mesh=MESH, config=CONFIG, precisions=("float32", "bfloat16"))
KINDS = ("experts", "recurrent layers", "weights of attention")
OK = Verdict(Status.OK, "log_probs", "log_probs", Place(0, None, 0, 0), count=5)


def examples(rule: Rule) -> Iterator[Divergence]:
    """Divergences that may be what a rule is about."""
    quantities = [*rule.at] or ["activations"]
    statuses = [*rule.status] or [Status.DRIFT, Status.COVERAGE]
    patterns = [Pattern(id.replace("*", "x"), id) for id in (*rule.patterns, *[*rule.any_of][:1])]
    ids = sorted(id for quantity, id in changes() if quantity in quantities)
    words = [word for word in (*WORDS, *ids) if re.search(rule.what, word)] if rule.what else [""]
    held = (*dict.fromkeys((*rule.holds, *INPUTS.get(quantities[0], ()))), "gradient lm_head.weight")
    for name, detail, word, status in itertools.product(NAMES, DETAILS, words, statuses):
        first = Verdict(status, quantities[0], name, Place(1, None, 0, 0), detail, max_ulp=3.0)
        own = Pattern("formula", word, {} if word in WORDS else {"changes": [word]})
        told = (*patterns, *([own] if word else []))
        base = Divergence(first, held, (), (3, 3), patterns=told, kinds=KINDS)
        yield base
        yield replace(base, unjudged=("activations", "token_loss"), broken=(1, 3))
        yield replace(base, first=replace(first, relative=0.5))
        yield replace(base, held=(*rule.holds,))
        yield replace(base, agree=("gradient",))
        yield replace(base, before=("param",))
        for id in ("tied", "everywhere", "names:step counters"):
            yield replace(base, patterns=(*told, Pattern(id, id)))
        yield replace(base, unjudged=("loss",), patterns=(*told, Pattern("everywhere", "everywhere")))


def scene_of(rule: Rule) -> RunContext:
    by_tokens = CONDITIONS["ratios_of_tokens"] in rule.when
    scene = replace(SCENE, config={}) if by_tokens else SCENE
    if CONDITIONS["penalty_in_rewards"] in rule.when:
        scene = replace(scene, config={"algorithm": {"kl_placement": "reward", "kl_coef": 0.1}})
    if CONDITIONS["one_exchange"] in rule.when:
        (own,) = (name for name in ("cp", "tp", "pp", "ep") if CONDITIONS[_SPLIT[name]] in rule.when)
        scene = replace(scene, mesh={**dict.fromkeys(MESH, 1), own: 2})
    return replace(scene, absent=("loss of rank 1",)) if rule.of_records else scene


_SPLIT = {
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
}


def example(rule: Rule) -> Divergence:
    return next(found for found in examples(rule) if matched(rule, found, scene_of(rule)) is not None)


@as_subtests("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_fires_on_what_it_is_about_and_on_nothing_else(rule: Rule) -> None:
    found = example(rule)
    evidence = matched(rule, found, scene_of(rule))
    assert evidence
    assert found.first.quantity in evidence[0]
    (told,) = diagnose(found, scene_of(rule), [rule])
    assert (told.rule, told.cause) == (rule.id, rule.cause)
    assert told.cites == {"quantity": found.first.quantity, "tensor": found.first.name}
    others = [
        replace(found, first=replace(found.first, status=Status.OK, detail="")),
        *([replace(found, patterns=())] if rule.patterns or rule.any_of or rule.what else []),
        *([replace(found, held=())] if rule.holds else []),
    ]
    if rule.at:
        elsewhere = next(q.name for q in QUANTITIES if q.name not in rule.at)
        others.append(replace(found, first=replace(found.first, quantity=elsewhere)))
    for other in others:
        assert matched(rule, other, scene_of(rule)) is None


def test_there_are_many_rules_each_with_a_name_and_commands_that_work() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES) >= 30
    table = variant_table()
    for rule in RULES:
        assert rule.cause[0].islower()
        if rule.variants:
            assert choose(table | spelled_out(rule.variants, table), rule.variants)


def test_the_tables_leave_no_condition_and_no_rounded_quantity_out() -> None:
    assert {met for rule in RULES for met in rule.when} == {*CONDITIONS.values()}
    (precision,) = (rule for rule in RULES if rule.id == "precision")
    rounded = [q.name for q in QUANTITIES if not q.exact and q.name not in ("advantages", "weights", "other")]
    assert [*precision.at] == rounded


def test_nothing_is_said_of_a_healthy_run() -> None:
    assert find_divergence([OK, replace(OK, quantity="loss")]) is None


def test_what_nobody_knows_is_unknown() -> None:
    drift = replace(OK, status=Status.DRIFT, quantity="entropy_loss", name="entropy_loss")
    divergence = find_divergence([drift, OK])
    assert divergence is not None
    (told,) = diagnose(divergence)
    assert told.rule == UNKNOWN
    assert str(told).startswith(
        "cause unknown: no rule knows this pattern; entropy_loss is made of entropy (rule "
    )


def test_a_diagnosis_survives_json() -> None:
    told = diagnose(example(RULES[0]), SCENE)
    assert [Diagnosis.from_json(json.loads(json.dumps(one.to_json()))) for one in told] == told


def test_commands_are_those_of_the_scene() -> None:
    assert next_command(RunContext(), "log_probs", "base") == "regress dump show DUMP/forward_data"
    compared = RunContext(commands={"compare": "regress compare A B --only {quantity}"})
    assert next_command(compared, "kl", "base") == "regress compare A B --only kl"
    replayed = RunContext(commands={"replay": "regress replay dense --variants {variants}"})
    assert next_command(replayed, "kl", "base,left") == "regress replay dense --variants base,left"


def drift(quantity: str, name: str = "", **place: int) -> Verdict:
    where = Place(**{"step": 0, "rank": 0, **place})
    return Verdict(Status.DRIFT, quantity, name or quantity, where, over=1, count=2)


def good(quantity: str, name: str = "", **place: int) -> Verdict:
    return replace(drift(quantity, name, **place), status=Status.OK)


def test_a_pure_backward_fault_is_found_behind_the_last_layer_that_breaks() -> None:
    names = [f"model.layers.{i}.mlp.w.weight" for i in range(12)]
    verdicts = [(drift if i <= 9 else good)("gradient", name) for i, name in enumerate(names)]
    found = find_divergence(
        [*verdicts, drift("gradient", "model.embed_tokens.weight"), good("loss", micro=0)]
    )
    assert found is not None
    assert found.first.name == "model.layers.9.mlp.w.weight"
    assert "gradient model.layers.10.mlp.w.weight" in found.held


def test_modules_come_in_the_order_of_the_model_whichever_rank_has_them() -> None:
    layers = [drift("activations", f"model.layers.{i}", micro=0, rank=i % 2) for i in (3, 10, 2)]
    norm = drift("activations", "model.norm", micro=0, rank=0)
    before = good("activations", "model.layers.1", micro=0, rank=1)
    found = find_divergence([norm, *layers, before, good("batch_inputs", "input_ids", micro=0)])
    assert found is not None
    assert found.first.name == "model.layers.2"
    assert found.held == ("batch_inputs", "activations model.layers.1")


def test_what_follows_is_told_from_what_does_not() -> None:
    verdicts = [drift("advantages", micro=0), drift("activations", "model.layers.0", micro=0)]
    verdicts += [drift("policy_loss", micro=0), drift("loss", micro=0), drift("kl", micro=0)]
    found = find_divergence([*verdicts, drift("log_probs", micro=0, step=1)])
    assert found is not None
    assert found.first.quantity == "advantages"
    assert found.downstream == {"policy_loss": 1, "loss": 1}
    assert found.independent == {"activations": 1, "kl": 1, "log_probs": 1}
    carried = find_divergence([*verdicts, drift("param", "w"), drift("log_probs", micro=0, step=1)])
    assert carried is not None
    assert carried.downstream["log_probs"] == 1


def test_an_earlier_step_comes_first() -> None:
    found = find_divergence([drift("log_probs", step=1, micro=0), drift("optimizer", "w/step")])
    assert found is not None
    assert found.first.quantity == "optimizer"


# rules that say where alone


def told_of(*rules: Rule) -> list[str]:
    first = Verdict(Status.DRIFT, "gradient", "w", Place(0, None, 0))
    found = Divergence(first, ("loss",), (), patterns=(Pattern("zero", "all zero"),))
    return [one.rule for one in diagnose(found, SCENE, rules)]


WHERE = Rule("where", "it is here", at=("gradient",), otherwise=True)
CLOSER = Rule(
    "closer", "it is here, behind what holds", at=("gradient",), holds=("loss",), tensor="w", otherwise=True
)
CAUSE = Rule("cause", "this did it", at=("gradient",), patterns=("zero",))
HINT = Rule("hint", "this may have done it", at=("gradient",), patterns=("zero",), hint=True)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ((WHERE, CAUSE), ["cause"]),
        ((CAUSE, WHERE, CLOSER), ["cause"]),
        ((WHERE, HINT), ["hint"]),
        ((WHERE, CLOSER), ["closer"]),
        ((CLOSER, WHERE), ["closer"]),
        ((WHERE, replace(CAUSE, patterns=("sign",))), ["where"]),
        ((replace(WHERE, at=("loss",)),), ["unknown"]),
    ],
)
def test_a_rule_that_says_where_alone_speaks_only_if_no_other_does(
    rules: tuple[Rule, ...], told: list[str]
) -> None:
    assert told_of(*rules) == told


def test_every_rule_of_a_place_alone_names_no_pattern() -> None:
    for rule in (rule for rule in RULES if rule.otherwise):
        assert not any((rule.patterns, rule.any_of, rule.what, rule.hint)), rule.id
