"""Loss masks of conversations, under chat templates of the kinds that models come with."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_jax.tokenizer import PreTrainedTokenizerFast
from train.conversations import messages_of, tokens_of_conversation, tools_of

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

LLAMA = """{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""

# Thoughts survive in what follows the last question of the user, and nowhere else.
QWEN = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

PLAIN = """{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""

FORGETFUL = """{%- if add_generation_prompt -%}{{ '<think>' }}{%- endif -%}""" + CHATML

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
MERGES = ("Ċ Ċ", "Ġ Ġ", "Ġ h", "h i", "l l", "e r")


def tokenizer_of(template: str, *, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, newlines and spaces among them, that puts a BOS before a
    plain text, as Llama's does. ``trim_offsets``: Llama's leave spaces out, Qwen's do not."""
    pairs = [tuple(merge.split()) for merge in MERGES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False
    )


TOKENIZERS = {
    "chatml": tokenizer_of(CHATML, trim_offsets=False),
    "llama": tokenizer_of(LLAMA),
    "qwen": tokenizer_of(QWEN),
}
END = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "qwen": "<|im_end|>"}


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(contents)
    return start + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def supervised(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any
) -> list[str]:
    """The texts of the runs of supervised tokens; checks the ids against the rendered text."""
    options = {"template_options": {}, **options}
    ids, mask = tokens_of_conversation(tokenizer, messages, **options)
    assert len(ids) == len(mask)
    runs, edges = [], np.flatnonzero(np.diff([0, *mask, 0]))
    for start, stop in edges.reshape(-1, 2):
        runs.append(tokenizer.decode(ids[start:stop]))
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, **options["template_options"]
    )
    assert tokenizer.decode(ids) == rendered
    return runs


# Spaces and newlines at either end, which merge with a template's own; bytes of a character.
said = st.text(st.sampled_from("hi \nlér:語"), max_size=12)


@pytest.mark.parametrize("name", ["chatml", "qwen"])
@given(st.lists(said, min_size=2, max_size=6), st.none() | said)
def test_what_the_assistant_said_and_its_end_of_turn_are_learnt(name, contents, system) -> None:
    contents = contents[: len(contents) // 2 * 2]
    answers = [content + END[name] for content in contents[1::2]]
    found = supervised(TOKENIZERS[name], turns(*contents, system=system))
    if not any(content.startswith("\n") for content in contents[1::2]):
        assert found == answers
    # A newline of the answer's merges with the prompt's, and that token is not the assistant's.
    for answer, run in zip(answers, found, strict=True):
        assert answer.endswith(run) and answer.strip("\n") == run.strip("\n")


@given(st.lists(said, min_size=2, max_size=6))
def test_a_template_that_trims(contents) -> None:
    contents = contents[: len(contents) // 2 * 2]
    found = supervised(TOKENIZERS["llama"], turns(*contents))
    assert found == [content.strip() + "<|eot_id|>" for content in contents[1::2]]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_last_turn_alone(name: str) -> None:
    messages = turns("a", "b c", "d", "  e\n f")
    (only,) = supervised(TOKENIZERS[name], messages, supervise="last")
    assert only.strip() == f"e\n f{END[name]}"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_one_bos(name: str) -> None:
    """The template's own, where it has one: the tokenizer adds none."""
    tokenizer = TOKENIZERS[name]
    ids, _ = tokens_of_conversation(tokenizer, turns("a", "b"), template_options={})
    assert ids.count(tokenizer.convert_tokens_to_ids("<|begin_of_text|>")) == (name == "llama")
    assert ids == tokenizer.apply_chat_template(turns("a", "b"), return_dict=False)


def test_turns_that_the_template_rewrites_later_are_not_learnt() -> None:
    messages = turns("q", "<think>\nhm\n</think>\n\nhi", "r", "<think>\nso\n</think>\n\nho")
    assert supervised(TOKENIZERS["qwen"], messages) == ["<think>\nso\n</think>\n\nho<|im_end|>"]
    messages[1]["content"] = "hi"  # nothing to rewrite
    assert supervised(TOKENIZERS["qwen"], messages)[0] == "hi<|im_end|>"


def test_a_rewritten_turn_hides_nothing_behind_it() -> None:
    """The second turn follows the rewritten first, as it would in use."""
    thought = "<think>\nhm\n</think>\n\n"
    messages = turns("q", thought + "hi", "r", "ho", "s", "er")
    assert supervised(TOKENIZERS["qwen"], messages) == ["ho<|im_end|>", "er<|im_end|>"]


def test_empty_thoughts_belong_to_who_writes_them() -> None:
    """Qwen3 puts empty thoughts into a last turn without any, and into the prompt on request."""
    empty = "<think>\n\n</think>\n\n"
    add = """{%- if m.role == 'assistant' and '</think>' not in content and loop.last -%}
{%- set content = '<think>\n\n</think>\n\n' + content -%}{%- endif -%}{{ '<|im_start|>' + m.role"""
    ask = """{%- if enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}"""
    template = QWEN.replace("{{ '<|im_start|>' + m.role", add).removesuffix("{%- endif -%}") + ask
    tokenizer, messages = tokenizer_of(template), turns("q", "hi", "r", "ho")
    # The first turn had thoughts when it was the last one.
    assert supervised(tokenizer, messages) == [empty + "ho<|im_end|>"]
    options = {"enable_thinking": False}
    assert supervised(tokenizer, messages, template_options=options) == ["ho<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out() -> None:
    """It would be a question, before which the template drops the answer's thoughts."""
    answer = "<think>\nhm\n</think>\n\nhi"
    assert supervised(TOKENIZERS["qwen"], turns("q", answer, "r")) == [answer + "<|im_end|>"]


def test_tools_are_rendered_and_their_answers_are_not_learnt() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    options = {"tools": [{"name": "f"}]}
    found = supervised(TOKENIZERS["qwen"], messages, template_options=options)
    assert found == ["call<|im_end|>", "it is 42<|im_end|>"]


def test_a_template_without_special_tokens() -> None:
    """The blank line that ends a turn is the template's."""
    found = supervised(tokenizer_of(PLAIN, trim_offsets=False), turns("a", "bc", "d", "ef"))
    # " b" is one pre-token but no merge: the prompt's space stands alone.
    assert found == ["bc", "ef"]


def test_a_turn_that_opens_the_conversation_is_not_learnt() -> None:
    messages = [{"role": "assistant", "content": "hello"}, *turns("q", "hi")]
    assert supervised(TOKENIZERS["chatml"], messages) == ["hi<|im_end|>"]
    with pytest.raises(ValueError, match="the assistant never answers"):
        supervised(TOKENIZERS["chatml"], messages[:1])


def test_a_last_turn_that_cannot_be_told_is_an_error() -> None:
    with pytest.raises(ValueError, match="renders the prompt of the last turn"):
        supervised(tokenizer_of(FORGETFUL), turns("q", "hi"))
    with pytest.raises(ValueError, match="the assistant never answers"):
        supervised(TOKENIZERS["chatml"], turns("q"))


def test_names_of_turns() -> None:
    ours = turns("q", "a", system="s")
    assert messages_of({"messages": ours}) == messages_of({"conversations": ours}) == ours
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [{"from": names[m["role"]], "value": m["content"]} for m in ours]
    assert messages_of({"conversations": theirs}) == ours
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert messages_of({"messages": [call]}) == [call | {"content": ""}]


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("hi", r"messages\[1\] must be an object"),
        ({"content": "x"}, r"messages\[1\] has the role None; accepted: system, "),
        ({"role": "bot", "content": "x"}, "role 'bot'"),
        ({"role": ["user"], "content": "x"}, "role \\['user'\\]"),
        ({"role": "user"}, "a string as its content, got None"),
        ({"from": "gpt"}, "a string as its content, got None"),
        ({"role": "user", "content": [{"type": "text"}]}, "a string as its content, got"),
        ({"role": "user", "content": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_turn_that_is_none_is_named(turn: Any, why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        messages_of({"messages": [*turns("q"), turn]})


def test_a_list_of_turns_and_of_tools() -> None:
    for nothing in (None, [], "hi", {"role": "user"}):
        with pytest.raises(TypeError, match="must be a list of turns"):
            messages_of({"conversations": nothing})
    assert tools_of({}) is None and tools_of({"tools": ""}) is None
    assert tools_of({"tools": [{"name": "f"}]}) == [{"name": "f"}]
    with pytest.raises(TypeError, match="tools must be a list"):
        tools_of({"tools": '[{"name": "f"}]'})
