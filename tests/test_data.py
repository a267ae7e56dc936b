"""Reading and packing of training samples."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import DataError, Sample, pack, read_samples

GOOD = json.dumps({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}).encode()
BAD = {
    b"{": "JSONDecodeError",
    b"": "JSONDecodeError",
    b"[1, 2]": "TypeError",
    b"null": "TypeError",
    b'"\xff"': "UnicodeDecodeError",
    b'{"input_ids": [1, 2]}': "loss_mask",
    b'{"loss_mask": [1, 1]}': "input_ids",
    b'{"input_ids": 3, "loss_mask": [1, 1]}': "TypeError",
    b'{"input_ids": [1, 2], "loss_mask": [1]}': "2 input_ids but 1 loss_mask",
    b'{"input_ids": [1, 10], "loss_mask": [1, 1]}': "token id 10 is not in 0..9",
    b'{"input_ids": [1, -1], "loss_mask": [1, 1]}': "token id -1",
    b'{"input_ids": [1, true], "loss_mask": [1, 1]}': "token id True",
    b'{"input_ids": [1, 2.0], "loss_mask": [1, 1]}': "token id 2.0",
    b'{"input_ids": [1, null], "loss_mask": [1, 1]}': "token id None",
    b'{"input_ids": "ab", "loss_mask": [1, 1]}': "token id 'a'",
    b'{"input_ids": [1, 2], "loss_mask": "11"}': "loss_mask '1' is not 0 or 1",
    b'{"input_ids": [1, 2], "loss_mask": [1, null]}': "loss_mask None",
    b'{"input_ids": [1, 2], "loss_mask": [2, 1]}': "loss_mask 2",
    b'{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}': "no two supervised tokens in a row",
    b'{"input_ids": [], "loss_mask": []}': "no two supervised",
}


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_samples_are_read(tmp_path: Path) -> None:
    boolean = b'{"input_ids": [4, 5], "loss_mask": [true, true]}'
    path = write(tmp_path / "samples.jsonl", GOOD, boolean)
    first, second = read_samples(path, vocab_size=10)
    assert first == Sample([1, 2, 3], [False, True, True])
    assert second == Sample([4, 5], [True, True])


@pytest.mark.parametrize(("line", "why"), BAD.items(), ids=lambda x: str(x)[:40])
def test_a_malformed_line_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    path = write(tmp_path / "samples.jsonl", GOOD, line, GOOD)
    samples = list(read_samples(path, vocab_size=10, max_bad_share=0.5))
    assert len(samples) == 2
    out = capsys.readouterr().out
    assert f"skipped {path}:2: " in out and why in out


@pytest.mark.parametrize(("bad", "raises"), [(0, False), (1, False), (2, True)])
def test_too_large_a_share_of_them_is_an_error(tmp_path: Path, bad: int, raises: bool) -> None:
    path = write(tmp_path / "samples.jsonl", *[GOOD] * (100 - bad), *[b"{"] * bad)
    samples = read_samples(path, vocab_size=10)
    if not raises:
        assert len(list(samples)) == 100 - bad
        return
    with pytest.raises(DataError, match=r"2 of 100 lines are malformed(.|\n)*jsonl:99: .*") as info:
        list(samples)
    assert f"{path}:100" in str(info.value)


documents = st.lists(st.integers(1, 14), min_size=1, max_size=30)
LENGTH = 10


def samples_of(sizes: list[int]) -> list[Sample]:
    """Token ids that say which document and place they are of."""
    mask = np.random.default_rng(len(sizes)).integers(0, 2, (len(sizes), 14)).astype(bool)
    return [
        Sample([100 * d + i for i in range(size)], mask[d, :size].tolist())
        for d, size in enumerate(sizes)
    ]


@given(documents, st.integers(0, 3))
def test_packing_keeps_every_token_once(sizes: list[int], seed: int) -> None:
    samples = samples_of(sizes)
    rows = pack(samples, LENGTH, seed=seed)
    assert {x.shape[1] for x in vars(rows).values()} == {LENGTH}
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, column in np.ndindex(rows.tokens.shape):
        segment = int(rows.segments[row, column])
        if segment == 0:  # padding: at the end, and nothing in it
            assert not rows.segments[row, column:].any()
            assert not rows.tokens[row, column] and not rows.loss_mask[row, column]
            assert not rows.positions[row, column]
            continue
        token = int(rows.tokens[row, column])
        document, place = divmod(token, 100)
        assert rows.positions[row, column] == place == len(found[row, segment])
        assert rows.loss_mask[row, column] == samples[document].loss_mask[place]
        found[row, segment].append(token)
    # Documents longer than a row are cut at its end.
    assert sorted(found.values()) == sorted(list(s.input_ids[:LENGTH]) for s in samples)
    for row in range(rows.tokens.shape[0]):
        numbers = [s for r, s in found if r == row]
        assert numbers == list(range(1, len(numbers) + 1))


@given(documents)
def test_packing_is_best_fit(sizes: list[int]) -> None:
    """As full as by the plain algorithm: longest first, into the least room that suffices."""
    rows: list[list[int]] = []
    for size in sorted((min(size, LENGTH) for size in sizes), reverse=True):
        fitting = [row for row in rows if LENGTH - sum(row) >= size]
        row = min(fitting, key=lambda row: LENGTH - sum(row), default=None)
        if row is None:
            rows.append(row := [])
        row.append(size)
    packed = pack(samples_of(sizes), LENGTH, seed=0)
    assert sorted((packed.segments > 0).sum(1)) == sorted(map(sum, rows))


@given(documents)
def test_packing_depends_on_the_seed_alone(sizes: list[int]) -> None:
    one, same, other = (pack(samples_of(sizes), LENGTH, seed=seed) for seed in (1, 1, 2))
    for name, value in vars(one).items():
        np.testing.assert_array_equal(value, getattr(same, name))
    as_set = lambda rows: sorted(map(tuple, rows.tokens.tolist()))  # noqa: E731
    assert as_set(one) == as_set(other)


def test_nothing_to_pack_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples to pack"):
        pack([], LENGTH, seed=0)
