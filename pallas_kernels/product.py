"""The matrix product of the kernels, on any chip's matrix unit."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(
    a: Float[Array, "m n"],
    b: Float[Array, "n o"] | Float[Array, "o n"],
    *,
    transposed: bool = False,
) -> Float[Array, "m o"]:
    """``a @ b``, or ``a @ b.T`` where ``b`` is the ``transposed`` factor, summed in float32.

    float32 operands are multiplied in full, whatever the ambient precision is; narrower ones as
    they are.
    """
    return lax.dot_general(
        a,
        b,
        (((1,), (int(transposed),)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
