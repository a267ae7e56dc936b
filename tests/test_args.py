"""The server's flags: aliases, contradictions, and what is refused by name."""

import json
from pathlib import Path

import pytest

from dflash_jax.serve.__main__ import main
from dflash_jax.serve.args import ServeArgs, make_parser, parse_args


def test_defaults_serve_the_embedded_pair():
    args = parse_args([])
    assert args == ServeArgs()
    assert (args.model, args.draft, args.port) == (None, None, 8000)
    assert args.engine_config().speculation


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--model-path", "x"], "model", "x"),
        (["--target", "x"], "model", "x"),
        (["--speculative-draft-model-path", "d"], "draft", "d"),
        (["--speculative-num-draft-tokens", "8"], "block_size", 8),
        (["--num-speculative-tokens", "7"], "block_size", 8),
        (["--context-length", "99"], "max_model_len", 99),
        (["--max-running-requests", "3"], "max_num_seqs", 3),
        (["--chunked-prefill-size", "64"], "prefill_tokens", 64),
        (["--tp-size", "2"], "tensor_parallel_size", 2),
        (["--dp-size", "2"], "data_parallel_size", 2),
        (["--disable-speculation"], "disable_speculation", True),
        (["--seed", "0"], "seed", 0),
        (["--compilation-cache-dir", "c"], "compilation_cache_dir", Path("c")),
    ],
)
def test_names_from_both_families(flags, field, value):
    assert getattr(parse_args(flags), field) == value


def test_vllms_speculative_config():
    text = json.dumps({"method": "dflash", "model": "d", "num_speculative_tokens": 15})
    args = parse_args(["--model", "m", "--speculative-config", text])
    assert (args.draft, args.block_size) == ("d", 16)
    assert args.engine_config().block_size == 16


def test_the_kv_cache_in_tokens_is_whole_pages_and_the_null_page():
    assert parse_args([]).engine_config().num_pages is None
    for name in ("--kv-cache-tokens", "--max-total-tokens"):
        args = parse_args([name, "100", "--page-size", "16", "--max-model-len", "100"])
        assert args.engine_config().num_pages == 7 + 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--mod", "x"], "unrecognized arguments: --mod"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is not supported"),
        (["--gpu-memory-utilization", "0.9"], "set --kv-cache-tokens"),
        (["--quantization", "awq"], "not supported"),
        (["--speculative-config", '{"methd": "dflash"}'], "unknown key 'methd'"),
        (["--speculative-config", '{"method": "eagle"}'], "method must be dflash"),
        (["--speculative-config", '{"num_speculative_tokens": "7"}'], "must be of type int"),
        (["--speculative-config", "[1]"], "must be a JSON object"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-block-size", "8", "--num-speculative-tokens", "8"], "contradict"),
        (["--speculative-block-size", "8", "--speculative-num-draft-tokens", "9"], "contradict"),
        (["--model", "m", "--draft", "d", "--speculative-config", '{"model": "e"}'], "contradict"),
        (["--disable-speculation", "--draft", "d"], "contradicts"),
        (["--disable-speculation", "--speculative-block-size", "8"], "contradicts"),
        (["--model", "m", "--speculative-block-size", "8"], "needs a draft"),
        (["--speculative-block-size", "1"], "at least 2"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--kv-cache-tokens", "63", "--max-model-len", "64"], "at least 64, got 63"),
        (["--kv-cache-tokens", "0"], "one full context, at least 2, got 0"),
        (["--port", "70000"], "--port must be in"),
        (["--max-model-len", "1"], "at least 2"),
        (["--shutdown-timeout", "nan"], "at least 0"),
        (["--dtype", "float16"], "invalid choice"),
        (["--api-key", ""], "empty"),
        (["--chat-template", "/no/such/file"], "there is no file"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_reason(flags, reason, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(flags)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-cache-dtype", "auto"],
        ["--disable-prefix-cache"],
        ["--pipeline-parallel-size", "1"],
        ["--speculative-block-size", "8", "--speculative-num-draft-tokens", "8"],
    ],
)
def test_what_asks_for_nothing_else_is_accepted(flags):
    parse_args(flags)


def test_print_config_masks_the_key(capsys):
    assert main(["--print-config", "--api-key", "secret", "--port", "1"]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert json.loads(printed)["port"] == 1


def test_every_field_has_a_flag_and_help():
    text = make_parser().format_help()
    for field in ServeArgs.__dataclass_fields__.values():
        assert field.metadata["names"][0] in text
        assert field.metadata["help"]
    words = " ".join(text.split())
    assert "(default: 8000)" in words and "(default: entropy) (default" not in words
