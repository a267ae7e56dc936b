"""``generate``: one prompt continued, as text while it comes or as one JSON object at the end."""

import json
import sys
import time
from typing import Any

from dflash_jax.cli.args import GenerateArgs
from dflash_jax.compilation_cache import keep_compilations
from dflash_jax.generate import LLM, Collector, Generation, load


def run(args: GenerateArgs) -> int:
    """Only what this prompt needs is compiled: one sequence, no warm-up."""
    keep_compilations(args.compilation_cache_dir)
    llm = load(args.model, args.draft, dtype=args.dtype, engine=args.engine_config())
    output, seconds = _generate(llm, args)
    report = _report(output, seconds)
    if args.json:
        print(json.dumps(report))
    else:
        print(flush=True)
        del report["output_ids"], report["text"]
        print(_one_line(report), file=sys.stderr)
    return 0


def _generate(llm: LLM, args: GenerateArgs) -> tuple[Generation, float]:
    started = before = time.perf_counter()
    if args.json:
        output = llm.generate(args.the_prompt(), args.sampling(), stop=args.stop)
        return output, time.perf_counter() - started
    has_text = llm.tokenizer is not None
    collected = Collector()
    for piece in llm.stream(args.the_prompt(), args.sampling(), stop=args.stop):
        now = time.perf_counter()
        collected.add(piece, now - before)
        before = now
        shown = piece.text if has_text else "".join(f"{i} " for i in piece.output_ids)
        print(shown, end="", flush=True)
    return collected.generation(has_text=has_text), time.perf_counter() - started


def _report(output: Generation, seconds: float) -> dict[str, Any]:
    """``seconds``: from the prompt to the end, compilation included. ``tokens_per_second``: of the
    cycles after the first, which is the one that compiles; None where they emitted nothing."""
    statistics = output.statistics
    later = statistics.cycle_seconds[1:]
    tokens = statistics.emitted - sum(statistics.tokens_per_cycle[:1])
    return {
        "output_ids": output.output_ids,
        "text": output.text,
        "tokens_per_cycle": statistics.tokens_per_cycle,
        "tau": statistics.tau,
        "histogram": statistics.histogram,
        "finish_reason": output.finish_reason,
        "seconds": seconds,
        "tokens_per_second": tokens / sum(later) if tokens > 0 else None,
    }


def _one_line(report: dict[str, Any]) -> str:
    rate = report["tokens_per_second"]
    histogram = ", ".join(f"{n} x {committed}" for committed, n in report["histogram"].items())
    return (
        f"{len(report['tokens_per_cycle'])} cycles, tau {report['tau']:.2f} "
        f"(cycles x tokens: {histogram or 'none'}); {report['finish_reason']}; "
        f"{report['seconds']:.2f} s with compilation"
        + ("" if rate is None else f", then {rate:.1f} tokens/s")
    )
