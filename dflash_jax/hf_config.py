"""The one door through which HF's ``config.json`` (or GGUF metadata) becomes a config of ours.

An allow-list: every key is used, known to be irrelevant to inference, or an error that names it.
Whatever a key could change in the model's output is never skipped.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig, TransformerConfig
from dflash_jax.config_keys import MISSING, ConfigError, Json, Keys
from dflash_jax.gguf_file import GGUFFile, read_gguf
from dflash_jax.tensor_source import gguf_to_hf

# Training, bookkeeping and HF's own run-time switches: nothing here changes a forward pass.
_IRRELEVANT = (
    "_name_or_path",
    "_attn_implementation_autoset",
    "attention_dropout",
    "dtype",
    "initializer_range",
    "is_llama_config",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
MAX_LAYERS = 1024  # far above any model, and small enough to fail before memory does
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


def target_config(config: Json) -> TargetConfig:
    """The TargetConfig of a Llama or Qwen3 ``config.json``; ConfigError for anything else."""
    keys = Keys(config, "target config")
    for nested in ("text_config", "vision_config"):
        if keys.has(nested):
            raise ConfigError(
                f"target config: {nested}: multimodal targets are not run;"
                f" accepted: {', '.join(_ARCHITECTURES)}"
            )
    architecture = _architecture(keys)
    _refuse_unsupported(keys)
    keys.only("rope_interleaved", False)
    keys.only("mlp_bias", False)
    keys.only("pretraining_tp", 1)
    keys.only("use_sliding_window", False)
    keys.ignore("max_window_layers")  # counts sliding layers, and there are none
    if architecture == "qwen3":
        keys.ignore("sliding_window")  # HF drops it unless use_sliding_window
    else:
        keys.only("sliding_window", None)

    num_layers = _num_layers(keys)
    keys.only("layer_types", ["full_attention"] * num_layers)
    hidden_size = keys.integer("hidden_size")
    num_heads = keys.integer("num_attention_heads")
    # HF derives a Llama's head_dim, and gives a Llama of before rope_theta its 10000. Qwen3's
    # head_dim is independent of the hidden size, so it must be said.
    derived = hidden_size // num_heads if architecture == "llama" else MISSING
    max_positions = keys.integer("max_position_embeddings")
    result = TargetConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", derived),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=_rope(keys, max_positions, default_theta=10000.0 if architecture == "llama" else None),
        max_position_embeddings=max_positions,
        architecture=architecture,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        qk_norm=architecture == "qwen3",
        eos_token_ids=keys.token_ids("eos_token_id"),
        bos_token_id=next(iter(keys.token_ids("bos_token_id")), None),
    )
    keys.finish()
    _check_heads(result, keys.where)
    return result


def draft_config(config: Json, target: TargetConfig) -> DraftConfig:
    """The DraftConfig of a DFlash ``config.json``, checked against the target it drafts for.

    ``vocab_size`` becomes the target's: embedding and head are the target's, so a draft's padding
    of the vocabulary means nothing. Source: docs/dflash.md, sections 2 and 3.
    """
    keys = Keys(config, "draft config")
    dflash = Keys(keys.get("dflash_config", {}), "draft config: dflash_config")
    keys.only("architectures", ["DFlashDraftModel"])
    keys.only("model_type", "qwen3")
    _refuse_unsupported(keys)
    keys.only("mlp_bias", False)
    # The draft has neither embedding nor head, its own code is never run, and layer_types says
    # which layers slide.
    keys.ignore("tie_word_embeddings", "auto_map", "max_window_layers", "vocab_size")
    keys.ignore("bos_token_id", "eos_token_id")

    def nested(key: str) -> Keys:
        keys.ignore(key)
        return dflash if dflash.has(key) else keys

    num_layers = _num_layers(keys)
    windows = _windows(keys, num_layers)
    max_positions = keys.integer("max_position_embeddings")
    mask_token_id = nested("mask_token_id").integer("mask_token_id", minimum=0)
    if mask_token_id >= target.vocab_size:
        below = f"an id below the target's {target.vocab_size} embedding rows"
        raise keys.error("mask_token_id", mask_token_id, below)
    result = DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=_equal_to_target(keys, "hidden_size", target.hidden_size),
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=_rope(keys, max_positions),
        max_position_embeddings=max_positions,
        block_size=nested("block_size").integer("block_size", minimum=2),
        mask_token_id=mask_token_id,
        target_layer_ids=_target_layer_ids(nested("target_layer_ids"), target.num_layers),
        num_target_layers=_equal_to_target(keys, "num_target_layers", target.num_layers),
        target_hidden_size=_equal_to_target(
            keys, "target_hidden_size", target.hidden_size, default=target.hidden_size
        ),
        windows=windows,
        causal=_causal(keys, dflash, windows),
    )
    dflash.finish()
    keys.finish()
    _check_heads(result, keys.where)
    return result


def _architecture(keys: Keys) -> Literal["llama", "qwen3"]:
    model_type = keys.get("model_type")
    classes = keys.get("architectures", [])
    for class_name, kind in _ARCHITECTURES.items():
        if model_type == kind and classes in ([], [class_name]):
            return "llama" if kind == "llama" else "qwen3"
    raise ConfigError(
        f"target config: model_type={model_type!r}, architectures={classes!r} is not run;"
        f" accepted: {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(keys: Keys) -> None:
    """Keys that target and draft share and that we run with one value alone."""
    keys.ignore(*_IRRELEVANT)
    keys.only("attention_bias", False)
    keys.only("hidden_act", "silu")
    keys.only("quantization_config", None)
    keys.only("partial_rotary_factor", 1.0)


def _num_layers(keys: Keys) -> int:
    count = keys.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise keys.error("num_hidden_layers", count, f"at most {MAX_LAYERS}")
    return count


def _equal_to_target(keys: Keys, key: str, wanted: int, default: object = MISSING) -> int:
    value = keys.integer(key, default)
    if value != wanted:
        raise keys.error(key, value, f"the target's {wanted}")
    return value


def _check_heads(config: TransformerConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={config.num_heads} is no multiple of"
            f" num_key_value_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{where}: head_dim={config.head_dim} must be even for RoPE")


def _target_layer_ids(keys: Keys, num_target_layers: int) -> tuple[int, ...]:
    ids = keys.get("target_layer_ids")
    accepted = f"ascending, different layers of 0..{num_target_layers - 1}"
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise keys.error("target_layer_ids", ids, accepted)
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise keys.error("target_layer_ids", ids, accepted)
    return tuple(ids)


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each draft layer, from layer_types, sliding_window, use_sliding_window."""
    switch = keys.get("use_sliding_window", None)
    window = keys.get("sliding_window", None)
    types = keys.get("layer_types", None)
    if types is None:
        if switch:
            raise ConfigError("draft config: layer_types is missing with use_sliding_window=True")
        return (None,) * num_layers
    names = {"full_attention", "sliding_attention"}
    named = isinstance(types, list) and all(isinstance(t, str) and t in names for t in types)
    if not isinstance(types, list) or not named or len(types) != num_layers:
        accepted = f"{num_layers} of {', '.join(sorted(names))}"
        raise keys.error("layer_types", types, accepted)
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if switch is False:
        raise keys.error("use_sliding_window", False, "true where layer_types has sliding layers")
    if window is None:
        raise ConfigError("draft config: sliding_window is missing and layer_types slides")
    size = keys.integer("sliding_window")
    return tuple(size if t == "sliding_attention" else None for t in types)


def _causal(keys: Keys, dflash: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Top-level is_causal, then dflash_config.causal, then the legacy rule: sliding is causal."""
    top, nested = keys.has("is_causal"), dflash.has("causal")
    if top:
        return (keys.boolean("is_causal"),) * len(windows)
    if nested:
        return (dflash.boolean("causal"),) * len(windows)
    return tuple(window is not None for window in windows)


def _rope(keys: Keys, max_positions: int, default_theta: float | None = None) -> RopeConfig:
    """RoPE of any spelling: rope_theta with rope_scaling ({type} or {rope_type}), rope_parameters.

    Where two spellings stand side by side they must say the same.
    """
    top_theta = keys.number("rope_theta") if keys.has("rope_theta") else None
    theta = default_theta if top_theta is None else top_theta
    spelled = {name: keys.get(name, None) for name in ("rope_scaling", "rope_parameters")}
    found = {
        name: _rope_object(value, f"{keys.where}: {name}", max_positions, theta)
        for name, value in spelled.items()
        if value is not None
    }
    if not found:
        return _rope_object({}, keys.where, max_positions, theta)
    if len(set(found.values())) > 1:
        raise ConfigError(f"{keys.where}: rope_scaling and rope_parameters differ: {found}")
    name, rope = found.popitem()
    if top_theta not in (None, rope.theta):
        raise ConfigError(f"{keys.where}: rope_theta={top_theta} but {name} says {rope.theta}")
    return rope


def _rope_object(
    json_object: object, where: str, max_positions: int, theta: float | None
) -> RopeConfig:
    keys = Keys(json_object, where)
    theta = keys.number("rope_theta", MISSING if theta is None else theta)
    keys.only("partial_rotary_factor", 1.0)
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind != keys.get("type", kind):
        raise ConfigError(f"{where}: rope_type={kind!r} and type={keys.get('type')!r} differ")

    def optional(key: str) -> float | None:
        return keys.number(key) if keys.has(key) else None

    match kind:
        case "default":
            rope = RopeConfig(theta)
        case "linear":
            rope = RopeConfig(theta, "linear", factor=keys.number("factor"))
        case "llama3":
            if not keys.number("high_freq_factor") > keys.number("low_freq_factor"):
                high, low = keys.get("high_freq_factor"), keys.get("low_freq_factor")
                raise keys.error("high_freq_factor", high, f"above low_freq_factor={low}")
            rope = RopeConfig(
                theta,
                "llama3",
                factor=keys.number("factor"),
                low_freq_factor=keys.number("low_freq_factor"),
                high_freq_factor=keys.number("high_freq_factor"),
                original_max_position_embeddings=keys.integer("original_max_position_embeddings"),
            )
        case "yarn":
            if theta <= 1 or keys.number("factor") < 1:
                raise keys.error("factor", keys.get("factor"), "at least 1, with rope_theta > 1")
            original = keys.integer("original_max_position_embeddings", max_positions)
            rope = RopeConfig(
                theta,
                "yarn",
                factor=keys.number("factor"),
                original_max_position_embeddings=original,
                beta_fast=keys.number("beta_fast", 32.0),
                beta_slow=keys.number("beta_slow", 1.0),
                mscale=optional("mscale"),
                mscale_all_dim=optional("mscale_all_dim"),
                attention_factor=optional("attention_factor"),
                truncate=keys.boolean("truncate", True),
            )
        case _:
            raise keys.error("rope_type", kind, "default, linear, llama3, yarn")
    keys.finish()
    return rope


def target_config_from_gguf(path: Path) -> TargetConfig:
    """The TargetConfig that a llama or qwen3 GGUF file's metadata describe.

    Tied when there is no output.weight. Numbers that GGUF holds in float32 become the shortest
    decimal that is the same float32, so 1e-05 is HF's 1e-05.
    """
    file = read_gguf(path)
    where = f"GGUF {path.name}"
    architecture = file.value("general.architecture")
    if architecture not in ("llama", "qwen3"):
        raise ConfigError(f"{where}: {architecture=} is not run; accepted: llama, qwen3")
    prefix = f"{architecture}."
    keys = Keys(
        {
            name.removeprefix(prefix): _shortest(value)
            for name, value in file.values.items()
            if name.startswith(prefix)
        },
        where,
    )
    shapes = {gguf_to_hf(name): tensor.shape for name, tensor in file.tensors.items()}
    if "model.embed_tokens.weight" not in shapes:
        raise ConfigError(f"{where}: token_embd.weight is missing")
    if "rope_freqs.weight" in shapes:
        raise ConfigError(f"{where}: RoPE scaled by a rope_freqs tensor is not run; use HF's files")

    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    derived = hidden_size // num_heads if architecture == "llama" else MISSING
    head_dim = keys.integer("attention.key_length", derived)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    keys.ignore("vocab_size")  # the embedding's rows say it
    keys.ignore("rope.scaling.finetuned")
    max_positions = keys.integer("context_length")
    result = TargetConfig(
        vocab_size=shapes["model.embed_tokens.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(keys, max_positions),
        max_position_embeddings=max_positions,
        architecture=architecture,
        tie_word_embeddings="lm_head.weight" not in shapes,
        qk_norm=architecture == "qwen3",
        eos_token_ids=_special_ids(file, "eos", "eot"),
        bos_token_id=next(iter(_special_ids(file, "bos")), None),
    )
    keys.finish()
    _check_heads(result, where)
    return result


def _shortest(value: object) -> object:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _special_ids(file: GGUFFile, *names: str) -> tuple[int, ...]:
    values = (file.value(f"tokenizer.ggml.{name}_token_id", None) for name in names)
    return tuple(dict.fromkeys(v for v in values if isinstance(v, int)))


def _rope_from_gguf(keys: Keys, max_positions: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)  # llama.cpp's default
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=factor)
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", max_positions)
        return RopeConfig(theta, "yarn", factor=factor, original_max_position_embeddings=original)
    raise keys.error("rope.scaling.type", kind, "none, linear, yarn")


def read_target_config(path: Path) -> TargetConfig:
    """The TargetConfig of an HF folder or a .gguf file.

    A folder's generation_config.json adds its end-of-sequence ids: HF's generate stops at them.
    """
    if path.suffix == ".gguf":
        return target_config_from_gguf(path)
    config = target_config(_read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if not generation.exists():
        return config
    extra = Keys(_read_json(generation), generation.name).token_ids("eos_token_id")
    ids = tuple(dict.fromkeys(config.eos_token_ids + extra))
    return dataclasses.replace(config, eos_token_ids=ids)


def read_draft_config(path: Path, target: TargetConfig) -> DraftConfig:
    """The DraftConfig of an HF folder, for the given target."""
    return draft_config(_read_json(path / "config.json"), target)


def _read_json(path: Path) -> Json:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; accepted: an HF folder or a .gguf file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON file: {error}") from error
