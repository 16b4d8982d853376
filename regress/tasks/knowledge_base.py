"""Small generated knowledge base, and the search over it: facts such as "city of bako: tolun".

Names and facts are made up, so that no model can know them, and the same on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from regress.tasks.calculator import ToolError
from regress.tasks.portable_draws import below, distinct, generator

RELATIONS = ("city", "color", "food", "job", "pet", "sport")
SYLLABLES = (2, 3, 4)
"""Lengths of the subjects' names."""
SUBJECTS = 512
"""Subjects with names of each length."""
VALUES = 64
"""Values of each relation."""
MAX_LENGTH = 200
ALPHABET = "abcdefgijklmnoprstuvyz: "

_CONSONANTS, _VOWELS = "bcdfgjklmnprstvyz", "aeiou"
_SYLLABLES = [first + second for first in _CONSONANTS for second in _VOWELS]
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class KnowledgeBase:
    """Facts by subject and relation, their documents, and an index of the documents' words."""

    subjects: dict[int, tuple[str, ...]]
    facts: dict[tuple[str, str], str]
    documents: tuple[str, ...]
    index: dict[str, tuple[int, ...]]


def question(relation: str, subject: str) -> str:
    """Return the question for a fact, and the query that finds it."""
    return f"{relation} of {subject}"


@lru_cache(maxsize=1)
def knowledge_base() -> KnowledgeBase:
    """Return the knowledge base: every subject has one value of each relation."""
    subjects = {count: tuple(_names(count)) for count in SYLLABLES}
    values = {relation: _values(relation) for relation in RELATIONS}
    rng = generator("knowledge", "facts")
    facts = {
        (relation, subject): values[relation][below(rng, VALUES)]
        for names in subjects.values()
        for subject in names
        for relation in RELATIONS
    }
    documents = tuple(f"{question(*key)}: {value}" for key, value in facts.items())
    index: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        for word in sorted(set(_WORD.findall(document))):
            index.setdefault(word, []).append(number)
    # a word of every document tells nothing
    useful = {word: tuple(found) for word, found in index.items() if len(found) < len(documents)}
    return KnowledgeBase(subjects, facts, documents, useful)


def search(text: str) -> str:
    """Return the document that shares most words with the query, rare words first, earlier documents before later.

    Raises:
        ToolError: for a query that is too long, or shares no word with any document.
    """
    if len(text) > MAX_LENGTH:
        raise ToolError(f"the query has {len(text)} characters, more than {MAX_LENGTH}; shorten it")
    base = knowledge_base()
    scores: Counter[int] = Counter()
    for word in set(_WORD.findall(text.lower())):
        found = base.index.get(word, ())
        for number in found:
            scores[number] += 1 + len(base.documents) // len(found)
    if not scores:
        raise ToolError("no document holds a word of the query; use other words")
    best = min(scores, key=lambda number: (-scores[number], number))
    return base.documents[best]


def _names(syllables: int) -> list[str]:
    """Return distinct names of so many syllables."""
    size = len(_SYLLABLES) ** syllables
    rng = generator("knowledge", "subjects", syllables)
    return [_word(index, syllables) for index in islice(distinct(rng, size), SUBJECTS)]


def _values(relation: str) -> list[str]:
    """Return distinct values: two syllables and an n, so that none is a subject's name."""
    rng = generator("knowledge", "values", relation)
    return [_word(index, 2) + "n" for index in islice(distinct(rng, len(_SYLLABLES) ** 2), VALUES)]


def _word(index: int, syllables: int) -> str:
    parts = []
    for _ in range(syllables):
        index, which = divmod(index, len(_SYLLABLES))
        parts.append(_SYLLABLES[which])
    return "".join(parts)
