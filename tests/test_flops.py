"""FLOPs of a step: by hand on small numbers, and beside what XLA counts."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.testing import tiny_pair
from train.bench import full_rows, random_params
from train.chips import chip_of
from train.flops import forward_flops, step_flops
from train.losses import LossConfig
from train.mesh import training_sharding
from train.objective import ObjectiveConfig
from train.stacked import FrozenTarget
from train.step import OptimizerConfig, init_state, make_step

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}
QUERY_OUTPUT, KEY_VALUE, MLP = 2 * (8 * 16 + 16 * 8), 2 * (8 * 8 * 2), 2 * (3 * 8 * 16)
PAIR = 2 * 2 * 16  # score and value of a query and a key, 4 heads of 4


def configs(**draft):
    pair = tiny_pair(
        target={**SHAPE, "num_layers": 3},
        draft={
            **SHAPE, "num_layers": 1, "target_layer_ids": (0, 2), "num_target_layers": 3,
            "target_hidden_size": 8, "block_size": 3, "windows": (None,), "causal": (False,),
            "mask_token_id": 99, **draft,
        },
    )[0]  # fmt: skip
    assert pair.draft_config is not None
    return pair.target_config, pair.draft_config


def test_a_step_counted_by_hand() -> None:
    """Two rows of 5 tokens, 4 anchors each, blocks of 3."""
    target, draft = configs()
    flops = step_flops(target, draft, rows=2, row_length=5, anchors=4)
    tokens, slots = 2 * 5, 2 * 4 * 3
    layer = tokens * (QUERY_OUTPUT + KEY_VALUE + MLP) + 2 * (1 + 2 + 3 + 4 + 5) * PAIR
    assert flops.target == 3 * layer
    features = tokens * 2 * (2 * 8) * 8
    # Anchors 0..3 see 0, 1, 2, 3 features, each from 3 slots; a block's slots see each other.
    attention = 2 * 4 * (1.5 * 3 + 3 * 3) * PAIR
    block = tokens * KEY_VALUE + slots * (QUERY_OUTPUT + KEY_VALUE + MLP) + attention
    assert flops.draft == 2 * features + 3 * block
    head = 2 * 4 * 2 * (2 * 8 * 100)  # slots 1 and 2 of every block
    assert flops.head == 2 * head
    assert flops.total == flops.target + flops.draft + flops.head

    forward = forward_flops(target, draft, rows=2, row_length=5, anchors=4)
    assert forward == (flops.target, features + block, head)
    taught = step_flops(target, draft, rows=2, row_length=5, anchors=4, kl=True)
    assert taught.head == 3 * head


@pytest.mark.parametrize(
    ("window", "causal", "context", "own"),
    [
        (None, False, 3 * 1.5, 9),
        (None, True, 3 * 1.5, 6),
        # Keys after a + o - 2: anchor 0 sees none, 1 to 3 see one from slot 0, none from others.
        (2, True, 0.75, 1 + 2 + 2),
        # Keys after a + o - 3: 0; 1 + 1; 2 + 1; 2 + 1.
        (3, False, 2.0, 9),
    ],
)
def test_windows_and_causal_blocks_see_less(
    window: int | None, causal: bool, context: float, own: int
) -> None:
    def draft_flops(**changes) -> float:
        target, draft = configs(**changes)
        return forward_flops(target, draft, rows=1, row_length=5, anchors=1).draft

    less = draft_flops(windows=(window,), causal=(causal,))
    assert draft_flops() - less == pytest.approx((3 * 1.5 + 9 - context - own) * PAIR)


def test_xla_counts_about_as_much() -> None:
    """One layer each and one tile, because XLA counts a loop's body once whatever its length. It
    counts more: whole tiles of scores, masked or not and once more in the backward pass, norms,
    softmaxes and the optimiser; these are small beside products over widths like these."""
    rows, length, anchors = 2, 32, 8
    shape = {**SHAPE, "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512,
             "head_dim": 32}  # fmt: skip
    pair = tiny_pair(
        target={**shape, "num_layers": 1},
        draft={
            **shape, "num_layers": 1, "target_layer_ids": (0,), "num_target_layers": 1,
            "target_hidden_size": 128, "block_size": 8, "windows": (None,), "causal": (False,),
            "mask_token_id": 99,
        },
        sharding=training_sharding(1, 1, 1),
    )[0]  # fmt: skip
    assert pair.draft is not None and pair.draft_config is not None
    optimizer = OptimizerConfig()
    step = make_step(pair, ObjectiveConfig(anchors, LossConfig()), optimizer)
    state = init_state(pair, random_params(pair.draft.placed(pair.sharding), 0), optimizer)
    operands = FrozenTarget.of(pair).placed(), full_rows(pair, rows, length), None
    analysis = cast(Any, step).lower(state, *operands, jnp.float32(0)).compile().cost_analysis()
    counted = step_flops(
        pair.target_config, pair.draft_config, rows=rows, row_length=length, anchors=anchors
    ).total
    assert analysis["flops"] == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_chips_are_found_by_their_kind(kind: str, name: str) -> None:
    chip = chip_of(kind)
    assert chip is not None and chip.name == name


def test_a_device_without_a_data_sheet() -> None:
    assert chip_of(jax.devices("cpu")[0].device_kind) is None
