"""Compiles every kernel's shapes and the three steps for a TPU topology without a TPU; prints one
JSON line. Run by test_tpu_aot.py in a process of its own: libtpu reads its settings from the
environment."""

import dataclasses
import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.cache import POOL, Batch, DecodeState, KVPools, kv_heads
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.decoder import INJECTION, InjectionWeights, Pair, PairParams
from dflash_jax.plain import plain_step
from dflash_jax.sampling import SamplingRows
from dflash_jax.sharding import Sharding, make_mesh, partition
from dflash_jax.speculative import prefill_step, speculative_step
from pallas_kernels import block_attention, kv_injection, kv_write
from pallas_kernels.block_attention.shapes import SHAPES as ATTENTION
from pallas_kernels.kv_injection.shapes import SHAPES as INJECTIONS

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(1e4),
    "max_position_embeddings": 512,
}
TARGET = TargetConfig(
    **SHAPE, num_layers=3, architecture="qwen3", tie_word_embeddings=True, qk_norm=True
)
DRAFT = DraftConfig(
    **SHAPE,
    num_layers=2,
    block_size=16,
    mask_token_id=511,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    target_hidden_size=256,
    windows=(None, 64),
    causal=(False, True),
)
# Pools far larger than VMEM, as they are: XLA copies one that fits there as a whole.
PAGES, PAGE_SIZE, SLOTS, ROWS, CHUNK = 40_000, 16, 4, 4, 64


def main(topology_name: str, data: int, model: int) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology_name).devices
    sharding = Sharding(make_mesh(data, model, devices=devices))
    pair = Pair.of(TARGET, DRAFT, sharding, jnp.dtype("bfloat16"))
    assert pair.draft is not None

    def abstract(shape: tuple[int, ...], dtype, *axes: str | None):
        placement = NamedSharding(sharding.mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement)

    heads = kv_heads(TARGET, sharding)
    pool = abstract((PAGES * data, heads, PAGE_SIZE, 128), jnp.bfloat16, *POOL)
    pools = [KVPools((pool,) * n, (pool,) * n) for n in (TARGET.num_layers, DRAFT.num_layers)]
    ints, floats = partial(abstract, dtype=jnp.int32), partial(abstract, dtype=jnp.float32)
    state = DecodeState(*pools, ints((SLOTS + 1,)), ints((SLOTS + 1,)))
    words = partial(abstract, dtype=jnp.uint32)
    row = (ROWS,)
    sampling = SamplingRows(
        words((ROWS, 2)), words(row), floats(row), ints(row), floats(row), floats(row)
    )
    batch = Batch(ints(row), ints((ROWS, 16)), sampling)
    params = PairParams(pair.target.placed(sharding), pair.draft.placed(sharding))
    shape = (DRAFT.num_layers, 2, heads, 64, DRAFT.hidden_size)
    weights = abstract(shape, jnp.bfloat16, *partition(*INJECTION))
    injection = InjectionWeights(weights, abstract((DRAFT.num_layers, 64), jnp.bfloat16))
    params = dataclasses.replace(params, injection=injection)
    chunk = (
        ints((ROWS, CHUNK)),
        ints(row),
        ints(row),
        abstract(row, jnp.bool_),
        ints(row),
    )
    steps = {
        "prefill": (prefill_step, chunk),
        "plain": (plain_step, ()),
        "speculative": (partial(speculative_step, block_size=16), ()),
    }
    # A shard's part of a pool, as a collective or a copy would name it.
    local = f"bf16[{PAGES},{heads // model},{PAGE_SIZE},128]"
    report = {}
    for name, (step, arguments) in steps.items():
        jitted = jax.jit(partial(step, pair), donate_argnums=1)
        compiled = jitted.lower(params, state, batch, *arguments).compile()
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        report[name] = {
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "temporary": memory.temp_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "pools_moved": [
                line.strip()[:200]
                for line in text.splitlines()
                if local in line and re.search(r"all-gather|all-to-all|collective-permute", line)
            ],
        }
    print(json.dumps({"steps": report, "kernels": compile_kernels(sharding)}))


def compile_kernels(sharding: Sharding) -> dict[str, int]:
    """Bytes of temporaries a chip, by shape; everything replicated over the mesh."""
    placement = NamedSharding(sharding.mesh, PartitionSpec())
    temporary = {}

    def compile_one(name: str, op, operands, donated: tuple[int, ...] = ()) -> None:
        run = jax.shard_map(
            op,
            mesh=sharding.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), operands
        )
        compiled = jax.jit(run, donate_argnums=donated).lower(*placed).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1, name
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes

    seen = set()
    for name, shape in ATTENTION.items():
        # The same program but for sizes, which matter where page tables are long.
        alike = dataclasses.replace(shape, batch=1, context=max(shape.context, 65536))
        if alike in seen:
            continue
        seen.add(alike)
        masks = {"causal": shape.causal, "window": shape.window, "soft_cap": shape.soft_cap}
        operands = _, k, v, k_pool, v_pool, table, lengths = shape.abstract("tpu", PAGES)
        compile_one(name, partial(block_attention, **masks), operands)
        rows = (k_pool, v_pool, k, v, table, lengths, lengths)
        compile_one(f"write/{name}", kv_write, rows, donated=(0, 1))
    for name, shape in INJECTIONS.items():
        turns = {"inverse_frequencies": jnp.ones(shape.frequencies), "attention_factor": 1.0}
        op = partial(kv_injection, **turns, eps=1e-6)
        compile_one(f"injection/{name}", op, shape.abstract("tpu", PAGES), donated=(3, 4))
    return temporary


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
