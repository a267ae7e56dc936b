"""Conversations to token ids, and which of them the assistant wrote, by the chat template alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from dflash_jax.tokenizer import PreTrainedTokenizerFast

Supervise = Literal["all", "last"]
"""Which turns of the assistant are learnt."""

ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT = {"human": "user", "gpt": "assistant"}
Message = dict[str, Any]


def messages_of(record: Mapping[str, Any]) -> list[Message]:
    """The turns of a record under one set of names; whatever else a turn carries is kept.

    Raises ValueError or TypeError naming the first turn that is none.
    """
    key = "conversations" if "conversations" in record else "messages"
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise TypeError(f"{key} must be a list of turns, got {turns!r:.40}")
    return [_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns)]


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a record's conversation was offered. Raises TypeError where they are none."""
    tools = record.get("tools") or None
    if not isinstance(tools, list | None):
        raise TypeError(f"tools must be a list of JSON schemas, got {tools!r:.40}")
    return tools


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise TypeError(f"{where} must be an object, got {turn!r:.40}")
    message = dict(turn)
    if "from" in message and "role" not in message:
        message |= {"role": message.pop("from"), "content": message.pop("value", None)}
    role = message.get("role")
    message["role"] = role = SHARE_GPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        accepted = ", ".join((*ROLES, *SHARE_GPT))
        raise ValueError(f"{where} has the role {role!r:.40}; accepted: {accepted}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        message["content"] = ""  # a call has no words, and templates concatenate
    elif not isinstance(content, str):
        raise TypeError(f"{where} must have a string as its content, got {content!r:.40}")
    message["content"].encode()  # a UnicodeEncodeError, a ValueError, of half a surrogate pair
    return message


def tokens_of_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    supervise: Supervise = "all",
    template_options: Mapping[str, Any],
) -> tuple[list[int], list[bool]]:
    """(input_ids, loss_mask): the rendered conversation up to the assistant's last turn.

    Raises ValueError where that last turn cannot be told from the rendering.
    """
    # One that opens the conversation answers no prompt, and templates refuse an empty one.
    turns = [n for n, message in enumerate(messages) if n and message["role"] == "assistant"]
    if not turns:
        raise ValueError("the assistant never answers")
    messages = messages[: turns[-1] + 1]  # of what follows nothing is learnt

    def render(count: int, *, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            list(messages[:count]),
            add_generation_prompt=prompt,
            tokenize=False,
            **template_options,
        )
        return cast(str, text)

    full = render(len(messages), prompt=False)
    spans = []
    for turn in turns if supervise == "all" else turns[-1:]:
        before = render(turn, prompt=True)
        after = full if turn == turns[-1] else render(turn + 1, prompt=False)
        # Templates that rewrite earlier turns (Qwen3 drops their thoughts) show the model another
        # text than it wrote, which is nothing to learn from.
        if after.startswith(before) and full.startswith(after):
            spans.append((len(before), len(after.rstrip())))  # not the template's own newline
        elif turn == turns[-1]:
            raise ValueError(
                f"the chat template renders the prompt of the last turn ({turn}) otherwise once it"
                f" is answered: it ends in {before[-40:]!r}, while the answered conversation has"
                f" {full[: len(before)][-40:]!r} there"
            )
    # The template has written the special tokens; the tokenizer would put a second BOS before them.
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    ids = cast(list[int], encoded["input_ids"])
    offsets = cast(list[tuple[int, int]], encoded["offset_mapping"])
    return ids, _inside(offsets, spans)


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token lies in one of the spans, both in reading order.

    Some byte-level tokenizers take spaces out of a token's offsets, so that one of spaces alone is
    (e, e) at its end e: hence first < end, and not first <= start, says that it is behind a prompt.
    """
    mask, remaining = [], list(reversed(spans))
    for start, end in offsets:
        while remaining and end > remaining[-1][1]:
            remaining.pop()
        mask.append(bool(remaining) and remaining[-1][0] <= start and remaining[-1][0] < end)
    return mask
