"""KV injection against numpy in float64: projection, norm, rotation and the place of every row."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tpu_interpreter import INTERPRET, no_races
from triton_ir import triton_kernels

from pallas_kernels import kv_injection, row_width
from pallas_kernels.kv_injection import gpu, tpu
from pallas_kernels.kv_injection.shapes import SHAPES as NAMED

BATCH, TOKENS, DIM, LAYERS, PAGE, WIDTH = 3, 5, 16, 2, 8, 3
EPS, FACTOR = 1e-6, 1.3
FREQUENCIES = np.array([1.0, 0.1, 0.01], np.float32)  # of 8 dims, so the last 2 pass through
HEADS = (2, 8)
ON_GPU = jax.default_backend() == "gpu"
# Interpreted where their chip is not; small tiles, so that small shapes take several.
IMPLEMENTATIONS = {
    "reference": {},
    "gpu": {"tiles": gpu.Tiles(fused_rows=15, depth=16), "interpret": not ON_GPU},
}
if not ON_GPU:  # whose tests of other chips' kernels are the CPU's
    IMPLEMENTATIONS["tpu"] = {"tiles": tpu.Tiles(rows=16), "interpret": INTERPRET}
inject = jax.jit(
    kv_injection,
    static_argnames=("attention_factor", "eps", "implementation", "tiles", "interpret"),
)
by_name = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def operands(
    seed: int, dtype=np.float32, platform: str = "cpu", tokens: int = TOKENS, page: int = PAGE
) -> dict:
    rng = np.random.default_rng(seed)
    pages = BATCH * WIDTH + 2
    spare = row_width(HEADS[1], platform) - HEADS[1]

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def pool() -> jax.Array:
        return jnp.pad(array(pages, HEADS[0], page, HEADS[1]), [(0, 0)] * 3 + [(0, spare)])

    table = rng.permutation(np.arange(1, pages))[: BATCH * WIDTH].reshape(BATCH, WIDTH)
    return {
        "features": array(BATCH, tokens, DIM),
        "weights": array(LAYERS, 2, *HEADS, DIM),
        "k_norms": array(LAYERS, 8),
        "k_pages": tuple(pool() for _ in range(LAYERS)),
        "v_pages": tuple(pool() for _ in range(LAYERS)),
        "page_table": table.astype(np.int32),
        "start": np.array([0, 3, 7], np.int32),
        "count": np.array([tokens, 2, 0], np.int32),
    }


def oracle(
    ops: dict, batch: int = BATCH, width: int = WIDTH
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    features = np.asarray(ops["features"], np.float64)
    k_pages = [np.array(p, np.float64) for p in ops["k_pages"]]
    v_pages = [np.array(p, np.float64) for p in ops["v_pages"]]
    page = k_pages[0].shape[2]
    for layer in range(LAYERS):
        k_weight, v_weight = np.asarray(ops["weights"][layer], np.float64)
        norm = np.asarray(ops["k_norms"][layer], np.float64)
        for b in range(batch):
            for t in range(ops["count"][b]):
                position = int(ops["start"][b]) + t
                if position >= page * width:
                    continue
                k = k_weight @ features[b, t]
                k = k / np.sqrt((k**2).mean(-1, keepdims=True) + EPS) * norm
                turned = (k[:, :3] + 1j * k[:, 3:6]) * np.exp(1j * position * FREQUENCIES) * FACTOR
                k = np.concatenate([turned.real, turned.imag, k[:, 6:]], axis=-1)
                place = ops["page_table"][b, position // page], slice(None), position % page
                k_pages[layer][place][:, :8] = k
                v_pages[layer][place][:, :8] = v_weight @ features[b, t]
    return k_pages, v_pages


def run(implementation: str, ops: dict, **options):
    options = {**SETTINGS, **IMPLEMENTATIONS[implementation], **options}
    with no_races() if implementation == "tpu" else contextlib.nullcontext():
        return jax.block_until_ready(inject(**ops, **options, implementation=implementation))


SETTINGS = {"inverse_frequencies": FREQUENCIES, "attention_factor": FACTOR, "eps": EPS}
LENGTHS = (TOKENS, 37)  # a cycle's; several pieces of a row, in several tiles


@settings(max_examples=30)
@given(
    st.sampled_from(LENGTHS),
    st.lists(
        st.tuples(st.integers(0, PAGE * WIDTH), st.integers(0, max(LENGTHS))),
        min_size=BATCH,
        max_size=BATCH,
    ),
    st.integers(0, 2**16),
)
@example(TOKENS, [(0, 0), (3, 0), (24, 5)], 0)  # nothing at all is written
@example(37, [(0, 37), (7, 1), (8, 16)], 1)
def test_every_implementation_equals_numpy(tokens: int, spans, seed: int) -> None:
    """Fault 23: rows past ``count`` leave the cache alone; positions are absolute."""
    for implementation in IMPLEMENTATIONS:
        ops = operands(seed, platform=implementation, tokens=tokens)
        ops["start"], ops["count"] = np.array(spans, np.int32).T
        ops["count"] = np.minimum(ops["count"], tokens)
        expected = oracle(ops)
        got = run(implementation, ops)
        # float32 sums of 16 products, then a norm: 1e-5 of values up to about 10.
        for ours, theirs in zip(jax.tree.leaves(got), (*expected[0], *expected[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=implementation)


@pytest.mark.parametrize("start", [0, 3, 7])
def test_one_segment_of_many_pages(start: int) -> None:
    """On a TPU a page takes its rows from the part of a segment where they are."""
    ops = operands(3, platform="tpu", tokens=61, page=8)
    ops["page_table"] = np.arange(1, 10, dtype=np.int32).reshape(1, 9)
    ops["features"] = ops["features"][:1]
    ops["start"], ops["count"] = np.array([start], np.int32), np.array([60], np.int32)
    got = run("tpu", ops, tiles=tpu.Tiles(rows=64))
    expected = oracle(ops, batch=1, width=9)
    for ours, theirs in zip(jax.tree.leaves(got), (*expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@by_name
@pytest.mark.parametrize("tokens", LENGTHS)
def test_bfloat16(implementation: str, tokens: int) -> None:
    """Norm and rotation are float32 inside; only the ends are rounded (8 bits, three times)."""
    ops = operands(1, jnp.bfloat16, platform=implementation, tokens=tokens, page=16)
    got = run(implementation, ops)
    expected = oracle(ops)
    for ours, theirs in zip(jax.tree.leaves(got), (*expected[0], *expected[1]), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0.02, atol=0.05)


@by_name
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_narrow_pages(implementation: str, dtype: str, tokens: int) -> None:
    """Values over their head's scale, to the nearest, and to the type's end past it."""
    ops = operands(2, platform=implementation, tokens=tokens, page=32)
    wide = oracle(ops)
    scales = np.random.default_rng(0).uniform(0.02, 0.05, (2, LAYERS, HEADS[0]))
    scales = scales.astype(np.float32)
    scales[1, 1] /= 10_000  # far past the end
    for name in ("k_pages", "v_pages"):
        ops[name] = tuple(jnp.zeros_like(p, dtype) for p in ops[name])
    got = run(implementation, ops, k_scales=scales[0], v_scales=scales[1])
    most = 127 if dtype == "int8" else 448
    for which in range(2):
        for layer in range(LAYERS):
            ours = np.asarray(got[which][layer], np.float32)
            scaled = wide[which][layer] / scales[which, layer][None, :, None, None]
            written = ours != 0
            expected = np.clip(scaled, -most, most)[written]
            # Half a unit of int8; half of 4 significant bits.
            step = 0.5 if dtype == "int8" else np.abs(expected) / 16
            assert np.all(np.abs(ours[written] - expected) <= step + 1e-3)
            assert written.sum() > 50
    assert np.abs(np.asarray(got[1][1], np.float32)).max() == most


@pytest.mark.parametrize("name", NAMED)
def test_the_gpu_kernel_lowers(name: str) -> None:
    shape = NAMED[name]
    frequencies = jnp.ones(shape.frequencies)
    assert triton_kernels(
        inject, *shape.abstract("gpu"), inverse_frequencies=frequencies, attention_factor=1.0,
        eps=1e-6, implementation="gpu",
    )  # fmt: skip


def test_the_front_door_names_what_does_not_fit() -> None:
    ops = operands(0)
    for wrong, match in [
        ({"k_norms": ops["k_norms"][:1]}, "one entry a layer"),
        ({"features": ops["features"][:, :0]}, r"features \(3, 0, 16\) is empty"),
        ({"v_pages": ops["v_pages"][:1]}, "one entry a layer"),
        ({"k_pages": (ops["k_pages"][0], ops["k_pages"][1][1:])}, "alike in every layer"),
        ({"weights": ops["weights"][..., :8]}, r"should be \(2, 2, 2, 8, 16\)"),
        ({"features": ops["features"][..., :5]}, r"should be \(2, 2, 2, 8, 5\)"),
        ({"start": ops["start"][1:]}, "must have 3 rows"),
        ({"count": ops["count"].astype(np.int16)}, "count int16 must be int32"),
        ({"features": ops["features"].astype(jnp.bfloat16)}, "features bfloat16, weights float32"),
        (
            {"inverse_frequencies": np.ones(5, np.float32)},
            "5 frequencies must turn 2 dims each",
        ),
        ({"k_scales": np.ones((2, 2), np.float32)}, "are for int8 and float8 pages"),
        ({"v_scales": np.ones(2)}, r"v_scales \(2,\) should be \(2, 2\)"),
        ({"implementation": "gpu", "tiles": tpu.Tiles()}, "tiles must be a pallas_kernels.kv_inj"),
        ({"interpret": True}, "tiles and interpret are for implementations tpu and gpu"),
        ({"implementation": "tpu"}, "pages of 8 rows, 8 wide, must be multiples of 8 and 128"),
        ({"implementation": "fastest"}, "no implementation 'fastest'; accepted: auto, reference"),
    ]:
        with pytest.raises(ValueError, match=match):
            kv_injection(**{**ops, **SETTINGS, **wrong})
