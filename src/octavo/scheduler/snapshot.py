"""What the scheduler's requests and blocks are at one moment, in plain values, for people who look.

Made between two steps, and only when somebody asks. A waiting request comes with the reason why it does not run, and
with what is known of how long that lasts.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows

if TYPE_CHECKING:  # for a type: the scheduler makes the snapshot
    from octavo.scheduler.scheduler import Scheduler

MAX_REQUESTS = 256  # running and waiting ones that are described; all are counted
MAX_CELLS = 4096  # of a map of blocks; of more blocks, every second is shown, or every third ...
FREE, CACHED, SHARED = -1, -2, -3  # in a map of blocks: nobody's; nobody's, with a prefix; of several requests


def snapshot(scheduler: "Scheduler", now_s: float, *, with_blocks: bool) -> dict[str, Any]:
    """Describe all requests, running ones first, each kind in its order; and who has which block, on request."""
    running = list(_running(scheduler))
    requests = [*running, *islice(_waiting(scheduler, now_s, running), MAX_REQUESTS)]
    state: dict[str, Any] = {
        "now_s": now_s,
        "max_running": len(scheduler.running.requests),
        "token_s": scheduler.pace.token_s,
        "decode_s": scheduler.pace.decode_s,
        "requests": requests,
    }
    if with_blocks:
        state["blocks"] = block_maps(scheduler.running)
    return state


def _running(scheduler: "Scheduler") -> Iterator[dict[str, Any]]:
    rows, pace = scheduler.running, scheduler.pace
    num_before = 0  # tokens of prompts that are computed first
    for row in rows.active.tolist()[:MAX_REQUESTS]:
        request = rows.request_at(row)
        num_computed, num_known = int(rows.num_computed[row]), int(rows.num_known[row])
        num_left = num_known - num_computed  # 1 while it decodes, 0 while its next token is computed
        state = _about(request, num_known) | {
            "status": "prefill" if num_left > 1 else "decode",
            "num_computed": num_computed,
            "num_blocks": sum(map(len, rows.held_blocks(row))),
        }
        if num_left > 1:
            if num_before:
                state |= {"reason": "long prompt", "wait_s": _times(num_before, pace.token_s)}
            num_before += num_left
        yield state


def _waiting(scheduler: "Scheduler", now_s: float, running: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield those that gates hold, then those that are queued, in order."""
    yield from (
        _about(request, len(request.token_ids)) | {"status": "waiting", "reason": request.waits_for}
        for request in scheduler.held
    )
    pace = scheduler.pace
    # When rows and blocks come back at the latest: a request may end before its limit.
    ends_s = sorted(_times(each["limit"] - each["num_known"], pace.decode_s) or 0.0 for each in running)
    num_before = sum(each["num_known"] - each["num_computed"] for each in running if each["status"] == "prefill")
    for position, request in enumerate(scheduler.waiting.in_order(now_s)):
        reason, needs = _why_queued(scheduler, request, num_before)
        if reason in ("rows", "blocks"):
            wait_s = ends_s[min(position, len(ends_s) - 1)] if ends_s and pace.decode_s is not None else None
        else:
            wait_s = _times(num_before, pace.token_s)
        state = {"status": "preempted" if request.num_preemptions else "waiting", "reason": reason, "wait_s": wait_s}
        num_tokens = len(request.token_ids)
        yield _about(request, num_tokens) | state | {"num_ahead": position, "num_blocks_needed": needs}
        num_before += num_tokens


def _why_queued(scheduler: "Scheduler", request: Request, num_before: int) -> tuple[str, int]:
    """Return what a queued request waits for, and how many blocks it needs. `num_before`: tokens of prompts."""
    blocks, num_tokens = scheduler.blocks, len(request.token_ids)
    needs = sum(blocks.blocks_for(num_tokens, group) for group in range(len(blocks.pools)))
    if not scheduler.running.has_room:
        return "rows", needs
    rejected = scheduler.admission.rejected
    if rejected is not None and not rejected.status.is_final:
        return "blocks", needs
    return ("long prompt" if num_before else "next step"), needs


def _about(request: Request, num_known: int) -> dict[str, Any]:
    message = request.message
    return {
        "id": message.request_id,
        "arrival_s": message.arrival_time_s,
        "priority": message.priority,
        "num_prompt": request.num_prompt_tokens,
        "num_known": num_known,
        "limit": request.max_num_tokens,
        "num_preemptions": request.num_preemptions,
        "adapter": None if message.adapter is None else message.adapter.name,
        "num_resumed": len(message.resumed_token_ids),
    }


def _times(num_tokens: int, token_s: float | None) -> float | None:
    return None if token_s is None else num_tokens * token_s


def block_maps(running: RunningRows) -> list[dict[str, Any]]:
    """Return for each KV group who has its blocks: runs of (owner, blocks), owners as indices of running requests."""
    maps = []
    rows = running.active.tolist()
    for group, pool in enumerate(running.blocks.pools):
        stride = -(-pool.num_blocks // MAX_CELLS)
        owner = np.full(pool.num_blocks + 1, FREE, dtype=np.int32)  # the last is the null block, which is nobody's
        for index, row in enumerate(rows):
            owner[running.held_blocks(row)[group]] = index
        cells = owner[: pool.num_blocks : stride]
        for at, block_id in enumerate(range(0, pool.num_blocks, stride)):
            num_owners = pool.ref_counts[block_id]
            if num_owners > 1:
                cells[at] = SHARED
            elif not num_owners and pool.has_prefix(block_id):
                cells[at] = CACHED
        ends = np.append((np.diff(cells) != 0).nonzero()[0] + 1, len(cells))
        starts = np.append(0, ends[:-1])
        runs = [[int(cells[start]), int(end - start)] for start, end in zip(starts, ends, strict=True)]
        kind = running.blocks.groups[group]
        window = kind.sliding_window if kind.kind != "recurrent" else None
        maps.append(
            {"kind": kind.kind, "window": window, "num_blocks": pool.num_blocks, "num_free": pool.num_free,
             "stride": stride, "runs": runs}
        )  # fmt: skip
    return maps
