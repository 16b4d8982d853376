"""``python -m tests.faults``: list faults, and inject them."""

from tests.faults.trials.commands import faults

if __name__ == "__main__":
    faults(prog_name="python -m tests.faults")
