"""Our loader and model against transformers' own, in torch, over folders that it wrote itself."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax
from dflash_jax import EngineConfig
from dflash_jax.checkpoint import export_target
from dflash_jax.decoder import Pair
from dflash_jax.hf_config import read_target_config
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import target_oracle

# float32 on both sides, sums in two orders: 1e-6 each over a few layers. A wrong layout is > 1e-1.
TOLERANCE = 2e-5
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}},
    ),
    "qwen3, tied, head_dim of its own": ("qwen3", {"tie_word_embeddings": True, "head_dim": 20}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 16, "num_key_value_heads": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_taps_and_greedy_text(name: str, tmp_path: Path) -> None:
    """Faults 17, 18, 19, 20, 25 against the implementation that defines them."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers in torch: `parity`")
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kind, changes = MODELS[name]
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # ones would hide a norm that is left out
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    shards = {"max_shard_size": "60KB"} if "tied" in name else {}
    model.save_pretrained(tmp_path, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not shards

    llm = dflash_jax.load(tmp_path, engine=EngineConfig(max_num_seqs=1, prefill_tokens=32))
    tokens = np.random.default_rng(0).integers(3, 90, 70).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens]), output_hidden_states=True)
        generated = model.generate(
            torch.tensor([tokens[:40]]),
            attention_mask=torch.ones(1, 40, dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 40:].tolist()

    logits, _ = target_oracle(llm.pair, llm.engine.params, tokens)
    assert_close(logits, theirs.logits[0].numpy())
    # HF norms its last entry; ours is the residual before that, so the norm is applied here.
    for tap in range(3):
        ours = np.asarray(features_at(llm, tokens, tap))
        assert_close(ours, theirs.hidden_states[tap + 1][0].numpy())
    result = llm.generate(tokens[:40], max_new_tokens=30, ignore_eos=True)
    assert result.output_ids == generated


def features_at(llm: dflash_jax.LLM, tokens: list[int], tap: int) -> jax.Array:
    model = llm.pair.target.bind(llm.engine.params.target)
    ids, positions = jnp.asarray([tokens]), jnp.arange(len(tokens))[None]

    def attend(layer: int, q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    features = model(ids, positions, attend, (tap,)).features[0]
    last = tap == llm.pair.target_config.num_layers - 1
    return model.model.norm(features) if last else features


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_we_export(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the oracle is transformers in torch: `parity`")
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    kind, changes = MODELS[name]
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    config_class(**{**SIZES, **changes}).save_pretrained(tmp_path)
    config = read_target_config(tmp_path)
    pair = Pair.of(config, None, Sharding(make_mesh()), jnp.dtype(jnp.float32))
    random = np.random.default_rng(0)
    params = {
        name: jnp.asarray(random.normal("norm" in name, 0.2, leaf.shape), jnp.float32)
        for name, leaf in pair.target.abstract.items()
    }
    export_target(tmp_path / "exported", config, params, jnp.float32)

    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(loading.values()), loading
    llm = dflash_jax.load(tmp_path / "exported", engine=EngineConfig(max_num_seqs=1))
    assert llm.pair.target_config == config
    tokens = random.integers(3, 90, 70).tolist()
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([tokens])).logits[0].numpy()
    assert_close(target_oracle(llm.pair, llm.engine.params, tokens)[0], theirs)


HEAPQ_SHA256 = "6d43277e5c76fc0f073cd388fcff852d14d068f6bb6d4886c340f8b75a1229a9"


@pytest.mark.slow
def test_perplexity_of_the_embedded_target() -> None:
    """The default target reads Python as the measured model does: 14.757 on heapq.py.

    CPython 3.11.7's heapq.py, its first 2,048 tokens in one window without BOS, 2,047 targets.
    """
    import heapq

    text = Path(heapq.__file__).read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    if digest != HEAPQ_SHA256:
        pytest.skip(f"this Python's heapq.py is not 3.11.7's (SHA-256 {digest})")
    llm = dflash_jax.load(
        dflash_jax.embedded.fetch_target(),
        engine=EngineConfig(max_num_seqs=1, max_model_len=2048),
    )
    ids = llm.encode(text.decode())[:2048]
    assert ids[:5] == (3327, 3681, 512, 18157, 7748)
    logits, _ = target_oracle(llm.pair, llm.engine.params, ids)
    losses = [
        np.logaddexp.reduce(row.astype(np.float64)) - row[target]
        for row, target in zip(logits, ids[1:], strict=False)
    ]
    assert len(losses) == 2047
    assert np.exp(np.mean(losses)) == pytest.approx(14.757, rel=0.005)
