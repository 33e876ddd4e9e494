"""Writes the files of a batch whose lines have ended: answers into one, errors into another, in the input's order."""

import asyncio
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from octavo.errors import StateError
from octavo.server.batches.files import FileStore
from octavo.server.batches.lines import unanswered
from octavo.server.batches.protocol import Batch, BatchStatus, RequestCounts, StoredFile
from octavo.server.batches.store import BatchStore, StoredLine, ended
from octavo.server.http.upload import create_private, write_all
from octavo.server.state.database import StateDatabase

_PAGE_LINES = 256
_WHY = {
    "cancelled": ("batch_cancelled", "This request could not be executed before the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}


@dataclass(slots=True)
class _Output:
    """A file that is being written, and how much is in it."""

    path: Path
    file: BinaryIO
    num_lines: int = 0
    num_bytes: int = 0


async def finalize(batch: Batch, database: StateDatabase, store: BatchStore, files: FileStore) -> None:
    """Write the files, and end the batch in the transaction that makes them known.

    A server that is killed meanwhile leaves unknown files, which go at the next start, and the next one writes anew.
    Raises StateError.
    """
    why: BatchStatus = "cancelled" if batch.status == "cancelling" else "expired"  # of lines without an answer
    outputs: list[_Output] = []
    try:
        for path in (files.new_part(), files.new_part()):
            outputs.append(_Output(path, create_private(path)))  # noqa: PERF401 - if one fails, `finally` knows the other
        num_unanswered, after = 0, -1
        while lines := await store.lines(batch.id, after, _PAGE_LINES):
            num_unanswered += await asyncio.to_thread(_write, outputs, lines, why)
            after = lines[-1].line
        await asyncio.to_thread(_sync, outputs)
        status: BatchStatus = "cancelled" if why == "cancelled" else "expired" if num_unanswered else "completed"
        await database.run(lambda db: _end(db, batch, status, outputs, files))
    except OSError as error:
        raise StateError(f"the output of a batch cannot be written: {error}") from error
    finally:
        for output in outputs:
            output.file.close()
            output.path.unlink(missing_ok=True)


def _write(outputs: list[_Output], lines: list[StoredLine], why: BatchStatus) -> int:
    """Write answers into the first file and errors into the second; return how many lines had neither."""
    data: list[list[bytes]] = [[], []]
    num_unanswered = 0
    for line in lines:
        record, is_failed = line.data, line.is_failed
        if record is None:
            num_unanswered += 1
            record, is_failed = msgspec.json.encode(unanswered(line.custom_id, *_WHY[why])), True
        data[is_failed].append(record + b"\n")
    for output, pieces in zip(outputs, data, strict=True):
        text = b"".join(pieces)
        write_all(output.file, text)
        output.num_lines += len(pieces)
        output.num_bytes += len(text)
    return num_unanswered


def _sync(outputs: list[_Output]) -> None:
    for output in outputs:
        os.fsync(output.file.fileno())


def _end(db: sqlite3.Connection, batch: Batch, status: BatchStatus, outputs: list[_Output], files: FileStore) -> None:
    [seconds] = db.execute("SELECT output_seconds FROM batches WHERE id = ?", (batch.id,)).fetchone()
    ids: list[str | None] = [None, None]
    kept: list[tuple[StoredFile, Path]] = []
    for index, (output, kind) in enumerate(zip(outputs, ("output", "error"), strict=True)):
        if output.num_lines:
            name = f"{batch.id}_{kind}.jsonl"
            file = files.new_file(num_bytes=output.num_bytes, filename=name, purpose="batch_output", seconds=seconds)
            ids[index] = file.id
            kept.append((file, output.path))
    counts = RequestCounts(
        total=batch.request_counts.total, completed=outputs[0].num_lines, failed=outputs[1].num_lines
    )
    owner = ended(db, replace(batch, output_file_id=ids[0], error_file_id=ids[1], request_counts=counts), status)
    for file, path in kept:
        files.keep(db, owner, file, path)
