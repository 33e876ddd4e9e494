"""Sends requests to a server: an open loop at planned times, a closed one with a fixed number in flight."""

import asyncio
import time
from collections.abc import Sequence

from octavo.cli.load.recorder import RequestRecord
from octavo.cli.load.workload import PATHS, Endpoint, PlannedRequest
from octavo.cli.remote.http import HttpClient
from octavo.cli.remote.wire import check_status
from octavo.errors import RequestError


class LoadGenerator:
    """Sends planned requests and records each. A failed request is a record with an error; it does not end the run."""

    def __init__(self, client: HttpClient, endpoint: Endpoint, timeout_s: float) -> None:
        self._client = client
        self._path = PATHS[endpoint]
        self._timeout_s = timeout_s

    async def run_open(self, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Send each request at its planned time after now."""
        start_s = time.perf_counter()
        tasks = []
        for request in planned:
            due_s = start_s + request.send_at_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._send(request, due_s)))
        return await asyncio.gather(*tasks)

    async def run_closed(self, planned: Sequence[PlannedRequest], concurrency: int) -> list[RequestRecord]:
        """Keep `concurrency` requests in flight."""
        queue = iter(planned)

        async def keep_one_in_flight() -> list[RequestRecord]:
            return [await self._send(request, time.perf_counter()) for request in queue]

        parts = await asyncio.gather(*(keep_one_in_flight() for _ in range(concurrency)))
        return [record for part in parts for record in part]

    async def _send(self, request: PlannedRequest, due_s: float) -> RequestRecord:
        record = RequestRecord(due_s, request.output_len)
        record.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self._path, request.body, record.on_body)
            check_status(response)
            record.end()
        except RequestError as error:
            record.end(str(error))
        except TimeoutError:
            record.end(f"no complete response within {self._timeout_s:g} s")
        return record
