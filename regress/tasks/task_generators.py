"""Built-in tasks: their prompts and answers.

Prompts are as short as they can be and still be read by a person, since tiny character-level models pay
for every character. Each function yields the strata of its task (see `strata.Stratum`).
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import gcd as greatest_common_divisor

from regress.tasks.calculator import calculate as value_of
from regress.tasks.knowledge_base import RELATIONS, knowledge_base, question
from regress.tasks.prompt_strata import Stratum


def _spell(index: int, alphabet: str, length: int) -> str:
    """Return word number `index` of the len(alphabet)**length words of this length."""
    letters = []
    for _ in range(length):
        index, digit = divmod(index, len(alphabet))
        letters.append(alphabet[digit])
    return "".join(letters)


def _words(
    verb: str, solve: Callable[[str], str], min_length: int, max_length: int, alphabet: str
) -> Iterator[Stratum]:
    """Yield one stratum for each word length: "<verb> <word>" -> solve(word)."""

    def of_length(length: int) -> Stratum:
        def at(index: int) -> tuple[str, str]:
            word = _spell(index, alphabet, length)
            return f"{verb} {word}", solve(word)

        return Stratum(len(alphabet) ** length, at)

    return map(of_length, range(min_length, max_length + 1))


def copy(min_length: int, max_length: int, alphabet: str) -> Iterator[Stratum]:
    """Yield strata of problems such as "copy abca" with the answer "abca"."""
    return _words("copy", lambda word: word, min_length, max_length, alphabet)


def reverse_string(min_length: int, max_length: int, alphabet: str) -> Iterator[Stratum]:
    """Yield strata of problems such as "rev abcd" with the answer "dcba"."""
    return _words("rev", lambda word: word[::-1], min_length, max_length, alphabet)


def sort(min_length: int, max_length: int, alphabet: str) -> Iterator[Stratum]:
    """Yield strata of problems such as "sort 3120" with the answer "0123", sorted by code point."""
    return _words("sort", lambda word: "".join(sorted(word)), min_length, max_length, alphabet)


def parity(min_length: int, max_length: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "parity 10110" with the answer "1": 1 for an odd number of ones, else 0."""
    return _words("parity", lambda bits: str(bits.count("1") % 2), min_length, max_length, "01")


def letter_counting(min_length: int, max_length: int, alphabet: str) -> Iterator[Stratum]:
    """Yield strata of problems such as "count a in abca" with the answer "2"; the letter need not occur."""

    def of_length(length: int) -> Stratum:
        def at(index: int) -> tuple[str, str]:
            index, which = divmod(index, len(alphabet))
            word, letter = _spell(index, alphabet, length), alphabet[which]
            return f"count {letter} in {word}", str(word.count(letter))

        return Stratum(len(alphabet) ** (length + 1), at)

    return map(of_length, range(min_length, max_length + 1))


def chain_sum(min_terms: int, max_terms: int, min_digits: int, max_digits: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "3+5-9" with the answer "-1": terms of one length, added and subtracted."""

    def of_shape(terms: int, digits: int) -> Stratum:
        low = 10 ** (digits - 1) if digits > 1 else 0
        values = 10**digits - low

        def at(index: int) -> tuple[str, str]:
            index, offset = divmod(index, values)
            total = low + offset
            prompt = str(total)
            for _ in range(terms - 1):
                index, choice = divmod(index, 2 * values)
                minus, offset = divmod(choice, values)
                total += -(low + offset) if minus else low + offset
                prompt += f"{'-' if minus else '+'}{low + offset}"
            return prompt, str(total)

        return Stratum(values * (2 * values) ** (terms - 1), at)

    shapes = product(range(min_terms, max_terms + 1), range(min_digits, max_digits + 1))
    return (of_shape(terms, digits) for terms, digits in shapes)


def modular_sum(min_terms: int, max_terms: int, max_value: int, modulus: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "4+6+3 mod 5" with the answer "3": terms from 0 to max_value."""

    def of_terms(terms: int) -> Stratum:
        def at(index: int) -> tuple[str, str]:
            values = []
            for _ in range(terms):
                index, value = divmod(index, max_value + 1)
                values.append(value)
            return f"{'+'.join(map(str, values))} mod {modulus}", str(sum(values) % modulus)

        return Stratum((max_value + 1) ** terms, at)

    return map(of_terms, range(min_terms, max_terms + 1))


def gcd(max_value: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "gcd 12 18" with the answer "6": ordered pairs from 1 to max_value.

    There is one stratum for each answer: 61 % of uniform pairs have the answer 1, and a model would learn
    only this.
    """
    pairs: dict[int, list[tuple[int, int]]] = {}
    for a, b in product(range(1, max_value + 1), repeat=2):
        pairs.setdefault(greatest_common_divisor(a, b), []).append((a, b))

    def of_answer(answer: int) -> Stratum:
        def at(index: int) -> tuple[str, str]:
            a, b = pairs[answer][index]
            return f"gcd {a} {b}", str(answer)

        return Stratum(len(pairs[answer]), at)

    return map(of_answer, sorted(pairs))


def calculate(min_terms: int, max_terms: int, max_digits: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "(3+4)*15" with the answer "105": sums, differences and products.

    From three terms on, two neighbors stand in brackets.
    """

    def of_terms(terms: int) -> Stratum:
        places = terms - 1 if terms > 2 else 1

        def at(index: int) -> tuple[str, str]:
            index, bracket = divmod(index, places)
            parts = []
            for place in range(terms):
                index, number = divmod(index, 10**max_digits)
                parts.append(str(number))
                if place < terms - 1:
                    index, sign = divmod(index, 3)
                    parts.append("+-*"[sign])
            if terms > 2:
                parts[2 * bracket] = f"({parts[2 * bracket]}"
                parts[2 * bracket + 2] += ")"
            prompt = "".join(parts)
            return prompt, value_of(prompt)

        return Stratum(places * 10 ** (max_digits * terms) * 3 ** (terms - 1), at)

    return map(of_terms, range(min_terms, max_terms + 1))


def lookup(min_syllables: int, max_syllables: int, relations: int) -> Iterator[Stratum]:
    """Yield strata of problems such as "city of bako", a fact of the knowledge base, with the answer "tolun"."""

    def of_length(syllables: int) -> Stratum:
        base = knowledge_base()
        names = base.subjects[syllables]

        def at(index: int) -> tuple[str, str]:
            index, relation = divmod(index, relations)
            key = RELATIONS[relation], names[index]
            return question(*key), base.facts[key]

        return Stratum(len(names) * relations, at)

    return map(of_length, range(min_syllables, max_syllables + 1))
