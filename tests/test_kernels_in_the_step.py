"""The kernels where they work: inside the engine's steps, under shard_map. Interpreted, so this is
about what the steps hand them (shards, tables, padding rows, lengths), not about speed."""

from functools import partial

import pytest
from tpu_interpreter import INTERPRET

from dflash_jax import Engine, EngineConfig, Request, SamplingParams
from dflash_jax.sharding import Sharding, make_mesh
from dflash_jax.testing import Tally, assert_same_tokens, tiny_pair
from pallas_kernels import row_width
from pallas_kernels.block_attention import api as attention
from pallas_kernels.block_attention import gpu as gpu_attention
from pallas_kernels.block_attention import tpu as tpu_attention
from pallas_kernels.kv_injection import api as injection
from pallas_kernels.kv_injection import gpu as gpu_injection
from pallas_kernels.kv_injection import tpu as tpu_injection
from pallas_kernels.kv_write import api as write
from pallas_kernels.kv_write import tpu as tpu_write

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=48, page_size=16, prefill_tokens=32)
SHAPE = {"hidden_size": 32, "num_kv_heads": 2}
REQUESTS = [
    Request("greedy", tuple(range(3, 20)), SamplingParams(max_new_tokens=8, ignore_eos=True)),
    Request(
        "drawn", (5, 6), SamplingParams(temperature=0.7, seed=1, max_new_tokens=5, ignore_eos=True)
    ),
]


def outputs(mesh: tuple[int, int]) -> dict[str, list[int]]:
    engine = Engine(*pair_on(mesh), CONFIG)
    for request in REQUESTS:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    while engine.has_work:
        for update in engine.step():
            tokens[update.request_id] += update.tokens
    return tokens


def pair_on(mesh: tuple[int, int]):
    return tiny_pair(target=SHAPE, draft=SHAPE, sharding=Sharding(make_mesh(*mesh)))


@pytest.mark.parametrize(
    ("platform", "mesh"), [("gpu", (2, 2)), ("tpu", (1, 1))], ids=lambda value: str(value)
)
def test_the_same_tokens(platform: str, mesh: tuple[int, int], monkeypatch, capsys) -> None:
    """One interpreted TPU is enough: its shards are the GPU's."""
    expected = outputs((1, 1))
    if platform == "tpu":
        kernels = {
            (attention, "portable"): tpu_attention.block_attention,
            (injection, "reference"): tpu_injection.kv_injection,
            (write, "reference"): tpu_write.kv_write,
        }
        monkeypatch.setattr("dflash_jax.cache.row_width", lambda dim, _: row_width(dim, "tpu"))
    else:
        kernels = {
            (attention, "portable"): gpu_attention.block_attention,
            (injection, "reference"): gpu_injection.kv_injection,
        }
    called = []

    def run_interpreted(kernel, *operands, **options):
        called.append(kernel)
        interpret = INTERPRET if platform == "tpu" else True
        return kernel(*operands, **options, interpret=interpret)

    for (door, replaced), kernel in kernels.items():
        monkeypatch.setitem(door.IMPLEMENTATIONS, replaced, partial(run_interpreted, kernel))
    got, tally = outputs(mesh), Tally()
    assert set(called) == set(kernels.values())
    assert "RACE DETECTED" not in capsys.readouterr().out  # of all kernels, not the last alone
    for request in REQUESTS:
        arguments = (request.prompt_ids, request.sampling)
        tokens = expected[request.id], got[request.id]
        assert_same_tokens(*pair_on((1, 1)), *arguments, *tokens, tally)
    assert not tally.excused
