"""``bench``: plain and speculative decoding of the same prompts, beside what memory allows.

The floor of a step is the bytes of the weights that it cannot do without, over the measured copy
bandwidth (KV and FLOPs left out: it is low for large batches). Steps are timed warm, by wall clock,
with the engine's host work in them; acceptance is that of real decoding, never simulated.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.cli.args import BenchArgs
from dflash_jax.cli.info import devices, versions
from dflash_jax.compilation_cache import keep_compilations
from dflash_jax.decoder import Pair
from dflash_jax.engine import Engine, EngineConfig
from dflash_jax.functional import Functional
from dflash_jax.generate import LLM, load
from dflash_jax.request import Request, SamplingParams

COPIES = 20


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way of decoding. ``step_ms``: median of the steps with a full batch.
    ``tokens_per_second``: of all sequences together, prefill and batch tail included."""

    step_ms: float
    steps: int
    tau: float
    tokens_per_second: float
    outputs: list[list[int]]


def run(args: BenchArgs) -> int:
    keep_compilations(args.compilation_cache_dir)
    loading = EngineConfig(max_num_seqs=1, max_model_len=2)
    llm = load(args.model, args.draft, dtype=args.dtype, engine=loading)
    prompts = [llm.encode(prompt) for prompt in args.prompts()]
    prompts = [prompts[i % len(prompts)] for i in range(max(args.batch, len(prompts)))]
    config = EngineConfig(
        max_num_seqs=args.batch,
        batch_buckets=(args.batch,),
        max_model_len=_context(llm, prompts, args),
        speculation=False,
    )
    shapes = {
        "batch": args.batch,
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "max_new_tokens": args.max_new_tokens,
        "max_model_len": config.max_model_len,
        "dtype": args.dtype,
    }
    print(f"device      {', '.join(devices())}")
    print(f"versions    {', '.join(f'{k} {v}' for k, v in versions().items())}")
    print(f"pair        {llm.name} with {args.draft or _draft_name(llm)}, real weights")
    print(f"shapes      {', '.join(f'{k} {v}' for k, v in shapes.items())}")

    bandwidth = copy_bandwidth()
    print(f"ceiling     memory copies at {bandwidth / 1e9:.1f} GB/s (read and write counted)")
    configs = {"plain": config} | {
        f"b = {b}": dataclasses.replace(config, speculation=True, block_size=b)
        for b in _block_sizes(llm, args)
    }
    sizes = {n: step_bytes(llm.pair, speculation=c.speculation) for n, c in configs.items()}
    for name, size in sizes.items():
        floor = (
            f"{1e3 * size / bandwidth:.2f} ms a step, which reads {size / 1e6:.0f} MB of weights"
        )
        print(f"floor       {name}: {floor}")

    sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
    print("\ndecoding    step ms  x floor    tau    tok/s  speed-up  equal")
    rows: list[dict[str, Any]] = []
    plain: Measured | None = None
    for name, config in configs.items():
        measured = measure(llm.with_engine(config).engine, prompts, sampling)
        plain = plain or measured
        rows.append(_row(name, measured, plain, 1e3 * sizes[name] / bandwidth))
    report = {
        "devices": devices(),
        "versions": versions(),
        "model": llm.name,
        **shapes,
        "acceptance": "real weights, greedy",
        "copy_bytes_per_second": bandwidth,
        "plain": rows[0],
        "speculative": rows[1:],
    }
    print(json.dumps(report))
    return 0


def copy_bandwidth() -> float:
    """Bytes a second that an elementwise pass over a large array reads and writes: median of many.

    In place: fresh memory for every result would time the operating system's page faults.
    """
    size = 2**28 if jax.default_backend() == "cpu" else 2**31
    array = jnp.zeros(size // 4, jnp.float32)
    add_one = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    array = add_one(array).block_until_ready()
    seconds = []
    for _ in range(COPIES):
        started = time.perf_counter()
        array = add_one(array).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds)


def step_bytes(pair: Pair, *, speculation: bool) -> int:
    """Weights a step reads: the target's and, with speculation, the draft's; the embedding only as
    the head, once for each model. Source: docs/dflash.md, section 5."""
    config = pair.target_config
    target, head = _bytes(pair.target), config.vocab_size * config.hidden_size * pair.dtype.itemsize
    if not config.tie_word_embeddings:
        target -= head
    if not speculation or pair.draft is None:
        return target
    return target + _bytes(pair.draft) + head


def _bytes(model: Functional[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in model.abstract.values())


def measure(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> Measured:
    """Decode all prompts, once to compile what they need and once to time it."""
    _decode(engine, prompts, dataclasses.replace(sampling, max_new_tokens=2))
    return _decode(engine, prompts, sampling)


def _decode(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> Measured:
    outputs: dict[str, list[int]] = {f"bench-{i}": [] for i in range(len(prompts))}
    for request_id, prompt in zip(outputs, prompts, strict=True):
        engine.add(Request(request_id, prompt, sampling))
    full: list[float] = []
    partial: list[float] = []
    emitted = cycles = 0
    started = time.perf_counter()
    while engine.has_work:
        before = time.perf_counter()
        updates = engine.step()
        seconds = time.perf_counter() - before
        for update in updates:
            outputs[update.request_id] += update.tokens
        decoded = [update for update in updates if update.committed is not None]
        if decoded:
            (full if len(decoded) == engine.config.max_num_seqs else partial).append(seconds)
            emitted += sum(len(update.tokens) for update in decoded)
            cycles += len(decoded)
    total = time.perf_counter() - started
    steps = full or partial
    return Measured(
        step_ms=1e3 * statistics.median(steps) if steps else math.nan,
        steps=len(steps),
        tau=emitted / max(cycles, 1),
        tokens_per_second=sum(map(len, outputs.values())) / total,
        outputs=list(outputs.values()),
    )


def _row(name: str, measured: Measured, plain: Measured, floor_ms: float) -> dict[str, Any]:
    """Print a line of the table, and give it back for the JSON."""
    same = sum(a == b for a, b in zip(measured.outputs, plain.outputs, strict=True))
    row = {
        "decoding": name,
        "step_ms": measured.step_ms,
        "floor_ms": floor_ms,
        "steps": measured.steps,
        "step_over_floor": measured.step_ms / floor_ms,
        "step_over_plain_step": measured.step_ms / plain.step_ms,
        "tau": measured.tau,
        "tokens_per_second": measured.tokens_per_second,
        "speed_up": measured.tokens_per_second / plain.tokens_per_second,
        "outputs_equal_to_plain": same,
    }
    print(
        f"{name:10}{row['step_ms']:9.2f}{row['step_over_floor']:9.2f}{row['tau']:7.2f}"
        f"{row['tokens_per_second']:9.1f}{row['speed_up']:10.2f}  {same}/{len(plain.outputs)}",
        flush=True,
    )
    return row


def _block_sizes(llm: LLM, args: BenchArgs) -> tuple[int, ...]:
    draft = llm.pair.draft_config
    if draft is None:
        return ()
    largest = max(args.block_sizes or (0,))
    if largest > draft.block_size:
        raise ValueError(
            f"--block-sizes must be at most the draft's {draft.block_size}, got {largest}"
        )
    return args.block_sizes or (llm.engine.block_size,)


def _context(llm: LLM, prompts: Sequence[tuple[int, ...]], args: BenchArgs) -> int:
    """Room for the longest prompt and its output, in steps of 64 so that programs are reused."""
    if args.max_model_len is not None:
        return args.max_model_len
    needed = -(-(max(map(len, prompts)) + args.max_new_tokens) // 64) * 64
    return min(needed, llm.pair.target_config.max_position_embeddings)


def _draft_name(llm: LLM) -> str:
    return "no draft" if llm.pair.draft_config is None else "the embedded draft"
