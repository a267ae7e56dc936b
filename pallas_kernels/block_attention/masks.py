"""What the two kernels share: who sees whom, and the heads that they take."""

import jax.numpy as jnp

HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a key that a query does not see. Finite: a step that shows a query nothing leaves a
weight that the first key it does see (itself, at the latest) scales to zero, and never NaN."""


def first_visible(position, window: int | None):
    """The first position that a query at ``position`` sees, at least 0."""
    return 0 if window is None else jnp.maximum(position - window + 1, 0)


MAX_HEAD_DIM = 256


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError for heads that the kernels are not built for."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"block_attention: head_dim {head_dim} is over the kernels' {MAX_HEAD_DIM}; "
            "implementation 'portable' takes any"
        )
