"""From messages and text to token ids, for a server: safe to call from several threads at once.

``LLM.encode`` is the library's and has one driver; it calls the tokenizer itself, which writes
truncation and padding settings into the shared backend, so the server must not use it.
"""

from collections.abc import Sequence
from typing import Any

import jinja2

from dflash_jax.serve.errors import ApiError
from dflash_jax.serve.protocol import Message
from dflash_jax.tokenizer import RESERVED_FOR_TEMPLATE, PreTrainedTokenizerFast


def encode(
    tokenizer: PreTrainedTokenizerFast, text: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a text. By the backend, which it does not change: transformers' own call sets
    truncation on it first, and two threads would meet there. As a batch of one, because
    ``encode`` keeps the interpreter's lock: megabytes of text would stop every other request."""
    backend = tokenizer.backend_tokenizer
    encoded = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return tuple(encoded[0].ids)


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The conversation as the model's chat template writes it (special tokens included).

    Raises ApiError 400 without a template, and with the template's own complaint.
    """
    if not tokenizer.chat_template:
        raise ApiError(
            400, "the model has no chat template; use /v1/completions or start with --chat-template"
        )
    kwargs = kwargs or {}
    reserved = next((name for name in kwargs if name in RESERVED_FOR_TEMPLATE), None)
    if reserved is not None:
        raise ApiError(
            400, f"chat_template_kwargs: {reserved!r} is not the template's to have",
            param="chat_template_kwargs",
        )  # fmt: skip
    conversation = [message.for_template() for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise ApiError(
            400, f"the chat template refuses these messages: {error}", param="messages"
        ) from error
    assert isinstance(text, str)
    return text
