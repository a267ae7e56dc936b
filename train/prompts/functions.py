"""Unfinished Python functions in our own words: a signature, a docstring, examples that are true.

Each exercise carries a solution, so that the calls shown in the docstring can be made up at random.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


def _ints(r: Random) -> list[int]:
    return [r.randint(-9, 30) for _ in range(r.randint(3, 6))]


def _word(r: Random) -> str:
    return r.choice(_WORDS)


def _sentence(r: Random) -> str:
    return " ".join(r.sample(_WORDS, r.randint(3, 5)))


_WORDS = (
    "river", "banana", "window", "level", "cloud", "stone", "letter", "kayak", "green", "silver",
    "noon", "bottle", "pepper", "garden", "radar", "yellow", "apple", "summer", "coffee", "tree",
    "Mississippi", "Lantern", "Otter", "balloon", "sky", "rhythm", "civic", "toffee", "onion",
)  # fmt: skip


@dataclass(frozen=True)
class Exercise:
    """A function to write: names to call it, its typed arguments, what it does, how to solve it."""

    names: tuple[str, ...]
    arguments: str
    returns: str
    purpose: str
    draw: Callable[[Random], tuple[Any, ...]]
    solve: Callable[..., Any]


def _row(names: str, arguments: str, returns: str, purpose: str, draw: Any, solve: Any) -> Exercise:
    return Exercise(tuple(names.split()), arguments, returns, purpose, draw, solve)


_N = lambda low, high: lambda r: (r.randint(low, high),)  # noqa: E731
_L = lambda r: (_ints(r),)  # noqa: E731
_W = lambda r: (_word(r),)  # noqa: E731
_S = lambda r: (_sentence(r),)  # noqa: E731
_LN = lambda r: (_ints(r), r.randint(1, 4))  # noqa: E731
_LL = lambda r: (_ints(r), _ints(r))  # noqa: E731
_WW = lambda r: (_word(r), _word(r))  # noqa: E731
_WN = lambda r: (_word(r), r.randint(1, 5))  # noqa: E731
_NN = lambda r: (r.randint(2, 60), r.randint(2, 60))  # noqa: E731
_WORDLIST = lambda r: (r.sample(_WORDS, r.randint(3, 5)),)  # noqa: E731

# Shaped like HumanEval's problems, hence none that HumanEval itself poses: what is left out for
# that reason are the classics (palindromes, common divisors, brackets, vowels, primes, base two).
EXERCISES = (
    _row("even_only keep_even", "numbers: list[int]", "list[int]", "Keep the even numbers, in the "
         "order in which they come.", _L, lambda x: [n for n in x if n % 2 == 0]),
    _row("spread value_range", "numbers: list[int]", "int", "Return the difference between the "
         "largest and the smallest number.", _L, lambda x: max(x) - min(x)),
    _row("digit_sum add_digits", "n: int", "int", "Add up the decimal digits of a number that is "
         "not negative.", _N(10, 99999), lambda n: sum(map(int, str(n)))),
    _row("rotate_left turn", "items: list[int], k: int", "list[int]", "Move the first k items to "
         "the end. k may exceed the length.", _LN, lambda x, k: x[k % len(x):] + x[:k % len(x)]),
    _row("initials first_letters", "sentence: str", "str", "Join the first letters of all words, "
         "in upper case.", _S, lambda s: "".join(w[0].upper() for w in s.split())),
    _row("running_total partial_sums", "numbers: list[int]", "list[int]", "Return, at each place, "
         "the sum of the numbers so far.", _L, lambda x: [sum(x[:i + 1]) for i in range(len(x))]),
    _row("letters_shared common_letters", "a: str, b: str", "list[str]", "List the letters found "
         "in both words, sorted, each once.", _WW, lambda a, b: sorted(set(a) & set(b))),
    _row("repeat_letters stretch", "word: str, times: int", "str", "Write every letter of the word "
         "the given number of times.", _WN, lambda w, n: "".join(c * n for c in w)),
    _row("divisors all_divisors", "n: int", "list[int]", "List every positive divisor of n from "
         "small to large.", _N(6, 90), lambda n: [d for d in range(1, n + 1) if n % d == 0]),
    _row("swap_case_words alternate_case", "sentence: str", "str", "Put every second word in upper "
         "case, starting with the second one.", _S, lambda s: " ".join(
             w.upper() if i % 2 else w for i, w in enumerate(s.split()))),
    _row("word_lengths lengths", "words: list[str]", "dict[str, int]", "Map each word to its "
         "number of letters.", _WORDLIST, lambda x: {w: len(w) for w in x}),
    _row("group_by_length by_size", "words: list[str]", "dict[int, list[str]]", "Group the words "
         "by how many letters they have.", _WORDLIST, lambda x: {
             n: [w for w in x if len(w) == n] for n in dict.fromkeys(map(len, x))}),
    _row("interleave weave", "a: list[int], b: list[int]", "list[int]", "Take items from both "
         "lists in turn and stop when the shorter one ends.", _LL,
         lambda a, b: [v for p in zip(a, b, strict=False) for v in p]),
    _row("above_average over_mean", "numbers: list[int]", "list[int]", "Return the numbers that "
         "exceed the mean of the list.", _L, lambda x: [n for n in x if n > sum(x) / len(x)]),
    _row("second_largest runner_up", "numbers: list[int]", "int", "Return the second largest "
         "different value; if there is none, the only one.", _L,
         lambda x: sorted(set(x))[-2] if len(set(x)) > 1 else x[0]),
    _row("caesar shift_letters", "word: str, shift: int", "str", "Move each small letter forward "
         "in the alphabet, from z on to a; other signs stay.", _WN, lambda w, n: "".join(
             string.ascii_lowercase[(ord(c) - 97 + n) % 26] if c.islower() else c for c in w)),
    _row("squares_below perfect_squares", "limit: int", "list[int]", "List all square numbers from "
         "1 that are smaller than the limit.", _N(5, 120),
         lambda n: [k * k for k in range(1, n) if k * k < n]),
    _row("most_frequent_letter top_letter", "word: str", "str", "Return the letter that occurs "
         "most; the alphabet decides a tie.", _W,
         lambda w: min(Counter(w.lower()).items(), key=lambda p: (-p[1], p[0]))[0]),
    _row("chunk split_evenly", "numbers: list[int], size: int", "list[list[int]]", "Cut the list "
         "into pieces of the given size; the last may be shorter.", _LN,
         lambda x, n: [x[i:i + n] for i in range(0, len(x), n)]),
    _row("without_negatives clip_at_zero", "numbers: list[int]", "list[int]", "Replace negative "
         "numbers by zero.", _L, lambda x: [max(n, 0) for n in x]),
    _row("neighbor_gaps differences", "numbers: list[int]", "list[int]", "Return how much each "
         "number differs from its predecessor.", _L,
         lambda x: [b - a for a, b in zip(x, x[1:], strict=False)]),
    _row("title_words capitalize_all", "sentence: str", "str", "Start each word with a capital "
         "letter and leave the others as they are.", _S,
         lambda s: " ".join(w[0].upper() + w[1:] for w in s.split())),
    _row("count_pairs pairs_with_sum", "numbers: list[int], target: int", "int", "Count the pairs "
         "of positions whose numbers add up to the target.",
         lambda r: ([r.randint(1, 6) for _ in range(6)], r.randint(4, 9)),
         lambda x, t: sum(a + b == t for i, a in enumerate(x) for b in x[i + 1:])),
    _row("unique_in_order without_repeats", "numbers: list[int]", "list[int]", "Remove later "
         "copies of a number and keep the first.",
         lambda r: ([r.randint(1, 5) for _ in range(7)],), lambda x: list(dict.fromkeys(x))),
    _row("compress run_lengths", "text: str", "str", "Write each run of equal letters as the "
         "letter and its length.",
         lambda r: ("".join(r.choice("abcd") * r.randint(1, 4) for _ in range(4)),),
         lambda t: _runs(t)),
    _row("minutes_to_clock clock_time", "minutes: int", "str", "Turn minutes since midnight into "
         "a time written HH:MM.", _N(0, 1439), lambda m: f"{m // 60:02d}:{m % 60:02d}"),
    _row("diagonal_sum trace", "matrix: list[list[int]]", "int", "Add the entries on the main "
         "diagonal of a square matrix.",
         lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(3)],),
         lambda m: sum(m[i][i] for i in range(len(m)))),
    _row("transpose flip_rows", "matrix: list[list[int]]", "list[list[int]]", "Turn the rows of a "
         "matrix into columns.",
         lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(2)],),
         lambda m: [list(c) for c in zip(*m, strict=True)]),
    _row("invert swap_keys", "table: dict[str, int]", "dict[int, str]", "Make the values of a "
         "dictionary its keys. All values differ.",
         lambda r: (dict(zip(r.sample(_WORDS, 3), r.sample(range(1, 30), 3), strict=True)),),
         lambda d: {v: k for k, v in d.items()}),
    _row("tax_total with_tax", "price: float, rate: float", "float", "Add a tax given in percent "
         "to a price and round to two decimals.",
         lambda r: (r.randint(100, 9000) / 100, float(r.randint(3, 25))),
         lambda p, t: round(p * (1 + t / 100), 2)),
    _row("mask hide_start", "text: str, shown: int", "str", "Replace all letters by stars except "
         "for the last ones, whose number is given.", _WN,
         lambda w, n: "*" * (len(w) - n) + w[-n:]),
    _row("nearest_multiple round_to", "n: int, step: int", "int", "Return the multiple of step "
         "that is closest to n; halfway, the smaller one.", _NN,
         lambda n, k: min((n // k * k, n // k * k + k), key=lambda m: (abs(n - m), m))),
    _row("acronym_map index_by_letter", "words: list[str]", "dict[str, list[str]]", "Map each "
         "first letter, in lower case, to the words that begin with it.", _WORDLIST,
         lambda x: {c: [w for w in x if w[0].lower() == c]
                    for c in dict.fromkeys(w[0].lower() for w in x)}),
    _row("outer_sum ends_total", "numbers: list[int]", "int", "Add the first and the last "
         "number.", _L, lambda x: x[0] + x[-1]),
    _row("countdown launch", "start: int", "list[str]", "Count from start to 1 as strings and end "
         "with the word liftoff.", _N(2, 7), lambda n: [*map(str, range(n, 0, -1)), "liftoff"]),
    _row("local_peaks hilltops", "numbers: list[int]", "list[int]", "Return the numbers that are "
         "larger than both of their neighbors.", _L,
         lambda x: [b for a, b, c in zip(x, x[1:], x[2:], strict=False) if a < b > c]),
    _row("cents make_coins", "amount: int", "list[int]", "Pay the amount with coins of 50, 20, 10, "
         "5, 2 and 1, always the largest that fits.", _N(3, 180), lambda n: _coins(n)),
    _row("join_and enumerate_words", "words: list[str]", "str", "Join the words by commas, and the "
         "last one by the word and.", _WORDLIST,
         lambda x: ", ".join(x[:-1]) + " and " + x[-1]),
)  # fmt: skip


def _runs(text: str) -> str:
    out = ""
    while text:
        rest = text.lstrip(text[0])
        out, text = f"{out}{text[0]}{len(text) - len(rest)}", rest
    return out


def _coins(amount: int) -> list[int]:
    out: list[int] = []
    for coin in (50, 20, 10, 5, 2, 1):
        out += [coin] * (amount // coin)
        amount %= coin
    return out


def write(exercise: Exercise, random: Random) -> str:
    """Writes the head of one function: `def` line and docstring, in one of many usual styles."""
    name = random.choice(exercise.names)
    typed = random.random() < 0.7
    bare = ", ".join(a.split(":")[0].strip() for a in exercise.arguments.split(", ") if ":" in a)
    head = f"({exercise.arguments}) -> {exercise.returns}:" if typed else f"({bare}):"
    style = random.choice((
        ">>> {call}\n    {value!r}", "{call} == {value!r}", "{call} should return {value!r}.",
        "{call} -> {value!r}", "For example, {call} returns {value!r}.", "",
    ))  # fmt: skip
    lines = [exercise.purpose]
    for _ in range(random.randint(1, 3) if style else 0):
        inputs = exercise.draw(random)
        call = f"{name}({', '.join(map(repr, inputs))})"
        lines.append(style.format(call=call, value=exercise.solve(*inputs)))
    gap = "\n\n    " if random.random() < 0.4 and style else "\n    "
    quote = random.choice(('"""', '"""', "'''"))
    start = random.choice(("", "", " ", "\n    "))
    body = lines[0] + "".join((gap if i == 0 else "\n    ") + x for i, x in enumerate(lines[1:]))
    return f"def {name}{head}\n    {quote}{start}{body}\n    {quote}"


def heads(count: int, random: Random) -> list[str]:
    """Writes `count` heads, going through the exercises in turn."""
    return [write(EXERCISES[i % len(EXERCISES)], random) for i in range(count)]
