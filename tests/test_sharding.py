"""One device and many give the same tokens; what cannot be split is refused by name."""

import jax
import pytest

from dflash_jax import Engine, EngineConfig, Request, SamplingParams
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import Tally, assert_same_tokens, tiny_pair

CONFIG = EngineConfig(
    max_num_seqs=4, max_model_len=96, page_size=4, num_pages=40, prefill_tokens=128
)
# 6 heads over 3 kv heads; 3 divides both. Everything else is seen by the random pair.
GOLDEN_MESHES = [(4, 1), (1, 3)]
MESHES = [(4, 1), (2, 2), (1, 4)]
# 8 heads over 2 kv heads: with 4 model shards each kv head lives on two of them. The vocabulary
# of 42 is divided by 2 and not by 4, so the head is split on one mesh and replicated on another.
WIDE = {"vocab_size": 42, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8}

REQUESTS = [
    Request(
        f"r{i}",
        tuple((7 * i + j // 3) % 39 for j in range(5 * i + 1)),
        SamplingParams(temperature=0.6 * (i % 3), seed=i, max_new_tokens=20, ignore_eos=True),
    )
    for i in range(7)
]


def outputs(pair, params) -> dict[str, tuple[list[int], list[int]]]:
    """{id: (tokens, committed per cycle)}."""
    engine = Engine(pair, params, CONFIG)
    for request in REQUESTS:
        engine.add(request)
    result: dict[str, tuple[list[int], list[int]]] = {r.id: ([], []) for r in REQUESTS}
    while engine.has_work:
        for update in engine.step():
            tokens, cycles = result[update.request_id]
            tokens += update.tokens
            if update.committed is not None:
                cycles.append(update.committed)
        engine.scheduler.check_integrity()
    return result


def assert_same_outputs(pair, params, expected, got) -> None:
    tally = Tally()
    for request in REQUESTS:
        (tokens, cycles), (sharded, sharded_cycles) = expected[request.id], got[request.id]
        arguments = (request.prompt_ids, request.sampling, tokens, sharded, tally)
        assert_same_tokens(pair, params, *arguments)
        assert cycles == sharded_cycles, "a mesh must not cost acceptance"
    assert not tally.excused


@pytest.fixture(scope="module")
def golden_outputs(load_golden):
    return outputs(*load_golden("llama-scaled"))


@pytest.mark.parametrize("mesh", GOLDEN_MESHES, ids=str)
def test_a_golden_pair_on_a_mesh(load_golden, golden_outputs, mesh) -> None:
    """Fault 15: nothing depends on where a row or a head lives."""
    got = outputs(*load_golden("llama-scaled", *mesh))
    assert_same_outputs(*load_golden("llama-scaled"), golden_outputs, got)


@pytest.fixture(scope="module")
def wide_outputs():
    return outputs(*tiny_pair(target=WIDE, draft=WIDE))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_random_pair_on_a_mesh(wide_outputs, mesh) -> None:
    """Repeated kv heads, an odd vocabulary, slots and pages of their own on every data shard."""
    sharding = Sharding(make_mesh(*mesh))
    got = outputs(*tiny_pair(target=WIDE, draft=WIDE, sharding=sharding))
    assert_same_outputs(*tiny_pair(target=WIDE, draft=WIDE), wide_outputs, got)


def test_pools_and_weights_are_split() -> None:
    pair, params = tiny_pair(target=WIDE, draft=WIDE, sharding=Sharding(make_mesh(2, 2)))
    state = pair.new_state(slots=4, pages=10, page_size=4)
    for pool in (*state.target_kv.k, *state.draft_kv.v):
        assert pool.shape == (20, 2, 4, 8)
        assert pool.addressable_shards[0].data.shape == (10, 1, 4, 8)
    kernel = params.target["model.layers.0.self_attn.q_proj.kernel"]
    assert kernel.addressable_shards[0].data.shape == (24, 32)


def test_impossible_meshes_name_the_numbers(load_golden) -> None:
    with pytest.raises(ValueError, match="model-parallel size 2 and num_key_value_heads 3"):
        load_golden("llama-scaled", 1, 2)
    with pytest.raises(ValueError, match="size 4 must divide num_attention_heads 6"):
        load_golden("llama-scaled", 1, 4)
    with pytest.raises(ValueError, match=r"a 3 x 2 .* mesh needs 6 devices, found 4"):
        make_mesh(3, 2)
    assert make_mesh(2, 1, jax.devices()[2:]).devices.ravel().tolist() == jax.devices()[2:]
