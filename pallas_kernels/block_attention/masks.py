"""What the two kernels share: who sees whom."""

import jax.numpy as jnp

HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a key that a query does not see. Finite: a step that shows a query nothing leaves a
weight that the first key it does see (itself, at the latest) scales to zero, and never NaN."""


def first_visible(position, window: int | None):
    """The first position that a query at ``position`` sees, at least 0."""
    return 0 if window is None else jnp.maximum(position - window + 1, 0)
