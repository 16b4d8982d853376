"""All rules of the diagnosis, theme by theme."""

from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.rules.gradients import GRADIENTS
from regress.compare.diagnosis.rules.inputs import INPUTS
from regress.compare.diagnosis.rules.loss import LOSS
from regress.compare.diagnosis.rules.model import MODEL
from regress.compare.diagnosis.rules.update import UPDATE

RULES: tuple[Rule, ...] = (*INPUTS, *MODEL, *LOSS, *GRADIENTS, *UPDATE)
