"""The engine as a machine: what it refuses, compiles, copies and donates."""

import re

import jax
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig, Request, SamplingParams
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import compilations, sampling_rows, tiny_pair

SMALL = EngineConfig(max_num_seqs=3, max_model_len=64, page_size=4, prefill_tokens=40)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(*tiny_pair(), SMALL)
    engine.warm_up(print)
    return engine


def test_bad_prompts_are_refused_by_name_and_harm_nobody(engine: Engine) -> None:
    """Fault 42."""
    engine.add(Request("good", (1, 2, 3), SamplingParams(max_new_tokens=5, ignore_eos=True)))
    for prompt, match in [
        ((), "the prompt is empty"),
        ((1,) * 64, "has 64 tokens; at most 63 fit a context of 64"),
        ((1,) * 640, "has 640 tokens"),
        ((1, 40), r"token id 40 is not in the vocabulary \(0..39\)"),
        ((-1,), "token id -1"),
    ]:
        with pytest.raises(ValueError, match=match):
            engine.add(Request("bad", prompt))
    with pytest.raises(ValueError, match="id 'good' is already in use"):
        engine.add(Request("good", (1,)))
    tokens = [token for update in engine.run() for token in update.tokens]
    assert len(tokens) == 5
    assert not engine.abort("good") and not engine.abort("bad")
    assert engine.step() == [] and not engine.has_work


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (EngineConfig(max_model_len=257), r"max_model_len must be in 2..256"),
        (EngineConfig(max_model_len=1), r"max_model_len must be in 2..256"),
        (EngineConfig(max_num_seqs=0), "max_num_seqs must be at least 1, got 0"),
        (EngineConfig(page_size=0), "page_size must be at least 1, got 0"),
        (EngineConfig(prefill_tokens=0), "prefill_tokens must be at least 1, got 0"),
        (EngineConfig(block_size=5), r"block_size must be in 1..4 .* got 5"),
        (EngineConfig(block_size=0), "block_size must be in 1..4"),
        (EngineConfig(block_size=3, verify_width=4), r"verify_width must be in 2..3"),
        (EngineConfig(verify_width=1), "verify_width must be in 2..4"),
        (EngineConfig(num_pages=16), "give at least 17 pages or lower max_model_len"),
    ],
)
def test_impossible_settings_are_refused_by_name(config: EngineConfig, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Engine(*tiny_pair(), config)


def random_workload(engine: Engine, seed: int) -> None:
    """Arrivals, aborts and every kind of sampling, at random."""
    rng = np.random.default_rng(seed)
    for i in range(40):
        prompt = tuple(int(t) for t in rng.integers(0, 39, rng.integers(1, 60)))
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            seed=i,
            max_new_tokens=int(rng.integers(1, 40)),
        )
        engine.add(Request(f"w{i}", prompt, sampling))
        for _ in range(rng.integers(0, 6)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(f"w{rng.integers(0, i + 1)}")
    for _ in engine.run():
        pass


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    """Fault 38."""
    with compilations() as compiled:
        random_workload(engine, 0)
    assert not compiled


def test_nothing_compiles_after_warm_up_beyond_the_drafts_reach() -> None:
    """Fault 38, with both kinds of decoding in use, on a 2 x 2 mesh."""
    sharding = Sharding(make_mesh(2, 2))
    pair, params = tiny_pair(draft={"max_position_embeddings": 40}, sharding=sharding)
    engine = Engine(pair, params, EngineConfig(max_num_seqs=2, max_model_len=64, prefill_tokens=32))
    engine.warm_up(print)
    with compilations() as compiled:
        random_workload(engine, 1)
    assert not compiled
    assert engine.stats.accepted_tokens <= engine.stats.drafted_tokens


def test_the_listener_sees_a_compilation() -> None:
    with compilations() as compiled:
        jax.jit(lambda x: x * 3.25)(np.ones(7, np.float32))
    assert len(compiled) == 1
    jax.jit(lambda x: x * 3.5)(np.ones(7, np.float32))
    assert len(compiled) == 1, "the listener is gone"


def test_counts_add_up(engine: Engine) -> None:
    """Fault 7: accepted tokens end where the output ends; proposed and emitted stand apart."""
    before = vars(engine.stats).copy()
    engine.add(Request("x", (1, 2, 3), SamplingParams(max_new_tokens=9, ignore_eos=True)))
    updates = list(engine.run())
    stats = {name: value - before[name] for name, value in vars(engine.stats).items()}
    cycles = [u.committed for u in updates if u.committed is not None]
    assert updates[0].committed is None and updates[-1].finish_reason == "length"
    assert stats["emitted_tokens"] == 9 == sum(len(u.tokens) for u in updates)
    assert stats["decode_steps"] == len(cycles) and stats["prefill_steps"] == 1
    assert stats["drafted_tokens"] == 3 * len(cycles)
    assert stats["accepted_tokens"] <= sum(cycles) - len(cycles)
    assert stats["prompt_tokens"] == 3


def compiled_steps(engine: Engine, rows: int) -> dict[str, jax.stages.Compiled]:
    """The engine's own jitted steps, compiled for ``rows`` padding rows."""
    batch = engine._batch([], rows)
    chunk, row = np.zeros((rows, 8), np.int32), np.zeros(rows, np.int32)
    args = (engine.params, engine.state, batch)
    return {
        "speculate": engine._speculate.lower(*args).compile(),
        "plain": engine._plain.lower(*args).compile(),
        "prefill": engine._prefill.lower(*args, chunk, row, row, row > 0, row).compile(),
    }


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=str)
def test_no_pool_is_copied_or_gathered(mesh: tuple[int, int]) -> None:
    """Pools are written in place: no copy (a step had 120), no collective with a pool operand.

    Target and draft have different head dims here, so that both pools are recognised.
    """
    sharding = Sharding(make_mesh(*mesh))
    pair, params = tiny_pair(draft={"head_dim": 4}, sharding=sharding)
    engine = Engine(pair, params, EngineConfig(max_num_seqs=4, max_model_len=64, page_size=4))
    shapes = {
        leaf.addressable_shards[0].data.shape
        for leaf in jax.tree.leaves((engine.state.target_kv, engine.state.draft_kv))
    }
    assert len(shapes) == 2
    texts = [f"f32[{','.join(map(str, shape))}]" for shape in shapes]
    moves = re.compile(r"\b(copy|copy-start|all-gather|all-to-all|all-gather-start)\(")
    for name, compiled in compiled_steps(engine, 4).items():
        lines = compiled.as_text().splitlines()
        assert any(text in line for line in lines for text in texts)
        wrong = [
            line.strip()
            for line in lines
            if moves.search(line) and any(text in line for text in texts)
        ]
        assert not wrong, f"{name}: {wrong[:3]}"


def test_the_state_is_donated(engine: Engine) -> None:
    old = engine.state
    engine.add(Request("d", (1,), SamplingParams(max_new_tokens=3, ignore_eos=True)))
    list(engine.run())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_sampling_rows_match_the_engines(engine: Engine) -> None:
    """Seeds are 64 bits wide at both ends, negative ones by their two's complement."""
    sampling = SamplingParams(temperature=0.5, top_k=-1, seed=-2)
    engine.add(Request("s", (1,), sampling))
    engine.scheduler.schedule()
    batch = engine._batch([(engine.scheduler.running[0], 0)], 1)
    expected = sampling_rows([sampling])
    for ours, theirs in zip(
        jax.tree.leaves(batch.sampling), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert engine.abort("s")
