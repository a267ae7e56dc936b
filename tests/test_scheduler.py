"""The scheduler alone, with a device that commits what hypothesis says."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_jax.request import Request, SamplingParams, cut
from dflash_jax.scheduler import DecodePlan, PrefillPlan, Scheduler, Sequence

BLOCK, MAX_LEN, PAGE = 4, 24, 4


def make(**changes) -> Scheduler:
    options = {
        "slots": 4,
        "pages": 7,
        "page_size": PAGE,
        "max_model_len": MAX_LEN,
        "lookahead": BLOCK,
        "prefill_shapes": [(2, 8), (4, 4)],
    }
    return Scheduler(**{**options, **changes})


def sequence(scheduler: Scheduler, arrival: int, prompt: int, new: int = 64) -> Sequence:
    sampling = SamplingParams(max_new_tokens=new)
    request = Request(f"r{arrival}", tuple(range(prompt)), sampling)
    added = Sequence(request, arrival, seed=0, tokens=list(request.prompt_ids))
    scheduler.add(added)
    return added


def commit(scheduler: Scheduler, sequence: Sequence, count: int) -> None:
    sampling = sequence.request.sampling
    room = min(sampling.max_new_tokens - sequence.num_emitted, MAX_LEN - len(sequence.tokens))
    kept, reason = cut([7] * count, room, frozenset())
    sequence.tokens += kept
    if reason:
        scheduler.finish(sequence)


def check_plan(scheduler: Scheduler, plan: PrefillPlan | DecodePlan) -> None:
    """What the engine relies on, for every row of a plan."""
    assert plan.sequences, "a plan without rows"
    assert len({s.slot for s in plan.sequences}) == len(plan.sequences)
    per_shard = plan.rows // scheduler.shards
    assert per_shard * scheduler.shards == plan.rows
    for shard in range(scheduler.shards):
        assert sum(scheduler.shard_of(s) == shard for s in plan.sequences) <= per_shard
    for row in plan.sequences:
        assert row in scheduler.running and row.slot >= 0
    if isinstance(plan, PrefillPlan):
        assert (plan.rows, plan.chunk) in scheduler.prefill_shapes
        for row, count in zip(plan.sequences, plan.counts, strict=True):
            assert 1 <= count <= plan.chunk
            assert len(row.pages) * PAGE >= row.cached + count
    else:
        for row in plan.sequences:
            reach = min(row.cached + BLOCK, scheduler.max_pages * PAGE)
            assert len(row.pages) * PAGE >= reach, "a block would write to pages it lacks"
            assert row.cached == len(row.tokens) - 1, "the anchor is the one token without KV"
            limit = scheduler.speculation_limit
            if plan.speculative and limit is not None:
                assert row.cached + BLOCK <= limit


class Scheduling(RuleBasedStateMachine):
    """Faults 34 (leaks), 35 (abort anywhere) and 36 (preemption loses nothing)."""

    @initialize(
        shards=st.sampled_from([1, 2]),
        pages=st.sampled_from([7, 9, 30]),
        limit=st.sampled_from([None, 0, 12]),
    )
    def start(self, shards: int, pages: int, limit: int | None) -> None:
        self.scheduler = make(
            shards=shards,
            pages=pages,
            speculation_limit=limit,
            prefill_shapes=[(2 * shards, 8), (4 * shards, 4)],
        )
        self.arrivals = 0
        self.live: list[Sequence] = []
        self.history: dict[int, list[int]] = {}

    @rule(prompt=st.integers(1, MAX_LEN - 1), new=st.integers(1, 30))
    def add(self, prompt: int, new: int) -> None:
        self.live.append(sequence(self.scheduler, self.arrivals, prompt, new))
        self.arrivals += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.live))
        assert self.scheduler.find(gone.request.id) is gone
        self.scheduler.finish(gone)
        assert self.scheduler.find(gone.request.id) is None
        self.live.remove(gone)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.live, "work is left and nothing is planned"
            return
        check_plan(self.scheduler, plan)
        self.run(plan, lambda: data.draw(st.integers(1, BLOCK)))

    def run(self, plan: PrefillPlan | DecodePlan, committed) -> None:
        if isinstance(plan, PrefillPlan):
            for row, count in zip(plan.sequences, plan.counts, strict=True):
                row.cached += count
                if row.cached == row.prefill_target and not row.num_emitted:
                    commit(self.scheduler, row, 1)
        else:
            for row in plan.sequences:
                count = committed() if plan.speculative else 1
                row.cached += count
                commit(self.scheduler, row, count)
        running = (*self.scheduler.running, *self.scheduler.waiting)
        self.live = [s for s in self.live if s in running]

    @invariant()
    def everything_is_owned_once(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.live)
            arrivals = [s.arrival for s in self.scheduler.running]
            assert arrivals == sorted(arrivals)

    def teardown(self) -> None:
        """Whatever happened, the rest finishes, with the slowest acceptance, and frees all."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            plan = self.scheduler.schedule()
            if plan is None:
                break
            check_plan(self.scheduler, plan)
            self.run(plan, lambda: 1)
        assert not self.live
        self.scheduler.check_integrity()
        assert all(a.num_free == a.num_pages - 1 for a in self.scheduler.allocators)


Scheduling.TestCase.settings = settings(max_examples=300, stateful_step_count=30)
TestScheduling = Scheduling.TestCase


def drain(scheduler: Scheduler) -> list[PrefillPlan | DecodePlan]:
    machine = Scheduling()
    machine.scheduler, machine.live = scheduler, [*scheduler.running, *scheduler.waiting]
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        machine.run(plan, lambda: BLOCK)
    return plans


def test_a_plan_follows_while_work_is_left() -> None:
    """A younger row that must yield its pages to an older, still prefilling one idles nobody."""
    scheduler = make(pages=9, prefill_shapes=[(2, 4)])
    old = sequence(scheduler, 0, 19)
    young = sequence(scheduler, 1, 1)
    while not old.prefilled:
        plan = scheduler.schedule()
        assert plan is not None
        machine = Scheduling()
        machine.scheduler, machine.live = scheduler, [old, young]
        machine.run(plan, lambda: BLOCK)


def test_prefill_and_decode_take_turns() -> None:
    scheduler = make(pages=30)
    sequence(scheduler, 0, 4)
    kinds = [type(scheduler.schedule())]
    running = scheduler.running[0]
    running.cached = 4
    commit(scheduler, running, 1)
    sequence(scheduler, 1, 20)
    kinds += [type(scheduler.schedule()) for _ in range(4)]
    assert kinds == [PrefillPlan, DecodePlan, PrefillPlan, DecodePlan, PrefillPlan]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    """Fault 36, the host's half: its tokens stay; only KV, slot and pages go."""
    scheduler = make()
    rows = [sequence(scheduler, i, 8) for i in range(3)]
    plans = drain(scheduler)
    assert scheduler.preemptions > 0
    assert all(len(row.tokens) == MAX_LEN for row in rows)
    decoded = [s.arrival for plan in plans if isinstance(plan, DecodePlan) for s in plan.sequences]
    assert decoded[-1] == max(decoded), "the oldest never waits for the youngest"


def test_rows_beyond_the_drafts_reach_decode_plainly_in_turn_with_the_others() -> None:
    scheduler = make(pages=30, speculation_limit=12)
    sequence(scheduler, 0, 16)
    sequence(scheduler, 1, 2)
    plans = [p for p in drain(scheduler) if isinstance(p, DecodePlan)]
    assert {(p.speculative, s.arrival) for p in plans for s in p.sequences} == {
        (False, 0),
        (True, 1),
        (False, 1),
    }


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pages": 6}, "give at least 7 pages or lower max_model_len"),
        ({"shards": 3}, "3 data shards must divide 4 slots"),
    ],
)
def test_impossible_settings_name_the_number_to_change(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(**changes)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.integers(1, 12),
    st.frozensets(st.integers(0, 5), max_size=2),
)
def test_cut_equals_going_token_by_token(tokens, room: int, stops) -> None:
    """Faults 3, 4, 6 and 9: one place ends the output, wherever in a block it falls."""
    kept, reason = [], None
    for token in tokens:
        kept.append(token)
        reason = "stop" if token in stops else "length" if len(kept) == room else None
        if reason:
            break
    assert cut(tokens, room, stops) == (kept, reason)


def test_sampling_params_name_the_field_and_what_is_accepted() -> None:
    for field, value, match in [
        ("temperature", float("nan"), "temperature must be a number from 0 to 100"),
        ("temperature", -1.0, "temperature must be"),
        ("top_k", -2, "top_k must be -1"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\]"),
        ("top_p", float("nan"), "top_p must be"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\]"),
        ("max_new_tokens", 0, "max_new_tokens must be at least 1, an integer, got 0"),
        ("seed", 2**64, "seed must be a 64-bit integer"),
    ]:
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(SamplingParams(), **{field: value})
