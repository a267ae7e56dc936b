"""Rows in the narrow types of quantised pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

NARROW_DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def to_page_dtype(rows: Float[Array, "..."], dtype: jnp.dtype) -> Num[Array, "..."]:
    """``rows``, divided by their scale already, as pages of ``dtype`` hold them: to the nearest,
    and to the type's end where they are past it (a cast alone makes NaN of them in float8)."""
    if dtype not in NARROW_DTYPES:
        return rows.astype(dtype)
    wide = rows.astype(jnp.float32)
    if dtype == jnp.int8:
        # Not jnp.round, which Triton has not; halves go up.
        return jnp.clip(jnp.floor(wide + 0.5), -127, 127).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(wide, -most, most).astype(dtype)
