"""Kernels for block speculative decoding over a paged KV cache: jax only, one folder an op.

Every op has a front door (``api``), a specification (``reference``: the shortest jnp that is
obviously right) and faster implementations of the same contract. Letters: B sequences,
T query tokens, S context tokens, N query heads, K kv heads, G = N/K, H head dim, P pages.
"""

from pallas_kernels.block_attention.api import block_attention
from pallas_kernels.kv_injection.api import kv_injection
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paging import row_width
from pallas_kernels.range_attention.api import range_attention
from pallas_kernels.rope import apply_rope

__all__ = [
    "apply_rope",
    "block_attention",
    "kv_injection",
    "kv_write",
    "range_attention",
    "row_width",
]
