"""Where weights come from: safetensors (one file or shards) and GGUF, read one tensor at a time.

Every source speaks HF tensor names and HF layouts (linears are [out, in]), whatever the file does.
Pickled checkpoints are never opened: unpickling runs code.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, for the safetensors reader)
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_jax.gguf_file import CheckpointError, GGUFTensor, read_gguf

TensorShape = tuple[int, ...]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
ACCEPTED = f"a folder with {SINGLE_FILE} or {INDEX_FILE}, a .safetensors file, or a .gguf file"


class TensorSource(Protocol):
    """Named tensors of a checkpoint."""

    def shapes(self) -> dict[str, tuple[TensorShape, str]]:
        """Shape and stored dtype (the file's own word, such as ``BF16`` or ``Q4_1``) by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in host memory; floating, quantised blocks already expanded to float32."""
        ...


class SafetensorsSource:
    """Tensors of one or more safetensors files.

    A file is mapped for the length of one call only, so resident memory stays near one tensor.
    """

    def __init__(self, files: list[Path], expected: Mapping[str, Path] | None = None) -> None:
        """``expected``: where an index says each tensor is; the files must agree with it."""
        self._info: dict[str, tuple[TensorShape, str]] = {}
        self._file: dict[str, Path] = {}
        for file in files:
            for name, info in _safetensors_header(file).items():
                if name in self._file:
                    both = f"{self._file[name].name} and {file.name}"
                    raise CheckpointError(f"tensor {name} is in two files: {both}")
                self._info[name], self._file[name] = info, file
        if expected is not None and dict(expected) != self._file:
            wrong = sorted(dict(expected).items() ^ self._file.items())
            names = ", ".join(dict.fromkeys(name for name, _ in wrong))
            raise CheckpointError(f"{INDEX_FILE} and the shards disagree about: {names}")

    def shapes(self) -> dict[str, tuple[TensorShape, str]]:
        return dict(self._info)

    def read(self, name: str) -> np.ndarray:
        with safe_open(self._file[name], framework="numpy") as file:
            return file.get_tensor(name)


def _safetensors_header(path: Path) -> dict[str, tuple[TensorShape, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _sharded(folder: Path) -> SafetensorsSource:
    try:
        shard_of = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE}: no JSON with a weight_map") from error
    if not isinstance(shard_of, dict):
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must be an object")
    # The name is judged and not its resolved path: the Hub's cache holds links to ../../blobs.
    outside = sorted({repr(s) for s in shard_of.values() if not _is_plain_shard_name(s)})
    if outside:
        raise CheckpointError(
            f"{folder / INDEX_FILE}: shards must be .safetensors files of the same folder,"
            f" got {', '.join(outside)}"
        )
    return SafetensorsSource(
        [folder / shard for shard in sorted(set(shard_of.values()))],
        expected={name: folder / shard for name, shard in shard_of.items()},
    )


def _is_plain_shard_name(shard: object) -> bool:
    return isinstance(shard, str) and bool(re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard))


# llama.cpp's names of a Llama or Qwen3 file, without the trailing ".weight".
_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """Tensors of a llama or qwen3 GGUF file, under HF names and dequantised to float32.

    llama.cpp stores the rows of Llama's q and k so that rotary pairs are neighbours; they are put
    back into HF's order (two halves). Tensors without an HF name keep theirs, so that the loader
    reports them.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self._heads: dict[str, int] = {}
        if file.value("general.architecture") == "llama":
            heads = file.value("llama.attention.head_count")
            kv_heads = file.value("llama.attention.head_count_kv", heads)
            self._heads = {"q_proj": heads, "k_proj": kv_heads}
        self._tensors: dict[str, GGUFTensor] = {gguf_to_hf(n): t for n, t in file.tensors.items()}

    def shapes(self) -> dict[str, tuple[TensorShape, str]]:
        return {name: (t.shape, t.kind.name) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            values = tensor.read()
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name}: {tensor.kind.name} cannot be dequantised"
                " (F32, F16, BF16, Q8_0, Q4_0, Q4_1, K-quants can)"
            ) from error
        for projection, heads in self._heads.items():
            if name.endswith(f".{projection}.weight"):
                return _undo_rotary_permutation(values, heads)
        return values


def _undo_rotary_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    out, inner = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, inner)
    return pairs.swapaxes(1, 2).reshape(out, inner)


def gguf_to_hf(name: str) -> str:
    """The HF name of a llama.cpp tensor, or the name itself where it has none."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, leaf = match.groups()
        if part in _GGUF_BLOCK:
            return f"model.layers.{layer}.{_GGUF_BLOCK[part]}.{leaf}"
    if (stem := name.removesuffix(".weight")) in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.weight"
    return name


def open_source(path: Path) -> TensorSource:
    """The tensors of a checkpoint folder or file, told apart by names alone.

    Raises CheckpointError for pickles, for shards outside the folder and where nothing is found.
    """
    if path.suffix == ".gguf":
        return GGUFSource(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: pickled weights are never loaded; accepted: {ACCEPTED}")
    if (path / SINGLE_FILE).exists():
        return SafetensorsSource([path / SINGLE_FILE])
    if (path / INDEX_FILE).exists():
        return _sharded(path)
    pickles = sorted(f.name for f in path.glob("*") if f.suffix in PICKLE_SUFFIXES)
    found = "only pickles, never loaded: " + ", ".join(pickles) if pickles else "no weights"
    raise CheckpointError(f"{path}: {found}; accepted: {ACCEPTED}")
