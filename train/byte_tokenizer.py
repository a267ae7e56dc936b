"""A tokenizer whose ids are bytes: what a target that is trained on the spot reads and writes."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.tokenizer import PreTrainedTokenizerFast

END, MASK = 256, 257  # after the 256 bytes: the end of a text, and the draft's mask
VOCAB_SIZE = 258
_SPECIAL = {END: "<|end|>", MASK: "<|mask|>"}
# A user's text is continued, not answered: the models read no conversations.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Token b is byte b; ``save_pretrained`` writes it as any HF folder has it."""
    spelling = _spelling()
    backend = Tokenizer(models.BPE(vocab={spelling[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_SPECIAL[i], normalized=False) for i in (END, MASK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_SPECIAL[END],
        mask_token=_SPECIAL[MASK],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def byte_stream(texts: Iterable[bytes]) -> Int[np.ndarray, "T"]:
    """Texts one after the other, each with its end."""
    parts = [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]
    return np.concatenate([np.append(part, np.int32(END)) for part in parts])


def _spelling() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it prints,
    else the next one from U+0100 on. Source: GPT-2's byte-level BPE."""
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printing)
    return {b: chr(b) for b in printing} | {b: chr(0x100 + i) for i, b in enumerate(others)}
