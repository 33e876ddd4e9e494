"""Gates: what may hold a request back before it runs, and what a request that passed one adds to its steps.

A new request is shown to every gate in turn, then queued. While a gate holds it, statistics show the gate's reason. To
add a gate, write a subclass in a file of its own and list it in `engine/core.py`, where gates are put together.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from octavo.contracts.schedule import NewRequestData, SchedulerOutput
from octavo.errors import OctavoError
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices
from octavo.scheduler.step_update import StepUpdate


class Gate(ABC):
    """Owned by the scheduler, on its thread. What a gate does not override does nothing, and costs nothing."""

    reason: str  # what the requests that it holds wait for, in a word or two
    _failed: Sequence[tuple[Request, OctavoError]] = ()  # see `take_failures`

    @abstractmethod
    def hold(self, request: Request) -> bool:
        """Decide about a new request; True: it waits until `take_ready` or `take_failures` returns it."""

    def take_ready(self, now_s: float) -> Iterable[Request]:
        """Let go of the held requests that may go on now. Called before each step while any gate holds a request."""
        return ()

    def take_failures(self) -> Iterable[tuple[Request, OctavoError]]:
        """Let go of the held requests that can never go on, with the error."""
        failed, self._failed = self._failed, ()
        return failed

    def forget(self, request: Request) -> None:  # noqa: B027 - a default
        """A request has ended. `waits_for` says where it waited, if it did; it may not have come this far."""

    def wait(self, timeout_s: float) -> None:
        """Nothing else can run: wait for what held requests need, for at most `timeout_s`."""
        time.sleep(timeout_s)

    def on_admit(self, request: Request, data: NewRequestData) -> NewRequestData:
        """Return what is sent to the ranks about a request that enters them."""
        return data

    def add_to_step(self, output: SchedulerOutput, rows: RowIndices) -> SchedulerOutput:
        """Return a step that has been scheduled, of `rows` [R], with what the gate adds."""
        return output

    def after_step(self, output: SchedulerOutput, update: StepUpdate) -> Mapping[str, OctavoError | None]:
        """A step has succeeded; return the requests that end with it: complete, or with an error."""
        return {}

    def after_failed_step(self, output: SchedulerOutput) -> Sequence[Request]:
        """A step has failed; return the running requests that later steps may have computed wrongly because of it."""
        return ()

    @property
    def owned_blocks(self) -> Sequence[tuple[int, int]]:
        """KV blocks that the gate is an owner of, as (group, block), as often as it is one."""
        return ()

    def check_integrity(self) -> None:
        """Assert the gate's invariants. Slow: for tests and idle times."""
        assert self.reason, "statistics show it"


class GateHooks:
    """What gates do in every step, without those that do nothing there."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self.on_admit = [gate.on_admit for gate in gates if type(gate).on_admit is not Gate.on_admit]
        self.add_to_step = [gate.add_to_step for gate in gates if type(gate).add_to_step is not Gate.add_to_step]
        self.forget = [gate.forget for gate in gates if type(gate).forget is not Gate.forget]
        self.after_step = [gate.after_step for gate in gates if type(gate).after_step is not Gate.after_step]
