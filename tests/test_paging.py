"""Writing rows to pages: exactly the live rows move, whatever the table looks like."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels.paging import write_rows

BATCH, TOKENS, HEADS = 3, 5, (2, 4)
write = jax.jit(write_rows)


@st.composite
def cases(draw):
    page_size, width = draw(st.sampled_from([(1, 8), (4, 3), (16, 2)]))
    row = st.tuples(st.integers(0, page_size * width), st.integers(0, TOKENS))
    return (
        page_size,
        width,
        draw(st.lists(row, min_size=BATCH, max_size=BATCH)),
        draw(st.integers(0, 2**16)),
    )


@given(cases())
@example((4, 3, [(0, 0), (12, 5), (10, 5)], 0))  # nothing; all past the end; half past the end
def test_live_rows_land_and_nothing_else_moves(case) -> None:
    """Faults 8 and 23: rows past ``count`` or past the table are dropped, not clamped."""
    page_size, width, spans, seed = case
    rng = np.random.default_rng(seed)
    pages = BATCH * width + 2
    pool = rng.standard_normal((pages, HEADS[0], page_size, HEADS[1]), np.float32)
    rows = rng.standard_normal((BATCH, TOKENS, *HEADS), np.float32)
    table = rng.permutation(np.arange(1, pages))[: BATCH * width].reshape(BATCH, width)
    start, count = np.array(spans, np.int32).T
    got = write(pool, rows, table.astype(np.int32), start, count)
    expected = pool.copy()
    for b in range(BATCH):
        for t in range(count[b]):
            position = start[b] + t
            if position < page_size * width:
                page = table[b, position // page_size]
                expected[page, :, position % page_size] = rows[b, t]
    np.testing.assert_array_equal(got, expected)


def test_rows_take_the_pools_dtype() -> None:
    pool = jnp.zeros((2, HEADS[0], 4, HEADS[1]), jnp.bfloat16)
    one = jnp.ones(1, jnp.int32)
    got = write_rows(pool, jnp.full((1, 1, *HEADS), 1 / 3), one[None], one, one)
    assert got.dtype == jnp.bfloat16
    assert got[1, 0, 1, 0] == jnp.bfloat16(1 / 3)


def test_a_donated_pool_is_written_in_place() -> None:
    pool, rows = jnp.zeros((3, HEADS[0], 4, HEADS[1])), jnp.ones((1, 2, *HEADS))
    one = jnp.ones(1, jnp.int32)
    step = jax.jit(partial(write_rows), donate_argnums=0)
    text = step.lower(pool, rows, one[None], one, one).compile().as_text()
    assert not [line for line in text.splitlines() if " copy(" in line and "f32[3,2,4,4]" in line]
    step(pool, rows, one[None], one, one)
    assert pool.is_deleted()
