"""Next-token training of a small target, for recipes that bring no checkpoint of one."""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.decoder import Pair
from dflash_jax.models import DenseTarget
from train.samples import DataError


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """``batch_rows`` windows of ``row_length`` tokens a step, from anywhere in the text. The
    learning rate warms up over ``warmup`` of the steps and falls to zero by a cosine."""

    batch_rows: int
    row_length: int
    learning_rate: float
    steps: int
    warmup: float = 0.05
    gradient_clip: float = 1.0
    log_every: int = 50
    seed: int = 0

    def __post_init__(self):
        for name in ("batch_rows", "row_length", "steps", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"language_model.{name} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"language_model.learning_rate must be more than 0, got {self.learning_rate}"
            )


def train_language_model(
    pair: Pair,
    stream: Int[np.ndarray, "T"],
    config: LanguageModelConfig,
    *,
    report: Callable[[str], None] = print,
) -> dict[str, jax.Array]:
    """``pair.target`` from random weights, trained on windows of ``stream`` (token ids).

    By Muon: all weights but the norms are matrices, and of the same text 100 of its steps leave 0.9
    nats a byte where Adam's leave 2.1. Rows are split over the mesh's data axis.

    Raises DataError for a text that is shorter than a window, and FloatingPointError where the loss
    is not finite.
    """
    if len(stream) <= config.row_length:
        raise DataError(f"{len(stream)} tokens of text fill no window of {config.row_length} + 1")
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.gradient_clip),
        optax.contrib.muon(_schedule(config), consistent_rms=0.2, adam_b2=0.98),
    )
    params = pair.target.init(config.seed, pair.sharding)
    placements = {name: leaf.sharding for name, leaf in params.items()}

    def loss(params: dict[str, Array], tokens: Int[Array, "Z S+1"]) -> Float[Array, ""]:
        return next_token_loss(pair.target.bind(params), tokens)

    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(gradient, state, params)  # optax mixes dtypes, ranks
        return optax.apply_updates(params, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(placements, None, None))
    state = jax.jit(optimizer.init)(params)
    split = NamedSharding(pair.sharding.mesh, PartitionSpec("data"))
    random = np.random.default_rng(config.seed)
    window = np.arange(config.row_length + 1)
    started, losses = time.perf_counter(), []
    for number in range(1, config.steps + 1):
        starts = random.integers(len(stream) - config.row_length, size=config.batch_rows)
        tokens = jax.device_put(stream[starts[:, None] + window], split)
        params, state, value = jitted(params, state, tokens)
        losses.append(value)
        if number % config.log_every == 0 or number == config.steps:
            mean = float(np.mean([float(x) for x in losses]))
            if not math.isfinite(mean):
                raise FloatingPointError(f"the target's loss is {mean} before step {number}")
            seconds = time.perf_counter() - started
            report(f"target: step {number} loss {mean:.3f} {seconds:.0f} s")
            losses.clear()
    return params


def next_token_loss(target: DenseTarget, tokens: Int[Array, "Z S+1"]) -> Float[Array, ""]:
    """Mean cross-entropy in nats of every token but a row's first."""

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # jax's own widens its logits implicitly
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
    logits = target.logits(target(inputs, positions, attend).hidden)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def _schedule(config: LanguageModelConfig) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(int(config.warmup * config.steps), 1), config.steps
    )
