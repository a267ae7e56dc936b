"""The law: speculative decoding emits plain decoding's tokens, whatever is asked and whoever is
beside it. ``plain`` is the same target, one token a step, alone (docs/dflash.md, section 6)."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import Engine, EngineConfig, Request, SamplingParams
from dflash_jax.decoder import Pair
from dflash_jax.request import cut
from dflash_jax.testing import Tally, assert_same_tokens, target_oracle, tiny_pair

TIED, LLAMA = "qwen3-tied-b16", "llama-scaled"
MAX_LEN, BLOCK = 112, 16
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


class Law:
    """A pair, its plain oracle and the engines that are held against it, each compiled once."""

    def __init__(self, pair: Pair, params, tally: Tally):
        self.pair, self.params, self.tally = pair, params, tally
        self.engine = functools.cache(self._engine)
        self._plain = functools.cache(self._decode_plainly)

    def _engine(self, **config: Any) -> Engine:
        defaults = {"max_num_seqs": 1, "max_model_len": MAX_LEN, "prefill_tokens": 16}
        return Engine(self.pair, self.params, EngineConfig(**{**defaults, **config}))

    def _decode_plainly(self, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        engine = self.engine(speculation=False)
        return run(engine, [Request("plain", prompt, sampling)])["plain"][0]

    def plain(self, request: Request) -> tuple[list[int], str | None]:
        """The expected output: the endless plain stream, cut here and not by the engine."""
        sampling = request.sampling
        room = min(sampling.max_new_tokens, MAX_LEN - len(request.prompt_ids))
        endless = dataclasses.replace(
            sampling, max_new_tokens=MAX_LEN, stop_token_ids=(), ignore_eos=True
        )
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.pair.target_config.eos_token_ids)
        stream = self._plain(request.prompt_ids, endless)
        return cut(stream, room, frozenset(stops))

    def check(self, request: Request, got: Sequence[int], reason: str | None) -> None:
        expected, expected_reason = self.plain(request)
        arguments = (request.prompt_ids, request.sampling, expected, got, self.tally)
        assert_same_tokens(self.pair, self.params, *arguments)
        if list(got) == expected:
            assert reason == expected_reason, request

    def check_all(self, engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Run ``requests`` together; returns the raw count of each one's cycles."""
        outputs = run(engine, requests)
        for request in requests:
            tokens, reason, _ = outputs[request.id]
            self.check(request, tokens, reason)
        return {id: cycles for id, (_, _, cycles) in outputs.items()}


def run(engine: Engine, requests: Sequence[Request], each_step: Callable[[], None] = lambda: None):
    """{id: (tokens, finish reason, raw counts)}; slots and pages are checked after every step."""
    assert not engine.has_work
    outputs: dict[str, Any] = {r.id: ([], None, []) for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        each_step()
        for update in engine.step():
            tokens, reason, cycles = outputs[update.request_id]
            assert update.tokens and reason is None, "tokens after the end"  # fault 6
            tokens += update.tokens
            if update.committed is not None:
                cycles.append(update.committed)
            outputs[update.request_id] = tokens, update.finish_reason, cycles
        engine.scheduler.check_integrity()
    free = [a.num_free for a in engine.scheduler.allocators]
    assert free == [a.num_pages - 1 for a in engine.scheduler.allocators]  # fault 34
    return outputs


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"\nlaws: {tally.sequences} sequences, {len(tally.excused)} excused differences")
    tally.check()


@pytest.fixture(scope="session")
def laws(load_golden, tally) -> Callable[[str], Law]:
    return functools.cache(lambda name: Law(*load_golden(name), tally))


def prompt_of(length: int, seed: int = 0, vocab: int = 280) -> tuple[int, ...]:
    """Runs of repeated tokens, on which the goldens' drafts accept, and noise between them."""
    rng = np.random.default_rng([length, seed])
    tokens = np.repeat(rng.integers(3, vocab, length), rng.integers(1, 6, length))[:length]
    return tuple(int(t) for t in tokens)


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(-(2**63), 2**64 - 1),
    max_new_tokens=st.integers(1, 60),
    stop_token_ids=st.lists(st.integers(0, 280), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
# Edges of pages, of prefill chunks (16) and of the context.
lengths = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 111])
prompts = st.builds(prompt_of, lengths, st.integers(0, 3))

# (pair, engine settings): every one a compilation, so every one varies all it can.
ENGINES = [
    (TIED, {"block_size": 2, "page_size": 1}),
    (TIED, {"block_size": 3, "page_size": 7, "draft_sampling": "coupled"}),
    (TIED, {"block_size": 5, "page_size": 64, "prefill_tokens": 33, "draft_sampling": "argmax"}),
    (TIED, {"block_size": 11, "page_size": 5, "verify_width": 4}),
    (TIED, {"block_size": 16, "page_size": 4, "prefill_tokens": 5, "draft_sampling": "argmax"}),
    (TIED, {"block_size": 16, "page_size": 200, "draft_sampling": "coupled"}),
    (LLAMA, {"block_size": 7, "page_size": 10, "draft_sampling": "coupled"}),
    (LLAMA, {"block_size": 8, "page_size": 8, "verify_width": 6, "prefill_tokens": 100}),
]


@pytest.mark.parametrize(("name", "config"), ENGINES, ids=str)
def test_speculative_equals_plain(laws, name: str, config: dict[str, Any]) -> None:
    """Faults 11, 13, 15: seeds, temperatures and filters, at any block and page size."""
    law = laws(name)
    engine = law.engine(**config)

    @settings(max_examples=12)
    @given(prompts, samplings)
    def holds(prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        law.check_all(engine, [Request("one", prompt, sampling)])

    holds()


def test_every_block_size(laws) -> None:
    """1 (plain decoding) to the draft's own 16, greedy and sampled, past a page and a block."""
    law = laws(TIED)
    sampled = dataclasses.replace(GREEDY, temperature=0.7, top_p=0.9, seed=11)
    for block_size in range(1, BLOCK + 1):
        engine = law.engine(block_size=block_size)
        for sampling in (GREEDY, sampled):
            law.check_all(engine, [Request("one", prompt_of(17), sampling)])


@pytest.fixture(scope="session")
def crowded(laws) -> Engine:
    """Nine slots and pages for three full contexts: rows are padded, mixed and preempted."""
    return laws(TIED).engine(max_num_seqs=9, page_size=8, num_pages=43, prefill_tokens=64)


@settings(max_examples=12)
@given(requests=st.lists(st.tuples(prompts, samplings), min_size=1, max_size=12))
def test_a_batch_equals_each_row_alone(laws, crowded, requests) -> None:
    """Faults 10, 15, 31, 32, 33, 36: neighbours, slots, padding and preemption change nothing."""
    batch = [Request(f"r{i}", *request) for i, request in enumerate(requests)]
    laws(TIED).check_all(crowded, batch)


def test_every_batch_size(laws, crowded) -> None:
    """Fault 33: 1..9 rows, most of them no bucket; each neighbour's temperature differs."""
    for size in range(1, 10):
        batch = [
            Request(
                f"r{i}",
                prompt_of(5 * i + size, i),
                SamplingParams(temperature=0.4 * (i % 3), seed=i, max_new_tokens=20),
            )
            for i in range(size)
        ]
        laws(TIED).check_all(crowded, batch)


def test_preempted_rows_come_back_to_the_same_tokens(laws, crowded) -> None:
    """Fault 36: nine contexts that grow to the end on pages for three."""
    before = crowded.scheduler.preemptions
    sampled = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_new_tokens=99, ignore_eos=True)
        for i in range(9)
    ]
    batch = [Request(f"r{i}", prompt_of(20 + i, i), s) for i, s in enumerate(sampled)]
    laws(TIED).check_all(crowded, batch)
    assert crowded.scheduler.preemptions >= before + 6


def test_unseeded_requests_differ_and_survive_preemption(crowded) -> None:
    """A seed is given at admission, once."""
    before = crowded.scheduler.preemptions
    free = SamplingParams(temperature=1.5, max_new_tokens=90, ignore_eos=True)
    outputs = run(crowded, [Request(f"r{i}", prompt_of(9), free) for i in range(9)])
    assert len({tuple(tokens) for tokens, _, _ in outputs.values()}) == 9
    assert all(len(tokens) == 90 for tokens, _, _ in outputs.values())
    assert crowded.scheduler.preemptions > before


def test_a_short_request_after_a_long_one_on_the_same_slot(laws) -> None:
    """Fault 31."""
    law = laws(TIED)
    engine = law.engine(block_size=16, page_size=4, prefill_tokens=5)
    for length in (100, 1, 64, 3):
        law.check_all(engine, [Request("one", prompt_of(length), GREEDY)])


@settings(max_examples=10)
@given(
    st.lists(st.tuples(prompts, samplings), min_size=2, max_size=9),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_aborts_leave_the_others_alone(laws, crowded, requests, aborts) -> None:
    """Faults 34 and 35: rows vanish at any step, waiting, prefilling or decoding."""
    law, step = laws(TIED), 0
    batch = [Request(f"r{i}", *request) for i, request in enumerate(requests)]
    gone: set[str] = set()

    def abort_some() -> None:
        nonlocal step
        for index, at in aborts:
            if at == step and crowded.abort(f"r{index}"):
                gone.add(f"r{index}")
                assert not crowded.abort(f"r{index}")
        step += 1

    outputs = run(crowded, batch, abort_some)
    for request in batch:
        tokens, reason, _ = outputs[request.id]
        if request.id in gone:
            assert reason is None
            tokens_alone = law.plain(request)[0][: len(tokens)]
            sampling = dataclasses.replace(request.sampling, stop_token_ids=())
            prefix = (request.prompt_ids, sampling, tokens_alone, tokens, law.tally)
            assert_same_tokens(law.pair, law.params, *prefix)
        else:
            law.check(request, tokens, reason)


@pytest.fixture(scope="session")
def agreeing(tally) -> tuple[Law, Engine]:
    """A pair that accepts whole blocks of tokens that hardly repeat: flat logits, and draft and
    target draw with the same noise."""
    pair, params = tiny_pair(target={"vocab_size": 4096}, draft={"block_size": BLOCK})
    flat = jax.tree.map(lambda leaf: leaf * 0.01, params)
    law = Law(pair, flat, tally)
    return law, law.engine(page_size=4, draft_sampling="coupled")


SAMPLED = SamplingParams(temperature=1.0, seed=7, max_new_tokens=40, ignore_eos=True)


def test_eos_at_every_index_of_a_block(agreeing) -> None:
    """Faults 3, 6 and 7: token j of a stream is declared the EOS, for every j."""
    law, engine = agreeing
    covered: set[int] = set()
    for length in (5, 33):
        endless = Request("one", prompt_of(length), SAMPLED)
        stream = law.plain(endless)[0]
        cycles = law.check_all(engine, [endless])["one"]
        index_in_block = [k for count in (1, *cycles) for k in range(count)]
        for j, token in enumerate(stream):
            if token in stream[:j]:
                continue
            before = engine.stats.accepted_tokens
            stop = dataclasses.replace(SAMPLED, stop_token_ids=(token,))
            tokens, reason, _ = run(engine, [Request("one", prompt_of(length), stop)])["one"]
            assert (tokens, reason) == (stream[: j + 1], "stop")
            assert engine.stats.accepted_tokens - before <= j  # nothing counts past the EOS
            covered.add(index_in_block[j])
    assert covered == set(range(BLOCK))


def test_a_stop_token_in_the_last_place_is_a_stop(agreeing) -> None:
    """Fault 4: the stop check comes before the length check."""
    law, engine = agreeing
    stream = law.plain(Request("one", prompt_of(5), SAMPLED))[0]
    for limit in (1, 6, 17):
        last = (stream[limit - 1],)
        stop = dataclasses.replace(SAMPLED, max_new_tokens=limit, stop_token_ids=last)
        tokens, reason, _ = run(engine, [Request("one", prompt_of(5), stop)])["one"]
        assert (tokens, reason) == (stream[:limit], "stop")


def test_every_max_new_tokens(agreeing) -> None:
    """Fault 9: the limit cuts inside an accepted block."""
    law, engine = agreeing
    for limit in range(1, 3 * BLOCK + 3):
        sampling = dataclasses.replace(SAMPLED, max_new_tokens=limit)
        for length in (5, 33):
            law.check_all(engine, [Request("one", prompt_of(length), sampling)])


def test_the_end_of_the_context(agreeing, laws) -> None:
    """Fault 8: prompts of max-k, k = 1..b+2, run to the context's last position."""
    golden = laws(LLAMA)
    narrow = golden.engine(block_size=8, page_size=8, verify_width=6, prefill_tokens=100)
    for law, engine in (agreeing, (golden, narrow)):
        for k in range(1, engine.block_size + 3):
            sampling = dataclasses.replace(SAMPLED, temperature=1.0 * (k % 2))
            request = Request("one", prompt_of(MAX_LEN - k), sampling)
            tokens, reason, _ = run(engine, [request])["one"]
            assert (len(tokens), reason) == (k, "length")
            law.check(request, tokens, reason)


def test_past_the_drafts_reach_decoding_is_plain(laws, load_golden, tally) -> None:
    """The draft's own maximum length: no block ends past it, and the tokens stay the same."""
    pair, params = load_golden(LLAMA)
    short = dataclasses.replace(pair.draft_config, max_position_embeddings=50)
    law = Law(dataclasses.replace(pair, draft_config=short), params, tally)
    engine = law.engine(max_num_seqs=2, page_size=8)
    batch = [Request("long", prompt_of(60), GREEDY), Request("short", prompt_of(5), GREEDY)]
    cycles = law.check_all(engine, batch)
    assert cycles["long"] == [1] * 39
    assert max(cycles["short"]) > 1


def test_a_token_equal_to_the_mask_id_survives(load_golden, tally) -> None:
    """Fault 1: the mask id is an ordinary token of the output."""
    pair, params = load_golden(TIED)
    stream = Law(pair, params, tally).plain(Request("one", prompt_of(33), GREEDY))[0]
    for mask in {stream[0], stream[9], stream[-1]}:
        config = dataclasses.replace(pair.draft_config, mask_token_id=mask)
        law = Law(dataclasses.replace(pair, draft_config=config), params, tally)
        tokens = run(law.engine(), [Request("one", prompt_of(33), GREEDY)])["one"][0]
        assert tokens == stream and mask in tokens


def test_only_written_tokens_can_stop(agreeing) -> None:
    """Fault 2: the mask id (drafts' input) and 0 (padding) stop nothing unless they are drawn."""
    law, engine = agreeing
    mask = law.pair.draft_config.mask_token_id
    stops = dataclasses.replace(SAMPLED, stop_token_ids=(mask, 0))
    requests = [Request("one", prompt_of(length), stops) for length in (5, 33, 64)]
    for request in requests:
        assert not {mask, 0} & set(law.plain(request)[0]), "choose another seed"
        law.check_all(engine, [request])


def test_random_pairs(tally) -> None:
    """A draft that never agrees costs nothing but time; taps and shapes of other kinds."""
    kinds = [
        {"target": {"num_kv_heads": 1}, "draft": {"windows": (3, None), "causal": (True, False)}},
        {"target": {"qk_norm": False, "architecture": "llama", "tie_word_embeddings": True}},
    ]
    for kind in kinds:
        pair, params = tiny_pair(**kind)
        law = Law(pair, params, tally)
        for seed in range(6):
            sampling = SamplingParams(temperature=0.5 * seed, seed=seed, max_new_tokens=50)
            law.check_all(
                law.engine(), [Request("one", prompt_of(seed * 9 + 1, vocab=39), sampling)]
            )


@pytest.mark.parametrize("draft_sampling", ["argmax", "coupled"])
def test_the_speculative_law_is_the_targets(draft_sampling) -> None:
    """Fault 13: the joint law of three tokens over 4,000 seeds against the exact one."""
    draws, vocab = 4000, 4
    pair, params = tiny_pair(target={"vocab_size": vocab, "num_layers": 1})
    config = EngineConfig(
        max_num_seqs=16, max_model_len=16, prefill_tokens=512, draft_sampling=draft_sampling
    )
    engine = Engine(pair, params, config)
    prompt = (1, 2, 3, 0, 1)
    params_of = functools.partial(
        SamplingParams, temperature=3.0, top_p=0.97, max_new_tokens=3, ignore_eos=True
    )
    outputs = run(engine, [Request(str(i), prompt, params_of(seed=i)) for i in range(draws)])
    assert max(max(cycles) for _, _, cycles in outputs.values()) == 4, "no draft was accepted"
    counts = np.zeros((vocab,) * 3)
    for tokens, _, _ in outputs.values():
        counts[tuple(tokens)] += 1

    def law_after(tokens: tuple[int, ...]) -> np.ndarray:
        logits = target_oracle(pair, params, (*prompt, *tokens))[0][-1].astype(np.float64) / 3
        p = np.exp(logits - logits.max())
        p /= p.sum()
        above = np.array([p[logits > v].sum() for v in logits])
        p = np.where(above < 0.97, p, 0)
        return p / p.sum()

    exact = np.zeros_like(counts)
    for a, p in enumerate(law_after(())):
        for b, q in enumerate(law_after((a,))):
            exact[a, b] = p * q * law_after((a, b))
    likely = exact * draws >= 5  # chi-square's usual condition on a cell
    rest = np.array([[counts[~likely].sum(), draws * exact[~likely].sum()]])
    cells = np.concatenate([np.stack([counts[likely], draws * exact[likely]], -1), rest])
    cells = cells[cells[:, 1] > 1]
    statistic = ((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum()
    freedom = len(cells) - 1
    # Mean + 5 standard deviations of chi-square; the seeds are fixed.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    assert counts[exact == 0].sum() == 0
