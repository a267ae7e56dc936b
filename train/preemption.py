"""The signal to stop: a training run finishes its step, writes a checkpoint and leaves."""

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """A context in which SIGTERM, and the first SIGINT, ask the loop to stop at a step's end.

    The second SIGINT interrupts as usual. One process notes the signals itself; with several, JAX
    passes SIGTERM on to all and agrees with them on the step, which every process must ask about
    in turn. Enter it in the main thread, after jax.distributed.initialize.
    """

    def __init__(self) -> None:
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        self._several = jax.process_count() > 1
        # JAX listens to SIGTERM below Python: a handler of ours would deafen it.
        kinds = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
        for kind in kinds:
            self._previous[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, previous in self._previous.items():
            signal.signal(kind, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def requested(self, step: int) -> bool:
        """Whether to save and stop after ``step``; the same answer in every process."""
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"\nstopping after a last checkpoint; once more to stop at once\n")
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)
