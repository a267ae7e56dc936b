"""The forward kernel of training's attention against the dense matrix, and in its place there."""

from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from triton_ir import triton_kernels

from pallas_kernels import range_attention
from pallas_kernels.range_attention import gpu
from pallas_kernels.range_attention.api import NOTHING
from train.attention import Forward, Ranges, Tiles, forward_on
from train.attention import range_attention as trained

ON_GPU = jax.default_backend() == "gpu"
TILES = gpu.Tiles(query_rows=32, keys=16)
OPTIONS = {"implementation": "gpu", "tiles": TILES, "interpret": not ON_GPU}
SHAPES = [(2, 17, 23, 2, 3, 8), (1, 70, 70, 1, 4, 64), (2, 33, 40, 2, 1, 80)]


def tensors(shape: tuple[int, ...], seed: int, dtype=jnp.float32):
    batch, tokens, length, kv_heads, groups, dim = shape
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    start = rng.integers(0, length, (batch, tokens))
    stop = np.minimum(start + rng.integers(0, length, (batch, tokens)), length)  # some see nothing
    kv = (batch, length, kv_heads, dim)
    q = array(batch, tokens, kv_heads * groups, dim)
    return q, array(*kv), array(*kv), jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)


@settings(max_examples=20)
@given(st.sampled_from(SHAPES), st.integers(0, 2**16))
def test_the_kernel_equals_the_dense_matrix(shape: tuple[int, ...], seed: int) -> None:
    operands = tensors(shape, seed)
    expected = range_attention(*operands, implementation="reference")
    got = range_attention(*operands, **OPTIONS)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert np.all(np.asarray(got[1])[np.asarray(operands[4] <= operands[3])] == NOTHING)


@pytest.mark.parametrize(("start", "stop"), [(3, 40), (-500, 7), (0, 10_000), (30, 40), (-9, -2)])
def test_a_range_past_the_keys_sees_those_that_exist(start: int, stop: int) -> None:
    q, k, v, *_ = tensors(SHAPES[0], 0)
    ranges = [jnp.full(q.shape[:2], bound, jnp.int32) for bound in (start, stop)]
    inside = [jnp.clip(bound, 0, k.shape[1]) for bound in ranges]
    expected = range_attention(q, k, v, *inside, implementation="reference")
    got = range_attention(q, k, v, *ranges, **OPTIONS)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "gpu"])
def test_bfloat16_is_the_rounded_float32_result(implementation: str) -> None:
    operands = tensors(SHAPES[1], 0, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in operands[:3]]
    expected = range_attention(*wide, *operands[3:], implementation="reference")[0]
    options = OPTIONS if implementation == "gpu" else {"implementation": implementation}
    got = range_attention(*operands, **options)[0]
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=2e-2)


def test_gradients_are_the_same_whatever_ran_forward() -> None:
    q, k, v, start, stop = tensors(SHAPES[0], 1)

    def loss(forward: Forward):
        def scalar(q, k, v):
            out, log_sum = trained(q, k, v, Ranges(start, stop), Tiles(), forward)
            return (out**2).sum() + jnp.where(log_sum > NOTHING, log_sum, 0).sum()

        return jax.grad(scalar, (0, 1, 2))(q, k, v)

    for ours, theirs in zip(loss("reference"), loss("tiles"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "shape", [(16, 512, 512, 3, 3, 64), (16, 1024, 512, 3, 3, 64), (4, 8192, 3072, 8, 4, 128)]
)
def test_the_kernel_lowers(shape: tuple[int, ...]) -> None:
    batch, tokens, length, kv_heads, groups, dim = shape
    of = jax.ShapeDtypeStruct
    q = of((batch, tokens, kv_heads * groups, dim), jnp.bfloat16)
    kv, bound = of((batch, length, kv_heads, dim), jnp.bfloat16), of((batch, tokens), jnp.int32)
    run = jax.jit(lambda *x: range_attention(*x, implementation="gpu"))
    assert triton_kernels(run, q, kv, kv, bound, bound)


def test_only_one_gpu_takes_the_kernel() -> None:
    def mesh(*platforms: str):
        devices = np.array([SimpleNamespace(platform=platform) for platform in platforms])
        return cast(Mesh, SimpleNamespace(devices=devices))

    assert forward_on(mesh("gpu")) == "gpu"
    assert forward_on(mesh("gpu", "gpu")) == forward_on(mesh("cpu")) == "tiles"
    assert forward_on(mesh("tpu")) == "tiles"


def test_the_front_door_names_what_does_not_fit() -> None:
    q, k, v, start, stop = tensors(SHAPES[0], 0)
    for operands, match in [
        ((q, k[:, :, :, :4], v, start, stop), "does not fit k"),
        ((q, k[:, :0], v[:, :0], start, stop), r"k \(2, 0, 2, 8\) is empty"),
        ((q[:, :, :5], k, v, start, stop), "5 query heads are no multiple of 2"),
        ((q, k, v, start[:, 1:], stop), r"should be \(2, 17\)"),
        ((q.astype(jnp.bfloat16), k, v, start, stop), "q bfloat16, k float32"),
        ((q, k, v, start, stop.astype(jnp.int16)), "stop int16 must be int32"),
    ]:
        with pytest.raises(ValueError, match=match):
            range_attention(*operands)
    with pytest.raises(ValueError, match="accepted: auto, reference, gpu"):
        range_attention(q, k, v, start, stop, implementation="portable")
