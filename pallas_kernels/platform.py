"""Which chip a program is for, and which implementation of an op runs there.

An explicit choice never falls back to another one, and a chip's own choice is one of a table.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Chip(NamedTuple):
    """What a program is compiled for: ``platform`` cpu, gpu or tpu; ``kind`` as JAX spells it
    ("TPU v6 lite", "NVIDIA H200")."""

    platform: str
    kind: str


def chip() -> Chip:
    """Inside shard_map the mesh's chip, so that compiling ahead of time for a machine that is not
    here is right; elsewhere the default device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return Chip(device.platform, device.device_kind)


def select(
    op: str,
    implementation: str,
    implementations: Mapping[str, Callable[..., Any]],
    auto: Mapping[str, str],
) -> Callable[..., Any]:
    """The named implementation of ``op``; for ``auto`` the one that ``auto`` has for the platform.

    Raises ValueError naming the op, the request and what is accepted.
    """
    name = auto[chip().platform] if implementation == "auto" else implementation
    if name not in implementations:
        accepted = ", ".join(["auto", *implementations])
        raise ValueError(f"{op}: no implementation {implementation!r}; accepted: {accepted}")
    return implementations[name]
