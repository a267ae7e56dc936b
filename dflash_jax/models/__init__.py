"""Target models: dense Llama and Qwen3 decoders, with taps."""

from dflash_jax.models.dense import DenseTarget, TargetOutput

__all__ = ["DenseTarget", "TargetOutput"]
