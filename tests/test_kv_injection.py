"""KV injection against numpy in float64: projection, norm, rotation and the place of every row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import kv_injection

IMPLEMENTATIONS = ["reference"]
BATCH, TOKENS, DIM, LAYERS, PAGE, WIDTH = 3, 5, 12, 2, 4, 4
EPS, FACTOR = 1e-6, 1.3
FREQUENCIES = np.array([1.0, 0.1, 0.01], np.float32)  # of 8 dims, so the last 2 pass through
HEADS = (2, 8)
inject = jax.jit(kv_injection, static_argnames=("attention_factor", "eps", "implementation"))


def operands(seed: int, dtype=np.float32) -> dict:
    rng = np.random.default_rng(seed)

    def arrays(*shape: int) -> tuple:
        return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(LAYERS))

    pages = BATCH * WIDTH + 2
    table = rng.permutation(np.arange(1, pages))[: BATCH * WIDTH].reshape(BATCH, WIDTH)
    return {
        "features": arrays(BATCH, TOKENS, DIM)[0],
        "k_weights": arrays(DIM, 16),
        "v_weights": arrays(DIM, 16),
        "k_norms": arrays(8),
        "k_pages": arrays(pages, HEADS[0], PAGE, HEADS[1]),
        "v_pages": arrays(pages, HEADS[0], PAGE, HEADS[1]),
        "page_table": table.astype(np.int32),
        "start": np.array([0, 3, 7], np.int32),
        "count": np.array([TOKENS, 2, 0], np.int32),
    }


def oracle(ops: dict) -> tuple[list[np.ndarray], list[np.ndarray]]:
    features = np.asarray(ops["features"], np.float64)
    k_pages = [np.array(p, np.float64) for p in ops["k_pages"]]
    v_pages = [np.array(p, np.float64) for p in ops["v_pages"]]
    for layer in range(LAYERS):
        k_weight, v_weight, norm = (
            np.asarray(ops[name][layer], np.float64)
            for name in ("k_weights", "v_weights", "k_norms")
        )
        for b in range(BATCH):
            for t in range(ops["count"][b]):
                position = int(ops["start"][b]) + t
                if position >= PAGE * WIDTH:
                    continue
                k = (features[b, t] @ k_weight).reshape(HEADS)
                k = k / np.sqrt((k**2).mean(-1, keepdims=True) + EPS) * norm
                turned = (k[:, :3] + 1j * k[:, 3:6]) * np.exp(1j * position * FREQUENCIES) * FACTOR
                k = np.concatenate([turned.real, turned.imag, k[:, 6:]], axis=-1)
                place = ops["page_table"][b, position // PAGE], slice(None), position % PAGE
                k_pages[layer][place] = k
                v_pages[layer][place] = (features[b, t] @ v_weight).reshape(HEADS)
    return k_pages, v_pages


SETTINGS = {"inverse_frequencies": FREQUENCIES, "attention_factor": FACTOR, "eps": EPS}


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, PAGE * WIDTH), st.integers(0, TOKENS)),
        min_size=BATCH,
        max_size=BATCH,
    ),
    st.integers(0, 2**16),
)
def test_every_implementation_equals_numpy(spans, seed: int) -> None:
    """Fault 23: rows past ``count`` leave the cache alone; positions are absolute."""
    ops = operands(seed)
    ops["start"], ops["count"] = np.array(spans, np.int32).T
    expected = oracle(ops)
    for implementation in IMPLEMENTATIONS:
        got = inject(**ops, **SETTINGS, implementation=implementation)
        # float32 sums of 12 products, then a norm: 1e-5 of values up to about 5.
        for ours, theirs in zip(jax.tree.leaves(got), (*expected[0], *expected[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation: str) -> None:
    """Norm and rotation are float32 inside; only the ends are rounded (8 bits, three times)."""
    ops = operands(1, jnp.bfloat16)
    got = inject(**ops, **SETTINGS, implementation=implementation)
    expected = oracle(ops)
    for ours, theirs in zip(jax.tree.leaves(got), (*expected[0], *expected[1]), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0.02, atol=0.05)


def test_the_front_door_names_what_does_not_fit() -> None:
    ops = operands(0)
    for wrong, match in [
        ({"k_norms": ops["k_norms"][:1]}, "one entry a layer"),
        ({"v_pages": ops["v_pages"][:1]}, "one entry a layer"),
        ({"k_weights": tuple(w[:, :8] for w in ops["k_weights"])}, r"should be \(12, 16\)"),
        ({"features": ops["features"][..., :5]}, r"should be \(5, 16\)"),
        ({"implementation": "fastest"}, "no implementation 'fastest'; accepted: auto, reference"),
    ]:
        with pytest.raises(ValueError, match=match):
            kv_injection(**{**ops, **SETTINGS, **wrong})
