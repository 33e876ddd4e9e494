"""Test doubles for Octavo and for programs that use it: one-line requests, and a worker without a model.

The fake model is a pure function: the next token is a hash of the context and the request's seed. So the correct output
of every request is known in advance (`expected_tokens`), whatever the schedule. Every slot of the fake KV cache holds
the hash of all tokens up to its position, and every read is checked, so a block that is reused too early or shared
wrongly fails at once.

Legend: R = requests in the step.
"""

from octavo.testing.fake_worker import FakeExecutor, FakeRank, FakeRow, FakeWorker, model_output_for, run_step
from octavo.testing.requests import (
    ROOT,
    KnownDrafter,
    context_hash,
    expected_tokens,
    make_request,
    make_scheduler,
    next_token,
)

__all__ = [
    "ROOT",
    "FakeExecutor",
    "FakeRank",
    "FakeRow",
    "FakeWorker",
    "KnownDrafter",
    "context_hash",
    "expected_tokens",
    "make_request",
    "make_scheduler",
    "model_output_for",
    "next_token",
    "run_step",
]
