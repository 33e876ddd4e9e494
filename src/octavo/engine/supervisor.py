"""Requests outlive the engine core that computes them: what was in flight when it died goes on in another.

A request is a pure function of its message, so the journal of a request is that message and the output tokens so far.
Added again with them (`EngineCoreRequest.resumed_token_ids`), it continues with the same bytes.

Requests that a core had begun with when it died are suspects: any of them may be what kills. If a core dies twice in a
row without giving a request a new token in between, the request goes on trial: its group runs without others in one
core. A group that kills is halved; a request that has killed three times while alone fails, and all others go on.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, FinishedRequest
from octavo.errors import RequestError

_DEATHS_UNTIL_TRIAL = 2  # the first may have any cause; running everything again at once is fastest
_DEATHS_ALONE = 3  # more than by accident, even where something kills every few seconds


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that has not finished, and all that is needed to continue it."""

    request: EngineCoreRequest
    token_ids: list[int] = field(default_factory=list)  # its output so far
    replica: int | None = None  # the core that has it; None: it waits here for one
    num_deaths: int = 0  # of cores that had begun with it, in a row, without a new token in between
    num_deaths_alone: int = 0  # of these, while it was alone
    is_aborted: bool = False

    @property
    def message(self) -> EngineCoreRequest:
        """What the next core gets."""
        if not self.token_ids:
            return self.request
        return msgspec.structs.replace(self.request, resumed_token_ids=self.token_ids)


class Supervisor:
    """Knows every unfinished request. Not thread-safe; starts and ends no processes."""

    def __init__(self) -> None:
        self._by_id: dict[str, InFlight] = {}
        self._held: deque[list[InFlight]] = deque()  # to be placed, oldest first; samples of a request stay together
        self._suspects: deque[list[InFlight]] = deque()  # groups to be tried one after the other
        self._trial: list[InFlight] = []  # those of the group on trial that have no new token yet
        self._court: int | None = None  # the replica that runs only the group on trial, while there are suspects

    def add(self, samples: Sequence[EngineCoreRequest]) -> None:
        """Register the samples of a new request; `take_placeable` hands them out."""
        entries = [InFlight(sample) for sample in samples]
        self._by_id.update({entry.request.request_id: entry for entry in entries})
        self._held.append(entries)

    def take_placeable(self, ready: Collection[int]) -> Iterator[tuple[list[InFlight], list[int]]]:
        """Hand out requests that may run now, each group with the replicas of `ready` among which to choose.

        The caller sets `InFlight.replica`. Those that it could not send are kept: give them to `put_back`.
        """
        if self._court is not None and self._court in ready and not self._trial and self._suspects:
            self._trial = self._suspects.popleft()
            yield list(self._trial), [self._court]
        if open_replicas := [replica for replica in ready if replica != self._court]:
            for _ in range(len(self._held)):
                yield self._held.popleft(), open_replicas

    def put_back(self, entries: Sequence[InFlight]) -> None:
        """Keep requests that could not be sent, before all others."""
        for entry in entries:
            entry.replica = None
        if self._trial and entries[0] in self._trial:
            self._suspects.appendleft(self._trial)
            self._trial = []
        else:
            self._held.appendleft(list(entries))

    def abort(self, request_ids: Sequence[str]) -> tuple[dict[int, list[str]], list[str]]:
        """Mark requests as aborted. Return the ids that replicas have, and those that have ended here and now."""
        by_replica: dict[int, list[str]] = {}
        ended: list[str] = []
        for request_id in request_ids:
            if (entry := self._by_id.get(request_id)) is None:
                continue
            entry.is_aborted = True
            if entry.replica is None:
                ended.append(request_id)
                self._forget(entry)
            else:
                by_replica.setdefault(entry.replica, []).append(request_id)
        return by_replica, ended

    def record(self, outputs: EngineCoreOutputs) -> bool:
        """Record what a core has computed. Returns whether more may now be placeable: a trial has ended."""
        was_on_trial, start = bool(self._trial), 0
        for request_id, count in zip(outputs.req_ids, outputs.num_new_tokens, strict=True):
            if (entry := self._by_id.get(request_id)) is not None:
                entry.token_ids += outputs.new_token_ids[start : start + count]
                if entry.num_deaths:
                    entry.num_deaths = entry.num_deaths_alone = 0
                    self._acquit(entry)
            start += count
        for request_id in outputs.finished:
            if (entry := self._by_id.get(request_id)) is not None:
                self._forget(entry)
        return was_on_trial and not self._trial

    def lose(self, replica: int, begun: Collection[str], death: str) -> dict[str, FinishedRequest]:
        """A core has died that had begun with the requests `begun`: keep what was in flight, to be placed again.

        Returns how those end that do not go on: aborted ones, and one that kills.
        """
        lost = [entry for entry in self._by_id.values() if entry.replica == replica]
        ended: dict[str, FinishedRequest] = {}
        for entry in lost:
            entry.replica = None
            if entry.request.request_id in begun:
                entry.num_deaths += 1
            if entry.is_aborted:
                ended[entry.request.request_id] = FinishedRequest(finish_reason="abort")
                self._forget(entry)
        lost = [entry for entry in lost if not entry.is_aborted]
        if replica == self._court:
            ended |= self._judge(begun, death)
        waiting = {entry for group in self._suspects for entry in group}
        lost = [entry for entry in lost if entry not in waiting and entry.request.request_id not in ended]
        if suspects := [entry for entry in lost if entry.num_deaths >= _DEATHS_UNTIL_TRIAL]:
            self._suspects.append(suspects)
            if self._court is None:
                self._court = replica
        self._held.extendleft([entry] for entry in reversed(lost) if entry not in suspects)
        return ended

    def give_up(self, replica: int, instead: int) -> None:
        """A replica gets no core any more: if it was to run those on trial, another one does."""
        if self._court == replica:
            self._court = instead

    def _judge(self, begun: Collection[str], death: str) -> dict[str, FinishedRequest]:
        """The core of a trial has died: halve the group, or end the one that was alone."""
        trial, self._trial = self._trial, []
        guilty = [entry for entry in trial if entry.request.request_id in begun]
        if rest := [entry for entry in trial if entry not in guilty]:
            self._suspects.append(rest)
        if len(guilty) > 1:
            half = len(guilty) // 2
            self._suspects.extendleft([guilty[half:], guilty[:half]])
        elif guilty:
            [entry] = guilty
            entry.num_deaths_alone += not rest
            if entry.num_deaths_alone < _DEATHS_ALONE:
                self._suspects.appendleft(guilty)
                return {}
            self._forget(entry)
            what = f"the engine died {entry.num_deaths} times in a row while it ran this request, at last alone"
            end = FinishedRequest(finish_reason="error", error=f"{what}: {death}", error_type=RequestError.__name__)
            return {entry.request.request_id: end}
        return {}

    def _acquit(self, entry: InFlight) -> None:
        if entry in self._trial:
            self._trial.remove(entry)
        if not self._trial and not self._suspects:
            self._court = None

    def _forget(self, entry: InFlight) -> None:
        del self._by_id[entry.request.request_id]
        if entry.replica is None:
            for groups in (self._held, self._suspects):
                for group in [group for group in groups if entry in group]:
                    group.remove(entry)
                    if not group:
                        groups.remove(group)
        self._acquit(entry)
