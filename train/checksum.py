"""What proves that an array came back as it was: bit for bit, at its place, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp


def checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """64 bits in hexadecimal of each array, computed where it lies; the same on every mesh.

    Elements have 8, 16 or 32 bits. Waits for the arrays.
    """
    # Each is waited for: on a mesh of CPU devices many small programs of collectives at once can
    # starve each other of threads until XLA gives up.
    sums = {name: jax.device_get(_checksum(x)) for name, x in arrays.items()}
    return {name: f"{int(a):08x}{int(b):08x}" for name, (a, b) in sums.items()}


def element_bits(dtype: Any) -> int:
    """Of bools, integers and floats; 0 for other kinds."""
    if dtype == jnp.bool_:
        return 8
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 0


@jax.jit
def _checksum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two wrapping sums over hashes of (position, bits): the same however ``x`` is sharded, as
    integer sums have no order. For a given position the hash is a bijection of the bits, so that
    one wrong element is found for certain; more of them, or moved ones, but for one in 2**64."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[element_bits(x.dtype)]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        position += along * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    first, second = (
        jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(seed))), dtype=jnp.uint32)
        for seed in (0x9E3779B9, 0x7F4A7C15)  # two halves of the golden ratio's bits
    )
    return first, second


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's 32-bit finaliser, a bijection."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
