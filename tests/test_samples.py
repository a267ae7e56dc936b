"""Reading of training samples: every form of a line, text files, malformed lines, held-out ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_conversations import CHATML, tokenizer_of
from train.samples import DataError, Sample, Tally, has_anchor, is_held_out, read_samples

GOOD = json.dumps({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}).encode()
BAD = {
    b"{": "JSONDecodeError",
    b"[" * 100_000: "nested too deeply",
    b"[1, 2]": "a line must be an object, got list",
    b"null": "got NoneType",
    b'"\xff"': "UnicodeDecodeError",
    b"{}": "accepted: input_ids with loss_mask",
    b'{"prompt": "hi"}': "a line of ['prompt']; accepted: input_ids with loss_mask",
    b'{"id": 1.5, "input_ids": [1, 2], "loss_mask": [1, 1]}': "id must be a string or an integer",
    b'{"input_ids": [1, 2]}': "loss_mask is missing",
    b'{"loss_mask": [1, 1]}': "input_ids is missing",
    b'{"input_ids": 3, "loss_mask": [1, 1]}': "input_ids must be a list, got 3",
    b'{"input_ids": [1, 2], "loss_mask": [1]}': "2 input_ids but 1 loss_mask",
    b'{"input_ids": [1, 500], "loss_mask": [1, 1]}': "token id 500 is not in 0..499",
    b'{"input_ids": [1, -1], "loss_mask": [1, 1]}': "token id -1",
    b'{"input_ids": [1, 1e99], "loss_mask": [1, 1]}': "token id 1e+99",
    b'{"input_ids": [1, 99999999999999999999], "loss_mask": [1, 1]}': "token id 999999999",
    b'{"input_ids": [1, true], "loss_mask": [1, 1]}': "token id True",
    b'{"input_ids": [1, 2.0], "loss_mask": [1, 1]}': "token id 2.0",
    b'{"input_ids": [1, null], "loss_mask": [1, 1]}': "token id None",
    b'{"input_ids": "ab", "loss_mask": [1, 1]}': "input_ids must be a list, got 'ab'",
    b'{"input_ids": [1, 2], "loss_mask": "11"}': "loss_mask must be a list, got '11'",
    b'{"input_ids": [1, 2], "loss_mask": [1, null]}': "loss_mask None is not 0 or 1",
    b'{"input_ids": [1, 2], "loss_mask": [2, 1]}': "loss_mask 2",
    b'{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}': "no two supervised tokens in a row",
    b'{"input_ids": [], "loss_mask": []}': "no two supervised",
    b'{"messages": [{"role": "user", "content": "q"}]}': "the assistant never answers",
    b'{"messages": []}': "messages must be a list of turns",
    b'{"text": 3}': "text must be a string, got int",
    b'{"text": ""}': "no two supervised",
    b'{"text": "\\ud800 and on"}': "surrogates not allowed",
}
TOKENIZER = tokenizer_of(CHATML)


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def read(*paths: Path, **options: Any) -> list[Sample]:
    return list(read_samples(paths, **{"vocab_size": 500, "tokenizer": TOKENIZER} | options))


def learnt(sample: Sample) -> str:
    assert sample.input_ids.dtype == np.int32 and sample.loss_mask.dtype == bool
    assert sample.input_ids.shape == sample.loss_mask.shape
    return TOKENIZER.decode(sample.input_ids[sample.loss_mask])


def test_token_ids(tmp_path: Path) -> None:
    boolean = b'{"input_ids": [4, 5], "loss_mask": [true, true], "source": "x"}'
    first, second = read(write(tmp_path / "a.jsonl", GOOD, boolean), tokenizer=None)
    assert (first.id, second.id) == ("a", "")
    assert (first.input_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 3], [False, True, True])
    assert (second.input_ids.tolist(), second.loss_mask.tolist()) == ([4, 5], [True, True])
    assert first.input_ids.dtype == np.int32


def test_conversations_and_text(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hi"}] * 2
    theirs = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "ho"}]
    records = [
        {"id": 7, "conversations": turns},
        {"messages": turns},
        {"conversations": theirs},
        {"text": "hi"},
    ]
    path = write(tmp_path / "a.jsonl", *(json.dumps(record).encode() for record in records))
    samples = read(path)
    assert [sample.id for sample in samples] == ["7", "", "", ""]
    both = "hi<|im_end|>" * 2
    # Text comes with the BOS that a plain prompt gets.
    assert [learnt(s) for s in samples] == [both, both, "ho<|im_end|>", "<|begin_of_text|>hi"]
    last = [learnt(sample) for sample in read(path, supervise="last")]
    assert last == ["hi<|im_end|>"] * 2 + ["ho<|im_end|>", "<|begin_of_text|>hi"]


def test_token_ids_win_over_the_conversation_they_were_made_of(tmp_path: Path) -> None:
    """They are what the target really wrote."""
    line = b'{"input_ids": [1, 2], "loss_mask": [1, 1], "conversations": "whatever"}'
    (sample,) = read(write(tmp_path / "a.jsonl", line), tokenizer=None)
    assert sample.input_ids.tolist() == [1, 2]


def test_template_options_reach_the_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("{{ date_string }}" + CHATML)
    line = b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]}'
    path = write(tmp_path / "a.jsonl", line)
    (sample,) = read(path, tokenizer=tokenizer, template_options={"date_string": "today"})
    assert tokenizer.decode(sample.input_ids).startswith("today<|im_start|>user")


def test_files_of_every_kind(tmp_path: Path) -> None:
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(GOOD + b"\n" + GOOD))
    text, code = tmp_path / "b.txt", tmp_path / "c.v1.py.gz"
    text.write_text("one\n\ntwo\n")
    code.write_bytes(gzip.compress(b"print('\xc3\xa9')\n"))
    tally = Tally()
    samples = read(zipped, text, code, tally=tally)
    assert [s.id for s in samples] == ["a", "a", "b.txt", "c.v1.py.gz"]
    assert learnt(samples[2]) == "<|begin_of_text|>one\n\ntwo\n"
    assert learnt(samples[3]) == "<|begin_of_text|>print('é')\n"
    assert (tally.lines, tally.bad) == (4, 0)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cut, no_gzip = tmp_path / "cut.jsonl.gz", write(tmp_path / "no.jsonl.gz", GOOD)
    cut.write_bytes(gzip.compress(GOOD * 100)[:-10])
    array = write(tmp_path / "array.json", b"[]")
    for path in (tmp_path / "none.jsonl", tmp_path, cut, no_gzip, array):
        with pytest.raises(DataError, match=path.name):
            read(path)
    binary = tmp_path / "a.bin"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"1 of 1 lines are malformed(.|\n)*a\.bin: UnicodeDecode"):
        read(binary)


def test_what_must_be_tokenised_needs_a_tokenizer(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", b'{"text": "hi"}')
    turns = b'{"messages": [{"role": "user", "content": "a"}]}'
    with pytest.raises(DataError, match="text must be tokenised, and there is no tokenizer"):
        read(text, tokenizer=None, max_bad_share=1.0)
    bare = tokenizer_of(CHATML)
    bare.chat_template = None
    for tokenizer, why in ((None, "no tokenizer"), (bare, "need a chat template")):
        with pytest.raises(DataError, match=f"conversations .*{why}"):
            read(write(tmp_path / "b.jsonl", turns), tokenizer=tokenizer, max_bad_share=1.0)


@pytest.mark.parametrize(("line", "why"), BAD.items(), ids=lambda x: str(x)[:40])
def test_a_malformed_line_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    path = write(tmp_path / "samples.jsonl", GOOD, line, GOOD)
    assert len(read(path, max_bad_share=0.5)) == 2
    out = capsys.readouterr().out
    assert f"skipped {path}:2: " in out and why in out


def test_what_a_template_raises_is_of_the_line(tmp_path: Path) -> None:
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}'
    path = write(tmp_path / "samples.jsonl", line)
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ messages[9].content }}"):
        with pytest.raises(DataError, match=r"samples\.jsonl:1: (Template|Undefined)Error"):
            read(path, tokenizer=tokenizer_of(template))


@pytest.mark.parametrize(("bad", "raises"), [(0, False), (1, False), (2, True)])
def test_too_large_a_share_of_them_is_an_error(tmp_path: Path, bad: int, raises: bool) -> None:
    """Of all files together."""
    path = write(tmp_path / "samples.jsonl", *[GOOD] * (50 - bad), *[b"{"] * bad)
    other = write(tmp_path / "other.jsonl", *[GOOD] * 50)
    if not raises:
        assert len(read(path, other)) == 100 - bad
        return
    with pytest.raises(DataError, match=r"2 of 100 lines are malformed(.|\n)*jsonl:49: ") as info:
        read(path, other)
    assert f"{path}:50" in str(info.value)


def test_empty_lines_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "samples.jsonl", b"", GOOD, b" \r", GOOD, b"{", b"")
    with pytest.raises(DataError, match=r"1 of 3 lines are malformed(.|\n)*jsonl:5: "):
        read(path)


def test_a_few_of_many_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "samples.jsonl", *[GOOD] * 30, *[b"{"] * 30)
    tally, said = Tally(), []
    assert len(read(path, max_bad_share=0.5, tally=tally, report=said.append)) == 30
    assert (tally.lines, tally.bad, len(tally.reasons)) == (60, 30, 10)
    assert len(said) == 11 and said[-1] == "skipped 30 of 60 lines in all"


def sample(name: str, token: int) -> Sample:
    return Sample(name, np.array([token, token], np.int32), np.ones(2, bool))


def test_held_out() -> None:
    """A share of the ids, the same ones always, growing with the share."""
    samples = [sample(f"id-{i}", 0) for i in range(2000)]
    held = {share: {s.id for s in samples if is_held_out(s, share)} for share in (0, 0.05, 0.2, 1)}
    assert not held[0] and len(held[1]) == 2000
    assert held[0.05] < held[0.2]
    assert 60 < len(held[0.05]) < 140 and 330 < len(held[0.2]) < 470
    assert [is_held_out(sample(f"id-{i}", 0), 0.2) for i in range(8)] == EIGHT
    assert all(is_held_out(sample(s.id, 5), 0.2) for s in samples if s.id in held[0.2])
    # By their tokens, where they have no id.
    nameless = [is_held_out(sample("", i), 0.2) for i in range(2000)]
    assert 330 < sum(nameless) < 470


# Pinned: another hash would move samples from one side to the other between two runs.
EIGHT = [False] * 6 + [True, True]


def test_an_anchor_needs_two_in_a_row() -> None:
    for mask, expected in (("", 0), ("1", 0), ("101", 0), ("011", 1), ("11", 1), ("0110", 1)):
        assert has_anchor(np.array([c == "1" for c in mask], bool)) == bool(expected)
