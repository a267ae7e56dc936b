"""Answers by the target itself, through our own engine: what a draft must learn to predict."""

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from dflash_jax.engine import Engine
from dflash_jax.generate import LLM
from dflash_jax.request import Request, SamplingParams
from dflash_jax.statistics import loop_start
from train.prompts import Prompt


def regenerate(
    llm: LLM,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    sampling: SamplingParams,
    seconds: float = float("inf"),
    report: Callable[[str], None] = print,
) -> int:
    """Append {"id", "source", "input_ids", "loss_mask"} lines for every prompt; returns tokens
    written by the target.

    The prompt goes through the chat template as a single user turn. An answer that loops is cut
    where its loop begins (docs/dflash.md, section 6), so that a draft does not learn loops. After
    ``seconds`` no further prompt is started. A prompt that does not fit the context is skipped
    and counted.
    """
    assert llm.tokenizer is not None
    limit = llm.engine.max_model_len - sampling.max_new_tokens
    requests, skipped = [], 0
    sources = {}
    for prompt in prompts:
        ids = llm.encode([{"role": "user", "content": prompt.text}])
        if len(ids) > limit:
            skipped += 1
            continue
        sources[prompt.id] = (prompt.source, ids)
        requests.append(Request(prompt.id, ids, sampling))
    if skipped:
        report(f"skipped {skipped} prompts of over {limit} tokens")
    written = 0
    with out.open("a", encoding="utf-8") as file:
        for request_id, answer in run_all(llm.engine, requests, seconds=seconds, report=report):
            source, ids = sources[request_id]
            written += _write(file, request_id, source, ids, answer)
    return written


def run_all(
    engine: Engine,
    requests: Iterable[Request],
    *,
    seconds: float = float("inf"),
    report: Callable[[str], None] = print,
) -> Generator[tuple[str, list[int]]]:
    """Run requests at full batch; yields (id, output ids) as each one ends. Closed early, it frees
    what it holds."""
    started = last = time.perf_counter()
    pending = iter(requests)
    answers: dict[str, list[int]] = {}
    slots = engine.config.max_num_seqs
    exhausted, finished, tokens = False, 0, 0
    try:
        while True:
            # Prefill many at once: a refill of every freed slot would prefill almost empty batches.
            refill = len(answers) <= slots - max(slots // 8, 1)
            while refill and not exhausted and len(answers) < slots:
                request = next(pending, None)
                if request is None or time.perf_counter() - started > seconds:
                    exhausted = True
                    break
                engine.add(request)
                answers[request.id] = []
            if not engine.has_work:
                return
            for update in engine.step():
                answers[update.request_id] += update.tokens
                tokens += len(update.tokens)
                if update.finish_reason is not None:
                    finished += 1
                    yield update.request_id, answers.pop(update.request_id)
            now = time.perf_counter()
            if now - last > 10:
                report(f"{finished} answers, {tokens} tokens, {tokens / (now - started):.0f} tok/s")
                last = now
    finally:
        for request_id in answers:
            engine.abort(request_id)


def _write(
    file: TextIO, request_id: str, source: str, prompt: Sequence[int], answer: Sequence[int]
) -> int:
    loop = loop_start(answer)
    kept = list(answer if loop is None else answer[:loop])
    if len(kept) < 2:
        return 0
    record = {
        "id": request_id,
        "source": source,
        "input_ids": [*prompt, *kept],
        "loss_mask": [0] * len(prompt) + [1] * len(kept),
    }
    file.write(json.dumps(record) + "\n")
    return len(kept)


def self_written_prompts(llm: LLM, count: int, *, seed: int, seconds: float) -> list[str]:
    """User turns that the target writes itself, from its own chat template's prefix at T = 1."""
    assert llm.tokenizer is not None
    marker = "@@user@@"
    rendered = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False
    )
    # The template writes its own special tokens; the tokenizer would put a second BOS before them.
    opening = llm.tokenizer(str(rendered).partition(marker)[0], add_special_tokens=False)
    prefix = tuple(opening["input_ids"])
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=100)
    requests = [
        Request(f"self/{i}", prefix, dataclasses.replace(sampling, seed=seed + i))
        for i in range(count)
    ]
    texts = []
    for _, answer in run_all(llm.engine, requests, seconds=seconds):
        if answer[-1] in llm.pair.target_config.eos_token_ids:  # a whole turn, not a cut one
            texts.append(str(llm.tokenizer.decode(answer[:-1])).strip())
    return texts
