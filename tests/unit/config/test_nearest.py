"""One wrong character in any key leads back to that key."""

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from regress.engine.config.config_messages import edits, nearest_keys
from regress.engine.config.config_schema import options

LETTERS = string.ascii_lowercase + "_."


@st.composite
def typos(draw: st.DrawFn) -> tuple[str, str]:
    """A key, and the key with one character left out, put in, replaced, or swapped with its neighbor."""
    key = draw(st.sampled_from(list(options())))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(LETTERS))
    wrong = draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[:at] + letter + key[at:],
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
            ]
        )
    )
    return key, wrong


@settings(deadline=None)
@given(typos())
def test_a_typo_leads_back(typo: tuple[str, str]) -> None:
    """Several keys are named only if one character makes the typo of each (top_p, top_k)."""
    key, wrong = typo
    if wrong in options():
        return
    near = nearest_keys(wrong, options())
    assert key in near
    assert all(edits(wrong, other) == 1 for other in near)
    assert len(near) <= 5  # the dimensions of parallel differ by one character


@settings(deadline=None)
@given(st.text(LETTERS, max_size=8), st.text(LETTERS, max_size=8), st.text(LETTERS, max_size=8))
def test_edits_are_a_distance(a: str, b: str, c: str) -> None:
    assert edits(a, b) == edits(b, a) <= max(len(a), len(b))
    assert (edits(a, b) == 0) == (a == b)
    assert edits(a + c, b + c) <= edits(a, b)


def test_edits() -> None:
    assert edits("kitten", "sitting") == 3
    assert edits("seed", "sede") == 1
    assert edits("", "abc") == 3


def test_abbreviations_and_wrong_sections() -> None:
    assert nearest_keys("optimizer.lr", options()) == ["optimizer.learning_rate"]
    assert nearest_keys("rollout_worker.temp", options()) == ["rollout_worker.temperature"]
    assert nearest_keys("trainer.max_grad_norm", options()) == ["optimizer.max_grad_norm"]


def test_a_key_of_any_length_is_looked_up_by_its_beginning() -> None:
    """A reference to a key of some thousands of characters took minutes to be refused."""
    assert nearest_keys("optimizer.learning_rat" + "e" * 10**6, options()) == ["optimizer.learning_rate"]
