"""Block attention: every implementation that this machine runs against
jax.nn.dot_product_attention over dense K/V that numpy gathered, never through our paging."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_interpreter import INTERPRET, no_races, races_found
from triton_ir import triton_kernels

from pallas_kernels import block_attention, row_width
from pallas_kernels.block_attention import gpu, tpu
from pallas_kernels.block_attention.masks import HIDDEN
from pallas_kernels.block_attention.portable import CHUNK_TOKENS
from pallas_kernels.block_attention.shapes import SHAPES as NAMED

# float32 sums of at most 2,000 products in two orders; a masking error is off by 1e-1.
TOLERANCE = 2e-5
ON_GPU = jax.default_backend() == "gpu"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How a test calls one: kernels are interpreted where their chip is not, and get small tiles,
    so that small shapes take several."""

    name: str
    tiles: tpu.Tiles | gpu.Tiles | None = None

    @property
    def platform(self) -> str:
        return "tpu" if self.name == "tpu" else "cpu"

    @property
    def options(self) -> dict:
        if self.tiles is None:
            return {"implementation": self.name}
        interpret = INTERPRET if self.name == "tpu" else not ON_GPU
        return {"implementation": self.name, "tiles": self.tiles, "interpret": interpret}


ANYWHERE = [Implementation("reference"), Implementation("portable")]
KERNELS = [Implementation("gpu", gpu.Tiles(query_rows=32, keys=16, programs=20, split_steps=2))]
if not ON_GPU:  # whose tests of other chips' kernels are the CPU's
    KERNELS.append(Implementation("tpu", tpu.Tiles(query_rows=32, context=32, keys=16)))


@dataclasses.dataclass(frozen=True)
class Shape:
    """(T, K, G, H) and the page table. Few of them: a shape is a compilation."""

    tokens: int
    kv_heads: int
    groups: int
    head_dim: int
    page_size: int
    width: int
    windows: tuple[int | None, ...] = (None, 1, 3, 40)

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
# For the kernels: one token and one head; several heads; several query tiles, the last one cut.
KERNEL_SHAPES = [
    Shape(1, 1, 1, 128, 8, 9, (None, 17)),
    Shape(16, 2, 3, 64, 8, 9, (None, 20)),
    Shape(37, 1, 2, 80, 16, 5, (None, 24)),
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
def cases(draw, shapes: list[Shape]) -> Case:
    shape = draw(st.sampled_from(shapes))
    window = draw(st.sampled_from(shape.windows))
    edges = {0, 1, shape.page_size - 1, shape.page_size, shape.capacity, CHUNK_TOKENS}
    edges |= {window - 1, window, window + 1} if window else set()
    edge = st.sampled_from([e for e in sorted(edges) if e <= shape.capacity])
    length = st.one_of(edge, st.integers(0, shape.capacity))
    return Case(
        shape,
        tuple(draw(st.lists(length, min_size=BATCH, max_size=BATCH))),
        draw(st.booleans()),
        window,
        draw(st.integers(0, 2**16)),
    )


def tensors(case: Case, dtype=np.float32, platform: str = "cpu"):
    """q, k, v, poisoned pools, a shuffled page table; and the dense context they stand for."""
    shape, rng = case.shape, np.random.default_rng(case.seed)
    heads = (shape.kv_heads, shape.head_dim)
    q = rng.standard_normal(
        (BATCH, shape.tokens, shape.kv_heads * shape.groups, shape.head_dim), np.float32
    )
    k, v = rng.standard_normal((2, BATCH, shape.tokens, *heads), np.float32)
    context = rng.standard_normal((2, BATCH, shape.capacity, *heads), np.float32)
    pages = BATCH * shape.width + 3
    row = row_width(shape.head_dim, platform)
    pools = np.full((2, pages, heads[0], shape.page_size, row), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, pages))
    table = np.zeros((BATCH, shape.width), np.int32)  # entries past a row's pages: the null page
    for row, length in enumerate(case.lengths):
        first = 0 if case.window is None else max(length - case.window + 1, 0)
        for entry in range(-(-length // shape.page_size)):
            table[row, entry] = ids[row * shape.width + entry]
        for position in range(first, length):  # nothing else may be looked at
            page, offset = table[row, position // shape.page_size], position % shape.page_size
            pools[:, page, :, offset, : shape.head_dim] = context[:, row, position]
            pools[:, page, :, offset, shape.head_dim :] = 0
    arrays = [jnp.asarray(a, dtype) for a in (q, k, v, pools[0], pools[1])]
    return (*arrays, jnp.asarray(table), jnp.asarray(case.lengths, jnp.int32)), context


@partial(
    jax.jit,
    static_argnames=(
        "causal", "window", "scale", "soft_cap", "implementation", "tiles", "interpret"
    ),
)  # fmt: skip
def attend(*operands, **options):
    return block_attention(*operands, **options)


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


def check(case: Case, implementation: Implementation) -> None:
    operands, context = tensors(case, platform=implementation.platform)
    options = {"causal": case.causal, "window": case.window, **implementation.options}
    got = attend(*operands, **options)
    expected = oracle(case, operands, context)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=implementation.name)


@settings(max_examples=60)
@given(cases(SHAPES))
@example(Case(SHAPES[1], (0, 0, 0), False, None, 0))  # no context at all
@example(Case(SHAPES[4], (0, 1280, 513), False, None, 1))
@example(Case(SHAPES[4], (1280, 1279, 1200), False, 40, 2))  # the loop starts past its first chunk
@example(Case(SHAPES[3], (32, 8, 7), False, None, 3))  # head_dim 64, bidirectional
def test_every_implementation_equals_dense_attention(case: Case) -> None:
    """Faults 21 (window), 22 (non-causal at head_dim 64), 24 (context past a chunk)."""
    for implementation in ANYWHERE:
        check(case, implementation)


@settings(max_examples=24)
@given(cases(KERNEL_SHAPES))
@example(Case(KERNEL_SHAPES[1], (0, 0, 0), False, None, 0))
@example(Case(KERNEL_SHAPES[1], (0, 72, 0), True, 20, 1))  # an empty row before and behind
@example(Case(KERNEL_SHAPES[2], (80, 1, 33), False, 24, 2))
def test_kernels_equal_dense_attention(case: Case) -> None:
    for implementation in KERNELS:
        with no_races():
            check(case, implementation)


ALL = [*ANYWHERE, *KERNELS]
by_name = pytest.mark.parametrize("implementation", ALL, ids=lambda i: i.name)
COMMON = Case(KERNEL_SHAPES[1], (72, 33, 3), True, None, 5)


@by_name
def test_bfloat16_is_the_rounded_float32_result(implementation: Implementation) -> None:
    case = dataclasses.replace(COMMON, shape=dataclasses.replace(COMMON.shape, page_size=16))
    operands, _ = tensors(case, jnp.bfloat16, implementation.platform)
    wide = [jnp.asarray(x, jnp.float32) for x in operands[:5]]
    expected = attend(*wide, *operands[5:], causal=True, implementation="reference")
    got = attend(*operands, causal=True, **implementation.options)
    assert got.dtype == jnp.bfloat16
    # Weights and result are rounded once each to 8 bits: 2 * 2**-8 of values below 4.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2**-7, atol=2**-7)


@by_name
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_narrow_pages(implementation: Implementation, dtype: str) -> None:
    """What was stored is a page's value times its head's scale; the block itself stays wide."""
    shape = dataclasses.replace(COMMON.shape, page_size=32, width=3)
    case = dataclasses.replace(COMMON, shape=shape)
    (q, k, v, k_pages, v_pages, *rest), _ = tensors(case, platform=implementation.platform)
    scales = jnp.asarray([[0.05, 0.02], [0.03, 0.04]], jnp.float32)
    narrow, stored = [], []
    for pool, scale in zip((k_pages, v_pages), scales, strict=True):
        scale = scale[None, :, None, None]
        values = pool / scale
        if dtype == "int8":  # an integer cannot be poisoned
            values = jnp.round(jnp.nan_to_num(values))
        narrow.append(values.astype(dtype))
        stored.append(narrow[-1].astype(jnp.float32) * scale)
    expected = attend(q, k, v, *stored, *rest, causal=True, implementation="reference")
    got = attend(
        q, k, v, *narrow, *rest,
        causal=True, k_scale=scales[0], v_scale=scales[1], **implementation.options,
    )  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@by_name
def test_scales_of_few_bits_are_multiplied_in_full(implementation: Implementation) -> None:
    """``scale`` times a bfloat16 ``k_scale`` is no bfloat16 where H is no power of four."""
    shape = dataclasses.replace(KERNEL_SHAPES[2], page_size=32, width=2)
    case = Case(shape, (64, 33, 3), True, None, 6)
    (q, k, v, *pools, table, lengths), _ = tensors(case, platform=implementation.platform)
    pools = [jnp.round(40 * jnp.nan_to_num(pool)).astype(jnp.int8) for pool in pools]
    scale = jnp.asarray([0.0234], jnp.bfloat16)

    def run(scale: jax.Array, **options) -> jax.Array:
        operands = (3 * q, k, v, *pools, table, lengths)
        return attend(*operands, causal=True, k_scale=scale, v_scale=scale, **options)

    expected = run(scale.astype(jnp.float32), implementation="reference")
    got = run(scale, **implementation.options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@by_name
def test_scale_and_soft_cap(implementation: Implementation) -> None:
    operands, _ = tensors(COMMON, platform=implementation.platform)
    options = {"causal": True, **implementation.options}
    doubled = (operands[0] * 2, *operands[1:])
    got = attend(*doubled, scale=0.5 * 64**-0.5, **options)
    plain = attend(*operands, **options)
    np.testing.assert_allclose(got, plain, rtol=0, atol=TOLERANCE)
    capped = attend(*operands, soft_cap=0.5, **options)
    (q, k, v, k_pages, v_pages, table, lengths) = operands
    # By hand, for the last query of the first row, whose 72 + 16 keys it sees all.
    keys = jnp.concatenate([dense_rows(k_pages, table[0])[:, :64], k[0, :, 0]])
    values = jnp.concatenate([dense_rows(v_pages, table[0])[:, :64], v[0, :, 0]])
    weights = jax.nn.softmax(0.5 * jnp.tanh(keys @ q[0, -1, 0] / 8 / 0.5))
    np.testing.assert_allclose(capped[0, -1, 0], weights @ values, rtol=0, atol=TOLERANCE)
    assert np.abs(capped - plain).max() > 0.1


def dense_rows(pool, table):
    """The first head's rows of a table's pages."""
    return pool[table, 0].reshape(-1, pool.shape[3])


@pytest.mark.parametrize("name", NAMED)
def test_the_gpu_kernel_lowers(name: str) -> None:
    """Triton's rules (powers of two, what it cannot express) are checked without a GPU."""
    shape = NAMED[name]
    options = {"causal": shape.causal, "window": shape.window, "soft_cap": shape.soft_cap}
    assert triton_kernels(attend, *shape.abstract("gpu"), **options, implementation="gpu")


@pytest.mark.parametrize("splits", [2, 3, 33, 40])
def test_shares_are_merged_by_their_weights(splits: int) -> None:
    """A part of the last chunk does not exist; one share has no keys at all."""
    rng = np.random.default_rng(splits)
    shares = rng.standard_normal((splits, 2, 3, 4, 24)).astype(np.float32)
    logs = rng.uniform(-9, 9, shares.shape[:-1]).astype(np.float32)
    logs[1] = HIDDEN
    merged = gpu._merge(jnp.asarray(shares), jnp.asarray(logs), jnp.float32, not ON_GPU)
    weights = np.exp(logs.astype(np.float64) - logs.max(0))
    expected = (shares * (weights / weights.sum(0))[..., None]).sum(0)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float32"), (256, "float32")]
)
def test_default_tiles_fit_into_the_chip(kind: str, head_dim: int, dtype: str) -> None:
    limit = {"NVIDIA H200": 227, "NVIDIA A100-SXM4-80GB": 163, "NVIDIA L4": 99}[kind] * 1024
    for tokens in (1, 16, 512):
        tiles = gpu.default_tiles(kind, tokens, head_dim, dtype)
        row = head_dim * jnp.dtype(dtype).itemsize
        held = row * (tiles.query_rows + 2 * tiles.stages * tiles.keys)
        assert held <= limit or tiles.keys == 16
    assert (
        gpu.default_tiles("NVIDIA H200", 16, 128, "bfloat16") == gpu.TUNED["NVIDIA H200"]["block"]
    )


def test_the_gpu_kernel_reaches_every_page_or_says_so() -> None:
    """Offsets of 32 bits are kept up to 2**32 bytes, and elements of one byte go past 2**31."""
    shape = dataclasses.replace(NAMED["8b/int8/32x8192"], batch=1, context=64)
    bytes_each = shape.kv_heads * shape.page_size * shape.head_dim

    def trace(pages: int) -> None:
        attend.trace(*shape.abstract("gpu", pages), causal=True, implementation="gpu")

    trace(2**31 // bytes_each)
    trace(2**32 // bytes_each + 1)
    with pytest.raises(ValueError, match="takes int8 pools of at most"):
        trace(2**31 // bytes_each + 1)


def test_a_race_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The check that the kernel tests make can fail: this one reads before its copy has come."""

    def racy(source, out, buffer, semaphore):
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        out[...] = buffer[...]
        copy.wait()

    x = jnp.ones((8, 128))
    pl.pallas_call(
        racy,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=INTERPRET,
    )(x)
    assert races_found() and "RACE DETECTED" in capsys.readouterr().out


def test_the_front_door_names_what_does_not_fit() -> None:
    q, k, v, k_pages, v_pages, table, lengths = tensors(Case(SHAPES[1], (3, 4, 20), True, None, 0))[
        0
    ]

    def call(q=q, k=k, v=v, k_pages=k_pages, v_pages=v_pages, table=table, lengths=lengths, **kw):
        return block_attention(q, k, v, k_pages, v_pages, table, lengths, causal=True, **kw)

    wide = dict.fromkeys(("k_pages", "v_pages"), jnp.zeros((*k_pages.shape[:3], 128)))
    huge = {"q": jnp.zeros((3, 8, 6, 512)), "k": jnp.zeros((3, 8, 2, 512))}
    huge |= {"v": huge["k"], **dict.fromkeys(wide, jnp.zeros((*k_pages.shape[:3], 512)))}
    for wrong, match in [
        ({"k": k[:, :-1]}, "does not fit k"),
        ({"q": q[:, :0], "k": k[:, :0], "v": v[:, :0]}, r"q \(3, 0, 6, 8\) is empty"),
        ({"table": table[:, :0]}, r"page_table \(3, 0\) is empty"),
        ({"v": v[..., :-1]}, "does not fit k"),
        ({"q": q[:, :, :5]}, "5 query heads are no multiple of 2"),
        ({"k_pages": k_pages[:, :1]}, "do not fit k"),
        ({"v_pages": v_pages[1:]}, "do not fit k"),
        ({"table": table[1:]}, "must have 3 rows"),
        ({"lengths": lengths[1:]}, "must have 3 rows"),
        ({"lengths": lengths.astype(jnp.float32)}, "context_lengths float32 must be int32"),
        ({"table": table.astype(jnp.int16)}, "page_table int16 must be int32"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0, got 0"),
        ({"q": q.astype(jnp.float16)}, "q float16, k float32, v float32 must be one of"),
        ({"k_pages": k_pages.astype(jnp.bfloat16)}, "pages bfloat16, float32 under a float32"),
        ({"k_scale": jnp.ones(2)}, "k_scale and v_scale are for int8 and float8 pages"),
        ({"k_scale": jnp.ones(1)}, r"k_scale \(1,\) should be one of 2 kv heads"),
        ({"implementation": "tpu", "tiles": gpu.Tiles()}, "tiles must be a pallas_kernels.block"),
        ({"interpret": True}, "tiles and interpret are for implementations tpu and gpu"),
        ({"implementation": "fastest"}, "no implementation 'fastest'; accepted: auto, reference"),
        ({"implementation": "tpu"}, "rows are 8 wide and must be a multiple of 128"),
        ({"implementation": "tpu", **wide}, "page_size 4 must be a multiple of 8 for float32"),
        ({"implementation": "gpu", **huge}, "head_dim 512 is over the kernels' 256"),
    ]:
        with pytest.raises(ValueError, match=match):
            call(**wrong)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (gpu.Tiles, {"keys": 48}, "keys must be a power of two, got 48"),
        (gpu.Tiles, {"stages": 0}, "stages must be at least 1, got 0"),
        (tpu.Tiles, {"context": 100}, "context must be a multiple of 16, got 100"),
    ],
)
def test_tiles_are_checked_where_they_are_made(make, wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**wrong)
