"""Text deltas: any split of the tokens gives the same text, tokens and reason as a slow oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_jax.text import TextStream

MIXED = "Hi there 😀👩‍👩‍👧 漢字かな交じり文 שלום עולם naïve — end."
EOS, MASK = "<|end|>", "<|mask|>"


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([MIXED, "the quick brown fox stops here"], trainer)
    backend.add_tokens([MASK])  # in the vocabulary, not special
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2's kind: a word mark that becomes a space, and a token a byte for what is rare."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁Hi", "a", "b", "▁the"]
    backend = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZER = byte_level()
VOCAB = len(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids(EOS)


def ids(text: str) -> list[int]:
    return TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids


def stream(tokens, cuts, reason="length", tokenizer=TOKENIZER, **options):
    """Feed ``tokens`` split at ``cuts``; (text, tokens, reason) of the joined deltas."""
    feeder = TextStream(tokenizer, **options)
    edges = sorted({0, len(tokens), *(c for c in cuts if c < len(tokens))})
    text, out = "", ()
    for begin, end in zip(edges, edges[1:], strict=False):
        delta = feeder.feed(tokens[begin:end], reason if end == len(tokens) else None)
        text, out = text + delta.text, out + delta.tokens
        if delta.finish_reason:
            return text, out, delta.finish_reason
    raise AssertionError("no delta ended the output")


def oracle(tokens, stop, include_stop):
    """Decode every prefix from scratch; read characters until a stop string is complete."""

    def decode(tokens, final):
        text = TOKENIZER.backend_tokenizer.decode(list(tokens))
        return text if final else text.rstrip("\ufffd")

    for n in range(1, len(tokens) + 1):
        for final in (False, True) if n == len(tokens) else (False,):
            text = decode(tokens[:n], final)
            for end in range(1, len(text) + 1):
                ended = [s for s in stop if text[:end].endswith(s)]
                if ended:
                    cut = end if include_stop else end - max(map(len, ended))
                    return text[:cut], tuple(tokens[:n]), "stop"
    return decode(tokens, True), tuple(tokens), "length"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 1000])
def test_emoji_cjk_and_hebrew_split_anywhere(size):
    tokens = ids(MIXED)
    text, out, reason = stream(tokens, range(0, len(tokens), size))
    assert (text, out, reason) == (MIXED, tuple(tokens), "length")


def test_no_delta_holds_half_a_character():
    feeder = TextStream(TOKENIZER)
    for token in ids(MIXED):
        assert "\ufffd" not in feeder.feed([token]).text


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCAB + 2), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40)),
)
def test_any_tokens_join_to_the_whole_decoding(tokens, cuts):
    """Junk bytes, ids past the vocabulary and special tokens included."""
    whole = TOKENIZER.backend_tokenizer.decode(tokens)
    assert stream(tokens, cuts) == (whole, tuple(tokens), "length")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\nx é😀", min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 60)),
    stop=st.lists(st.text(alphabet="ab\nx é😀", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_agree_with_the_oracle(text, cuts, stop, include):
    tokens = ids(text)
    assert stream(tokens, cuts, stop=stop, include_stop=include) == oracle(tokens, stop, include)


def test_a_stop_string_at_the_start_of_a_long_block():
    tokens = ids("STOP and a long accepted block after it")
    text, out, reason = stream(tokens, [], stop=["STOP"])
    assert (text, reason) == ("", "stop")
    assert TOKENIZER.decode(out) == "STOP"


def test_a_stop_string_over_three_deltas_is_never_sent():
    feeder = TextStream(TOKENIZER, stop=["END!"])
    deltas = [feeder.feed(ids(part)) for part in ("go EN", "D", "! no")]
    assert [d.text for d in deltas] == ["go ", "", ""]
    assert deltas[-1].finish_reason == "stop"
    assert TOKENIZER.decode(deltas[-1].tokens) == "!"
    with pytest.raises(ValueError, match="ended already"):
        feeder.feed(ids("more"))


def test_a_held_beginning_is_flushed_at_the_end():
    assert stream(ids("almost EN"), [3], stop=["END"])[0] == "almost EN"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_eos_token_stays_in_the_ids_and_leaves_the_text(skip, include):
    tokens = [*ids("bye"), END]
    options = {"skip_special_tokens": skip, "include_stop": include}
    text, out, reason = stream(tokens, [2], "stop", **options)
    assert out == tuple(tokens) and reason == "stop"
    assert text == ("bye" + EOS if include and not skip else "bye")


def test_the_mask_token_is_an_ordinary_token():
    mask = TOKENIZER.convert_tokens_to_ids(MASK)
    tokens = [*ids("a"), mask, *ids("b")]
    assert stream(tokens, [1, 2]) == (f"a{MASK}b", tuple(tokens), "length")


def test_byte_fallback_keeps_inner_spaces_and_whole_emoji():
    tokenizer = byte_fallback()
    emoji = [1 + b for b in "😀😀".encode()]
    tokens = [258, 261, *emoji, 258]
    whole = tokenizer.backend_tokenizer.decode(tokens)
    assert whole == "Hi the😀😀 Hi"
    for size in (1, 2, 3, 5):
        assert stream(tokens, range(0, 20, size), tokenizer=tokenizer)[0] == whole


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TextStream(TOKENIZER, stop=["a", ""])
