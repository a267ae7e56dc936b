import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint import (
    CheckpointError,
    GGUFSource,
    TensorSource,
    draft_config_json,
    draft_tensor_name,
    export_draft,
    export_target,
    load_params,
    open_source,
    target_config_json,
    target_tensor_name,
)
from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.decoder import Pair
from dflash_jax.hf_config import (
    draft_config,
    read_draft_config,
    read_target_config,
    target_config,
)
from dflash_jax.sharding import Sharding, make_mesh

GOLDENS = Path(__file__).parent / "goldens"
UNTIED = GOLDENS / "qwen3-untied"


class Dictionary:
    """A source in memory that remembers what was read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.was_read: list[str] = []

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        words = {np.dtype(np.float32): "F32", np.dtype(np.int8): "I8"}
        return {n: (t.shape, words[t.dtype]) for n, t in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        self.was_read.append(name)
        return self.tensors[name]


def abstract_of(
    source: TensorSource, rename: Callable[[str], str | None], dtype: jnp.dtype | type = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """What a model would ask for: matrices but the embedding are kernels, [in, out]."""
    abstract = {}
    for name, (shape, _) in source.shapes().items():
        path = rename(name)
        if path is None:
            continue
        if len(shape) == 2 and "embed" not in path:
            path, shape = path.removesuffix("weight") + "kernel", shape[::-1]
        abstract[path] = jax.ShapeDtypeStruct(shape, dtype)
    return abstract


def arange(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_kernels_are_transposed_and_all_is_cast() -> None:
    source = Dictionary({"a.weight": arange(3, 2), "norm.weight": arange(3)})
    params = load_params(
        {
            "a.kernel": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
            "norm.weight": jax.ShapeDtypeStruct((3,), jnp.float32),
        },
        source,
    )
    assert params["a.kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params["a.kernel"], np.float32), arange(3, 2).T)
    np.testing.assert_array_equal(params["norm.weight"], arange(3))


def test_tensors_go_to_their_sharding() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    sharding = NamedSharding(mesh, P(None, "model"))
    spec = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)
    kernel = load_params({"a.kernel": spec}, Dictionary({"a.weight": arange(4, 6)}))["a.kernel"]
    assert kernel.sharding == sharding
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(6, 2)}
    np.testing.assert_array_equal(kernel, arange(4, 6).T)


def test_one_error_lists_everything_before_any_weight_is_read() -> None:
    source = Dictionary(
        {
            "square.weight": arange(3, 2),
            "whole.weight": arange(2).astype(np.int8),
            "fine.weight": arange(2),
            "extra.weight": arange(1),
            "conv_1.weight": arange(1),
        }
    )
    abstract = {
        "square.kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "whole.weight": jax.ShapeDtypeStruct((2,), jnp.float32),
        "fine.weight": jax.ShapeDtypeStruct((2,), jnp.float32),
        "absent.kernel": jax.ShapeDtypeStruct((5, 4), jnp.float32),
    }
    with pytest.raises(CheckpointError) as error:
        load_params(abstract, source)
    for problem in (
        "5 tensors",
        "wrong shape: square.weight is [3, 2], expected [2, 3]",
        "wrong dtype: whole.weight is I8",
        "missing: absent.weight [4, 5]",
        "unexpected: extra.weight",
        "unexpected: conv_1.weight (DFlash-2",
    ):
        assert problem in str(error.value)
    assert not source.was_read


def test_a_head_that_is_not_there_is_missed_and_a_tied_copy_is_not() -> None:
    """Fault 25: with tied embeddings the head is the embedding; else it must be in the file."""
    embedding = {"model.embed_tokens.weight": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    head = {"lm_head.kernel": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    both = Dictionary(
        {
            "model.embed_tokens.weight": arange(4, 2),
            "lm_head.weight": arange(4, 2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": arange(1),
        }
    )
    tied, untied = (target_tensor_name(tie_word_embeddings=tie) for tie in (True, False))
    assert load_params(embedding, both, tied).keys() == embedding.keys()
    assert load_params(embedding | head, both, untied).keys() == {*embedding, *head}
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.weight"):
        load_params(embedding, both, untied)
    alone = Dictionary({"model.embed_tokens.weight": arange(4, 2)})
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_params(embedding | head, alone, untied)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("conv_in.weight", "DFlash-2"),
        ("layers.0.selector_head.weight", "DFlash-2"),
        ("gru_cell.weight", "Domino"),
        ("projector_type", "Domino"),
        ("markov_head.weight", "DSpark"),
        ("confidence_head.weight", "DSpark"),
        ("d2t", "reduced vocabulary"),
        ("t2d", "reduced vocabulary"),
        ("embed_tokens.weight", "target's embedding"),
        ("model.lm_head.weight", "target's embedding and head"),
        ("layers.0.mlp.up_proj.weight_scale", "quantised"),
        ("layers.0.mlp.up_proj.weight_scale_inv", "quantised"),
        ("layers.0.mlp.up_proj.qweight", "quantised"),
        ("layers.0.mlp.up_proj.weight_packed", "quantised"),
        ("layers.0.self_attn.sinks", "sinks"),
        ("layers.0.self_attn.q_proj.bias", "bias"),
        ("something_new", ""),
    ],
)
def test_other_drafters_tensors_are_refused_by_name(name: str, reason: str) -> None:
    source = Dictionary({"fc.weight": arange(2, 4), name: arange(2)})
    abstract = {"fc.kernel": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    with pytest.raises(CheckpointError) as error:
        load_params(abstract, source, draft_tensor_name)
    assert f"unexpected: {name}" in str(error.value) and reason in str(error.value)


def test_draft_name_variants() -> None:
    source = Dictionary(
        {"model.encoder.fc.weight": arange(2, 4), "encoder.output_norm_enc.weight": arange(2)}
    )
    abstract = {
        "fc.kernel": jax.ShapeDtypeStruct((4, 2), jnp.float32),
        "hidden_norm.weight": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    params = load_params(abstract, source, draft_tensor_name)
    np.testing.assert_array_equal(params["fc.kernel"], arange(2, 4).T)
    source.tensors["fc.weight"] = arange(2, 4)
    with pytest.raises(CheckpointError, match=r"twice: model\.encoder\.fc\.weight and fc\.weight"):
        load_params(abstract, source, draft_tensor_name)


def test_an_exported_draft_is_the_draft_that_was_loaded(tmp_path: Path) -> None:
    target = read_target_config(UNTIED / "target")
    config = read_draft_config(UNTIED / "draft", target)
    source = open_source(UNTIED / "draft")
    params = load_params(abstract_of(source, draft_tensor_name), source, draft_tensor_name)
    export_draft(tmp_path, config, params, jnp.float32)
    assert read_draft_config(tmp_path, target) == config
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, UNTIED / "draft"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
    export_draft(tmp_path, config, params)
    assert {dtype for _, dtype in open_source(tmp_path).shapes().values()} == {"BF16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_exported_config_reads_back_whatever_its_layers() -> None:
    target = read_target_config(UNTIED / "target")
    base = read_draft_config(UNTIED / "draft", target)
    yarn = RopeConfig(1e6, "yarn", 4.0, 64, mscale=0.7, mscale_all_dim=1.0, truncate=False)
    llama3 = RopeConfig(1e6, "llama3", 8.0, 64)
    for config in (
        replace(base, windows=(8, None), causal=(True, False)),
        replace(base, windows=(8, 8), causal=(False, False)),
        replace(base, causal=(True, True), rope=yarn),
        replace(base, rope=llama3),
        replace(base, rope=RopeConfig(1e4, "linear", 2.0)),
    ):
        assert draft_config(draft_config_json(config, "bfloat16"), target) == config
    with pytest.raises(ValueError, match="is_causal is one value"):
        draft_config_json(replace(base, causal=(True, False)), "bfloat16")
    with pytest.raises(ValueError, match="one sliding_window"):
        draft_config_json(replace(base, windows=(8, 16), causal=(True, True)), "bfloat16")


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-tied-b16", "qwen3-untied"])
def test_an_exported_target_is_the_target_that_was_loaded(tmp_path: Path, name: str) -> None:
    folder = GOLDENS / name / "target"
    config = read_target_config(folder)
    source = open_source(folder)
    rename = target_tensor_name(tie_word_embeddings=config.tie_word_embeddings)
    params = load_params(abstract_of(source, rename), source, rename)
    export_target(tmp_path, config, params, jnp.float32)
    assert read_target_config(tmp_path) == config
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor])


def test_an_exported_target_config_reads_back_whatever_its_ends_and_rope() -> None:
    base = read_target_config(UNTIED / "target")
    llama = replace(base, architecture="llama", qk_norm=False)
    for config in (
        replace(base, eos_token_ids=(), bos_token_id=None),
        replace(base, eos_token_ids=(2, 5), rope=RopeConfig(1e6, "yarn", 4.0, 64)),
        replace(llama, rope=RopeConfig(5e5, "llama3", 8.0, 64), tie_word_embeddings=True),
    ):
        assert target_config(target_config_json(config, "float32")) == config
    with pytest.raises(ValueError, match="llama with qk_norm=True has no HF class"):
        target_config_json(replace(llama, qk_norm=True), "float32")


def sharded(folder: Path, weight_map: dict[str, object]) -> Path:
    save_file({"a": arange(2)}, folder / "one.safetensors")
    save_file({"b": arange(3).astype(ml_dtypes.bfloat16)}, folder / "two.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    both = {"a": "one.safetensors", "b": "two.safetensors"}
    source = open_source(sharded(tmp_path, both))
    assert source.shapes() == {"a": ((2,), "F32"), "b": ((3,), "BF16")}
    assert source.read("b").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(source.read("b").astype(np.float32), arange(3))


@pytest.mark.parametrize(
    "shard", ["../one.safetensors", "/one.safetensors", "x/one.safetensors", "one.bin", "..", 3]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard: object) -> None:
    with pytest.raises(CheckpointError, match="same folder") as error:
        open_source(sharded(tmp_path, {"a": shard}))
    assert repr(shard) in str(error.value)


def test_an_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    wrong = {"a": "one.safetensors", "c": "two.safetensors"}
    with pytest.raises(CheckpointError, match="disagree about: b, c"):
        open_source(sharded(tmp_path, wrong))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        open_source(sharded(tmp_path, {"a": "gone.safetensors"}))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="weight_map"):
        open_source(tmp_path)


def test_links_into_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blob", tmp_path / "snapshot"
    snapshot.mkdir()
    save_file({"a": arange(2)}, blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    np.testing.assert_array_equal(open_source(snapshot).read("a"), arange(2))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"not even a pickle")
    for path in (pickle, tmp_path):
        with pytest.raises(CheckpointError, match="pickle.*never loaded"):
            open_source(path)
    with pytest.raises(CheckpointError, match="no weights"):
        open_source(tmp_path / "empty")


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = (UNTIED / "draft" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        open_source(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF"):
        open_source(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "gone.gguf")


LLAMA = TargetConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e4),
    max_position_embeddings=64,
    architecture="llama",
    tie_word_embeddings=True,
    qk_norm=False,
)


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to HF's q and k: interleave the two rotary halves."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, tie_word_embeddings=False)])
def test_gguf_is_read_under_hf_names_and_in_hf_row_order(
    tmp_path: Path, write_gguf, config: TargetConfig
) -> None:
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", config))
    assert ("lm_head.weight" in source.shapes()) != config.tie_word_embeddings
    raw = {t.name: t.data for t in GGUFReader(tmp_path / "m.gguf").tensors}
    for part, heads in (("q", 4), ("k", 2)):
        ours = source.read(f"model.layers.0.self_attn.{part}_proj.weight")
        np.testing.assert_array_equal(
            llama_cpp_order(ours, heads), raw[f"blk.0.attn_{part}.weight"]
        )
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
    ):
        np.testing.assert_array_equal(source.read(f"{ours}.weight"), raw[f"{theirs}.weight"])


def test_qwen3_gguf_rows_are_left_alone(tmp_path: Path, write_gguf) -> None:
    config = replace(LLAMA, architecture="qwen3", qk_norm=True)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", config, arch="qwen3"))
    raw = {t.name: t.data for t in GGUFReader(tmp_path / "m.gguf").tensors}
    query = source.read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(query, raw["blk.0.attn_q.weight"])
    assert source.shapes()["model.layers.0.self_attn.k_norm.weight"] == ((16,), "F32")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_expanded(tmp_path: Path, write_gguf, kind: str) -> None:
    kinds = GGMLQuantizationType
    exact = GGUFSource(write_gguf(tmp_path / "f32.gguf", LLAMA))
    source = GGUFSource(write_gguf(tmp_path / "q.gguf", LLAMA, kind=kinds[kind]))
    assert source.shapes().keys() == exact.shapes().keys()
    rename = target_tensor_name(tie_word_embeddings=True)
    params = load_params(abstract_of(source, rename), source, rename)
    # 32 normal values span about 5; four bits leave half a step of 5 / 15, eight far less.
    bound = 0.4 if kind.startswith("Q4") else 0.03
    for path, value in params.items():
        stored = exact.read(path.replace("kernel", "weight"))
        expected = stored.T if path.endswith("kernel") else stored
        assert np.abs(np.asarray(value) - expected).max() < bound, path


def test_gguf_tensors_without_an_hf_name_are_reported(tmp_path: Path, write_gguf) -> None:
    def change(writer) -> None:
        writer.add_tensor("rope_freqs.weight", arange(8))

    source = GGUFSource(write_gguf(tmp_path / "m.gguf", LLAMA, change))
    abstract = abstract_of(source, lambda n: None if n.startswith("rope") else n)
    with pytest.raises(CheckpointError, match=r"1 tensors.*\n  unexpected: rope_freqs\.weight"):
        load_params(abstract, source)


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-tied-b16", "qwen3-untied"])
def test_our_modules_ask_for_exactly_what_checkpoints_hold(name: str) -> None:
    target = read_target_config(GOLDENS / name / "target")
    draft = read_draft_config(GOLDENS / name / "draft", target)
    pair = Pair.of(target, draft, Sharding(make_mesh(data=2, model=2)), jnp.dtype(jnp.float32))
    assert pair.draft is not None
    rename = target_tensor_name(tie_word_embeddings=target.tie_word_embeddings)
    for module, part, names in (
        (pair.target, "target", rename),
        (pair.draft, "draft", draft_tensor_name),
    ):
        source = open_source(GOLDENS / name / part)
        params = load_params(module.placed(pair.sharding), source, names)
        assert params.keys() == module.abstract.keys()
        assert len(params) == len(source.shapes())
