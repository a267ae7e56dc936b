"""Checkpoints in and out: HF names and layouts on disk, our parameter paths in memory.

A parameter's dotted path is its HF name, but for linears: stored [in, out] under ``kernel`` here,
[out, in] under ``weight`` there.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig, TransformerConfig
from dflash_jax.tensor_source import (
    SINGLE_FILE,
    CheckpointError,
    GGUFSource,
    SafetensorsSource,
    TensorShape,
    TensorSource,
    open_source,
)

__all__ = [
    "CheckpointError",
    "GGUFSource",
    "SafetensorsSource",
    "TensorSource",
    "draft_tensor_name",
    "export_draft",
    "export_target",
    "load_params",
    "open_source",
    "target_tensor_name",
]

Rename = Callable[[str], str | None]
"""From a checkpoint's tensor name to the HF name we know, or None to skip it on purpose."""

FLOATING = ("F64", "F32", "F16", "BF16")
GGUF_BLOCKS = re.compile(r"I?Q\d\w*|TQ\d\w*|MXFP4")  # a GGUF source expands them to float32

# Why a name that we have no parameter for cannot be dropped, by one of its dotted parts.
_FOREIGN = (
    (r"conv_.*|selector_.*", "DFlash-2 drafters are not run"),
    (r"projector_type|gru_.*", "Domino drafters are not run"),
    (r"markov_.*|confidence_.*", "DSpark drafters are not run"),
    (r"d2t|t2d", "a draft with its own reduced vocabulary is not run"),
    (r"embed_tokens|lm_head", "a draft uses the target's embedding and head, not its own"),
    (
        r".*_scale(_inv)?|scales|qweight|qzeros|g_idx|.*zero_point|absmax|quant_.*|.*_packed",
        "quantised tensors are not run",
    ),
    (r"sinks?", "attention sinks are not run"),
    (r"bias", "linears have no bias"),
)


def _identity(name: str) -> str:
    return name


def target_tensor_name(*, tie_word_embeddings: bool) -> Rename:
    """Names of a target checkpoint: a tied head's second copy and RoPE tables are left out."""

    def rename(name: str) -> str | None:
        tied_copy = tie_word_embeddings and name == "lm_head.weight"
        return None if tied_copy or name.endswith("rotary_emb.inv_freq") else name

    return rename


def draft_tensor_name(name: str) -> str:
    """A draft's tensor name without the optional ``model.``, encoder variants included."""
    name = name.removeprefix("model.")
    return _ENCODER_VARIANT.get(name, name)


_ENCODER_VARIANT = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


def load_params(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    source: TensorSource,
    rename: Rename = _identity,
) -> dict[str, jax.Array]:
    """Parameters by dotted path, each cast to its abstract dtype and put to its sharding.

    ``abstract``: shape, dtype and (optional) sharding by path; a path that ends in ``kernel`` is
    read from HF's ``weight`` and transposed. Host memory stays near one tensor.
    Raises one CheckpointError that lists every missing, unexpected, wrong-shaped and non-floating
    tensor, before any of them is read.
    """
    plan = _plan(abstract, source, rename)
    return {
        path: _put(source.read(name), spec, transpose=_is_kernel(path))
        for path, (name, spec) in plan.items()
    }


def _is_kernel(path: str) -> bool:
    return path.rpartition(".")[2] == "kernel"


def _hf_name(path: str) -> str:
    return path.removesuffix("kernel") + "weight" if _is_kernel(path) else path


def _plan(
    abstract: Mapping[str, jax.ShapeDtypeStruct], source: TensorSource, rename: Rename
) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """The source's name of every parameter, once nothing at all speaks against loading."""
    available = source.shapes()
    problems: list[str] = []
    source_name: dict[str, str] = {}
    for name in available:
        hf_name = rename(name)
        if hf_name is None:
            continue
        if hf_name in source_name:
            problems.append(f"twice: {source_name[hf_name]} and {name}")
        source_name[hf_name] = name

    plan: dict[str, tuple[str, jax.ShapeDtypeStruct]] = {}
    for path, spec in abstract.items():
        name = source_name.pop(_hf_name(path), None)
        wanted: TensorShape = spec.shape[::-1] if _is_kernel(path) else spec.shape
        if name is None:
            problems.append(f"missing: {_hf_name(path)} {list(wanted)}")
            continue
        shape, dtype = available[name]
        if shape != wanted:
            problems.append(f"wrong shape: {name} is {list(shape)}, expected {list(wanted)}")
        if dtype not in FLOATING and not GGUF_BLOCKS.fullmatch(dtype):
            problems.append(f"wrong dtype: {name} is {dtype}, accepted {', '.join(FLOATING)}")
        plan[path] = (name, spec)
    problems += [f"unexpected: {name}{_why_foreign(name)}" for name in source_name.values()]
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise CheckpointError(f"{len(problems)} tensors do not fit the model:\n  {listed}")
    return plan


def _why_foreign(name: str) -> str:
    for pattern, reason in _FOREIGN:
        if any(re.fullmatch(pattern, part) for part in name.split(".")):
            return f" ({reason})"
    return ""


def _put(tensor: np.ndarray, spec: jax.ShapeDtypeStruct, *, transpose: bool) -> jax.Array:
    view = tensor.T if transpose else tensor

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.array(view[index or ...], dtype=spec.dtype, order="C")

    if spec.sharding is None:
        array = jax.device_put(shard(None))
    else:
        array = jax.make_array_from_callback(spec.shape, spec.sharding, shard)
    # Transfers are asynchronous: without this, host copies of many tensors would pile up.
    return array.block_until_ready()


def export_draft(
    folder: Path,
    config: DraftConfig,
    params: Mapping[str, jax.Array],
    dtype: jnp.dtype | type | str = jnp.bfloat16,
) -> None:
    """Write a draft as HF does (config.json, model.safetensors), for SGLang, vLLM and ourselves.

    ``params``: by dotted path, as from load_params. Source: docs/dflash.md, section 3.
    """
    _export(folder, draft_config_json(config, jnp.dtype(dtype).name), params, dtype)


def export_target(
    folder: Path,
    config: TargetConfig,
    params: Mapping[str, jax.Array],
    dtype: jnp.dtype | type | str = jnp.bfloat16,
) -> None:
    """Write a target as HF does (config.json, model.safetensors); its tokenizer is the caller's.

    ``params``: by dotted path, as from load_params.
    """
    _export(folder, target_config_json(config, jnp.dtype(dtype).name), params, dtype)


def _export(
    folder: Path,
    config: Mapping[str, object],
    params: Mapping[str, jax.Array],
    dtype: jnp.dtype | type | str,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for path, value in params.items():
        tensor = np.asarray(value).astype(jnp.dtype(dtype))
        tensors[_hf_name(path)] = np.ascontiguousarray(tensor.T if _is_kernel(path) else tensor)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def target_config_json(config: TargetConfig, dtype: str) -> dict[str, object]:
    """``config.json`` of an exported target; hf_config.target_config reads the same config back.

    Raises ValueError for a mix of architecture and q/k norms that HF has no class for.
    """
    if config.qk_norm != (config.architecture == "qwen3"):
        raise ValueError(f"{config.architecture} with qk_norm={config.qk_norm} has no HF class")
    ends = list(config.eos_token_ids)
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        **_transformer_json(config),
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "dtype": dtype,
    }


_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def _transformer_json(config: TransformerConfig) -> dict[str, object]:
    """The keys that target and draft share."""
    scaling = rope_scaling_json(config.rope)
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope.theta,
            **(scaling or {"rope_type": "default"}),
        },
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "vocab_size": config.vocab_size,
    }


def draft_config_json(config: DraftConfig, dtype: str) -> dict[str, object]:
    """``config.json`` of an exported draft; hf_config.draft_config reads the same config back.

    Raises ValueError for layers whose causality differs in a way that no published key says.
    """
    if len({w for w in config.windows if w is not None}) > 1:
        raise ValueError(f"one sliding_window serves all layers, got {config.windows}")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        **_transformer_json(config),
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in config.windows
        ],
        "sliding_window": next((w for w in config.windows if w is not None), None),
        "use_sliding_window": any(w is not None for w in config.windows),
        "tie_word_embeddings": False,
        "dtype": dtype,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        **_causality_json(config),
    }


def _causality_json(config: DraftConfig) -> dict[str, object]:
    """Nothing where the legacy rule (sliding layers alone are causal) already says it."""
    if config.causal == tuple(w is not None for w in config.windows):
        return {}
    if len(set(config.causal)) > 1:
        raise ValueError(f"is_causal is one value for all layers, got {config.causal}")
    return {"is_causal": config.causal[0]}


_ROPE_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}


def rope_scaling_json(rope: RopeConfig) -> dict[str, object] | None:
    """HF's ``rope_scaling`` of a RopeConfig, None where nothing is scaled."""
    if rope.kind == "default":
        return None
    fields = {name: getattr(rope, name) for name in _ROPE_SCALING_FIELDS[rope.kind]}
    return {"rope_type": rope.kind, **{k: v for k, v in fields.items() if v is not None}}
