"""The start-up self-test: one canned prompt, with speculation and without."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import jax.numpy as jnp

from dflash_jax.engine import Engine
from dflash_jax.request import Request, SamplingParams
from dflash_jax.serve.prompts import encode, render_chat
from dflash_jax.serve.protocol import Message
from dflash_jax.tokenizer import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PROMPT = "What is 17 + 25? Answer step by step, then count from 1 to 20."
TOKENS = 48


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """``equal``: greedy speculation gave plain decoding's tokens; None without speculation.
    ``accept_length``: tokens a cycle. Steps in seconds."""

    equal: bool | None
    accept_length: float
    speculative_step: float
    plain_step: float


def canned_prompt(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """A chat where the model has a template, for that is what drafts are trained on."""
    if not tokenizer.chat_template:
        return encode(tokenizer, PROMPT, add_special_tokens=True)
    text = render_chat(tokenizer, [Message(role="user", content=PROMPT)])
    return encode(tokenizer, text, add_special_tokens=False)


def run_self_test(engine: Engine, prompt_ids: tuple[int, ...]) -> SelfTest:
    """Decode up to 48 tokens greedily, both ways, on an idle engine, and log what came out.

    In float32 a difference is logged as an error: it is allowed only at a near-tie of the two best
    tokens. In bfloat16 it is reported, not judged.
    """
    prompt_ids = prompt_ids[: max(engine.max_model_len // 2, 1)]
    speculates = engine.scheduler.speculation_limit != 0
    with _plain_decoding(engine):
        _generate(engine, prompt_ids, 2)  # compiles what a server that speculates never runs
        plain, _, plain_step = _generate(engine, prompt_ids, TOKENS)
    if not speculates:
        logger.info("self-test: %d tokens, %.1f ms a plain step", len(plain), 1e3 * plain_step)
        return SelfTest(None, 1.0, 0.0, plain_step)
    tokens, cycles, step = _generate(engine, prompt_ids, TOKENS)
    length = (len(tokens) - 1) / max(cycles, 1)  # the first token is prefill's
    result = SelfTest(tokens == plain, length, step, plain_step)
    speed_up = length * plain_step / step if step else 0.0
    same = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=True)) if a != b), None)
    logger.info(
        "self-test: %d tokens, %.2f a cycle, %.1f ms a cycle, %.1f ms a plain step, speed-up %.2f; "
        "speculation %s plain decoding",
        len(tokens), length, 1e3 * step, 1e3 * plain_step, speed_up,
        "equals" if result.equal else f"differs at token {same} from",
    )  # fmt: skip
    if speed_up < 1:
        logger.warning("self-test: speculation is slower than plain decoding here")
    if not result.equal and engine.pair.dtype == jnp.float32:
        logger.error(
            "self-test: speculation and plain decoding differ in float32 at token %d; that is "
            "right only where the target's two best tokens are within rounding of each other", same,
        )  # fmt: skip
    return result


def _generate(
    engine: Engine, prompt_ids: tuple[int, ...], tokens: int
) -> tuple[list[int], int, float]:
    """(tokens, decoding steps, seconds a decoding step)."""
    steps, seconds = engine.stats.decode_steps, engine.stats.decode_seconds
    sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    engine.add(Request("self-test", prompt_ids, sampling))
    out = [token for update in engine.run() for token in update.tokens]
    steps = engine.stats.decode_steps - steps
    return out, steps, (engine.stats.decode_seconds - seconds) / max(steps, 1)


@contextlib.contextmanager
def _plain_decoding(engine: Engine) -> Iterator[None]:
    scheduler = engine.scheduler
    limit, scheduler.speculation_limit = scheduler.speculation_limit, 0
    try:
        yield
    finally:
        scheduler.speculation_limit = limit
