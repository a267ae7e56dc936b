"""The matrix product of the kernels, on any chip's matrix unit."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(
    a: Float[Array, "m n"],
    b: Float[Array, "n o"] | Float[Array, "o n"],
    *,
    transposed: bool = False,
    float32: lax.Precision | lax.DotAlgorithmPreset = lax.Precision.HIGHEST,
) -> Float[Array, "m o"]:
    """``a @ b``, or ``a @ b.T`` where ``b`` is the ``transposed`` factor, summed in float32.

    float32 operands are multiplied as ``float32`` says, by default in full, whatever the ambient
    precision is; narrower ones as they are.
    """
    return lax.dot_general(
        a,
        b,
        (((1,), (int(transposed),)), ((), ())),
        precision=float32 if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def tf32_x3(interpret: bool) -> lax.Precision | lax.DotAlgorithmPreset:
    """How a GPU's matrix unit multiplies float32: each factor as a sum of two TF32 parts, and three
    of their four products, which is float32 but for its last bit or two. Its scalar units took 14
    times as long (LOG.md); the interpreter, on a CPU, has nothing else."""
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
