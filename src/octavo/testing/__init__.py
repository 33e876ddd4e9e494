"""Test doubles for Octavo and for programs that use it: one-line requests, and a worker without a model.

The fake model is a pure function: the next token is a hash of the context and the request's seed. So the correct output
of every request is known in advance (`expected_tokens`), whatever the schedule. Every slot of the fake KV cache holds
the hash of all tokens up to its position, and every read is checked, so a block that is reused too early or shared
wrongly fails at once.

Legend: R = requests in the step.
"""

from octavo.testing.fake_worker import FakeExecutor as FakeExecutor
from octavo.testing.fake_worker import FakeRank as FakeRank
from octavo.testing.fake_worker import FakeRow as FakeRow
from octavo.testing.fake_worker import FakeWorker as FakeWorker
from octavo.testing.fake_worker import model_output_for as model_output_for
from octavo.testing.fake_worker import run_step as run_step
from octavo.testing.requests import ROOT as ROOT
from octavo.testing.requests import KnownDrafter as KnownDrafter
from octavo.testing.requests import context_hash as context_hash
from octavo.testing.requests import expected_tokens as expected_tokens
from octavo.testing.requests import make_request as make_request
from octavo.testing.requests import make_scheduler as make_scheduler
from octavo.testing.requests import next_token as next_token
