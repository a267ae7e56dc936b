import heapq
import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoint import CheckpointError
from dflash_jax.embedded import fetch_target
from dflash_jax.tokenizer import TokenizerError, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<tool>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


def write_tokenizer(path: Path, *, pre: str = "smollm", add_bos: bool = False) -> Path:
    """Every byte, a few merges, four added tokens: a byte-level BPE as llama.cpp stores it."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
    tokens = SPECIAL + alphabet + [merge.replace(" ", "") for merge in merges]
    types = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types + [TokenType.NORMAL] * (len(tokens) - len(types)))
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    loaded = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("gguf") / "m.gguf"))
    assert loaded is not None
    return loaded


def test_merges_digits_and_spaces(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("hello hello 12") == ["hello", "Ġhello", "Ġ", "1", "2"]


def test_special_ids_and_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 64
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer("<tool>")["input_ids"] == [3]
    # Control tokens are skippable; a user-defined one is text.
    assert tokenizer.decode([*ids, 3], skip_special_tokens=True) == "user hello<tool>"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_folder_gives_the_tokenizer_that_was_saved_in_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again("hello 12<tool>")["input_ids"] == tokenizer("hello 12<tool>")["input_ids"]
    assert again.chat_template == TEMPLATE


def test_a_folder_without_one_has_none() -> None:
    assert load_tokenizer(GOLDENS / "llama-scaled" / "target") is None


def test_what_is_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="pre='qwen2'"):
        load_tokenizer(write_tokenizer(tmp_path / "q.gguf", pre="qwen2"))
    with pytest.raises(TokenizerError, match="add_bos_token"):
        load_tokenizer(write_tokenizer(tmp_path / "b.gguf", add_bos=True))
    with pytest.raises(CheckpointError, match=r"gone\.gguf"):
        load_tokenizer(tmp_path / "gone.gguf")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(TokenizerError, match="no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_default_target_tokenizes_as_published() -> None:
    tokenizer = load_tokenizer(fetch_target())
    assert tokenizer is not None
    source = Path(heapq.__file__).read_text()
    ids = tokenizer(source)["input_ids"]
    assert tokenizer.decode(ids) == source
    if sys.version_info[:2] == (3, 11):  # the ids are of that version's first line
        assert ids[:5] == [3327, 3681, 512, 18157, 7748]
    assert tokenizer.eos_token_id == 2
    control = list(range(17))
    assert tokenizer.decode(control, skip_special_tokens=True) == ""
