"""What operators watch, in Prometheus' format, under the names they know from vLLM and SGLang."""

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax.monitoring
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dflash_jax.serve.async_engine import Snapshot
from dflash_jax.serve.selftest import SelfTest

logger = logging.getLogger(__name__)

WINDOW = 500  # cycles that the acceptance gauges look back on
LOW_ACCEPTANCE = 0.6
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STEP_SECONDS = (0.001, 0.0025, *SECONDS[:9])
COMPILED = "/jax/core/compile/backend_compile_duration"


class _Cycle(NamedTuple):
    """Token counts of a cycle, or the sums of several. ``reached``: drafts up to and with the first
    rejected one; what was drafted behind it says nothing about the draft."""

    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    emitted: int = 0


class _Window:
    """The last ``size`` cycles and their sums."""

    def __init__(self, size: int):
        self._size, self._cycles, self.sums = size, deque[_Cycle](), _Cycle()

    def __len__(self) -> int:
        return len(self._cycles)

    def add(self, cycle: _Cycle) -> None:
        oldest = self._cycles.popleft() if len(self) == self._size else _Cycle()
        self._cycles.append(cycle)
        columns = zip(self.sums, cycle, oldest, strict=True)
        self.sums = _Cycle(*(total + new - old for total, new, old in columns))


class Metrics:
    """One registry a server. Written on the event loop, except for compilations."""

    def __init__(self, snapshot: Callable[[], Snapshot]):
        registry = self.registry = CollectorRegistry()

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=registry)

        spec = "vllm:spec_decode_num_"
        self.drafts = counter(spec + "drafts", "Cycles of drafting and verifying")
        self.drafted = counter(spec + "draft_tokens", "Tokens proposed")
        self.accepted = counter(spec + "accepted_tokens", "Proposed tokens that were returned")
        self.accepted_at = counter(
            spec + "accepted_tokens_per_pos", "Accepted, by place in the block", ("position",)
        )
        self.accept_length = gauge("sglang:spec_accept_length", "Tokens returned a cycle, lately")
        self.accept_rate = gauge(
            "sglang:spec_accept_rate", "Accepted of all proposed, lately; falls as blocks grow"
        )
        self.draft_acceptance = gauge(
            "dflash:draft_acceptance_rate",
            "Accepted of the drafts up to and with each cycle's first rejection, lately: how likely"
            f" the next draft is right, at any block size; below {LOW_ACCEPTANCE} is warned of",
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens returned")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Admission to first token", SECONDS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Time a token, step time over tokens", STEP_SECONDS
        )
        self.end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "Admission to last token", SECONDS
        )
        self.finished = counter(
            "vllm:request_success", "Requests answered, by finish reason", ("finished_reason",)
        )
        self.aborted = counter("dflash:requests_aborted", "Requests whose client went or gave up")
        self.rejected = counter("dflash:requests_rejected", "Requests refused", ("status",))
        self.compilations = counter(
            "dflash:compilations_after_ready", "Programs compiled while serving; must stay 0"
        )
        for name, help, read in (
            ("vllm:num_requests_running", "Requests that hold a slot", lambda s: s.running),
            ("vllm:num_requests_waiting", "Requests that wait for one", lambda s: s.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of KV pages in use, 0 to 1",
                lambda s: 1 - s.free_pages / s.pages if s.pages else 0.0,
            ),
        ):
            gauge(name, help).set_function(lambda read=read: read(snapshot()))
        self._gauge = gauge
        self._recent = _Window(WINDOW)
        self._warned = False

    def cycle(self, drafted: int, accepted: int, emitted: int) -> None:
        """One cycle of one request, cut where its output ends."""
        if not drafted:
            return
        self.drafts.inc()
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        for position in range(accepted):
            self.accepted_at.labels(str(position)).inc()
        # After the accepted drafts comes the token that replaces the first rejected one, unless all
        # were accepted or the output ended before it.
        self._recent.add(_Cycle(drafted, accepted, min(drafted, emitted), emitted))
        cycles, sums = len(self._recent), self._recent.sums
        rate = sums.accepted / max(sums.reached, 1)
        self.accept_length.set(sums.emitted / cycles)
        self.accept_rate.set(sums.accepted / sums.drafted)
        self.draft_acceptance.set(rate)
        if cycles == WINDOW and rate < LOW_ACCEPTANCE and not self._warned:
            self._warned = True
            logger.warning(
                "draft acceptance rate %.2f is below %.1f over %d cycles (%.2f tokens a cycle); "
                "suspects: a block size too large for this text, a draft of another target",
                rate, LOW_ACCEPTANCE, WINDOW, sums.emitted / WINDOW,
            )  # fmt: skip

    def self_test(self, result: SelfTest) -> None:
        """Export what the start-up self-test found."""
        exact = {None: -1, True: 1, False: 0}[result.equal]
        for name, help, value in (
            ("equal", "Speculation equals plain decoding: 1, 0, or -1 without a draft", exact),
            ("accept_length", "Tokens a cycle in the self-test", result.accept_length),
            ("speculative_step_seconds", "A cycle in the self-test", result.speculative_step),
            ("plain_step_seconds", "A plain step in the self-test", result.plain_step),
        ):
            self._gauge(f"dflash:self_test_{name}", help).set(value)

    def watch_compilations(self) -> Callable[[], None]:
        """Count compilations from now on, on any thread; returns the function that ends it."""

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event == COMPILED:
                self.compilations.inc()
                logger.warning("a program was compiled while serving, in %.1f s", duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)
        return lambda: jax.monitoring.unregister_event_duration_listener(listen)

    def render(self) -> bytes:
        return generate_latest(self.registry)
