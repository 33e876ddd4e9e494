"""The journal of kept answers: what a server finds that comes after a kill, and what a full or damaged disk costs."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.kept import journal as module
from octavo.server.kept.journal import MAX_ATTEMPTS, Answer, Entry, Found, Journal
from octavo.server.kept.recording import Event
from octavo.server.kept.returning import Returning
from octavo.server.openai.birth import Birth

ANSWER = Answer(ended_s=1.0, num_choices=1, events=[Event(0, 1, b"data: x\n\n")], warnings=["w"])
MIB = 2**20


def entry(serial: str, **fields: Any) -> Entry:
    known: dict[str, Any] = {
        "serial": serial, "path": "/v1/completions", "owner": "o", "key": b"k", "request": b"r", "is_stream": True,
        "name": f"cmpl-{serial}", "birth": Birth(seeds=[1, 2**64 - 1], model_key="m"),
    }  # fmt: skip
    return Entry(**known | fields)


@asynccontextmanager
async def opened(path: Path, *, is_killed: bool = True, max_bytes: int = MIB) -> AsyncIterator[tuple[Journal, Found]]:
    journal = Journal(path, max_bytes)
    found = journal.load()
    yield journal, found
    if is_killed:
        await journal._writes.close()  # what was asked for is written, and nothing else
        journal._close_database()
    else:
        await journal.close()


async def test_what_was_accepted_is_found(tmp_path: Path) -> None:
    path, entries = tmp_path / "j", [entry(f"{number}") for number in range(4)]
    async with opened(path) as (journal, found):
        assert found == Found(unfinished=[], finished=[])
        await asyncio.gather(*(journal.add(each, b"body") for each in entries))
        journal.finish("1", ANSWER)
        journal.remove("2")
    async with opened(path) as (journal, found):
        assert [each.entry for each in found.unfinished] == [entries[0], entries[3]]
        assert {each.body for each in found.unfinished} == {b"body"}
        assert found.finished == [(entries[1], ANSWER)]
        assert journal.problem is None
    assert {name.stat().st_mode & 0o077 for name in tmp_path.iterdir()} == {0}


async def test_many_requests_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits, commit = list[int](), Journal._commit

    async def counted(journal: Journal, works: list[Any]) -> None:
        commits.append(len(works))
        await commit(journal, works)

    monkeypatch.setattr(Journal, "_commit", counted)
    async with opened(tmp_path / "j") as (journal, _):
        await asyncio.gather(*(journal.add(entry(f"{number}"), b"") for number in range(200)))
    assert sum(commits) == 200
    assert len(commits) < 50


async def test_a_request_that_kills_servers_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path / "j") as (journal, _):
        await journal.add(entry("poison"), b"")
    for _ in range(MAX_ATTEMPTS):
        async with opened(tmp_path / "j") as (_, found):
            assert len(found.unfinished) == 1
    async with opened(tmp_path / "j") as (_, found):
        assert not found.unfinished
    assert f"{MAX_ATTEMPTS} kills" in caplog.text


async def test_a_restart_in_peace_is_no_attempt(tmp_path: Path) -> None:
    async with opened(tmp_path / "j", is_killed=False) as (journal, _):
        await journal.add(entry("long"), b"")
    for _ in range(MAX_ATTEMPTS + 1):
        async with opened(tmp_path / "j", is_killed=False) as (_, found):
            assert len(found.unfinished) == 1


async def test_nobody_waits_after_a_long_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "j") as (journal, _):
        await journal.add(entry("old"), b"")
    monkeypatch.setattr(module, "MAX_OUTAGE_S", -1.0)
    async with opened(tmp_path / "j") as (_, found):
        assert not found.unfinished


async def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file may have so many pages, and SQLite reports a full disk beyond them."""
    big = msgspec.structs.replace(ANSWER, events=[Event(0, 1, os.urandom(2 * MIB))])
    async with opened(tmp_path / "j") as (journal, _):
        for number in range(6):
            await journal.add(entry(f"{number}"), b"x")
            journal.finish(f"{number}", big)
        await journal.add(entry("late"), b"x" * 900_000)
        for number in range(6):
            journal.remove(f"{number}")
        await journal.add(entry("more"), b"x")
        assert journal.problem is None  # there is room again
    assert caplog.text.count("disk is full") == 1
    async with opened(tmp_path / "j") as (_, found):
        assert {each.entry.serial for each in found.unfinished} >= {"more"}


async def test_bodies_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path / "j") as (journal, _):
        await journal.add(entry("a"), b"x" * 600_000)
        await journal.add(entry("b"), b"x" * 600_000)
        assert "more bodies" in str(journal.problem)
        journal.finish("a", ANSWER)
        await journal.add(entry("c"), b"x" * 600_000)
        assert journal.problem is None
    assert caplog.text.count("keep-mib") == 1
    async with opened(tmp_path / "j") as (_, found):
        assert [each.entry.serial for each in found.unfinished] == ["c"]


@pytest.mark.parametrize("damage", ["no database", "half a page", "another version"])
async def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    async with opened(path) as (journal, _):
        await journal.add(entry("lost"), b"x" * 100_000)
    if damage == "no database":
        path.write_bytes(b"x" * 10_000)
    elif damage == "half a page":
        data = path.read_bytes()
        path.write_bytes(data[:20_000] + bytes(4096) + data[24_096:])
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    async with opened(path) as (journal, found):
        assert not found.unfinished
        assert "set aside" in str(journal.problem)
        await journal.add(entry("new"), b"")
        assert "set aside" in str(journal.problem)  # until the server ends
    assert caplog.text.count("requests of the server before are lost") == 1
    async with opened(path) as (journal, found):
        assert [each.entry.serial for each in found.unfinished] == ["new"]
        assert journal.problem is None
    assert (tmp_path / "j.damaged").exists()


async def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path / "missing" / "j") as (journal, _):
        await journal.add(entry("a"), b"")
        assert "No such file" in str(journal.problem)
        (tmp_path / "missing").mkdir()
        await journal.add(entry("b"), b"")
        assert journal.problem is None
    assert caplog.text.count("is not journaled") == 2  # at the start, and at a write


async def test_what_is_too_old_is_forgotten_on_disk_too(tmp_path: Path) -> None:
    args = ServerArgs(state_dir=str(tmp_path), resume_s=60.0)
    async with opened(tmp_path / "answers.sqlite3") as (journal, _):
        await journal.add(entry("old"), b"")
        journal.finish("old", ANSWER)
    returning = Returning(args, HttpMetrics())
    returning.restore()
    assert returning.metrics.num_kept_bytes == 0
    await returning.close()
    async with opened(tmp_path / "answers.sqlite3") as (_, found):
        assert not found.finished
