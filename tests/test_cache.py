"""What is in the pools: after every step, exactly what a recompute from scratch would give."""

import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig, Request, SamplingParams
from dflash_jax.cache import KVPools, kv_heads
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import draft_kv_oracle, target_kv_oracle, tiny_pair

# Keys after a norm are of size 1; paths differ in the order of float32 sums alone.
TOLERANCE = 2e-4


def rows(pools: KVPools, pages: list[int], length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    def dense(pool) -> np.ndarray:
        paged = np.asarray(pool)[pages].swapaxes(1, 2)
        return paged.reshape(-1, *paged.shape[2:])[:length]

    return [(dense(k), dense(v)) for k, v in zip(pools.k, pools.v, strict=True)]


def assert_equal_layers(got, expected) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1, np.abs(b).max()))


@pytest.mark.parametrize("draft_sampling", ["argmax", "coupled"])
def test_after_every_step_both_caches_equal_a_recompute(load_golden, draft_sampling) -> None:
    """Faults 23 (no noise K/V stays), 17 and 18: rows [0, s) of accepting and rejecting rows."""
    pair, params = load_golden("llama-scaled")
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=128,
        page_size=5,
        prefill_tokens=32,
        draft_sampling=draft_sampling,
    )
    engine = Engine(pair, params, config)
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_new_tokens=40, ignore_eos=True)))
    hot = SamplingParams(temperature=0.8, seed=1, max_new_tokens=25, ignore_eos=True)
    engine.add(Request("b", tuple(range(3, 50)), hot))
    committed = set()
    while engine.has_work:
        committed |= {update.committed for update in engine.step()}
        for sequence in [s for s in engine.scheduler.running if s.cached]:
            tokens = sequence.tokens[: sequence.cached]
            draft = rows(engine.state.draft_kv, sequence.pages, sequence.cached)
            target = rows(engine.state.target_kv, sequence.pages, sequence.cached)
            assert_equal_layers(draft, draft_kv_oracle(pair, params, tokens))
            assert_equal_layers(target, target_kv_oracle(pair, params, tokens))
            assert engine.state.lengths[sequence.slot] == sequence.cached
    assert {1, 2, 8} <= committed, "the trace must accept, partly accept and reject"


def test_the_padding_slot_stays_empty() -> None:
    """Fault 33: a padding row that grew would lengthen every row's attention."""
    pair, params = tiny_pair()
    engine = Engine(pair, params, EngineConfig(max_num_seqs=3, max_model_len=64))
    for i in range(3):
        engine.add(Request(str(i), (1, 2, i), SamplingParams(max_new_tokens=30, ignore_eos=True)))
    for _ in engine.run():
        assert engine.state.lengths[-1] == 0


def test_kv_heads_and_the_sizes_that_divide() -> None:
    """Heads are repeated until every model shard owns one; a size that fits neither is named."""
    config = tiny_pair()[0].target_config  # N = 4, K = 2

    def heads(model: int) -> int:
        return kv_heads(config, Sharding(make_mesh(1, model)))

    assert [heads(1), heads(2), heads(4)] == [2, 2, 4]
    with pytest.raises(ValueError, match="size 3 must divide num_attention_heads 4"):
        heads(3)
