"""Tokenizers of HF folders and of GGUF files.

transformers is first imported here, and everything else takes its tokenizer class from here: on
import it warns that PyTorch, of which we have no use, is not installed.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.gguf_file import GGUFFile, read_gguf


def _not_about_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


logging.getLogger("transformers").addFilter(_not_about_torch)
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

logging.getLogger("transformers").removeFilter(_not_about_torch)

__all__ = [
    "RESERVED_FOR_TEMPLATE",
    "PreTrainedTokenizerFast",
    "TokenizerError",
    "encode_chat",
    "load_tokenizer",
]

RESERVED_FOR_TEMPLATE = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
)
"""Names that transformers takes for itself: no variable of a chat template can have them."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class TokenizerError(ValueError):
    """A tokenizer that we do not run; the message names what is accepted."""


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of an HF folder or a .gguf file, with its chat template and special ids.

    None for a folder without one: such a model takes and gives token ids alone.
    Raises TokenizerError for tokenizers that need their own Python code or that are not fast.
    """
    if path.suffix == ".gguf":
        return _from_gguf(read_gguf(path))
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        # What a damaged tokenizer.json or tokenizer_config.json raises, depending on the damage.
        raise TokenizerError(
            f"{path}: no tokenizer that transformers can load: {error!r}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerError(
            f"{path}: {type(tokenizer).__name__} is slow; accepted: tokenizer.json"
        )
    return tokenizer


def encode_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> tuple[int, ...]:
    """Token ids of a conversation as the chat template writes it, up to where an answer begins.

    ``variables``: what the template reads beside the messages, ``tools`` among them. Raises
    ValueError on names that are not its to have, and with the template's own complaint.
    """
    if taken := (RESERVED_FOR_TEMPLATE - {"tools"}) & variables.keys():
        raise ValueError(f"{min(taken)!r} cannot be a variable of a chat template")
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            return_dict=True,
            **variables,
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:  # odd keys of odd messages too
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return tuple(cast(dict[str, list[int]], encoded)["input_ids"])


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast:
    """A byte-level BPE from GGUF metadata, as llama.cpp would tokenize."""

    def value(key: str, default: object) -> object:
        return file.value(f"tokenizer.ggml.{key}", default)

    kind, pre = value("model", None), value("pre", None)
    if (kind, pre) != ("gpt2", "smollm"):
        raise TokenizerError(
            f"GGUF tokenizer model={kind!r}, pre={pre!r} is not run; accepted: gpt2 with smollm."
            " An HF folder with tokenizer.json works for every model"
        )
    if value("add_bos_token", False) or value("add_space_prefix", False):
        raise TokenizerError("GGUF tokenizer add_bos_token, add_space_prefix: accepted: false")
    tokens = _list(file, "tokens")
    merges = [_pair(merge) for merge in _list(file, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _list(file, "token_type")
    if len(types) != len(tokens):
        raise TokenizerError(f"GGUF tokenizer: {len(tokens)} tokens but {len(types)} token_type")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = token_type == TokenType.CONTROL
            added = AddedToken(token, special=special, normalized=False)
            tokenizer.add_special_tokens([added]) if special else tokenizer.add_tokens([added])

    def named(key: str) -> str | None:
        token_id = value(f"{key}_token_id", None)
        return tokens[token_id] if isinstance(token_id, int) else None

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=file.value("tokenizer.chat_template", None),
        model_max_length=file.value(f"{file.value('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _list(file: GGUFFile, key: str) -> list[Any]:
    values = file.value(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise TokenizerError(f"GGUF tokenizer: {key} must be a list, got {values!r}")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
