"""Training samples, read from what people have: token ids, conversations, text."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

import jinja2
import numpy as np

from dflash_jax.tokenizer import PreTrainedTokenizerFast
from train.conversations import (
    Supervise,
    messages_of,
    tokens_of_conversation,
    tools_of,
)

NAMED = 10  # malformed lines that are told of, however many there are


class DataError(ValueError):
    """Training data that cannot be used; the message names file, line and reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One document. ``loss_mask[i]``: token i is learnt. ``id`` is "" where the data has none."""

    id: str
    input_ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool, of the same length


@dataclasses.dataclass
class Tally:
    """What a reading has come across so far; a text file counts as one line, an empty line as
    none."""

    lines: int = 0
    bad: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)  # of the first bad ones

    def reject(self, where: str, why: Exception) -> None:
        self.bad += 1
        if len(self.reasons) < NAMED:
            self.reasons.append(f"{where}: {type(why).__name__}: {why}")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """From one line or text to a Sample. Raises ValueError, TypeError, LookupError or
    TemplateError where it is malformed, DataError where no line of its kind could be read."""

    vocab_size: int
    tokenizer: PreTrainedTokenizerFast | None
    supervise: Supervise
    template_options: Mapping[str, Any]

    def line(self, line: bytes) -> Sample:
        record = object_of(line)
        name = record.get("id")
        if not isinstance(name, str | int | None):
            raise TypeError(f"id must be a string or an integer, got {name!r}")
        name = "" if name is None else str(name)
        if "input_ids" in record or "loss_mask" in record:
            return self._checked(name, *_ids_and_mask(record))
        if "conversations" in record or "messages" in record:
            tokens = tokens_of_conversation(
                self._tokenizer("conversations", template=True),
                messages_of(record),
                supervise=self.supervise,
                template_options={"tools": tools_of(record), **self.template_options},
            )
            return self._checked(name, *tokens)
        if "text" in record:
            return self.text(name, record["text"])
        raise ValueError(
            f"a line of {sorted(record)}; accepted: input_ids with loss_mask, conversations,"
            " messages or text"
        )

    def text(self, name: str, text: str) -> Sample:
        """A whole document, with the special tokens that a plain prompt gets; all is learnt."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        text.encode()  # a UnicodeEncodeError, a ValueError, of half a surrogate pair
        ids = cast(list[int], self._tokenizer("text")(text)["input_ids"])
        return self._checked(name, ids, [True] * len(ids))

    def _tokenizer(self, what: str, *, template: bool = False) -> PreTrainedTokenizerFast:
        if self.tokenizer is None:
            raise DataError(f"{what} must be tokenised, and there is no tokenizer")
        if template and self.tokenizer.chat_template is None:
            raise DataError(f"{what} need a chat template, and the tokenizer has none")
        return self.tokenizer

    def _checked(self, name: str, ids: Sequence[int], mask: Sequence[bool]) -> Sample:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"token id {wrong} is not in 0..{self.vocab_size - 1}")
        sample = Sample(name, np.array(ids, np.int32), np.array(mask, bool))
        if not has_anchor(sample.loss_mask):
            raise ValueError("no two supervised tokens in a row, so no block can be trained on it")
        return sample


def read_samples(
    paths: Sequence[Path],
    *,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
    supervise: Supervise = "all",
    template_options: Mapping[str, Any] | None = None,
    max_bad_share: float = 0.01,
    tally: Tally | None = None,
    report: Callable[[str], None] = print,
) -> Iterator[Sample]:
    """Samples of .jsonl files, each line of any accepted form, and of text files, each a document.

    Lines: {"input_ids", "loss_mask"}; {"conversations"} or {"messages"} of {"role", "content"} or
    ShareGPT's {"from", "value"}; {"text"}. An "id" is kept, other keys are the caller's. Any file
    may be gzipped (.gz). Of a conversation the assistant's turns are learnt, of text everything.

    tokenizer: needed for all but token ids.
    supervise: all turns of the assistant, or the last one alone.
    template_options: what the chat template is given besides, say enable_thinking or date_string.
    tally: counts lines and bad ones as they are read.

    Malformed lines are named and skipped. Raises DataError where more than ``max_bad_share`` of all
    are malformed, where a file cannot be read, or where a tokenizer or chat template is missing.
    """
    tally = Tally() if tally is None else tally
    reader = _Reader(vocab_size, tokenizer, supervise, template_options or {})
    for path in paths:
        for where, read in _documents(path, reader):
            tally.lines += 1
            try:
                sample = read()
            except DataError:
                raise  # of the run, not of this line
            except (ValueError, TypeError, LookupError, jinja2.TemplateError) as error:
                tally.reject(where, error)
                continue
            yield sample
    if tally.bad > max_bad_share * tally.lines:
        named = "\n  ".join(tally.reasons)
        raise DataError(f"{tally.bad} of {tally.lines} lines are malformed:\n  {named}")
    for reason in tally.reasons:
        report(f"skipped {reason}")
    if tally.bad > len(tally.reasons):
        report(f"skipped {tally.bad} of {tally.lines} lines in all")


def has_anchor(loss_mask: np.ndarray) -> bool:
    """Whether a block can be trained: an anchor needs one supervised token and its label next."""
    return bool((loss_mask[1:] & loss_mask[:-1]).any())


def is_held_out(sample: Sample, share: float) -> bool:
    """Whether a sample belongs to the ``share`` (0..1) that is not trained on.

    Decided by a hash of the id, or of the tokens where it has none: the same in every run and
    order, and samples of one id stay together.
    """
    content = sample.id.encode("utf-8", "surrogatepass") or sample.input_ids.tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a JSONL file (.gz too), empty ones left out. Lines of bytes: a bad byte
    spoils its own line alone, and text lines would also end at U+2028.

    Raises DataError where the file cannot be opened or is damaged.
    """
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def object_of(line: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises ValueError or TypeError where it is none."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(record, dict):
        raise TypeError(f"a line must be an object, got {type(record).__name__}")
    return record


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BufferedIOBase]:
    if not file.is_file():
        raise DataError(f"{file} is no file")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            yield content
    except (OSError, EOFError, zlib.error) as error:  # of gzip: not one, cut, damaged
        raise DataError(f"{file} cannot be read: {error}") from error


def _ids_and_mask(record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    if missing := {"input_ids", "loss_mask"} - record.keys():
        raise ValueError(f"input_ids and loss_mask go together, and {min(missing)} is missing")
    ids, mask = record["input_ids"], record["loss_mask"]
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list):
            raise TypeError(f"{name} must be a list, got {values!r:.40}")
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids but {len(mask)} loss_mask")
    if not set(map(type, ids)) <= {int}:
        wrong = next(i for i in ids if type(i) is not int)
        raise TypeError(f"token id {wrong!r:.40} is no integer")
    if wrong := [m for m in mask if type(m) not in (bool, int) or m not in (0, 1)]:
        raise ValueError(f"loss_mask {wrong[0]!r:.40} is not 0 or 1")
    return ids, mask


def _documents(path: Path, reader: _Reader) -> Iterator[tuple[str, Callable[[], Sample]]]:
    """(where it is, how to read it) of every line of a .jsonl file, or of a text file's whole.

    Raises DataError where the file cannot be opened or is damaged.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".json":
        raise DataError(f"{path}: a .json file is no text; accepted: .jsonl, one record a line")
    if kind == ".jsonl":
        for number, line in lines_of(path):
            yield f"{path}:{number}", lambda line=line: reader.line(line)
    else:
        with _opened(path) as file:
            content = file.read()
        yield str(path), lambda: reader.text(path.name, content.decode())
