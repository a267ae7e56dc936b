"""The front door: load, generate and stream, on a tiny pair with a tokenizer."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from tiny_model import GOLDEN, write_model

import dflash_jax
from dflash_jax import LLM, EngineConfig, Generation, SamplingParams
from dflash_jax.resolve import ResolveError

CONTEXT = 80
ENGINE = EngineConfig(
    max_num_seqs=2, max_model_len=CONTEXT, prefill_tokens=32, batch_buckets=(2,), seed=0
)
IDS = [5, 5, 5, 9, 9, 9, 9, 40, 40]
# Sampled, so that tokens vary; cool enough that drafts are accepted.
FREE = {"ignore_eos": True, "temperature": 0.6, "seed": 5}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return dflash_jax.load(*write_model(tmp_path_factory.mktemp("generate")), engine=ENGINE)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM):
    yield
    assert_clean(llm)


def assert_clean(llm: LLM) -> None:
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()
    (pages,) = llm.engine.scheduler.allocators
    assert pages.num_free == pages.num_pages - 1


@pytest.fixture(scope="module")
def long(llm: LLM) -> Generation:
    result = llm.generate(IDS, max_new_tokens=40, **FREE)
    assert len(set(result.output_ids)) > 9 and len(result.statistics.histogram) > 2
    return result


def test_one_prompt_gives_one_and_a_list_a_list(llm: LLM) -> None:
    text = "the cat and"
    one = llm.generate(text, max_new_tokens=6)
    assert isinstance(one, Generation) and one.text is not None
    ids = llm.encode(text)
    assert ids[0] == 1, "the tokenizer's BOS"
    same = [llm.generate(list(ids), max_new_tokens=6), llm.generate([text], max_new_tokens=6)[0]]
    assert [g.output_ids for g in same] == [one.output_ids] * 2
    # Three in two slots, of three kinds, in order.
    chat = [{"role": "user", "content": "hat"}]
    mixed = llm.generate([text, IDS, chat], max_new_tokens=6)
    alone = [llm.generate(prompt, max_new_tokens=6) for prompt in (text, IDS, chat)]
    assert [g.output_ids for g in mixed] == [g.output_ids for g in alone]
    assert llm.generate([IDS], max_new_tokens=6)[0].output_ids == alone[1].output_ids


def test_chats_go_through_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hat"}]
    assert llm.tokenizer is not None
    rendered = "<s>user: hat\nassistant:"
    assert llm.encode(chat) == tuple(llm.tokenizer(rendered, add_special_tokens=False)["input_ids"])
    loud = llm.encode(chat, {"loud": True})
    assert llm.tokenizer.decode(loud).endswith("LOUD assistant:")
    with pytest.raises(ValueError, match="'tokenize' cannot be a variable of a chat template"):
        llm.encode(chat, {"tokenize": False})
    with pytest.raises(ValueError, match="refuses these messages: no tools"):
        llm.encode([{"role": "tool", "content": "3"}])


def test_what_needs_a_tokenizer_or_a_template_says_so(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hat"}]
    bare = LLM(llm.engine, None, "bare", {})
    for prompt in ("text", chat):
        with pytest.raises(ValueError, match="bare has no tokenizer; give the prompt as token ids"):
            bare.generate(prompt)
    with pytest.raises(ValueError, match="bare has no tokenizer; stop strings need one"):
        bare.generate(IDS, stop=["x"])
    result = bare.generate(IDS, max_new_tokens=3, **FREE)
    assert result.text is None and len(result.output_ids) == 3
    assert llm.tokenizer is not None
    template, llm.tokenizer.chat_template = llm.tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match="has no chat template; give the prompt as text"):
            llm.generate(chat)
    finally:
        llm.tokenizer.chat_template = template


@pytest.mark.parametrize("settings", [FREE, {"temperature": 1.0, "seed": 4}, {"stop": ["e"]}])
def test_a_stream_joins_to_generate(llm: LLM, settings: dict) -> None:
    whole = llm.generate("the hat", max_new_tokens=23, **settings)
    pieces = list(llm.stream("the hat", max_new_tokens=23, **settings))
    assert sum((p.output_ids for p in pieces), []) == whole.output_ids
    assert "".join(p.text for p in pieces) == whole.text
    # generate also counts the spare cycle that emits nothing; a stream ends before it.
    counts = [p.committed for p in pieces][1:]
    assert whole.statistics.tokens_per_cycle[: len(counts)] == counts
    assert pieces[0].committed is None
    assert [p.finish_reason for p in pieces if p.finish_reason] == [whole.finish_reason]


def test_a_stream_closed_early_frees_what_it_holds(llm: LLM) -> None:
    stream = llm.stream(IDS, max_new_tokens=60, **FREE)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert_clean(llm)


@pytest.mark.parametrize("limit", [1, 2, 3, 15, 16, 17, 18, 33])
def test_max_new_tokens_is_exact(llm: LLM, long: Generation, limit: int) -> None:
    """One token more is run, and cut; the cycles alone commit as many as were asked for."""
    result = llm.generate(IDS, max_new_tokens=limit, **FREE)
    assert result.output_ids == long.output_ids[:limit]
    assert result.finish_reason == "length"
    cycles = result.statistics.tokens_per_cycle
    assert sum(cycles) >= limit > sum(cycles[:-1])


def test_the_context_ends_an_output(llm: LLM) -> None:
    result = llm.generate(IDS, max_new_tokens=500, **FREE)
    assert len(result.output_ids) == CONTEXT - len(IDS) and result.finish_reason == "length"


def test_stop_tokens_at_every_place(llm: LLM, long: Generation) -> None:
    """Before the limit, exactly at it, and just past it, where the token that is run in excess
    must not turn a length into a stop."""
    for place, token in enumerate(long.output_ids[:24]):
        if token in long.output_ids[:place]:
            continue
        for limit in {place, place + 1, place + 2} - {0}:
            result = llm.generate(IDS, max_new_tokens=limit, stop_token_ids=(token,), **FREE)
            stopped = place < limit
            assert result.output_ids == long.output_ids[: place + 1 if stopped else limit]
            assert result.finish_reason == ("stop" if stopped else "length"), (place, limit)


def with_eos(llm: LLM, token: int) -> LLM:
    """The same, where ``token`` ends an output."""
    pair = llm.pair
    config = dataclasses.replace(pair.target_config, eos_token_ids=(token,))
    llm.engine.pair = dataclasses.replace(pair, target_config=config)
    return llm


def test_eos_ends_unless_ignored(llm: LLM, long: Generation) -> None:
    place = next(i for i in range(2, 30) if long.output_ids[i] not in long.output_ids[:i])
    original = llm.engine.pair
    try:
        with_eos(llm, long.output_ids[place])
        assert llm.generate(IDS, max_new_tokens=40, **FREE).output_ids == long.output_ids
        for limit, reason in [(place, "length"), (place + 1, "stop"), (place + 9, "stop")]:
            result = llm.generate(IDS, temperature=0.6, seed=5, max_new_tokens=limit)
            assert result.output_ids == long.output_ids[: min(limit, place + 1)]
            assert result.finish_reason == reason
    finally:
        llm.engine.pair = original


def test_stop_strings(llm: LLM) -> None:
    """At the first place where one is complete, wherever the cycles end."""
    whole = llm.generate("the cat", max_new_tokens=30, **FREE)
    assert whole.text is not None
    readable = [i for i in range(len(whole.text) - 1) if "\ufffd" not in whole.text[i : i + 2]]
    assert readable, "a seed with some text"
    for start in readable[:8]:
        stop = whole.text[start : start + 2]
        result = llm.generate("the cat", max_new_tokens=30, stop=[stop, "\n\n\n"], **FREE)
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.output_ids == whole.output_ids[: len(result.output_ids)]
    never = llm.generate("the cat", max_new_tokens=30, stop=["@@@"], **FREE)
    assert (never.text, never.finish_reason) == (whole.text, "length")


def test_seeds(llm: LLM) -> None:
    def draw(seed: int | None) -> Sequence[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=12, ignore_eos=True)
        return llm.generate(IDS, sampling).output_ids

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)
    sampling = SamplingParams(temperature=1.0, seed=7, max_new_tokens=12, ignore_eos=True)
    batch = llm.generate([IDS, IDS], sampling)
    assert batch[0].output_ids == batch[1].output_ids == draw(7)


def test_settings_are_checked_by_name(llm: LLM) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        llm.generate(IDS, max_tokens=3)
    with pytest.raises(TypeError, match="max_tokens"):
        llm.stream(IDS, max_tokens=3)  # at the call, not at the first piece
    with pytest.raises(ValueError, match="top_p must be in"):
        llm.generate(IDS, top_p=0.0)
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    assert len(llm.generate(IDS, sampling).output_ids) == 2
    assert len(llm.generate(IDS, sampling, max_new_tokens=4).output_ids) == 4


def test_statistics_agree_with_the_output(llm: LLM, long: Generation) -> None:
    statistics = long.statistics
    assert statistics.emitted == len(long.output_ids) - 1, "prefill drew the first"
    assert len(statistics.cycle_seconds) == len(statistics.tokens_per_cycle)
    assert min(statistics.cycle_seconds) > 0
    ends = list(accumulate(statistics.tokens_per_cycle))
    emitting = 1 + sum(end < statistics.emitted for end in ends)
    assert long.tau == statistics.emitted / emitting
    assert emitting in (len(ends) - 1, len(ends)), "one spare cycle at most"
    assert sum(n * count for n, count in statistics.histogram.items()) >= 40
    stopped = llm.generate(IDS, max_new_tokens=40, stop_token_ids=(long.output_ids[0],), **FREE)
    assert (stopped.statistics.tau, stopped.statistics.histogram) == (0.0, {})


@pytest.mark.parametrize(
    ("prompts", "settings", "match"),
    [
        ([IDS, []], {}, "the prompt is empty"),
        ([IDS, IDS, [1] * CONTEXT], {}, f"has {CONTEXT} tokens"),
        ([IDS, [288]], {}, "token id 288"),
        ([IDS], {"stop": ["x", ""]}, "a stop string is empty"),
    ],
)
def test_a_failed_prompt_leaves_nothing_behind(llm, prompts, settings, match) -> None:
    with pytest.raises(ValueError, match=match):
        llm.generate(prompts, **settings)
    assert_clean(llm)


def test_interleaved_callers_get_their_own(llm: LLM, long: Generation) -> None:
    """Whoever steps the engine moves all requests; no one's tokens may be lost."""
    stream = llm.stream(IDS, max_new_tokens=40, **FREE)
    first = next(stream)
    between = llm.generate("the cat", max_new_tokens=20, **FREE)
    rest = list(stream)
    assert first.output_ids + sum((p.output_ids for p in rest), []) == long.output_ids
    assert between.output_ids == llm.generate("the cat", max_new_tokens=20, **FREE).output_ids


def test_load_speaks_plainly_without_a_draft(llm: LLM, long: Generation) -> None:
    """The law from the outside, and the checkpoint's own sampling values."""
    plain = dflash_jax.load(GOLDEN / "target", engine=ENGINE)
    assert plain.pair.draft is None and plain.tokenizer is None
    result = plain.generate(IDS, max_new_tokens=40, **FREE)
    assert result.output_ids == long.output_ids and result.text is None
    assert set(result.statistics.tokens_per_cycle) == {1} and result.tau <= 1
    assert plain.name == str(GOLDEN / "target")


def test_load_reports_the_checkpoints_sampling(tmp_path: Path) -> None:
    target, _ = write_model(tmp_path)
    text = '{"temperature": 0.6, "top_k": 20, "do_sample": true, "eos_token_id": 2, "top_p": null}'
    (target / "generation_config.json").write_text(text)
    llm = dflash_jax.load(target, engine=EngineConfig(max_model_len=32), dtype="bfloat16")
    assert llm.defaults == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    assert llm.pair.dtype == np.dtype("bfloat16")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("seed", 1.5),
        ("max_new_tokens", 2.5),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("stop_token_ids", 5),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(llm: LLM, setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting):
        llm.generate([1, 2, 3], **{setting: value})


def test_numpy_ids_are_ids(llm: LLM) -> None:
    ids = np.array([5, 6, 7])
    settings = {"max_new_tokens": 3, "ignore_eos": True}
    assert llm.generate(list(ids), **settings).output_ids == (
        llm.generate([5, 6, 7], **settings).output_ids
    )


def test_impossible_arguments_of_load_are_named(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "goldens" / "llama-scaled" / "target"
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="int8"):
        dflash_jax.load(folder, dtype="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="-1"):
        dflash_jax.load(folder, data_parallel=-1)
    with pytest.raises(ResolveError, match="a draft is an HF folder"):
        dflash_jax.load(folder, tmp_path / "draft.gguf")
