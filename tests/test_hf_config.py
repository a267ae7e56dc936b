import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from dflash_jax.checkpoint import draft_config_json
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig, default_target_layer_ids
from dflash_jax.hf_config import (
    ConfigError,
    draft_config,
    read_draft_config,
    read_target_config,
    target_config,
    target_config_from_gguf,
)

GOLDENS = Path(__file__).parent / "goldens"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
TARGET = target_config(QWEN3)
# As z-lab publishes them: with the code's own address and the base model's leftovers.
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 160,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def draft(**changes: object) -> DraftConfig:
    return draft_config(DRAFT | changes, TARGET)


def draft_with(**nested: object) -> DraftConfig:
    return draft(dflash_config={"mask_token_id": 127, "target_layer_ids": [1, 3]} | nested)


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-tied-b16", "qwen3-untied"])
def test_goldens_are_read_and_exported_the_same(name: str) -> None:
    target = read_target_config(GOLDENS / name / "target")
    config = read_draft_config(GOLDENS / name / "draft", target)
    stated = json.loads((GOLDENS / name / "draft" / "config.json").read_text())
    exported = draft_config_json(config, "float32")
    assert {k: exported[k] for k in stated} == stated
    assert draft_config(exported, target) == config


def test_a_target_saved_by_transformers_is_read(tmp_path: Path) -> None:
    for saved in (LlamaConfig(), Qwen3Config()):
        saved.save_pretrained(tmp_path)
        config = read_target_config(tmp_path)
        assert config.num_layers == 32
        assert config.rope == RopeConfig(10000.0)


def test_llama_head_dim_is_derived_and_others_must_say_it() -> None:
    assert target_config(LLAMA).head_dim == 16
    assert target_config(LLAMA | {"head_dim": None}).head_dim == 16
    assert target_config(LLAMA | {"head_dim": 48}).head_dim == 48
    with pytest.raises(ConfigError, match="head_dim is missing"):
        target_config({k: v for k, v in QWEN3.items() if k != "head_dim"})
    # Fault 20: hidden / heads would have been 16.
    assert draft().head_dim == 32
    with pytest.raises(ConfigError, match="head_dim is missing"):
        draft(head_dim=None)


@pytest.mark.parametrize(
    ("scaling", "kind"), [(LLAMA3, "llama3"), (YARN, "yarn"), ({"factor": 2.0}, "linear")]
)
def test_three_spellings_of_rope_are_one(scaling: dict[str, object], kind: str) -> None:
    bare = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    spellings = [
        LLAMA | {"rope_scaling": {"type": kind, **scaling}},
        LLAMA | {"rope_scaling": {"rope_type": kind, **scaling}},
        LLAMA | {"rope_scaling": {"rope_type": kind, "type": kind, **scaling}},
        bare | {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **scaling}},
        LLAMA | {"rope_parameters": {"rope_type": kind, **scaling}},
    ]
    ropes = {target_config(spelling).rope for spelling in spellings}
    (rope,) = ropes
    assert (rope.theta, rope.kind, rope.factor) == (5e5, kind, scaling["factor"])


def test_rope_theta_inside_rope_parameters_is_not_missed() -> None:
    """Fault 19: theta under rope_parameters, and the draft's RoPE is not the target's."""
    config = draft(rope_theta=None, rope_parameters={"rope_theta": 7e6, "rope_type": "default"})
    assert config.rope == RopeConfig(7e6) != TARGET.rope
    scaled = draft(rope_scaling={"rope_type": "yarn", **YARN, "mscale": 0.7, "truncate": False})
    assert scaled.rope.mscale == 0.7 and not scaled.rope.truncate
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        draft(rope_theta=None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "x": 1}}, "x=1"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "differ"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2}}, "factor=2"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta=500000.0"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention="),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_theta": 5e5},
            },
            "differ",
        ),
        ({"rope_scaling": "yarn"}, "JSON object"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types="),
        ({"layer_types": ["full_attention"] * 5}, "layer_types="),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"text_config": {"vocab_size": 3}}, "text_config"),
        ({"logit_scale": 0.5, "num_experts": 8}, "logit_scale=0.5, num_experts=8"),
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id="),
    ],
)
def test_a_target_we_do_not_run_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        target_config(LLAMA | change)
    assert named in str(error.value)


def test_a_published_draft_is_read() -> None:
    assert draft() == DraftConfig(
        vocab_size=128,  # fault 26: the file's 160 is padding, the head is the target's
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        max_position_embeddings=512,
        block_size=16,
        mask_token_id=127,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=64,
        windows=(None, None),
        causal=(False, False),
    )


def test_nested_draft_keys_win_over_top_level_ones() -> None:
    top = draft(dflash_config=None, mask_token_id=5, target_layer_ids=[0, 5])
    assert (top.mask_token_id, top.target_layer_ids) == (5, (0, 5))
    both = draft(mask_token_id=5, target_layer_ids=[0, 5])
    assert (both.mask_token_id, both.target_layer_ids) == (127, (1, 3))
    assert draft_with(block_size=8).block_size == 8


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        (None, None, (True, False)),  # legacy: the sliding layer is causal
        (None, False, (False, False)),
        (None, True, (True, True)),
        (False, True, (False, False)),
        (True, False, (True, True)),
    ],
)
def test_causality_is_decided_in_order(
    top: bool | None, nested: bool | None, expected: tuple[bool, ...]
) -> None:
    config = draft(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
        use_sliding_window=True,
        is_causal=top,
        dflash_config=DRAFT["dflash_config"] | {"causal": nested},
    )
    assert config.windows == (32, None)
    assert config.causal == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dflash_config": {"mask_token_id": 127}}, "target_layer_ids is missing"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": 1}, "block_size=1"),
        ({"num_target_layers": 7}, "num_target_layers=7"),
        ({"hidden_size": 32}, "hidden_size=32"),
        ({"target_hidden_size": 32}, "target_hidden_size=32"),
        ({"layer_types": ["full_attention"]}, "layer_types="),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window=False"),
        (
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
            "sliding_window is missing",
        ),
        ({"layer_types": None, "use_sliding_window": True}, "layer_types is missing"),
        ({"projector_type": "gru"}, "projector_type='gru'"),
        ({"draft_vocab_size": 64}, "draft_vocab_size=64"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures="),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_a_draft_we_do_not_run_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        draft(**change)
    assert named in str(error.value)


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [1, 6], [1.0], ["1"], 3, [True]])
def test_bad_taps_are_refused(ids: object) -> None:
    with pytest.raises(ConfigError, match="target_layer_ids"):
        draft_with(target_layer_ids=ids)


@pytest.mark.parametrize("mask", [128, -1, 1.5, "<mask>", True])
def test_the_mask_id_is_a_row_of_the_targets_embedding(mask: object) -> None:
    with pytest.raises(ConfigError, match="mask_token_id"):
        draft_with(mask_token_id=mask)


def test_unknown_nested_draft_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="selector_layers=2"):
        draft_with(selector_layers=2)


@given(st.integers(1, 64), st.integers(0, 8))
def test_default_taps_are_usable_or_refused(layers: int, taps: int) -> None:
    try:
        ids = default_target_layer_ids(layers, taps)
    except ValueError:
        closer_than_one = 1 < taps < layers and layers - 4 < taps - 1
        assert taps == 0 or taps > layers or closer_than_one
        return
    assert ids == tuple(sorted(set(ids))) and ids[0] >= 0 and ids[-1] < layers


def test_default_taps_are_the_papers() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(36, 1) == (18,)
    assert default_target_layer_ids(2, 2) == (0, 1)


def test_generation_config_adds_end_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_target_config(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_target_config(tmp_path).eos_token_ids == (2, 7, 9)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        read_target_config(tmp_path)
    with pytest.raises(ConfigError, match="is missing"):
        read_target_config(tmp_path / "nowhere")


def test_gguf_metadata_say_what_config_json_would(tmp_path: Path, write_gguf) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(5e5)

    file = write_gguf(tmp_path / "m.gguf", target_config(LLAMA), change)
    expected = target_config(LLAMA | {"eos_token_id": 2})
    assert target_config_from_gguf(file) == read_target_config(file) == expected


@pytest.mark.parametrize(
    ("arch", "key", "value", "named"),
    [
        ("llama", "llama.expert_count", 8, "expert_count=8"),
        ("llama", "llama.rope.dimension_count", 8, "rope.dimension_count=8"),
        ("gemma", None, None, "gemma"),
    ],
)
def test_gguf_files_we_do_not_run_are_refused(
    tmp_path: Path, write_gguf, arch: str, key: str | None, value: int | None, named: str
) -> None:
    def change(writer: GGUFWriter) -> None:
        if key is not None and value is not None:
            writer.add_uint32(key, value)

    file = write_gguf(tmp_path / "m.gguf", target_config(LLAMA), change, arch=arch)
    with pytest.raises(ConfigError, match=named):
        target_config_from_gguf(file)


def test_configs_are_hashable() -> None:
    """They are static arguments of jitted functions."""
    assert len({TARGET, target_config(QWEN3), draft(), draft()}) == 2
    assert isinstance(TARGET, TargetConfig)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 2000),
        ("vocab_size", 2**31),
    ],
)
def test_numbers_no_model_has_are_errors_that_name_the_key(key: str, value: object) -> None:
    path = Path(__file__).parent / "goldens" / "llama-scaled" / "target" / "config.json"
    config = json.loads(path.read_text())
    with pytest.raises(ConfigError, match=key):
        target_config({**config, key: value})
