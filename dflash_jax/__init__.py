"""DFlash speculative decoding for JAX: the target's own text, a block of tokens at a time."""

from dflash_jax.engine import Engine, EngineConfig
from dflash_jax.generate import LLM, Generation, Piece, load
from dflash_jax.request import Request, SamplingParams

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "Generation",
    "Piece",
    "Request",
    "SamplingParams",
    "load",
]
__version__ = "0.1.0"
