"""Model configurations: small frozen dataclasses, what the rest of the library reads.

They are made from a checkpoint's ``config.json`` at one door, ``dflash_jax.hf_config``.
Letters as in the whole project: D model dim, F ffn dim, N query heads, K kv heads, H head dim,
V vocabulary, L target layers, M draft layers, n taps, b block size (anchor included).
"""

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the terms of HF ``rope_parameters``.

    ``linear`` uses ``factor``; ``llama3`` adds ``low_freq_factor``, ``high_freq_factor`` and
    ``original_max_position_embeddings``; ``yarn`` uses ``factor``, ``beta_fast``, ``beta_slow``,
    ``original_max_position_embeddings``, ``attention_factor`` (None: derived from ``factor``,
    ``mscale`` and ``mscale_all_dim``) and ``truncate``.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What target and draft share: a pre-norm decoder with GQA, RoPE and a SwiGLU MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    """A dense Llama or Qwen3 target. ``qk_norm``: per-head RMSNorm of q and k (Qwen3)."""

    architecture: Literal["llama", "qwen3"]
    tie_word_embeddings: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class DraftConfig(TransformerConfig):
    """A DFlash draft. Everything here, RoPE too, is the draft's own and not the target's.

    ``windows[i]``: sliding window W of layer i (a query sees keys > q - W), or None.
    ``causal[i]``: whether layer i is causal inside the block (docs/dflash.md, section 2).
    ``target_layer_ids``: taps, 0-based, ascending; the feature of id i is the residual stream
    after target block i.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps for training a new draft: L=36, n=5 -> (1, 9, 17, 25, 33); every layer where n = L.
    Never used to guess a loaded draft's taps: a checkpoint states its own."""
    if num_taps < 1 or num_target_layers < num_taps:
        raise ValueError(f"num_taps must be in 1..{num_target_layers}, got {num_taps}")
    if num_taps == num_target_layers:
        return tuple(range(num_taps))
    if num_taps == 1:
        return (num_target_layers // 2,)
    steps = (1 + i * (num_target_layers - 4) / (num_taps - 1) for i in range(num_taps))
    ids = tuple(round(step) for step in steps)
    if ids != tuple(sorted(set(ids))):
        raise ValueError(f"{num_target_layers} layers are too few for {num_taps} taps: {ids}")
    return ids
