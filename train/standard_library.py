"""Text that every Python brings along: its own source, read in a fixed order and cut three ways."""

import dataclasses
import sysconfig
from pathlib import Path
from typing import Literal

from train.questions import Question
from train.samples import DataError

Part = Literal["read", "asked", "held out"]
"""What a target is trained on; what it is asked to continue, for its draft; what judges both."""

_EVERY = 10  # files: of ten neighbours by name one is held out, one is asked, eight are read


@dataclasses.dataclass(frozen=True)
class StandardLibrary:
    """The ``*.py`` files of one package of the standard library, the package's folders included.

    ``package``: a folder's path below the library's root; "" is everything but site-packages.
    """

    package: str

    @property
    def name(self) -> str:
        return self.package or "standard library"

    def files(self, part: Part) -> list[Path]:
        """Ordered by path. Raises DataError where this Python has too few of them, as one whose
        library is an archive."""
        names = (path.relative_to(self._root) for path in self._root.rglob("*.py"))
        ordered = sorted((n for n in names if "site-packages" not in n.parts), key=Path.as_posix)
        if len(ordered) < _EVERY:
            raise DataError(
                f"{self._root} holds {len(ordered)} Python files and at least {_EVERY} are needed"
            )
        return [self._root / name for i, name in enumerate(ordered) if _part(i) == part]

    def texts(self, part: Part) -> list[bytes]:
        return [path.read_bytes() for path in self.files(part)]

    def questions(self, part: Part, count: int, length: int) -> list[Question]:
        """Up to ``count`` passages of at most ``length`` bytes, each from the start of a line,
        spread evenly over the files. Where the files are short, passages overlap."""
        starts = [
            (path.relative_to(self._root).as_posix(), text, start)
            for path, text in zip(self.files(part), self.texts(part), strict=True)
            for start in _line_starts(text)
            if start + length <= len(text)
        ]
        step = max(len(starts) / count, 1.0)
        chosen = (starts[int(i * step)] for i in range(min(count, len(starts))))
        return [
            Question.of_text(
                f"{file}:{start}",
                self.name,
                # a character that the cut went through is left out
                text[start : start + length].decode("utf-8", errors="ignore"),
            )
            for file, text, start in chosen
        ]

    @property
    def _root(self) -> Path:
        return Path(sysconfig.get_path("stdlib")) / self.package


def _part(index: int) -> Part:
    return {0: "held out", 1: "asked"}.get(index % _EVERY, "read")  # pyright: ignore[reportReturnType]


def _line_starts(text: bytes) -> list[int]:
    return [i + 1 for i, byte in enumerate(text[:-1]) if byte == ord("\n")]
