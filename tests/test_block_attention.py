"""Block attention: every implementation that a CPU runs against jax.nn.dot_product_attention over
dense K/V that numpy gathered, never through our paging."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import block_attention
from pallas_kernels.block_attention.portable import CHUNK_TOKENS

IMPLEMENTATIONS = ["reference", "portable"]
# float32 sums of at most 2,000 products in two orders; a masking error is off by 1e-1.
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """(T, K, G, H) and the page table. Few of them: a shape is a compilation."""

    tokens: int
    kv_heads: int
    groups: int
    head_dim: int
    page_size: int
    width: int

    @property
    def capacity(self) -> int:
        return self.page_size * self.width


SHAPES = [
    Shape(1, 1, 1, 8, 1, 7),
    Shape(8, 2, 3, 8, 4, 5),
    Shape(5, 3, 2, 16, 16, 3),
    Shape(16, 1, 5, 64, 8, 4),
    Shape(7, 2, 4, 8, 64, 20),  # more than two chunks, the last one cut
    Shape(3, 1, 2, 8, CHUNK_TOKENS + 8, 3),  # a page longer than a chunk
    Shape(4, 1, 1, 8, 48, 24),  # a page that does not divide a chunk
]
BATCH = 3


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    lengths: tuple[int, ...]
    causal: bool
    window: int | None
    seed: int


@st.composite
def cases(draw) -> Case:
    shape = draw(st.sampled_from(SHAPES))
    edges = sorted({0, 1, shape.page_size - 1, shape.page_size, shape.capacity, CHUNK_TOKENS})
    edge = st.sampled_from([e for e in edges if e <= shape.capacity])
    length = st.one_of(edge, st.integers(0, shape.capacity))
    return Case(
        shape,
        tuple(draw(st.lists(length, min_size=BATCH, max_size=BATCH))),
        draw(st.booleans()),
        draw(st.sampled_from([None, None, 1, 3, 40])),
        draw(st.integers(0, 2**16)),
    )


def tensors(case: Case, dtype=np.float32):
    """q, k, v, poisoned pools, a shuffled page table; and the dense context they stand for."""
    shape, rng = case.shape, np.random.default_rng(case.seed)
    heads = (shape.kv_heads, shape.head_dim)
    q = rng.standard_normal(
        (BATCH, shape.tokens, shape.kv_heads * shape.groups, shape.head_dim), np.float32
    )
    k, v = rng.standard_normal((2, BATCH, shape.tokens, *heads), np.float32)
    context = rng.standard_normal((2, BATCH, shape.capacity, *heads), np.float32)
    pages = BATCH * shape.width + 3
    pools = np.full((2, pages, shape.page_size, *heads), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, pages))
    table = np.zeros((BATCH, shape.width), np.int32)  # entries past a row's pages: the null page
    for row, length in enumerate(case.lengths):
        first = 0 if case.window is None else max(length - case.window + 1, 0)
        for entry in range(-(-length // shape.page_size)):
            table[row, entry] = ids[row * shape.width + entry]
        for position in range(first, length):  # nothing else may be looked at
            page, offset = table[row, position // shape.page_size], position % shape.page_size
            pools[:, page, offset] = context[:, row, position]
    arrays = [jnp.asarray(a, dtype) for a in (q, k, v, pools[0], pools[1])]
    return (*arrays, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32)), context


@partial(jax.jit, static_argnames=("causal", "window", "implementation"))
def attend(*operands, causal, window, implementation):
    return block_attention(*operands, causal=causal, window=window, implementation=implementation)


@jax.jit
def dense(q, keys, values, mask):
    return jax.nn.dot_product_attention(q, keys, values, mask=mask)


def oracle(case: Case, operands, context) -> np.ndarray:
    q, k, v = operands[:3]
    tokens, capacity = case.shape.tokens, case.shape.capacity
    keys, values = (
        jnp.concatenate([jnp.asarray(c), own], axis=1)
        for c, own in zip(context, (k, v), strict=True)
    )
    mask = np.zeros((BATCH, 1, tokens, capacity + tokens), bool)
    for row, length in enumerate(case.lengths):
        for t in range(tokens):
            for slot in range(capacity + tokens):
                key = slot if slot < capacity else length + slot - capacity
                exists = slot >= capacity or slot < length
                sees = exists and not (case.causal and key > length + t)
                if case.window is not None:
                    sees = sees and key > length + t - case.window
                mask[row, 0, t, slot] = sees
    return np.asarray(dense(q, keys, values, jnp.asarray(mask)))


@settings(max_examples=60)
@given(cases())
@example(Case(SHAPES[1], (0, 0, 0), False, None, 0))  # no context at all
@example(Case(SHAPES[4], (0, 1280, 513), False, None, 1))
@example(Case(SHAPES[4], (1280, 1279, 1200), False, 40, 2))  # the loop starts past its first chunk
@example(Case(SHAPES[3], (32, 8, 7), False, None, 3))  # head_dim 64, bidirectional
def test_every_implementation_equals_dense_attention(case: Case) -> None:
    """Faults 21 (window), 22 (non-causal at head_dim 64), 24 (context past a chunk)."""
    operands, context = tensors(case)
    expected = oracle(case, operands, context)
    for implementation in IMPLEMENTATIONS:
        got = attend(
            *operands, causal=case.causal, window=case.window, implementation=implementation
        )
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_the_rounded_float32_result(implementation: str) -> None:
    case = Case(SHAPES[4], (1280, 700, 3), True, None, 5)
    operands, _ = tensors(case, jnp.bfloat16)
    wide = [jnp.asarray(x, jnp.float32) for x in operands[:5]]
    expected = attend(*wide, *operands[5:], causal=True, window=None, implementation="reference")
    got = attend(*operands, causal=True, window=None, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    # Weights and result are rounded once each to 8 bits: 2 * 2**-8 of values below 4.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2**-7, atol=2**-7)


def test_scale() -> None:
    operands, _ = tensors(Case(SHAPES[1], (3, 4, 20), True, None, 6))
    doubled = (operands[0] * 2, *operands[1:])
    for name in IMPLEMENTATIONS:
        options = {"causal": True, "implementation": name}
        got = block_attention(*doubled, scale=0.5 * 8**-0.5, **options)
        np.testing.assert_allclose(got, block_attention(*operands, **options), atol=TOLERANCE)


def test_the_front_door_names_what_does_not_fit() -> None:
    q, k, v, k_pages, v_pages, table, lengths = tensors(Case(SHAPES[1], (3, 4, 20), True, None, 0))[
        0
    ]

    def call(q=q, k=k, v=v, k_pages=k_pages, v_pages=v_pages, table=table, lengths=lengths, **kw):
        return block_attention(q, k, v, k_pages, v_pages, table, lengths, causal=True, **kw)

    for wrong, match in [
        ({"k": k[:, :-1]}, "does not fit k"),
        ({"v": v[..., :-1]}, "does not fit k"),
        ({"q": q[:, :, :5]}, "5 query heads are no multiple of 2"),
        ({"k_pages": k_pages[:, :, :1]}, "do not fit k"),
        ({"v_pages": v_pages[1:]}, "do not fit k"),
        ({"table": table[1:]}, "must have 3 rows"),
        ({"lengths": lengths[1:]}, "must have 3 rows"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"implementation": "fastest"}, "no implementation 'fastest'; accepted: auto, reference"),
    ]:
        with pytest.raises(ValueError, match=match):
            call(**wrong)
