"""The synchronous engine: requests in, updates out, one device step a call.

It joins the scheduler (host ints) with the jitted steps (device). ``generate``, ``stream``, the
server, the benchmark and the tests all drive this one class.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Batch
from dflash_jax.decoder import Pair, PairParams
from dflash_jax.plain import plain_step
from dflash_jax.request import Request, Update, cut
from dflash_jax.sampling import SamplingRows
from dflash_jax.scheduler import DecodePlan, PrefillPlan, Scheduler, Sequence
from dflash_jax.speculative import DraftSampling, prefill_step, speculative_step

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How many requests run at once, on how much memory, and how they decode.

    ``max_model_len`` None: the target's. ``num_pages`` (a data shard's) None: 4,096 tokens a
    sequence, or the whole context where that is shorter; longer ones share, and the youngest is
    preempted. ``prefill_tokens``: the most tokens of one prefill step, all shards together.
    ``batch_buckets``: the rows (a data shard's) that decode steps are compiled for; None: powers of
    two. ``block_size`` b (anchor included) None: the draft's; it may be smaller, 1 being plain
    decoding. ``verify_width``: how many of the b tokens the target verifies; None: all.
    ``speculation`` False: plain decoding, no draft. ``seed`` feeds the seeds of unseeded requests;
    None: entropy.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefill_tokens: int = 512
    batch_buckets: tuple[int, ...] | None = None
    block_size: int | None = None
    verify_width: int | None = None
    draft_sampling: DraftSampling = "coupled"
    speculation: bool = True
    seed: int | None = None


@dataclasses.dataclass
class EngineStats:
    """Totals since start. Seconds are wall clock of whole steps, host work included."""

    prefill_steps: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Engine:
    """Serves any number of requests over one slot space. Not thread-safe: one driver at a time."""

    def __init__(self, pair: Pair, params: PairParams, config: EngineConfig = EngineConfig()):
        """Raises ValueError naming an impossible setting."""
        self.pair = pair
        target = pair.target_config
        limit = target.max_position_embeddings
        self.max_model_len = limit if config.max_model_len is None else config.max_model_len
        if not 2 <= self.max_model_len <= limit:
            raise ValueError(
                f"max_model_len must be in 2..{limit} (the target's max_position_embeddings), "
                f"got {self.max_model_len}"
            )
        for name in ("max_num_seqs", "page_size", "prefill_tokens"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
        self.block_size = _block_size(pair, config)
        shards = pair.sharding.data
        slots = -(-config.max_num_seqs // shards) * shards
        pages = config.num_pages
        if pages is None:
            tokens = max(self.max_model_len, slots // shards * min(self.max_model_len, 4096))
            pages = -(-tokens // config.page_size) + slots // shards + 1
        self.scheduler = Scheduler(
            slots=slots,
            pages=pages,
            page_size=config.page_size,
            max_model_len=self.max_model_len,
            lookahead=self.block_size,
            prefill_shapes=_prefill_shapes(
                config.prefill_tokens, slots, shards, self.max_model_len
            ),
            batch_buckets=config.batch_buckets,
            shards=shards,
            speculation_limit=self._speculation_limit(),
        )
        self.config = config
        self.stats = EngineStats()
        self.params = pair.prepared(params)
        self.state = pair.new_state(slots=slots, pages=pages, page_size=config.page_size)
        self._tables = np.zeros((slots + 1, self.scheduler.max_pages), np.int32)
        # The page list, and how much of it, that a slot's table row shows: rows change rarely, and
        # every admission makes a new list.
        self._written: list[tuple[list[int], int]] = [([], -1)] * slots
        self._arrivals = 0
        self._seeds = np.random.default_rng(config.seed)
        self._prefill = self._jit(prefill_step)
        self._plain = self._jit(plain_step)
        self._speculate = self._jit(
            speculative_step,
            block_size=self.block_size,
            verify_width=config.verify_width,
            draft_sampling=config.draft_sampling,
        )

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, naming the fault, on a prompt that cannot run."""
        vocab, ids = self.pair.target_config.vocab_size, request.prompt_ids
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; at most {self.max_model_len - 1} fit a context "
                f"of {self.max_model_len} with one new token"
            )
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt token id {wrong} is not in the vocabulary (0..{vocab - 1})")
        if self.scheduler.find(request.id):
            raise ValueError(f"request id {request.id!r} is already in use")
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        self.scheduler.add(Sequence(request, self._arrivals, seed % 2**64, list(ids)))
        self._arrivals += 1

    def abort(self, request_id: str) -> bool:
        """Drop a request and free what it holds; False if it is not (or no longer) here."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return False
        self.scheduler.finish(sequence)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self) -> Iterator[Update]:
        """Step until nothing is left."""
        while self.has_work:
            yield from self.step()

    # Steps

    def step(self) -> list[Update]:
        """Run one prefill chunk or one decoding cycle; [] when idle."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        return self._run_prefill(plan) if isinstance(plan, PrefillPlan) else self._run_decode(plan)

    def warm_up(self, progress: Callable[[str], None] = logger.info) -> None:
        """Compile every shape that serving can meet, by running it on padding rows."""
        scheduler = self.scheduler
        for rows, chunk in scheduler.prefill_shapes:
            started = time.perf_counter()
            self._call_prefill(PrefillPlan([], [], rows, chunk), [])
            progress(f"compiled prefill {rows} x {chunk} in {time.perf_counter() - started:.1f} s")
        limit = scheduler.speculation_limit
        for bucket in scheduler.batch_buckets:
            rows = bucket * scheduler.shards
            for speculative in (True, False):
                if (limit == 0) if speculative else (limit is None):
                    continue
                started = time.perf_counter()
                self._call_decode(self._batch([], rows), speculative)
                kind = f"speculation, b = {self.block_size}" if speculative else "plain decoding"
                seconds = time.perf_counter() - started
                progress(f"compiled {kind}, {rows} rows in {seconds:.1f} s")

    def _run_prefill(self, plan: PrefillPlan) -> list[Update]:
        started = time.perf_counter()
        placed = self._place(plan.sequences, plan.rows)
        anchors = self._call_prefill(plan, placed)
        updates = []
        for (sequence, row), count in zip(placed, plan.counts, strict=True):
            sequence.cached += count
            self.stats.prompt_tokens += count
            if sequence.cached == sequence.prefill_target and not sequence.num_emitted:
                updates.append(self._commit(sequence, [int(anchors[row])]))
        self.stats.prefill_steps += 1
        self.stats.prefill_seconds += time.perf_counter() - started
        return updates

    def _run_decode(self, plan: DecodePlan) -> list[Update]:
        started = time.perf_counter()
        placed = self._place(plan.sequences, plan.rows)
        tokens, counts = self._call_decode(self._batch(placed, plan.rows), plan.speculative)
        updates = []
        for sequence, row in placed:
            count = int(counts[row])
            sequence.cached += count
            drafted = tokens.shape[1] - 1
            new = [int(t) for t in tokens[row, :count]]
            updates.append(self._commit(sequence, new, count, drafted))
        self.stats.decode_steps += 1
        self.stats.decode_seconds += time.perf_counter() - started
        return updates

    def _commit(
        self, sequence: Sequence, new: list[int], committed: int | None = None, drafted: int = 0
    ) -> Update:
        request = sequence.request
        sampling = request.sampling
        room = min(
            sampling.max_new_tokens - sequence.num_emitted,
            self.max_model_len - len(sequence.tokens),
        )
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= frozenset(self.pair.target_config.eos_token_ids)
        kept, reason = cut(new, room, stops)
        sequence.tokens += kept
        self.stats.emitted_tokens += len(kept)
        if committed is not None:
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += min(committed - 1, len(kept))
        if reason is not None:
            self.scheduler.finish(sequence)
        return Update(request.id, tuple(kept), committed, drafted, reason)

    # Device calls: numpy in, numpy out

    def _place(self, sequences: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Each sequence with its row: a data shard's sequences fill its own part of the rows."""
        shards = self.scheduler.shards
        next_row = [shard * (rows // shards) for shard in range(shards)]
        placed = []
        for sequence in sequences:
            shard = self.scheduler.shard_of(sequence)
            placed.append((sequence, next_row[shard]))
            next_row[shard] += 1
        return placed

    def _batch(self, placed: list[tuple[Sequence, int]], rows: int) -> Batch:
        padding = len(self._tables) - 1
        slot_ids = np.full(rows, padding, np.int32)
        seed = np.zeros((rows, 2), np.uint32)
        temperature, top_k = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        top_p, min_p = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        for sequence, row in placed:
            sampling = sequence.request.sampling
            slot_ids[row] = sequence.slot
            written = self._written[sequence.slot]
            if written != (sequence.pages, len(sequence.pages)):
                table = self._tables[sequence.slot]
                table[: len(sequence.pages)] = sequence.pages
                table[len(sequence.pages) :] = 0
                self._written[sequence.slot] = sequence.pages, len(sequence.pages)
            seed[row] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
            temperature[row], top_k[row] = sampling.temperature, max(sampling.top_k, 0)
            top_p[row], min_p[row] = sampling.top_p, sampling.min_p
        choice = np.zeros(rows, np.uint32)
        sampling_rows = SamplingRows(seed, choice, temperature, top_k, top_p, min_p)  # pyright: ignore[reportArgumentType]
        return Batch(slot_ids, self._tables[slot_ids], sampling_rows)  # pyright: ignore[reportArgumentType]

    def _call_prefill(self, plan: PrefillPlan, placed: list[tuple[Sequence, int]]) -> np.ndarray:
        tokens = np.zeros((plan.rows, plan.chunk), np.int32)
        start, count = np.zeros(plan.rows, np.int32), np.zeros(plan.rows, np.int32)
        last, forced = np.zeros(plan.rows, bool), np.full(plan.rows, -1, np.int32)
        for (sequence, row), n in zip(placed, plan.counts, strict=True):
            begin = sequence.cached
            tokens[row, :n] = sequence.tokens[begin : begin + n]
            start[row], count[row] = begin, n
            last[row] = begin + n == sequence.prefill_target
            if sequence.num_emitted:
                forced[row] = sequence.tokens[-1]
        batch = self._batch(placed, plan.rows)
        self.state, anchors = self._prefill(
            self.params, self.state, batch, tokens, start, count, last, forced
        )
        return np.asarray(anchors)

    def _call_decode(self, batch: Batch, speculative: bool) -> tuple[np.ndarray, np.ndarray]:
        step = self._speculate if speculative else self._plain
        self.state, cycle = step(self.params, self.state, batch)
        return jax.device_get((cycle.tokens, cycle.count))

    def _jit(self, step: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """``step`` over this pair, its state donated. float32 means float32: Hopper and TPU would
        round the products otherwise, and speculative and plain decoding would part."""
        exact = self.pair.dtype == jnp.float32
        bound = partial(step, self.pair, **static)

        def run(*args):
            with jax.default_matmul_precision("highest" if exact else "default"):
                return bound(*args)

        run.__name__ = step.__name__
        return jax.jit(run, donate_argnums=1)

    def _speculation_limit(self) -> int | None:
        """Positions that a drafted block may reach; 0: no speculation; None: all."""
        if self.block_size == 1 or self.pair.draft_config is None:
            return 0
        reach = self.pair.draft_config.max_position_embeddings
        if reach >= self.max_model_len:
            return None
        logger.warning(
            "the draft reaches %d positions and the context %d: past the draft's reach decoding "
            "is plain",
            reach,
            self.max_model_len,
        )
        return reach


def _block_size(pair: Pair, config: EngineConfig) -> int:
    """b of this engine; 1 is plain decoding."""
    if pair.draft_config is None or not config.speculation:
        return 1
    trained = pair.draft_config.block_size
    block = trained if config.block_size is None else config.block_size
    if not 1 <= block <= trained:
        raise ValueError(
            f"block_size must be in 1..{trained} (the draft was trained with {trained}; it may "
            f"shrink, not grow), got {block}"
        )
    width = config.verify_width
    if width is not None and not 2 <= width <= block:
        raise ValueError(f"verify_width must be in 2..{block} (block_size), got {width}")
    return block


def _prefill_shapes(
    budget: int, slots: int, shards: int, max_model_len: int
) -> list[tuple[int, int]]:
    """(rows, chunk) shapes within a token budget: many short prompts or one long chunk."""
    per_shard, slots = max(budget // shards, 1), slots // shards
    longest = min(per_shard, max_model_len)
    chunks = [c for c in (32, 128, 512, 2048) if c < longest] + [longest]
    return [(min(per_shard // c, slots) * shards, c) for c in chunks]
