"""From token losses to one number."""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields.objective_field import value
from regress.grpo.objective_catalogue import AGGREGATIONS
from regress.grpo.objective_part import described

DENOMINATOR_SCOPES = ("global", "microbatch", "microbatch_sum")
NORM_RULES = ("maximum", "longest")


@dataclass
class AggregationFields:
    """Weights of token losses."""

    aggregation: str = value(
        "token-mean",
        "how token losses become one number, as the weight of a token of N samples, K tokens and n in its sample: "
        f"{described(AGGREGATIONS)}",
        choices=AGGREGATIONS,
    )
    norm_length: int | None = value(
        None,
        "constant length of seq-mean-token-sum-norm; null: as norm_rule says",
        minimum=1,
    )
    norm_rule: str = value(
        "maximum",
        "length of seq-mean-token-sum-norm: the maximal completion length, or the longest completion of each "
        "microbatch (verl 0.9 with rows that are not padded to the maximum)",
        choices=NORM_RULES,
    )
    denominator_scope: str = value(
        "global",
        "what the denominator counts: the mini-batch over all microbatches and ranks, or each microbatch, over which "
        "the loss is then the mean, or (microbatch_sum) the sum",
        choices=DENOMINATOR_SCOPES,
    )
    count_empty_rows: bool = value(
        True,
        "whether samples without any loss token count in the denominators of the seq-mean aggregations",
    )
