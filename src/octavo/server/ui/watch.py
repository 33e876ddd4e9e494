"""What the page shows of the engine, while somebody looks: asked of the core by message, sent as a stream of events.

All who look get the same events. Nobody looks: nothing is asked, and nothing runs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.front import EngineFront
from octavo.errors import OctavoError
from octavo.metrics.collect import EngineMetrics, Histogram, HttpMetrics
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.tenants.claim import RequestNames
from octavo.server.ui.memory import process_memory

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.2  # between two events
_MAX_SHARE = 0.005  # of the core's time, whatever a snapshot costs
_SLOW_S = 1.0  # between two maps of the blocks, and two looks at the memory
_CALL_S = 2.0  # how long a snapshot is waited for: a core that restarts answers when it has
Describe = Callable[[], Mapping[str, Any]]


class EngineWatch:
    """Makes the events. Owned by the event loop.

    `tenants` describes who there is, and their requests that have not reached the engine; None: keys have no names.
    """

    def __init__(
        self, lifecycle: EngineLifecycle, http: HttpMetrics, names: RequestNames, tenants: Describe | None = None
    ) -> None:
        self._lifecycle, self._http, self._names, self._tenants = lifecycle, http, names, tenants
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._call: asyncio.Task[list[Any]] | None = None  # one that the core has not answered
        self._slow_s = 0.0  # when what is sent less often is due
        self.num_events = 0  # since the start

    def join(self, watcher: "Watcher") -> None:
        self._watchers.add(watcher)
        self._slow_s = 0.0  # who is new gets everything with the next event
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self, watcher: "Watcher") -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None
            if self._call is not None:  # its answer would be old when somebody looks again
                self._call.add_done_callback(_discard)
                self._call = None

    async def _run(self) -> None:
        while True:
            started_s = time.monotonic()
            event, cost_s = await self._event()
            encoding_s = time.perf_counter()
            frame = b"data: " + msgspec.json.encode(event) + b"\n\n"
            cost_s = max(cost_s, time.perf_counter() - encoding_s)  # of the core or, about as much, of the event loop
            self.num_events += 1
            for watcher in list(self._watchers):
                watcher.put(frame)
            interval_s = max(MIN_INTERVAL_S, cost_s / _MAX_SHARE)
            await asyncio.sleep(started_s + interval_s - time.monotonic())

    async def _event(self) -> tuple[dict[str, Any], float]:
        """Return an event, and what it has cost the core, in seconds."""
        status = self._lifecycle.status
        event: dict[str, Any] = {"now_s": time.time(), "status": status, **self._of_http()}
        event |= {"requests": []} if self._tenants is None else self._tenants()
        if status != "ready":
            return event, 0.0
        engine, service = self._lifecycle.engine, self._lifecycle.service  # either may end while this waits
        front = engine.front
        is_slow = time.monotonic() >= self._slow_s
        if is_slow:
            self._slow_s = time.monotonic() + _SLOW_S
            event["memory"] = await asyncio.to_thread(process_memory)
        event |= self._of_engine(engine.metrics, front) | {"models": [card.id for card in service.models.cards]}
        states = await self._states(engine, with_blocks=is_slow)
        known: set[str] = set()
        for replica, state in enumerate(states):
            for request in state["requests"]:
                known.add(request["id"])
                event["requests"].append(request | {"replica": replica} | self._of_client(request["id"]))
        event["requests"] += self._homeless(front, known, is_restarting=bool(event["outages"]) or not states)
        self._add_times(front, event["requests"])
        if states:
            event |= {"token_s": states[0]["token_s"], "decode_s": states[0]["decode_s"]}
            event["max_running"] = sum(state["max_running"] for state in states)
            if is_slow:
                event["blocks"] = [
                    group | {"replica": replica} for replica, state in enumerate(states) for group in state["blocks"]
                ]
        return event, max((state["took_s"] for state in states), default=0.0)

    async def _states(self, engine: AsyncLLMEngine, *, with_blocks: bool) -> list[Any]:
        """Ask the cores, one call at a time; none, if no answer comes soon."""
        if self._call is None:
            self._call = asyncio.create_task(engine.call("state", with_blocks))
        done, _ = await asyncio.wait((self._call,), timeout=_CALL_S)
        if not done:
            return []
        call, self._call = self._call, None
        try:
            states = call.result()
        except OctavoError:  # the engine has ended: the next event says so
            return []
        except RuntimeError:  # or it has been unloaded
            if self._lifecycle.status == "ready":
                raise
            return []
        if with_blocks and any("blocks" not in state for state in states):  # the answer to a question of before
            self._slow_s = 0.0
            return [state | {"blocks": []} for state in states]
        return states

    def _of_http(self) -> dict[str, Any]:
        http = self._http
        return {
            "in_flight": http.num_in_flight,
            "responses": dict(http.responses),
            "rejections": dict(http.rejections),
            "num_replayed": http.num_replayed + http.num_resumed,
        }

    def _of_engine(self, metrics: EngineMetrics, front: EngineFront) -> dict[str, Any]:
        parallel = front.config.parallel
        stats = None if metrics.stats is None else msgspec.structs.asdict(metrics.stats)
        return {
            "stats": stats,
            "num_prompt_tokens": metrics.num_prompt_tokens,
            "num_generation_tokens": metrics.num_generation_tokens,
            "num_deaths": metrics.num_core_deaths,
            "num_replicas": parallel.data_parallel_size,
            "num_ranks": parallel.world_size,
            "outages": {str(number): reason for number, reason in front.client.outages.items()},
            "finished": dict(metrics.finished),
            "ttft": _counts(metrics.time_to_first_token),
            "inter_token": _counts(metrics.inter_token_latency),
            "drafts": _drafts(metrics),
            "adapters": _adapters(metrics),
        }

    def _of_client(self, core_id: str) -> dict[str, Any]:
        name = self._names.get(core_id)
        return {"name": None, "tenant": None} if name is None else {"name": name.request_id, "tenant": name.tenant}

    def _homeless(self, front: EngineFront, known: set[str], *, is_restarting: bool) -> list[dict[str, Any]]:
        """Describe the requests that no core has: they wait for one that restarts."""
        if not is_restarting:
            return []
        return [
            {
                "id": sample.request_id,
                "status": "waiting",
                "reason": "restart",
                "arrival_s": state.request.arrival_time_s,
                "num_prompt": state.num_prompt_tokens,
                "num_known": state.num_prompt_tokens + len(sample.token_ids),
                "limit": None,
                "priority": state.request.priority,
                **self._of_client(sample.request_id),
            }
            for state, sample in front.outputs.unfinished()
            if sample.request_id not in known
        ]

    def _add_times(self, front: EngineFront, requests: list[dict[str, Any]]) -> None:
        """Add when each request first ran and got its first token, as the frontend knows."""
        times = {sample.request_id: state for state, sample in front.outputs.unfinished()}
        for request in requests:
            if (state := times.get(request.get("id", ""))) is not None:
                request["scheduled_s"] = None if state.admitted is None else state.admitted.scheduled_time_s
                request["first_token_s"] = state.first_token_time_s
                request["num_cached"] = state.num_cached_tokens


class Watcher:
    """One who looks: the source of a stream, which gets the latest event and may miss others."""

    is_over = False

    def __init__(self, watch: EngineWatch) -> None:
        self._watch = watch
        self._frame = b""
        self._notify: Callable[[], None] = lambda: None

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._watch.join(self)

    def put(self, frame: bytes) -> None:
        self._frame = frame
        self._notify()

    def take(self) -> bytes:
        frame, self._frame = self._frame, b""
        return frame

    def count_tokens(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._watch.leave(self)


def _discard(call: "asyncio.Task[list[Any]]") -> None:
    """Take the result, or the error, of a call that nobody waits for any more."""
    if not call.cancelled() and (error := call.exception()) is not None:
        logger.debug("the engine has not described its state: %s", error)


def _counts(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram's upper bounds, and how many values are up to each; the last one has no bound."""
    pairs = list(histogram.cumulative())
    return {"bounds": [bound for bound, _ in pairs[:-1]], "counts": [count for _, count in pairs]}


def _drafts(metrics: EngineMetrics) -> dict[str, Any] | None:
    parts = list(metrics.spec_decode_by_replica.values())
    if not parts:
        return None
    stats = type(parts[0]).sum(parts)
    return {"proposed": stats.proposed, "accepted": stats.accepted}


def _adapters(metrics: EngineMetrics) -> list[dict[str, Any]]:
    adapters = metrics.adapters
    names = sorted({*adapters.requests, *adapters.loads, *adapters.waiting, *adapters.running})
    counts = ("waiting", "running", "requests", "loads", "evictions")
    return [{"name": name} | {each: getattr(adapters, each)[name] for each in counts} for name in names]
