"""All rules of the diagnosis, theme by theme; the most specific of those that match is told first."""

from regress.compare.diagnosis import Rule
from regress.compare.rules_inputs import INPUTS
from regress.compare.rules_loss import LOSS
from regress.compare.rules_model import MODEL
from regress.compare.rules_update import UPDATE

RULES: tuple[Rule, ...] = (*INPUTS, *MODEL, *LOSS, *UPDATE)
