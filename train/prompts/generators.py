"""Questions from the generators of reasoning-gym, as a program of its own.

It runs in a process of its own because the package is unpacked to a temporary folder, and neither
that folder nor the package's own dependencies belong in the path of a training run. Its version of
GSM8K ("gsm_symbolic") is not in the table, because GSM8K is what we evaluate on, nor is
"list_functions", whose questions do not follow from its seed.
"""

from __future__ import annotations

import json
import re
import sys

MATHS = (
    "chain_sum", "basic_arithmetic", "gcd", "lcm", "leg_counting", "time_intervals", "products",
    "calendar_arithmetic", "fraction_simplification", "number_sequence", "simple_equations",
    "decimal_arithmetic", "decimal_chain_sum", "prime_factorization", "power_function",
    "simple_geometry", "coin_flip", "dice", "polynomial_equations", "base_conversion",
    "simple_integration", "polynomial_multiplication", "count_primes", "complex_arithmetic",
)  # fmt: skip
TEXT = (
    "family_relationships", "syllogism", "knights_knaves", "aiw", "word_sorting", "number_sorting",
    "letter_counting", "spell_backward", "sentence_reordering", "word_sequence_reversal",
    "number_filtering", "caesar_cipher", "color_cube_rotation", "propositional_logic",
    "needle_haystack", "self_reference", "countdown", "puzzle24", "zebra_puzzles", "jugs",
    "ransom_note", "isomorphic_strings", "course_schedule", "letter_jumble",
    "number_format", "word_ladder", "count_bits", "rotate_matrix",
)  # fmt: skip

# Orders to leave out the working: the answers would be a single number, which teaches a draft
# model nothing, and questions asked by people do not end like this.
_TERSE = re.compile(
    r"\s*[^.?!\n]*\b(?:(?:give|return|reply|respond|provide)(?: with)? only|only (?:reply|respond)"
    r"|as (?:your|the) final answer|respond with a single)\b[^\n]*",
    re.IGNORECASE,
)


def questions(name: str, count: int, seed: int) -> list[str]:
    """Draws `count` questions from one generator, without its orders to be terse."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]  (in the folder of main)

    rows = reasoning_gym.create_dataset(name, size=count, seed=seed)
    return [_TERSE.sub("", row["question"]).strip() for row in rows]


def main() -> None:
    """Arguments: folder with the package, "maths" or "text", questions a generator, seed."""
    folder, kind, count, seed = sys.argv[1:]
    sys.path.insert(0, folder)
    for name in {"maths": MATHS, "text": TEXT}[kind]:
        for text in questions(name, int(count), int(seed)):
            print(json.dumps(text))


if __name__ == "__main__":
    main()
