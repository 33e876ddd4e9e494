"""Exceptions from signal handlers while an engine works, and whether the next call is right nevertheless."""

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from octavo.engine.llm_engine import LLMEngine
from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams


class AlarmError(Exception):
    """Raised by the handler: not `KeyboardInterrupt`, which would end all tests if it came too late."""


@contextmanager
def alarms() -> Iterator[None]:
    """Let SIGALRM raise `AlarmError` in the main thread."""

    def ring(number: int, frame: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def generate_until(delay_s: float, engine: LLMEngine, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    engine.generate(prompts, params)


def endure(engine: LLMEngine, prompts: Sequence[Prompt], params: SamplingParams, *, times: int) -> None:
    """Interrupt `generate` at random moments; the call after each one must give what an undisturbed one gives."""
    expected = [output.outputs for output in engine.generate(prompts, params)]
    endless = params.replace(max_tokens=None, ignore_eos=True)
    rng = random.Random(0)
    with alarms():
        for _ in range(times):
            delay_s = rng.uniform(0.001, 0.03)
            with pytest.raises(AlarmError):  # every time: nothing may swallow it
                generate_until(delay_s, engine, prompts, endless)
            assert [output.outputs for output in engine.generate(prompts, params)] == expected
            assert not engine.has_unfinished_requests()
    engine.check_integrity()
