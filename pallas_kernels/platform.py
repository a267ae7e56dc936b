"""Which chip a program is for, and which implementation of an op runs there.

An explicit choice never falls back to another one, and a chip's own choice is one of a table.
"""

from collections.abc import Callable, Mapping
from functools import partial
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
    kernels: Mapping[str, type],
    *,
    tiles: Any,
    interpret: Any,
) -> Callable[..., Any]:
    """The named implementation of ``op``; for ``auto`` the one that ``auto`` has for the platform.
    Those of ``kernels`` get ``tiles``, of the class that it has for them, and ``interpret``.

    Raises ValueError naming the op, the request and what is accepted.
    """
    name = auto[chip().platform] if implementation == "auto" else implementation
    if name not in implementations:
        accepted = ", ".join(["auto", *implementations])
        raise ValueError(f"{op}: no implementation {implementation!r}; accepted: {accepted}")
    run = implementations[name]
    if name in kernels:
        if tiles is not None and not isinstance(tiles, kernels[name]):
            expected = f"{kernels[name].__module__}.{kernels[name].__name__}"
            raise ValueError(f"{op}: tiles must be a {expected}, got {tiles!r}")
        return partial(run, tiles=tiles, interpret=interpret)
    if interpret or tiles is not None:
        owners = f"implementation{'s' if len(kernels) > 1 else ''} {' and '.join(kernels)}"
        raise ValueError(f"{op}: tiles and interpret are for {owners}")
    return run
