"""What the target is asked: conversations that end where an answer is wanted, read from files."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.generate import LLM
from train.conversations import Message, messages_of, tools_of
from train.samples import DataError, lines_of, object_of

ANSWERED = ("user", "tool")
"""Roles whose turn an assistant answers."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A conversation up to the turn that is to be answered. ``source``: what it was made from.
    ``tools``: the JSON schemas that the assistant is offered."""

    id: str
    source: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None

    @classmethod
    def of_text(cls, id: str, source: str, text: str) -> "Question":
        """A single user turn."""
        return cls(id, source, [{"role": "user", "content": text}])

    def seed(self, base: int) -> int:
        """This question's own seed, whatever else is asked beside it: in one piece, in shards and
        resumed, a run draws the same."""
        digest = hashlib.blake2b(f"{base}/{self.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def encode(
        self, llm: LLM, template_variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Its prompt. Raises ValueError with the chat template's complaint."""
        tools = {"tools": self.tools} if self.tools else {}
        return llm.encode(self.messages, {**tools, **(template_variables or {})})


def read_questions(
    files: Sequence[Path], *, max_bad_share: float = 0.01, report: Callable[[str], None] = print
) -> list[Question]:
    """The questions of JSONL files (.gz too), in order, ids unique over all of them.

    A line is {"id", "text"} or {"id", "conversations" or "messages"}, whose last turn is dropped
    where it is the assistant's: it will be rewritten. "source" is the file's name where a line has
    none. Malformed lines are named, counted and skipped; DataError on more than ``max_bad_share``
    of them all, on a file that cannot be read, and where no question is left.
    """
    questions: list[Question] = []
    places: dict[str, str] = {}
    bad: list[str] = []
    for file in files:
        for number, line in lines_of(file):
            place = f"{file}:{number}"
            try:
                question = _question(line, source=file.name.partition(".")[0])
                if question.id in places:
                    raise ValueError(f"id {question.id!r} was given at {places[question.id]}")
            except (ValueError, TypeError) as error:
                bad.append(f"{place}: {error}")
                continue
            places[question.id] = place
            questions.append(question)
    total = len(questions) + len(bad)
    if len(bad) > max_bad_share * total:
        first = "\n  ".join(bad[:10])
        raise DataError(f"{len(bad)} of {total} lines are malformed, such as\n  {first}")
    for fault in bad:
        report(f"skipped {fault}")
    if not questions:
        raise DataError(f"no question in {', '.join(map(str, files))}")
    return questions


def _question(line: bytes, *, source: str) -> Question:
    record = object_of(line)
    if "id" not in record:
        raise ValueError("has no id")
    texts = {"id": record["id"], "source": record.get("source", source)}
    if "text" in record:
        texts["text"] = record["text"]
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, got {value!r:.40}")
        value.encode()  # a UnicodeEncodeError, a ValueError, of half a surrogate pair
    if "text" in texts:
        return Question.of_text(**texts)
    if not {"conversations", "messages"} & record.keys():
        raise ValueError("has none of text, conversations and messages")
    if record.get("system"):
        raise ValueError("a system text beside the turns is not read: make it the first of them")
    messages = messages_of(record)
    if messages[-1]["role"] == "assistant":
        del messages[-1]
    if not messages or messages[-1]["role"] not in ANSWERED:
        last = f"ends with a turn of {messages[-1]['role']}" if messages else "has no other turn"
        raise ValueError(f"nothing to answer: without its answer the conversation {last}")
    return Question(**texts, messages=messages, tools=tools_of(record))
