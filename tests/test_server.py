"""The server through HTTP: what it answers equals the engine's own output, whatever goes on."""

import asyncio
import concurrent.futures
import contextlib
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import MODEL, Running, run_server, solo
from tiny_model import write_model

import dflash_jax
from dflash_jax.engine import EngineConfig
from dflash_jax.generate import LLM, load

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=128, prefill_tokens=32)
LONG = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(folders) -> LLM:
    """The same pair on an engine of its own: the oracle."""
    llm = load(*folders, engine=CONFIG)
    llm.engine.warm_up()
    return llm


@pytest.fixture(scope="module")
def server(folders, alone):
    def prepare() -> LLM:
        llm = load(*folders, engine=CONFIG)
        llm.engine.warm_up()
        return llm

    with run_server(prepare, max_request_bytes=200_000) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_leaks(server: Running):
    """Every test leaves every page free."""
    yield
    deadline = time.monotonic() + 120
    scheduler = server.engine.served.engine.scheduler
    while scheduler.running or scheduler.waiting or server.engine.live_ids():
        assert time.monotonic() < deadline, "a request is still held"
        time.sleep(0.01)
    scheduler.check_integrity()
    assert all(a.num_free == a.num_pages - 1 for a in scheduler.allocators)


def encode(llm: LLM, text: str, special: bool = True) -> tuple[int, ...]:
    assert llm.tokenizer is not None
    return tuple(llm.tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids)


def decode(llm: LLM, tokens) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.backend_tokenizer.decode(list(tokens))


def sampled(i: int) -> dict:
    return {"temperature": 0.7 + 0.2 * (i % 4), "seed": i, "top_p": 0.95}


def test_chat_streamed_equals_whole_equals_solo(server, alone):
    messages = [{"role": "user", "content": "שלום 😀"}]
    prompt = encode(alone, "<s>user: שלום 😀\nassistant:", special=False)
    for i in range(6):
        common = {"model": MODEL, "messages": messages, "max_tokens": 40, **sampled(i)}
        with server.openai() as client:
            whole = client.chat.completions.create(**common)
            chunks = list(
                client.chat.completions.create(
                    **common, stream=True, stream_options={"include_usage": True}
                )
            )
        tokens, reason = solo(alone, prompt, max_new_tokens=40, **sampled(i))
        spoken = tokens[:-1] if reason == "stop" else tokens
        assert whole.choices[0].message.content == decode(alone, spoken)
        assert whole.choices[0].finish_reason == reason
        assert whole.usage.completion_tokens == len(tokens)
        assert whole.usage.prompt_tokens == len(prompt)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert not any(c.choices[0].delta.role for c in chunks[1:-1])
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == reason
        assert sum(c.choices[0].finish_reason is not None for c in chunks[:-1]) == 1
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert len({c.id for c in chunks}) == 1


def test_the_event_stream_ends_with_done(server):
    body = {"prompt": "the cat", "max_tokens": 4, "stream": True}
    response = server.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.strip().split("\n\n")
    assert all(e.startswith("data: ") for e in events)
    assert events[-1] == "data: [DONE]"


def test_greedy_blocks_are_cut_at_max_tokens(server, alone):
    """A golden that accepts whole blocks: each limit is met exactly, in few steps."""
    prompt = encode(alone, "hi")
    tokens, _ = solo(alone, prompt, max_new_tokens=40)
    for limit in (1, 2, 3, 15, 16, 17, 18, 33, 40):
        body = {"text": "hi", "sampling_params": {"temperature": 0, "max_new_tokens": limit}}
        answer = server.post("/generate", body).json()
        assert answer["output_ids"] == tokens[:limit]
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == limit
        assert meta["finish_reason"] == {"type": "length", "length": limit}
        assert meta["spec_verify_ct"] < max(limit, 2)
        if limit > 1:
            assert meta["spec_accept_length"] == limit / meta["spec_verify_ct"]


def test_a_stop_token_at_every_place_in_a_block(server, alone):
    for seed in range(20):
        tokens, _ = solo(alone, encode(alone, "x"), max_new_tokens=20, temperature=1.0, seed=seed)
        stop = tokens[seed % len(tokens)]
        body = {"text": "x", "sampling_params": {"temperature": 1.0, "max_new_tokens": 20,
                "sampling_seed": seed, "stop_token_ids": [stop]}}  # fmt: skip
        answer = server.post("/generate", body).json()
        assert answer["output_ids"] == tokens[: tokens.index(stop) + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop"}


def test_stop_strings_are_cut_wherever_they_fall(server):
    for seed in range(8):
        body = {"prompt": "the cat", "max_tokens": 30, "ignore_eos": True, **sampled(seed)}
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
        for at in (0, len(text) // 2, len(text) - 2):
            stop = text[at : at + 2]
            cut = server.post("/v1/completions", {**body, "stop": [stop]}).json()
            assert cut["choices"][0]["text"] == text[: text.index(stop)]
            assert cut["choices"][0]["finish_reason"] == "stop"
            kept = server.post(
                "/v1/completions", {**body, "stop": stop, "include_stop_str_in_output": True}
            ).json()
            assert kept["choices"][0]["text"] == text[: text.index(stop) + len(stop)]
            assert kept["usage"] == cut["usage"]
            events = server.post("/v1/completions", {**body, "stop": stop, "stream": True}).text
            assert events.count('"finish_reason":"stop"') == 1


def test_many_different_requests_at_once_equal_their_solo_runs(server, alone):
    """More requests than rows, long and short mixed: no two share anything."""

    def ask(i: int) -> list[int]:
        sampling = {"max_new_tokens": 1 + 7 * (i % 9), "temperature": 0.3 * (i % 4)}
        sampling |= {"sampling_seed": i, "top_k": 50 * (i % 2), "ignore_eos": bool(i % 3)}
        body = {"input_ids": prompt(i), "sampling_params": sampling}
        return server.post("/generate", body).json()["output_ids"]

    def prompt(i: int) -> list[int]:
        return [3 + (i * 31 + j * j) % 280 for j in range(1 + (i * 13) % 60)]

    before = server.metric("dflash:compilations_after_ready_total")
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        outputs = list(pool.map(ask, range(24)))
    assert server.metric("dflash:compilations_after_ready_total") == before
    for i, output in enumerate(outputs):
        expected, _ = solo(
            alone, tuple(prompt(i)), max_new_tokens=1 + 7 * (i % 9), temperature=0.3 * (i % 4),
            seed=i, top_k=50 * (i % 2), ignore_eos=bool(i % 3),
        )  # fmt: skip
        assert output == expected, f"request {i}"


def test_completions_take_lists_of_text_and_ids(server, alone):
    ids = [list(encode(alone, text)) for text in ("the cat", "😀")]
    common = {"max_tokens": 6, "temperature": 0}
    by_text = server.post("/v1/completions", {"prompt": ["the cat", "😀"], **common}).json()
    by_ids = server.post("/v1/completions", {"prompt": ids, **common}).json()
    assert by_text["choices"] == by_ids["choices"]
    assert [c["index"] for c in by_text["choices"]] == [0, 1]
    one = server.post("/v1/completions", {"prompt": ids[1], **common}).json()
    assert one["choices"][0]["text"] == by_ids["choices"][1]["text"]
    stream = server.post("/v1/completions", {"prompt": ids, **common, "stream": True}).text
    assert stream.count('"finish_reason":"length"') == 2


def test_native_streams_have_all_the_text_so_far(server):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
            "stream": True}  # fmt: skip
    events = server.post("/generate", body).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert server.post("/generate", {**body, "stream": False}).json()[1]["meta_info"]


def test_unseeded_requests_differ(server):
    body = {"prompt": "a", "max_tokens": 30, "temperature": 1.5, "ignore_eos": True}
    texts = {server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("room", range(18))
def test_the_last_tokens_of_the_context(server, alone, room):
    """Prompts of max - k tokens: exact counts, or 400 where none is left."""
    prompt = [5] * (128 - room)
    body = {"prompt": prompt, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    if room == 0:
        assert response.status_code == 400
        assert "127" in response.json()["error"]["message"]
        return
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == room
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [[]]}, 400),
        ("/v1/completions", {"prompt": ["a", ""]}, 400),
        ("/v1/completions", {"prompt": ["a"] * 10_000}, 400),
        ("/v1/completions", {"prompt": [5] * 1280}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": [10**30]}, 400),
        ("/v1/completions", {"prompt": [True]}, 400),
        ("/v1/completions", {"prompt": {"a": 1}}, 400),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}, 400),
        ("/v1/completions", {"prompt": "a" * 300_000}, 413),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400),
        ("/v1/completions", {"prompt": "a", "temperature": -1, "stream": True}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "u", "content": ""}], "chat_template_kwargs": {"tokenize": 1}},
            400,
        ),
        ("/generate", {}, 400),
        ("/generate", {"text": "a", "input_ids": [1]}, 400),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/tokenize", {}, 400),
        ("/abort", {}, 400),
        ("/no/such/path", {}, 404),
        ("/health", {}, 405),
    ],
)
def test_bad_requests_are_answered_and_harm_nobody(server, path, body, status):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_400(server, data):
    response = httpx.post(server.url + "/v1/completions", content=data, trust_env=False)
    assert response.status_code == 400


def test_a_body_of_undeclared_length_has_the_same_limit(server):
    chunks = (b" " * 50_000 for _ in range(10))
    response = httpx.post(server.url + "/generate", content=chunks, trust_env=False)
    assert response.status_code == 413


def test_only_special_tokens_run(server):
    answer = server.post("/v1/completions", {"prompt": [1, 2, 2], "max_tokens": 3}).json()
    assert answer["usage"]["prompt_tokens"] == 3


def test_template_kwargs_reach_the_template(server):
    messages = [{"role": "user", "content": "x"}]
    plain = server.post("/tokenize", {"messages": messages}).json()
    loud = server.post(
        "/tokenize", {"messages": messages, "chat_template_kwargs": {"loud": True}}
    ).json()
    assert loud["count"] == plain["count"] + len("LOUD ")
    back = server.post("/detokenize", {"tokens": loud["tokens"]}).json()
    assert back["prompt"] == "<s>user: x\nLOUD assistant:"


def test_models_and_operations(server):
    with server.openai() as client:
        assert [card.id for card in client.models.list().data] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
    assert server.get("/v1/models/other").status_code == 404
    assert server.get("/health").json()["status"] == "ready"
    assert server.get("/ready").status_code == 200
    assert server.get("/version").json()["version"] == dflash_jax.__version__
    assert server.get("/server_info").json()["engine"]["max_num_seqs"] == 4
    assert server.get("/flush_cache").status_code == server.post("/flush_cache", {}).status_code
    names = server.get("/metrics").text
    for name in ("vllm:spec_decode_num_drafts_total", "sglang:spec_accept_length",
                 "vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket",
                 'vllm:request_success_total{finished_reason="length"}'):  # fmt: skip
        assert name in names


def test_proposed_accepted_and_emitted_are_counted_apart(server):
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")

    def read():
        counts = [server.metric(f"vllm:spec_decode_num_{name}_total") for name in names]
        return [*counts, server.metric("vllm:generation_tokens_total")]

    before = read()
    body = {"text": "hi", "sampling_params": {"temperature": 0, "max_new_tokens": 10}}
    meta = server.post("/generate", body).json()["meta_info"]
    drafts, drafted, accepted, by_place, emitted = (
        a - b for a, b in zip(read(), before, strict=True)
    )
    assert (drafts, emitted) == (meta["spec_verify_ct"], 10)
    assert drafted == 15 * drafts
    assert accepted == by_place == meta["spec_accept_token_num"] <= emitted


def test_clients_that_leave_free_their_pages(server):
    """Both kinds of answer, left at several moments; the fixture checks the pages."""
    aborted = server.metric("dflash:requests_aborted_total")
    for stream in (True, False):
        for wait in (0.001, 0.005, 0.02):
            with contextlib.suppress(httpx.TimeoutException):  # a fast machine may answer first
                body = {**LONG, "prompt": ["a", "b", "c", "d", "e", "f"], "stream": stream}
                timeout = httpx.Timeout(5, read=wait)
                with (
                    httpx.Client(trust_env=False) as client,
                    client.stream(
                        "POST", server.url + "/v1/completions", json=body, timeout=timeout
                    ) as response,
                ):
                    if stream:
                        next(response.iter_raw())
                        raise httpx.ReadTimeout("enough")
    deadline = time.monotonic() + 120
    while server.metric("dflash:requests_aborted_total") <= aborted:
        assert time.monotonic() < deadline
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_abort_ends_an_answer_with_its_reason(server):
    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=300) as client:
            body = {**LONG, "prompt": ["a"] * 8, "request_id": "mine"}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            aborted: list[str] = []
            while not aborted and not answer.done():
                aborted = (await client.post("/abort", json={"rid": "mine"})).json()["aborted"]
            return aborted, (await answer).json()

    aborted, answer = asyncio.run(scenario())
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert aborted and reasons.count("abort") == len(aborted)
    assert server.post("/abort", {"rid": "nobody"}).json() == {"aborted": []}
