"""The first signal asks, the second interrupts, and the handlers of before come back."""

import os
import signal

import pytest

from train.preemption import Preemption


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(kind, capfd):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Preemption() as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), kind)
        assert preemption.requested(2) and preemption.requested(3)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert ("once more" in capfd.readouterr().err) == (kind == signal.SIGINT)


def test_the_second_interrupt_interrupts():
    # A shell starts what runs in the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_twice():
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert preemption.requested(1)
