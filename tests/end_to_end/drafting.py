"""Drafters in processes of their own: a worker that drafts, and an engine core that is given a drafter.

Both know sequences from a file of JSON, which an environment variable names.
"""

import json
import os
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.engine import core_proc
from octavo.engine.core import EngineCore
from octavo.testing import KnownDrafter
from octavo.worker.worker import Worker

VARIABLE = "OCTAVO_TEST_KNOWN_SEQUENCES"


def drafter() -> KnownDrafter:
    known = json.loads(Path(os.environ[VARIABLE]).read_text())
    return KnownDrafter.of_sequences(known, vocab_size=max(map(max, known)) + 1)


class DraftingWorker(Worker):
    """Proposes with each step's output what may follow."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._drafter = drafter()

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        model_output, done = super().begin(scheduler_output).result(), Future[ModelRunnerOutput]()
        tried = scheduler_output.scheduled_spec_decode_tokens
        ends = scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens + model_output.num_sampled
        ends -= 0 if tried is None else tried.counts
        at = model_output.num_sampled.nonzero()[0].tolist()
        req_ids, token_ids = [model_output.req_ids[index] for index in at], self.runner.rows.token_ids
        contexts = [np.array(token_ids[scheduler_output.rows[index], : ends[index]]) for index in at]
        proposals = dict(zip(req_ids, self._drafter.propose(req_ids, contexts), strict=True))
        done.set_result(msgspec.structs.replace(model_output, draft_token_ids=proposals))
        return done


if __name__ == "__main__":
    core_proc.__dict__["EngineCore"] = partial(EngineCore, drafter=drafter())
    sys.exit(core_proc.main())
