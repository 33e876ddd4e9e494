"""The request log: what is kept and for how long, what it never holds, and what a full disk costs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidParameterError
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.http.exchange import Exchange
from octavo.server.logged.log import RequestLog
from octavo.server.logged.requests import FILE_NAME, Contents, Facts, Identity, LogReader, checkpoint_content
from octavo.server.openai.birth import Birth

IDENTITY = Identity(version="1", profile="p", model="m", path="/m", weights="w", settings={"dtype": "float32"})
CONTENTS = Contents(body=b"{}", answer=b"x" * 100_000, token_ids=[[1, 2]])


def facts(name: str, **fields: Any) -> Facts:
    known: dict[str, Any] = {
        "request_id": f"req-{name}", "reply_id": f"cmpl-{name}", "path": "/v1/completions", "owner": "o",
        "is_stream": False, "started_s": 0.0, "ended_s": time.time(), "status": 200, "error": None, "birth": Birth(),
    }  # fmt: skip
    return Facts(**known | fields)


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[RequestLog]:
    log = RequestLog(ServerArgs(request_log=str(folder), **options), lambda: IDENTITY)
    yield log
    await log.close()


def names(folder: Path) -> list[str]:
    with closing(LogReader(folder)) as log:
        return [facts.reply_id for _, facts in log.facts()]


async def test_the_oldest_go_over_size_and_age(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    async with opened(folder, request_log_mib=1, request_log_days=1.0) as log:
        for number in range(30):
            log.put(facts(f"{number}"), CONTENTS)
            if number % 7 == 0:
                await log._writes.close()
        log.put(facts("large"), Contents(body=b"", answer=b"x" * 2**20, token_ids=[]))
        assert "--request-log-mib" in (log.problem or "")
    assert names(folder) == [f"cmpl-{number}" for number in range(20, 30)]
    assert (folder / FILE_NAME).stat().st_size < 2 * 2**20
    async with opened(folder, request_log_mib=1, request_log_days=1.0) as log:
        log.put(facts("old", ended_s=time.time() - 86_500), CONTENTS)
        log.put(facts("new"), CONTENTS)
    async with opened(folder, request_log_days=1e-9) as log:
        running = asyncio.create_task(log.run())  # nothing is logged, and yet the old go
        await asyncio.sleep(0)
        running.cancel()
    assert names(folder) == []


async def test_what_is_logged_is_found_by_either_id(tmp_path: Path) -> None:
    async with opened(tmp_path) as log, opened(tmp_path) as other:  # of a second server
        log.put(facts("a", request_id="same"), CONTENTS)
        await log._writes.close()
        other.put(facts("b", request_id="same", birth=Birth(seeds=[2**64 - 1], call_key=b"k")), CONTENTS)
        await other._writes.close()
        with closing(LogReader(tmp_path)) as reader:  # while they run
            assert reader.numbers_of("same") == [1, 2]
            [number] = reader.numbers_of("cmpl-b")
            found = reader.read(number)
            assert found is not None
            assert (found.contents, found.identity, found.facts.birth.seeds) == (CONTENTS, IDENTITY, [2**64 - 1])
            with pytest.raises(InvalidParameterError, match="not in the log"):
                reader.numbers_of("cmpl-c")
            assert reader.read(9) is None


async def test_a_full_disk_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with opened(tmp_path) as log:
        log._database.run_now(lambda db: db.execute("PRAGMA max_page_count = 12").fetchall())
        for _ in range(2):
            log.put(facts("lost"), CONTENTS)
            await log._writes.close()
            assert "full" in (log.problem or "")
        log._database.run_now(lambda db: db.execute("PRAGMA max_page_count = 10000").fetchall())
        log.put(facts("kept"), CONTENTS)
        await log._writes.close()
        assert log.problem is None
    assert names(tmp_path) == ["cmpl-kept"]
    assert len(caplog.records) == 1  # said once


async def test_memory_for_what_waits_for_the_disk_is_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path, request_log_mib=1024) as log:
        for number in range(80):
            log.put(facts(f"{number}"), Contents(body=b"", answer=bytes(2**20), token_ids=[]))
        assert "faster than the disk" in (log.problem or "")
        assert log._num_waiting_bytes <= 64 * 2**20
        log._writes._waiting.clear()  # no need to write them


@pytest.mark.parametrize(("only", "expected"), [("all", ["a", "b", "c"]), ("failed", ["b"])])
async def test_failed_ones_only(only: Any, expected: list[str], tmp_path: Path) -> None:
    async with opened(tmp_path, request_log_only=only) as log:
        for name, status in (("a", 200), ("b", 500), ("c", 499)):
            log.put(facts(name, status=status), CONTENTS)
    assert names(tmp_path) == [f"cmpl-{name}" for name in expected]


async def test_a_sample(tmp_path: Path) -> None:
    async def nothing() -> Any:
        raise AssertionError

    async def refuse(birth: Birth) -> Any:
        raise bad_request("no")

    async with opened(tmp_path, request_log_sample=0.5) as log:
        exchange = Exchange({"path": "/v1/completions"}, nothing, nothing, "r")  # type: ignore[arg-type]
        for _ in range(100):
            with pytest.raises(ApiError):
                await log.watched(exchange, False, refuse)(Birth())
    assert 20 < len(names(tmp_path)) < 80


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameterError, match=r"request_log=.*cannot be used"):
        RequestLog(ServerArgs(request_log=str(tmp_path / "file")), lambda: IDENTITY)
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(InvalidParameterError, match=rf"request_log=.*{FILE_NAME} cannot be used"):
        RequestLog(ServerArgs(request_log=str(tmp_path)), lambda: IDENTITY)
    for folder, limit in ((tmp_path, "cannot be read"), (tmp_path / "none", "there is no")):
        with pytest.raises(InvalidParameterError, match=limit):
            LogReader(folder)


def test_weights_are_told_apart_by_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(6 * 2**20))
    digest = checkpoint_content(one)
    assert checkpoint_content(two) == digest  # a copy
    (two / "model.safetensors").write_bytes(b"\x01" * 6 * 2**20)
    assert checkpoint_content(two) != digest
    (one / "config.json").write_text("[]")
    assert checkpoint_content(one) != digest
    assert checkpoint_content(one / "model.safetensors") != checkpoint_content(two / "model.safetensors")
