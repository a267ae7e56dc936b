"""Prompt files as users have them: every form, and every fault by file and line."""

import gzip
import json
from pathlib import Path

import pytest

from train.questions import Question, read_questions
from train.samples import DataError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def write(path: Path, *records: object) -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_every_form_of_a_question(tmp_path: Path) -> None:
    plain = write(
        tmp_path / "plain.jsonl",
        {"id": "t", "source": "s", "text": "a\u2028b"},
        b"",
        {"id": "u", "text": "c"},
    )
    system = {"role": "system", "content": "be brief"}
    share_gpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    chats = write(
        tmp_path / "chats.jsonl.gz",
        {"id": "x", "conversations": [USER, ANSWER]},
        {"id": "y", "source": "s", "messages": [USER, ANSWER, USER]},
        {"id": "z", "conversations": [system, *share_gpt * 2], "tools": [{"name": "f"}]},
    )
    assert read_questions([plain, chats]) == [
        Question.of_text("t", "s", "a\u2028b"),
        Question.of_text("u", "plain", "c"),
        Question("x", "chats", [USER]),
        Question("y", "s", [USER, ANSWER, USER]),
        Question("z", "chats", [system, USER, ANSWER, USER], [{"name": "f"}]),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Expecting property name"),
        (b'{"id": "\xff"}', "codec can't decode byte"),
        ([], "a line must be an object, got list"),
        ({"text": "a"}, "has no id"),
        ({"id": 3, "text": "a"}, "id must be a string, got 3"),
        ({"id": "a", "source": 3, "text": "a"}, "source must be a string"),
        ({"id": "a", "source": "b"}, "has none of text, conversations and messages"),
        ({"id": "a", "text": None}, "text must be a string, got None"),
        ({"id": "a", "messages": [ANSWER]}, "the conversation has no other turn"),
        ({"id": "a", "messages": [USER, ANSWER, ANSWER]}, "ends with a turn of assistant"),
        (
            {"id": "a", "messages": [{"role": "bard", "content": ""}]},
            "has the role 'bard'; accepted",
        ),
        ({"id": "a", "text": "\ud800"}, "surrogates not allowed"),
        ({"id": "a", "messages": [USER], "system": "s"}, "make it the first of them"),
        ({"id": "a", "messages": [USER], "tools": "t"}, "tools must be a list"),
        ({"id": "p0", "text": "again"}, "id 'p0' was given at .*good.jsonl:1"),
    ],
)
def test_bad_lines_are_named_counted_and_skipped(tmp_path: Path, line, reason: str) -> None:
    good = write(tmp_path / "good.jsonl", *({"id": f"p{i}", "text": "a"} for i in range(3)))
    bad = write(tmp_path / "bad.jsonl", {"id": "q", "text": "a"}, line)
    said: list[str] = []
    questions = read_questions([good, bad], max_bad_share=0.2, report=said.append)
    assert [q.id for q in questions] == ["p0", "p1", "p2", "q"]
    with pytest.raises(
        DataError, match=rf"1 of 5 lines are malformed(.|\n)*:2: .*{reason}"
    ) as error:
        read_questions([good, bad], max_bad_share=0.19)
    assert said == [f"skipped {str(error.value).splitlines()[1].strip()}"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent is no file"):
        read_questions([tmp_path / "absent"])
    with pytest.raises(DataError, match=r"no question in .*empty.jsonl"):
        read_questions([write(tmp_path / "empty.jsonl", b"")])
    (tmp_path / "text.gz").write_text("no gzip")
    with pytest.raises(DataError, match=r"text.gz cannot be read: Not a gzipped file"):
        read_questions([tmp_path / "text.gz"])
    whole = write(tmp_path / "cut.gz", {"id": "a", "text": "b"})
    whole.write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cut.gz cannot be read"):
        read_questions([whole])
    content = bytearray(write(tmp_path / "bad.gz", {"id": "a", "text": "b"}).read_bytes())
    content[10] ^= 255  # the first byte of what is compressed
    (tmp_path / "bad.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"bad.gz cannot be read"):
        read_questions([tmp_path / "bad.gz"])


def test_a_seed_is_a_function_of_base_and_id() -> None:
    one, other = Question("a", "s", [USER]), Question("b", "s", [USER])
    assert one.seed(3) == Question("a", "t", []).seed(3)
    assert len({one.seed(3), one.seed(4), other.seed(3)}) == 3
    assert 0 <= one.seed(-1) < 2**64
