"""tau, cycles and loops against brute force."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.statistics import DecodeStatistics, cut_cycles, loop_start

cycles = st.lists(st.integers(1, 16), max_size=30)
# Few symbols, so that 8-grams repeat.
outputs = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.tuples(
        st.lists(st.integers(0, 5), max_size=20),
        st.lists(st.integers(0, 5), min_size=1, max_size=9),
        st.integers(0, 12),
        st.lists(st.integers(0, 5), max_size=20),
    ).map(lambda parts: parts[0] + parts[1] * parts[2] + parts[3]),
)


def test_no_cycles_have_no_tau() -> None:
    statistics = DecodeStatistics()
    assert (statistics.tau, statistics.histogram) == (0.0, {})


@given(cycles, st.data())
def test_tau_and_histogram(committed: list[int], data: st.DataObject) -> None:
    """A cycle after the output's end counts for the histogram and not for tau."""
    emitted = data.draw(st.integers(0, sum(committed)))
    statistics = DecodeStatistics(committed, emitted, [0.1] * len(committed))
    begins = [0, *accumulate(committed)][: len(committed)]
    emitting = sum(begin < emitted for begin in begins)
    assert statistics.tau == (emitted / emitting if emitting else 0)
    histogram = statistics.histogram
    assert list(histogram) == sorted(set(committed))
    assert all(histogram[n] == committed.count(n) for n in histogram)


@given(outputs)
def test_loop_start(tokens: list[int]) -> None:
    """An 8-gram that occurs more than 4 times, overlaps included; a loop begins where the first
    of them comes again."""
    grams = [tuple(tokens[i : i + 8]) for i in range(max(len(tokens) - 7, 0))]
    again = [i for i, gram in enumerate(grams) if grams[:i].count(gram) == 1]
    expected = next((i for i in again if grams.count(grams[i]) > 4), None)
    assert loop_start(tokens) == expected


def test_four_occurrences_are_no_loop() -> None:
    gram = list(range(8))
    assert loop_start(gram * 4) is None
    assert loop_start([99, *gram * 5]) == 9
    assert loop_start([7] * 11) is None  # four overlapping 8-grams
    assert loop_start([7] * 12) == 1


@given(cycles, st.integers(1, 500))
def test_cut_cycles(committed: list[int], emitted: int) -> None:
    """As many whole cycles as it takes, the last one cut."""
    ends = list(accumulate(committed))
    total = ends[-1] if ends else 0
    needed = next((i for i, end in enumerate(ends, 1) if end >= emitted), len(committed))
    assert cut_cycles(committed, emitted) == (min(emitted, total), needed)
