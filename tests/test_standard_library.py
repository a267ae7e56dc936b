"""The same text every time, and none of it on both sides."""

from pathlib import Path

import pytest

from train.samples import DataError
from train.standard_library import Part, StandardLibrary

LIBRARY = StandardLibrary("encodings")
PARTS: tuple[Part, ...] = ("read", "asked", "held out")


def test_parts_share_no_file_and_come_in_order() -> None:
    parts = {part: LIBRARY.files(part) for part in PARTS}
    together = [path for files in parts.values() for path in files]
    assert len(set(together)) == len(together) > 100
    for files in parts.values():
        assert files == sorted(files, key=Path.as_posix) and all(f.is_file() for f in files)
    assert len(parts["read"]) > 6 * len(parts["asked"]) >= 6 * 10
    assert LIBRARY.texts("held out")[0] == parts["held out"][0].read_bytes()


def test_questions_are_passages_of_their_files_from_a_line_start() -> None:
    questions = LIBRARY.questions("held out", 40, 50)
    assert questions == LIBRARY.questions("held out", 40, 50)
    assert len({question.id for question in questions}) == 40
    assert {question.source for question in questions} == {"encodings"}
    names = {question.id.partition(":")[0] for question in questions}
    assert len(names) > 5, "spread over the files"
    texts = {path.name: path.read_bytes() for path in LIBRARY.files("held out")}
    for question in questions:
        name, _, start = question.id.partition(":")
        (message,) = question.messages
        passage = message["content"].encode()
        at = texts[name].index(passage, int(start))
        assert at == int(start) and texts[name][at - 1 : at] == b"\n"
        assert 50 - 3 <= len(passage) <= 50


def test_fewer_passages_than_asked_for_are_all_there_are() -> None:
    questions = LIBRARY.questions("held out", 10**9, 50)
    assert 100 < len(questions) == len({question.id for question in questions})


@pytest.mark.parametrize("package", ["nosuch", "json"])
def test_a_library_without_enough_source_is_named(package: str) -> None:
    with pytest.raises(DataError, match=rf"{package} holds \d Python files and at least 10 are"):
        StandardLibrary(package).files("read")
