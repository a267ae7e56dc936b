"""Continuous batching, host side only: which rows run next, on which pages. No device arrays."""

import dataclasses
from collections import deque
from collections.abc import Sequence as SequenceOf

from dflash_jax.pages import PageAllocator
from dflash_jax.request import Request


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way: its tokens (prompt and emitted), its slot and its pages.

    ``tokens[:cached]`` have KV. Once running, ``tokens[cached]`` is the anchor and the last token.
    """

    request: Request
    arrival: int
    seed: int
    tokens: list[int]
    cached: int = 0
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def prefill_target(self) -> int:
        """Tokens to run before decoding: the prompt, or after a preemption all but the anchor."""
        return len(self.tokens) - (1 if self.num_emitted else 0)

    @property
    def prefilled(self) -> bool:
        return self.cached >= self.prefill_target and self.num_emitted > 0


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Run ``counts[i]`` prompt tokens of ``sequences[i]``, in a [rows, chunk] shape."""

    sequences: list[Sequence]
    counts: list[int]
    rows: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Run one cycle of ``sequences``; ``speculative`` False: plain decoding."""

    sequences: list[Sequence]
    rows: int
    speculative: bool


class Scheduler:
    """Admits in arrival order, alternates prefill chunks with decode cycles, preempts the youngest
    when pages run out. Slots and pages belong to data shards: slot s lives on shard
    ``s // slots_per_shard`` with page ids local to it.
    """

    def __init__(
        self,
        *,
        slots: int,
        pages: int,
        page_size: int,
        max_model_len: int,
        lookahead: int,
        prefill_shapes: SequenceOf[tuple[int, int]],
        batch_buckets: SequenceOf[int] | None = None,
        shards: int = 1,
        speculation_limit: int | None = None,
    ):
        """``pages``: a shard's, null page included. ``lookahead``: tokens a cycle may write (b).
        ``prefill_shapes``: (rows, chunk), any order. ``batch_buckets``: rows of a shard that a
        decode step may have, the largest holding every slot; None: powers of two.
        ``speculation_limit``: rows whose block would end past this position decode plainly (the
        draft's own maximum length); 0: never speculate; None: no limit.
        """
        self.max_pages = -(-max_model_len // page_size)
        if pages - 1 < self.max_pages:
            raise ValueError(
                f"{pages - 1} pages of {page_size} tokens hold less than one sequence of "
                f"max_model_len {max_model_len}; give at least {self.max_pages + 1} pages or "
                "lower max_model_len"
            )
        if slots % shards:
            raise ValueError(f"{shards} data shards must divide {slots} slots")
        self.page_size, self.max_model_len = page_size, max_model_len
        self.lookahead, self.speculation_limit = lookahead, speculation_limit
        self.prefill_shapes = sorted(prefill_shapes, key=lambda shape: shape[1])
        self.shards, self.slots_per_shard = shards, slots // shards
        self.batch_buckets = _batch_buckets(batch_buckets, self.slots_per_shard)
        self.allocators = [PageAllocator(pages) for _ in range(shards)]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by arrival
        self._free_slots = [
            deque(range(s * self.slots_per_shard, (s + 1) * self.slots_per_shard))
            for s in range(shards)
        ]
        self._prefill_last = self._plain_last = False
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def shard_of(self, sequence: Sequence) -> int:
        return sequence.slot // self.slots_per_shard

    def schedule(self) -> PrefillPlan | DecodePlan | None:
        """The next step, its pages reserved; None when nothing is left to do."""
        self._admit()
        prefilling = [s for s in self.running if not s.prefilled]
        decoding = [s for s in self.running if s.prefilled]
        if prefilling and not (decoding and self._prefill_last):
            self._prefill_last = True
            return self._plan_prefill(prefilling)
        self._prefill_last = False
        plan = self._plan_decode(decoding)
        if plan is None and self.running:
            # Every decoding row gave its pages to an older one, which is still prefilling.
            self._prefill_last = True
            return self._plan_prefill([s for s in self.running if not s.prefilled])
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Release a sequence in whatever state it is."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)

    def find(self, request_id: str) -> Sequence | None:
        for sequence in (*self.running, *self.waiting):
            if sequence.request.id == request_id:
                return sequence
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and pages are each owned exactly once."""
        for shard, allocator in enumerate(self.allocators):
            allocator.check_integrity()
            owned = [p for s in self.running if self.shard_of(s) == shard for p in s.pages]
            assert len(set(owned)) == len(owned), "two sequences share a page"
            used = allocator.num_pages - 1 - allocator.num_free
            assert len(owned) == used, f"shard {shard}: {used} pages used, {len(owned)} owned"
        slots = [s.slot for s in self.running] + [s for free in self._free_slots for s in free]
        assert sorted(slots) == list(range(self.shards * self.slots_per_shard)), "slots lost"
        assert all(not s.pages and s.slot < 0 for s in self.waiting), "a waiting row holds pages"

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            # The whole prompt's pages and the first cycle's at once: what is admitted can end its
            # prefill and decode once, unless an older row needs its pages first.
            needed = self._pages_for(sequence.prefill_target + self.lookahead)
            shard = max(
                (s for s in range(self.shards) if self._free_slots[s]),
                key=lambda s: self.allocators[s].num_free,
                default=None,
            )
            pages = None if shard is None else self.allocators[shard].allocate(needed)
            if shard is None or pages is None:
                return
            self.waiting.popleft()
            sequence.slot, sequence.pages, sequence.cached = (
                self._free_slots[shard].popleft(),
                pages,
                0,
            )
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.arrival)

    def _plan_prefill(self, prefilling: list[Sequence]) -> PrefillPlan:
        remaining = prefilling[0].prefill_target - prefilling[0].cached
        fitting = [shape for shape in self.prefill_shapes if shape[1] >= remaining]
        rows, chunk = (fitting or self.prefill_shapes[-1:])[0]
        chosen = self._fill_rows(prefilling, rows)
        counts = [min(chunk, s.prefill_target - s.cached) for s in chosen]
        return PrefillPlan(chosen, counts, rows, chunk)

    def _plan_decode(self, decoding: list[Sequence]) -> DecodePlan | None:
        for sequence in decoding:
            if sequence.slot >= 0:  # an earlier one may have preempted it
                self._reserve(sequence)
        ready = [s for s in decoding if s.slot >= 0]
        if not ready:
            return None
        speculative = [s for s in ready if self._may_speculate(s)]
        plain = [s for s in ready if not self._may_speculate(s)]
        # Rows past the draft's reach decode plainly, in turn with the others.
        self._plain_last = bool(plain) and not (speculative and self._plain_last)
        group = plain if self._plain_last else speculative
        per_shard = [sum(self.shard_of(s) == shard for s in group) for shard in range(self.shards)]
        rows = next(b for b in self.batch_buckets if b >= max(per_shard))
        return DecodePlan(group, rows * self.shards, not self._plain_last)

    def _may_speculate(self, sequence: Sequence) -> bool:
        limit = self.speculation_limit
        return limit is None or sequence.cached + self.lookahead <= limit

    def _fill_rows(self, sequences: list[Sequence], rows: int) -> list[Sequence]:
        room = [rows // self.shards] * self.shards
        chosen = []
        for sequence in sequences:
            shard = self.shard_of(sequence)
            if room[shard]:
                room[shard] -= 1
                chosen.append(sequence)
        return chosen

    def _pages_for(self, tokens: int) -> int:
        return min(-(-tokens // self.page_size), self.max_pages)

    def _reserve(self, sequence: Sequence) -> None:
        """Pages for the next cycle of a running sequence, preempting the youngest if need be."""
        allocator = self.allocators[self.shard_of(sequence)]
        missing = self._pages_for(sequence.cached + self.lookahead) - len(sequence.pages)
        while missing > 0:
            pages = allocator.allocate(missing)
            if pages is not None:
                sequence.pages += pages
                return
            shard = self.shard_of(sequence)
            youngest = [s for s in self.running if self.shard_of(s) == shard][-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        shard = self.shard_of(sequence)
        self.allocators[shard].free(sequence.pages)
        self._free_slots[shard].append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot, sequence.pages, sequence.cached = -1, [], 0


def _batch_buckets(buckets: SequenceOf[int] | None, slots: int) -> tuple[int, ...]:
    """Ascending row counts, the last of which holds every slot of a shard."""
    if buckets is None:
        return tuple(1 << i for i in range((slots - 1).bit_length() + 1))
    if not buckets or min(buckets) < 1 or max(buckets) < slots:
        raise ValueError(
            f"batch_buckets must be positive and one must hold all {slots} slots, got {buckets}"
        )
    return tuple(sorted(set(buckets)))
