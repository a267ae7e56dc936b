"""Ids are bytes, whatever the bytes spell."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.tokenizer import load_tokenizer
from train.byte_tokenizer import END, MASK, VOCAB_SIZE, byte_stream, byte_tokenizer

TOKENIZER = byte_tokenizer(64)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_becomes_its_bytes_and_comes_back(text: str) -> None:
    if "<|" in text:  # the two special tokens are spelt with it
        return
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_one_id_each_and_the_vocabulary_is_full() -> None:
    assert TOKENIZER("a<|end|><|mask|>")["input_ids"] == [ord("a"), END, MASK]
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert (TOKENIZER.eos_token_id, TOKENIZER.mask_token_id) == (END, MASK)


def test_a_saved_one_loads_and_continues_what_a_user_says(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None and loaded.get_vocab() == TOKENIZER.get_vocab()
    text = "def é(x):\r\n\t# \u2028 😀  \n"
    messages = [{"role": "user", "content": text}]
    encoded = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert encoded["input_ids"] == list(text.encode())


def test_a_stream_marks_where_texts_end() -> None:
    stream = byte_stream([b"ab", b"", b"\xff"])
    assert stream.dtype == np.int32
    assert stream.tolist() == [97, 98, END, END, 255, END]
