"""Numerics as strict as JAX can be asked for, on four CPU devices, compiled once."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from hypothesis import settings

import dflash_jax
from dflash_jax import EngineConfig
from dflash_jax.config import TargetConfig
from dflash_jax.decoder import Pair, PairParams

# Machines are shared and first calls compile: a slow example is no fault.
settings.register_profile("dflash_jax", deadline=None)
settings.load_profile("dflash_jax")


def pytest_configure(config: pytest.Config) -> None:
    # Before any backend is made: the number of devices cannot change afterwards.
    jax.config.update("jax_num_cpu_devices", 4)
    # Programs of four devices in flight together have starved each other on two cores.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    store = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    cache = store.mkdir("jax_compilation") if store else None
    jax.config.update("jax_compilation_cache_dir", str(cache) if cache else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


LONG = ("test_tiny", "test_distributed", "test_tpu_aot", "test_train", "test_laws")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: workers take files in this order, and the last one works alone."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture
def compilation_cache(tmp_path: Path) -> Iterator[list[str]]:
    """The flags by which a command keeps the suite's own compilation cache, which is in force again
    afterwards: commands change the whole process's."""
    before = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    yield ["--compilation-cache-dir", before or str(tmp_path)]
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.fixture
def run_command(
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str, Sequence[str]], tuple[object, str, str]]:
    """Runs a command of ``python -m train``: (exit status, stdout, stderr)."""
    from train.cli import commands  # here: few tests need matplotlib

    def run(name: str, argv: Sequence[str]) -> tuple[object, str, str]:
        try:
            status: object = commands.main([name, *argv])
        except SystemExit as exit:  # argparse
            status = exit.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


class LoadGolden(Protocol):
    def __call__(self, name: str, data: int = ..., model: int = ...) -> tuple[Pair, PairParams]: ...


@pytest.fixture(scope="session")
def load_golden() -> LoadGolden:
    """A golden pair, on a mesh of data x model devices. Their drafts accept well."""

    @functools.cache
    def load(name: str, data: int = 1, model: int = 1) -> tuple[Pair, PairParams]:
        folder = Path(__file__).parent / "goldens" / name
        llm = dflash_jax.load(
            folder / "target",
            folder / "draft",
            data_parallel=data,
            model_parallel=model,
            engine=EngineConfig(max_model_len=32),
        )
        return llm.pair, llm.engine.params

    return load


class WriteGGUF(Protocol):
    def __call__(
        self,
        path: Path,
        config: TargetConfig,
        change: Callable[[GGUFWriter], None] = ...,
        *,
        arch: str = ...,
        kind: GGMLQuantizationType = ...,
    ) -> Path: ...


@pytest.fixture
def write_gguf() -> WriteGGUF:
    """Writes a tiny llama or qwen3 .gguf of random weights, tied or not, as llama.cpp names it."""

    def write(
        path: Path,
        config: TargetConfig,
        change: Callable[[GGUFWriter], None] = lambda writer: None,
        *,
        arch: str = "llama",
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    ) -> Path:
        writer = GGUFWriter(path, arch)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
        change(writer)
        random = np.random.default_rng(0)
        for name, shape in _gguf_shapes(config).items():
            values = random.standard_normal(shape, np.float32)
            if len(shape) == 1:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _gguf_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * h, config.num_kv_heads * h
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, d),
        "output_norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, d)
    for i in range(config.num_layers):
        layer = {
            "attn_norm": (d,),
            "attn_q": (q, d),
            "attn_k": (kv, d),
            "attn_v": (kv, d),
            "attn_output": (d, q),
            "ffn_norm": (d,),
            "ffn_gate": (f, d),
            "ffn_up": (f, d),
            "ffn_down": (d, f),
        }
        if config.qk_norm:
            layer |= {"attn_q_norm": (h,), "attn_k_norm": (h,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
