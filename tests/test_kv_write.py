"""KV writes: every implementation against a loop over rows in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tpu_interpreter import INTERPRET, no_races

from pallas_kernels import kv_write
from pallas_kernels.kv_write import tpu

BATCH, WIDTH, HEADS = 3, 3, (2, 8)
write = jax.jit(kv_write, static_argnames=("implementation", "tiles", "interpret"))
IMPLEMENTATIONS = {
    "reference": {},
    "tpu": {"tiles": tpu.Tiles(rows=16), "interpret": INTERPRET},
}


def operands(seed: int, tokens: int, implementation: str, page: int = 8, dtype=np.float32):
    rng = np.random.default_rng(seed)
    row = 128 if implementation == "tpu" else HEADS[1]
    pages = BATCH * WIDTH + 2
    pools = np.zeros((2, pages, HEADS[0], page, row), np.float32)
    pools[..., : HEADS[1]] = rng.standard_normal((*pools.shape[:4], HEADS[1]))
    rows = rng.standard_normal((2, BATCH, tokens, *HEADS)).astype(np.float32)
    table = rng.permutation(np.arange(1, pages))[: BATCH * WIDTH].reshape(BATCH, WIDTH)
    return [jnp.asarray(x, dtype) for x in (*pools, *rows)], table.astype(np.int32)


@settings(max_examples=30)
@given(
    st.sampled_from((5, 37)),
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 37)), min_size=BATCH, max_size=BATCH),
    st.integers(0, 2**16),
)
@example(5, [(0, 0), (3, 0), (24, 5)], 0)  # nothing at all is written
@example(37, [(0, 37), (7, 1), (8, 16)], 1)
def test_live_rows_land_and_nothing_else_moves(tokens: int, spans, seed: int) -> None:
    start, count = np.array(spans, np.int32).T
    count = np.minimum(count, tokens)
    for implementation, options in IMPLEMENTATIONS.items():
        (k_pages, v_pages, k, v), table = operands(seed, tokens, implementation)
        expected = np.array([k_pages, v_pages])
        for b in range(BATCH):
            for t in range(count[b]):
                if (position := start[b] + t) < 8 * WIDTH:
                    place = (slice(None), table[b, position // 8], slice(None), position % 8)
                    expected[place][..., : HEADS[1]] = np.array([k[b, t], v[b, t]])
        with no_races():
            got = write(
                k_pages, v_pages, k, v, table, start, count,
                implementation=implementation, **options,
            )  # fmt: skip
        np.testing.assert_array_equal(np.array(got), expected, err_msg=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_other_types(implementation: str, dtype: str) -> None:
    """Rows are rounded to the pages' type once, and the rows beside them stay as they are."""
    page = 16 if dtype == "bfloat16" else 32
    (k_pages, v_pages, k, v), table = operands(3, 20, implementation, page)
    pools = [(8 * pool).astype(dtype) for pool in (k_pages, v_pages)]
    start, count = np.array([0, 30, 5], np.int32), np.array([20, 7, 0], np.int32)
    arguments = (*pools, 8 * k, 8 * v, table, start, count)
    got = write(*arguments, implementation=implementation, **IMPLEMENTATIONS[implementation])
    expected = write(*arguments, implementation="reference")
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs)


def test_the_front_door_names_what_does_not_fit() -> None:
    (k_pages, v_pages, k, v), table = operands(0, 5, "reference")
    ones = np.ones(BATCH, np.int32)
    call = partial(kv_write, k_pages, page_table=table, start=ones, count=ones)
    for wrong, match in [
        ({"k": k[:, :, :1]}, "do not fit pages"),
        ({"v": v[:, :4]}, "do not fit pages"),
        ({"v_pages": v_pages.astype(jnp.bfloat16)}, "do not fit pages .* of bfloat16"),
        ({"count": ones[:1]}, "must have 3 rows"),
        ({"interpret": True}, "tiles and interpret are for implementation tpu"),
        ({"implementation": "tpu"}, "pages of 8 rows, 8 wide, must be multiples of 8 and 128"),
        ({"implementation": "gpu"}, "no implementation 'gpu'; accepted: auto, reference, tpu"),
    ]:
        with pytest.raises(ValueError, match=match):
            call(**{"v_pages": v_pages, "k": k, "v": v, **wrong})
