"""What a server holds: sockets and files, threads, memory, requests and KV blocks."""

import re
import time
from dataclasses import dataclass
from typing import Self

import psutil
from tests.server.http_server import HttpServer

WAIT_S = 30.0
# Connections of the tests' own clients come and go, and libraries open a file or two on first use.
FREE_HANDLES = 16
FREE_THREADS = 16  # pools, and the process that tries forms, start theirs for the first who needs them
FREE_PROCESSES = 1  # the one that tries forms out comes with the first of them, and again when it died of one
FREE_BYTES = 200 * 2**20  # allocators keep memory for the next request, and cycles wait for their collector
# What an idle server shows; the request that asks for it is in flight.
IDLE = {
    "octavo_requests_running": 0,
    "octavo_requests_waiting": 0,
    "octavo_kv_cache_usage": 0,
    "octavo_http_requests_in_flight": 1,
}


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """Of the front and the engine together."""

    num_handles: int
    num_threads: int
    num_bytes: int
    num_processes: int

    @classmethod
    def of(cls, server: HttpServer) -> Self:
        front = psutil.Process(server.process.pid)
        spares = [each for each in front.children() if each.cmdline()[-1:] == ["import"]]  # come seconds after a start
        processes = [each for each in (front, *front.children(recursive=True)) if each not in spares]
        return cls(
            num_handles=sum(process.num_fds() for process in processes),
            num_threads=sum(process.num_threads() for process in processes),
            num_bytes=sum(process.memory_info().rss for process in processes),
            num_processes=len(processes),
        )

    def wait_until_restored(self, server: HttpServer, free_bytes: int = FREE_BYTES) -> None:
        """Wait until the server holds no more than this, give or take what costs nothing.

        Raises:
            AssertionError: it still does after a long while, or is not well.
        """
        deadline_s = time.monotonic() + WAIT_S
        while left := self._left_over(server, free_bytes):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)
        assert server.client.get("/health").status_code == 200

    def _left_over(self, server: HttpServer, free_bytes: int) -> list[str]:
        now = type(self).of(server)
        left = [
            f"{name}: {getattr(self, name)} before, {getattr(now, name)} now"
            for name, free in (
                ("num_handles", FREE_HANDLES), ("num_threads", FREE_THREADS), ("num_bytes", free_bytes),
                ("num_processes", FREE_PROCESSES),
            )
            if getattr(now, name) > getattr(self, name) + free
        ]  # fmt: skip
        gauges = read_gauges(server)
        return left + [f"{name}: {gauges[name]}" for name, idle in IDLE.items() if gauges[name] > idle]


def read_gauges(server: HttpServer) -> dict[str, float]:
    """Return what `/metrics` says, summed over labels."""
    totals: dict[str, float] = {}
    for name, number in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", server.client.get("/metrics").text, re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(number)
    return totals
