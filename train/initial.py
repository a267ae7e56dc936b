"""Where a draft starts: at random, or from the target's own last layers.

The second has the shapes for it when draft and target agree in width, heads and ffn. Its context
feature starts as the last tap before the target's last layer, normed as the target's next layer
would norm it, so every layer's k_proj and v_proj see what they were trained on, and its outputs are
already what the head reads.
"""

import jax
import jax.numpy as jnp

from dflash_jax.decoder import Pair
from dflash_jax.functional import Params


def random_draft(pair: Pair, target: Params, seed: int) -> dict[str, jax.Array]:
    """Random weights; the last norm is the target's, whose scale the shared head expects."""
    assert pair.draft is not None
    params = pair.draft.init(seed, pair.sharding)
    params["norm.weight"] = target["model.norm.weight"]
    return params


def draft_from_target(pair: Pair, target: Params, seed: int) -> dict[str, jax.Array]:
    """Draft layer i takes the weights of target layer L - M + i; what the target has no weight for
    (q/k norms, the projection of the other taps) starts neutral.

    Raises ValueError where the shapes differ.
    """
    assert pair.draft_config is not None
    config = pair.draft_config
    params = random_draft(pair, target, seed)
    first = config.num_target_layers - config.num_layers
    for name, value in params.items():
        if not name.startswith("layers."):
            continue
        _, layer, rest = name.split(".", 2)
        source = f"model.layers.{first + int(layer)}.{rest}"
        if source not in target:
            continue
        if target[source].shape != value.shape:
            raise ValueError(
                f"{name} {value.shape} cannot start as {source} {target[source].shape}: "
                "draft and target must agree in width, heads and ffn"
            )
        params[name] = target[source]
    width, taps = config.target_hidden_size, config.target_layer_ids
    last_layer = config.num_target_layers - 1
    tap = max((i for i, layer in enumerate(taps) if layer < last_layer), default=len(taps) - 1)
    projection = (
        jnp.zeros((len(taps), width, config.hidden_size), jnp.float32)
        .at[tap]
        .set(jnp.eye(width, config.hidden_size, dtype=jnp.float32))
    )
    fc = params["fc.kernel"]
    params["fc.kernel"] = projection.reshape(fc.shape).astype(fc.dtype)
    after = min(taps[tap] + 1, last_layer)
    params["hidden_norm.weight"] = target[f"model.layers.{after}.input_layernorm.weight"]
    return params
