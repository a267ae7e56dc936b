"""Requests: what is honoured, what is refused by name, what is warned of once."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.serve import protocol
from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.protocol import ChatRequest, CompletionRequest, NativeRequest, parse

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def refused(**fields) -> ApiError:
    with pytest.raises(ApiError) as error:
        body = chat(**fields)
        _ = body.stops, body.wants_usage
        tokens = 1 if body.max_tokens is None else body.max_tokens
        body.params(max_tokens=tokens, seed=body.seed, defaults={}, name="max_tokens")
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("n", True), ("logprobs", True), ("top_logprobs", 5), ("logit_bias", {"1": 1}),
        ("frequency_penalty", 0.1), ("presence_penalty", -1), ("repetition_penalty", 1.1),
        ("min_tokens", 1), ("response_format", {"type": "json_object"}), ("tools", [{}]),
        ("tool_choice", "required"), ("echo", True), ("suffix", "x"), ("best_of", 2),
        ("logprobs", 0), ("guided_json", {}), ("bad_words", ["x"]), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_a_field_that_is_not_honoured_is_named(field, value):
    error = refused(**{field: value})
    assert field in error.message and error.param == field
    assert error.body()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("field", protocol.NEUTRAL)
def test_null_and_neutral_values_are_accepted(field):
    for value in (None, *protocol.NEUTRAL[field]):
        chat(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "8"), ("max_tokens", True), ("max_tokens", 1.5), ("max_tokens", 0),
        ("max_tokens", -1), ("temperature", "hot"), ("temperature", -0.1), ("temperature", 1e9),
        ("temperature", 10**400), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**31),
        ("min_p", 2), ("seed", 2**64), ("seed", "x"), ("stop", 3), ("stop", [""]), ("stop", ""),
        ("stop", ["x"] * 65), ("stop", "x" * 1025), ("stop", ["x"] * 100_000),
        ("stop_token_ids", list(range(2000))), ("stop_token_ids", ["a"]), ("messages", []),
        ("messages", "hi"), ("messages", [{"role": "user"}]), ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": 1}]), ("model", 1), ("stream", "yes"),
        ("stream_options", {"include_usage": True}), ("chat_template_kwargs", []),
        ("request_id", ""), ("request_id", "a b"), ("request_id", "x" * 200),
    ],
)  # fmt: skip
def test_wrong_types_and_values_are_named(field, value):
    error = refused(**{field: value})
    assert error.param is not None and error.param.split(".")[0] == field


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b'{"messages": NaN}', b"[" * 10_000, b'{"a": "\xff"}',
     b'{"a": "\\ud800"}', b"1" * 10_000],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(ApiError, match="JSON"):
        parse(ChatRequest, body)


def test_a_million_wrong_items_are_one_error():
    with pytest.raises(ApiError) as error:
        parse(CompletionRequest, json.dumps({"prompt": [None] * 10**6}).encode())
    assert len(error.value.message) < 1000


def test_unknown_fields_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(protocol, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat(zzz=1, user="u")
        for i in range(1000):
            chat(**{f"field{i}": 1})
    assert sum("'zzz'" in message for message in caplog.messages) == 1
    assert len(caplog.messages) <= protocol.MAX_WARNINGS
    assert not any("'user'" in message for message in caplog.messages)


def test_defaults_are_the_models_then_openais():
    body = chat(top_p=0.5)
    params = body.params(
        max_tokens=3, seed=-(2**63), defaults={"top_p": 0.9, "top_k": 20}, name="max_tokens"
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 0.5, 20, 0.0)
    assert params.seed == -(2**63)


def test_a_model_that_does_not_sample_is_greedy_by_default():
    def temperature(**fields):
        defaults = {"do_sample": False, "temperature": 0.6}
        body = chat(**fields)
        return body.params(max_tokens=1, seed=None, defaults=defaults, name="").temperature

    assert temperature() == 0.0
    assert temperature(temperature=0.3) == 0.3


def test_text_parts_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "x"}])
    assert body.messages[0].for_template() == {"role": "user", "content": "a\nb", "name": "x"}
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(ApiError, match="image_url"):
        chat(messages=[{"role": "user", "content": image}]).messages[0].for_template()


def test_prompts_of_every_kind():
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompt == prompt
    native = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
    assert parse(NativeRequest, json.dumps(native).encode()).input_ids == [1]
    with pytest.raises(ApiError, match="min_new_tokens"):
        native["sampling_params"]["min_new_tokens"] = 2
        parse(NativeRequest, json.dumps(native).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
known_fields = st.sampled_from([*ChatRequest.model_fields, *protocol.NEUTRAL])


@given(st.dictionaries(known_fields, json_values, max_size=4))
def test_any_values_give_a_request_or_a_400(fields):
    try:
        body = chat(**fields)
        _ = body.stops, body.wants_usage, [m.for_template() for m in body.messages]
        tokens = 1 if body.max_tokens is None else body.max_tokens
        body.params(max_tokens=tokens, seed=body.seed, defaults={}, name="max_tokens")
    except ApiError as error:
        assert error.status == 400
