"""``info``: versions, devices, and what a pair is; no weight is read."""

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dflash_jax
from dflash_jax.cli.args import InfoArgs
from dflash_jax.config import TransformerConfig
from dflash_jax.decoder import Pair
from dflash_jax.generate import find_pair
from dflash_jax.hf_config import read_draft_config, read_target_config
from dflash_jax.sharding import Sharding, make_mesh

PACKAGES = ("jax", "jaxlib", "flax", "transformers", "tokenizers", "numpy")


def run(args: InfoArgs) -> int:
    target_path, draft_path = find_pair(args.model, args.draft)
    target = read_target_config(target_path)
    draft = None if draft_path is None else read_draft_config(draft_path, target)
    dtype = jnp.dtype(args.dtype)
    pair = Pair.of(target, draft, Sharding(make_mesh()), dtype)
    report: dict[str, Any] = {"versions": versions(), "devices": devices()}
    report["target"] = _describe(target_path, target, pair.target.abstract, dtype)
    if pair.draft is not None and draft is not None and draft_path is not None:
        report["draft"] = _describe(draft_path, draft, pair.draft.abstract, dtype)
        report["taps"] = list(draft.target_layer_ids)
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(report)))
    return 0


def versions() -> dict[str, str]:
    ours = {"dflash_jax": dflash_jax.__version__, "python": platform.python_version()}
    return ours | {name: version(name) for name in PACKAGES}


def devices() -> list[str]:
    """One line a device: its platform and its kind."""
    return [f"{device.platform}: {device.device_kind}" for device in jax.devices()]


def _describe(
    path: Path,
    config: TransformerConfig,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
) -> dict[str, Any]:
    """``memory``: bytes of the weights, and of the KV of one token, in ``dtype``."""
    parameters = sum(math.prod(leaf.shape) for leaf in abstract.values())
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return {
        "path": str(path),
        "parameters": parameters,
        "memory": {
            "dtype": dtype.name,
            "weights_bytes": parameters * dtype.itemsize,
            "kv_bytes_per_token": kv * dtype.itemsize,
        },
        "config": dataclasses.asdict(config),
    }


def _lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    lines: list[str] = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}", *_lines(item, indent + "  ")]
        elif isinstance(item, list | tuple):
            lines.append(f"{indent}{name}: {', '.join(map(str, item))}")
        else:
            lines.append(f"{indent}{name}: {item}")
    return lines
