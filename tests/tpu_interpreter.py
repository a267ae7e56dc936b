"""Runs TPU kernels on the CPU under TPU semantics: memory starts as NaN, and a race fails."""

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def races_found() -> bool:
    """Of the kernel that ran last. JAX only prints races; the flag is private, so it is read here
    alone."""
    races = interpret_pallas_call.races
    return races is not None and races.races_found


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()  # an earlier test's race is not ours
    yield
    assert not races_found(), "the kernel that ran last has a race"
