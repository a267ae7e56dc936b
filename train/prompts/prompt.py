"""A prompt, and what keeps a training set free of copies and of evaluation prompts."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from train.prompts.sources import normal_words


@dataclass(frozen=True)
class Prompt:
    """One user turn: a stable id, the source it was made from, and the text."""

    id: str
    source: str
    text: str


def distinct(texts: Iterable[str], seen: set[str]) -> list[str]:
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
    return distinct(good, seen)


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
