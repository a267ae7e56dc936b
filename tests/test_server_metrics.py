"""The acceptance gauges: what they count, how far they look back, and what they warn of."""

import logging

import pytest

from dflash_jax.serve.async_engine import Snapshot
from dflash_jax.serve.metrics import WINDOW, Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Snapshot)


def rates(metrics: Metrics) -> tuple[float, float, float]:
    """(tokens a cycle, accepted of all proposed, accepted of the drafts reached)."""
    names = ("sglang:spec_accept_length", "sglang:spec_accept_rate", "dflash:draft_acceptance_rate")
    values = [metrics.registry.get_sample_value(name) for name in names]
    return tuple(-1.0 if value is None else value for value in values)  # pyright: ignore[reportReturnType]


def test_a_healthy_large_block_is_not_warned_of(metrics, caplog):
    """b = 16 and 6 tokens a cycle: a third of the proposed, yet 5 of every 6 drafts reached."""
    with caplog.at_level(logging.WARNING):
        for _ in range(WINDOW + 1):
            metrics.cycle(drafted=15, accepted=5, emitted=6)
    assert rates(metrics) == pytest.approx((6, 5 / 15, 5 / 6))
    assert not caplog.records


def test_a_draft_that_misses_is_warned_of_once(metrics, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * WINDOW):
            metrics.cycle(drafted=15, accepted=1, emitted=2)
    assert rates(metrics) == pytest.approx((2, 1 / 15, 1 / 2))
    (record,) = caplog.records
    assert "0.50 is below 0.6" in record.message
    assert "block size" in record.message and "another target" in record.message


def test_only_drafts_that_were_judged_are_reached(metrics):
    metrics.cycle(drafted=3, accepted=3, emitted=4)  # all accepted: nothing was rejected
    assert rates(metrics)[2] == 1
    metrics.cycle(drafted=3, accepted=2, emitted=2)  # the output ended among the accepted
    assert rates(metrics)[2] == 1
    metrics.cycle(drafted=3, accepted=0, emitted=1)
    assert rates(metrics)[2] == pytest.approx(5 / 6)


def test_what_is_older_than_the_window_is_forgotten(metrics):
    for _ in range(WINDOW):
        metrics.cycle(drafted=3, accepted=0, emitted=1)
    assert rates(metrics) == (1, 0, 0)
    for _ in range(WINDOW):
        metrics.cycle(drafted=3, accepted=3, emitted=4)
    assert rates(metrics) == (4, 1, 1)
