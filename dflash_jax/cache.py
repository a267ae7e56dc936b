"""One paged slot space: a page table shared by target and draft, a K and a V pool a layer.

Everything here runs under shard_map over ("data", "model"): a data shard's page ids are local to
its own part of the pool, so no collective ever touches a pool.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import TransformerConfig
from dflash_jax.layers import Attend
from dflash_jax.sampling import SamplingRows
from dflash_jax.sharding import Sharding, partition
from pallas_kernels import block_attention, kv_write, row_width

POOL = partition("pages", "kv_heads", None, None)
ROWS = partition("rows", None, "heads", None)  # q, k, v: [B, T, heads, H]
TABLE, VECTOR = partition("rows", None), partition("rows")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPools:
    """A model's K and V, one pool a layer: [P, K, page_size, W]."""

    k: tuple[Float[Array, "P K page W"], ...]
    v: tuple[Float[Array, "P K page W"], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What lives on the device between steps; donated to every step.

    ``lengths[s]``: committed tokens of slot s that have KV = the anchor's position.
    ``anchors[s]``: the newest token, sampled by the target but not yet run through it.
    The last slot belongs to padding rows.
    """

    target_kv: KVPools
    draft_kv: KVPools
    lengths: Int[Array, "S"]
    anchors: Int[Array, "S"]

    def advance(
        self, slots: Int[Array, "B"], lengths: Int[Array, "B"], anchors: Int[Array, "B"]
    ) -> "DecodeState":
        """The rows' new lengths and anchors.

        The padding slot stays empty: left to grow with every cycle, it would become the batch's
        longest context, which attention reads to its end.
        """
        return dataclasses.replace(
            self,
            lengths=self.lengths.at[slots].set(lengths).at[-1].set(0),
            anchors=self.anchors.at[slots].set(anchors),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What the host says of one step's B rows: slot ids, page tables, sampling settings."""

    slots: Int[Array, "B"]
    page_table: Int[Array, "B pages"]
    sampling: SamplingRows


def kv_heads(config: TransformerConfig, sharding: Sharding) -> int:
    """Heads a pool holds: each kv head is repeated until every model shard owns one."""
    tp = sharding.model
    if config.num_heads % tp:
        raise ValueError(
            f"model-parallel size {tp} must divide num_attention_heads {config.num_heads}"
        )
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        raise ValueError(
            f"model-parallel size {tp} and num_key_value_heads {config.num_kv_heads}: "
            "one must divide the other"
        )
    return max(config.num_kv_heads, tp)


def allocate(
    config: TransformerConfig | None,
    *,
    pages: int,
    page_size: int,
    dtype: jnp.dtype,
    sharding: Sharding,
) -> KVPools:
    """Zeroed pools of ``pages`` pages a data shard. ``config`` None: no layers."""
    if config is None:
        return KVPools((), ())
    width = row_width(config.head_dim, sharding.mesh.devices.flat[0].platform)
    shape = (pages * sharding.data, kv_heads(config, sharding), page_size, width)
    placement = jax.sharding.NamedSharding(sharding.mesh, POOL)

    def pool():
        return jnp.zeros(shape, dtype, device=placement)

    layers = range(config.num_layers)
    return KVPools(tuple(pool() for _ in layers), tuple(pool() for _ in layers))


def paged_attend(
    pools: KVPools,
    page_table: Int[Array, "B pages"],
    lengths: Int[Array, "B"],
    sharding: Sharding,
    *,
    causal: Callable[[int], bool],
    window: Callable[[int], int | None],
) -> Attend:
    """The ``attend`` of a model that reads its context from ``pools`` and leaves them alone."""

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        k_pool, v_pool = pools.k[layer], pools.v[layer]
        run = jax.shard_map(
            partial(
                block_attention,
                causal=causal(layer),
                window=window(layer),
            ),
            mesh=sharding.mesh,
            in_specs=(ROWS, ROWS, ROWS, POOL, POOL, TABLE, VECTOR),
            out_specs=ROWS,
            check_vma=False,
        )
        k, v = repeat_heads(k, k_pool.shape[1]), repeat_heads(v, v_pool.shape[1])
        return run(q, k, v, k_pool, v_pool, page_table, lengths)

    return attend


class WritingAttend:
    """A causal ``attend`` that also keeps the tokens' own K and V: ``pools`` are the new ones.

    Each layer's pool is written before it is read (the attention looks at positions below
    ``lengths`` only, so the new rows do not show). Read first, XLA would see no order between the
    two and would copy every pool.
    """

    def __init__(
        self,
        pools: KVPools,
        page_table: Int[Array, "B pages"],
        lengths: Int[Array, "B"],
        count: Int[Array, "B"],
        sharding: Sharding,
    ):
        """The first ``count`` tokens of each row are kept, at ``lengths`` and on."""
        self._k, self._v = list(pools.k), list(pools.v)
        self._page_table, self._lengths, self._count = page_table, lengths, count
        self._sharding = sharding

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        write = jax.shard_map(
            kv_write,
            mesh=self._sharding.mesh,
            in_specs=(POOL, POOL, ROWS, ROWS, TABLE, VECTOR, VECTOR),
            out_specs=(POOL, POOL),
            check_vma=False,
        )
        k_pool, v_pool = self._k[layer], self._v[layer]
        heads = k_pool.shape[1]
        own_k, own_v = repeat_heads(k, heads), repeat_heads(v, heads)
        self._k[layer], self._v[layer] = write(
            k_pool, v_pool, own_k, own_v, self._page_table, self._lengths, self._count
        )
        attend = paged_attend(
            self.pools,
            self._page_table,
            self._lengths,
            self._sharding,
            causal=lambda _: True,
            window=lambda _: None,
        )
        return attend(layer, q, k, v)

    @property
    def pools(self) -> KVPools:
        return KVPools(tuple(self._k), tuple(self._v))


def repeat_heads(rows: Float[Array, "... K H"], heads: int) -> Float[Array, "... R H"]:
    """Repeat each kv head in place so that ``heads`` remain; a no-op without sharing."""
    repeats = heads // rows.shape[-2]
    return rows if repeats == 1 else jnp.repeat(rows, repeats, axis=-2)
