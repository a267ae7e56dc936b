"""What must not change between a training run and its resumption."""

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

from dflash_jax.checkpoint import draft_config_json
from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from train.checksum import checksums

if TYPE_CHECKING:
    from train.loop import LoopConfig


def contract_of(
    pair: Pair, target_params: Params, config: "LoopConfig", data: str
) -> dict[str, Any]:
    """Plain JSON: target, draft, objective, optimiser, schedule, data. How the work is cut (mesh,
    accumulation, tiles, slices, recomputation) and what is only watched (logs, checkpoints) may
    change."""
    assert pair.draft_config is not None
    loss = dataclasses.asdict(config.objective.loss)
    del loss["slice_blocks"]
    return {
        "target": {
            "config": dataclasses.asdict(pair.target_config),
            "weights": weights_digest(target_params),
            "dtype": pair.dtype.name,
        },
        "draft": draft_config_json(pair.draft_config, "float32"),
        "objective": {"anchors": config.objective.anchors, "loss": loss},
        "optimizer": dataclasses.asdict(config.optimizer),
        "schedule": {
            "steps": config.steps,
            "epochs": config.epochs,
            "batch_rows": config.batch_rows,
            "seed": config.seed,
        },
        "data": data,
    }


def weights_digest(params: Params) -> str:
    """One hash of all weights, the same on every mesh."""
    sums = checksums(dict(params))
    return hashlib.sha256("".join(sums[name] for name in sorted(sums)).encode()).hexdigest()
