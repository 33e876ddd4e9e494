"""Files over HTTP: what a client uploads is on disk, its own, within limits, and there after kill -9."""

import os
import signal
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import Message
from tests.server.http_server import HttpServer

from octavo.errors import InvalidParameterError, StateError
from octavo.server.args import ServerArgs
from octavo.server.batches.files import FileStore
from octavo.server.http.errors import ApiError
from octavo.server.http.upload import Upload, receive_upload
from octavo.server.state.database import StateDatabase

KEYS = ("--api-key", "one", "--api-key", "two")
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
LIMITS = ("--max-file-bytes", "1000", "--max-files", "6", "--max-stored-bytes", "1500")


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parent") / "state"


@pytest.fixture(scope="module")
def server(state_dir: Path) -> Iterator[HttpServer]:
    with HttpServer("--state-dir", str(state_dir), *KEYS, *LIMITS, has_model=False, headers=ONE) as running:
        yield running


def upload(server: HttpServer, content: bytes = b"x", name: str = "in.jsonl", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    data = {"purpose": "batch", **fields}
    return server.client.post("/v1/files", files={"file": (name, content)}, data=data, headers=headers)


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def delete_all(server: HttpServer) -> None:
    for headers in (ONE, TWO):
        for file in server.client.get("/v1/files", headers=headers).json()["data"]:
            assert server.client.delete(f"/v1/files/{file['id']}", headers=headers).status_code == 200


def test_a_file_comes_back_as_it_was(server: HttpServer, state_dir: Path) -> None:
    content = bytes(range(256)) + b"\r\n--boundary\r\n\r\n"
    file = upload(server, content, "a\xe4 b.jsonl").json()
    assert file["id"].startswith("file-")
    assert file["expires_at"] == file["created_at"] + 30 * 86400
    assert {name: file[name] for name in ("object", "bytes", "filename", "purpose", "status")} == {
        "object": "file", "bytes": len(content), "filename": "a\xe4 b.jsonl", "purpose": "batch", "status": "processed"
    }  # fmt: skip
    assert server.client.get(f"/v1/files/{file['id']}").json() == file
    assert server.client.get(f"/v1/files/{file['id']}/content").content == content
    assert {stat.S_IMODE(path.stat().st_mode) for path in state_dir.rglob("*") if path.is_file()} == {0o600}
    deleted = server.client.delete(f"/v1/files/{file['id']}").json()
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        assert error_of(server.client.get(f"/v1/files/{file['id']}{path}")) == (404, "not_found", "file_id")
    assert not list((state_dir / "files").iterdir())


def test_lists_have_pages(server: HttpServer) -> None:
    ids = [upload(server, name=f"{number}").json()["id"] for number in range(4)]
    first = server.client.get("/v1/files", params={"limit": 3}).json()
    assert [file["id"] for file in first["data"]] == ids[:0:-1]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[3], ids[1], True)
    rest = server.client.get("/v1/files", params={"limit": 3, "after": first["last_id"]}).json()
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[:1], False)
    oldest = server.client.get("/v1/files", params={"order": "asc", "purpose": "batch"}).json()["data"]
    assert [file["id"] for file in oldest] == ids
    assert server.client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
    for parameters in ({"limit": "0"}, {"limit": "ten"}, {"order": "up"}, {"after": "file-x"}):
        assert server.client.get("/v1/files", params=parameters).status_code == 400
    delete_all(server)


def test_files_belong_to_the_key_that_brought_them(server: HttpServer) -> None:
    file = upload(server).json()
    for call in (server.client.get, server.client.delete):
        assert error_of(call(f"/v1/files/{file['id']}", headers=TWO)) == (404, "not_found", "file_id")
    assert server.client.get("/v1/files", headers=TWO).json()["data"] == []
    assert server.client.get("/v1/files").json()["data"] == [file]
    delete_all(server)


def test_limits_and_mistakes_have_typed_errors(server: HttpServer, state_dir: Path) -> None:
    assert error_of(upload(server, bytes(1001))) == (413, "file_too_large", "file")
    assert error_of(upload(server, bytes(3 * 2**20))) == (413, "file_too_large", "file")
    assert error_of(upload(server, b"")) == (400, "empty_file", "file")
    assert error_of(upload(server, purpose="fine-tune")) == (400, "invalid_value", "purpose")
    seconds: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}
    assert error_of(upload(server, **seconds)) == (400, "invalid_value", "expires_after[seconds]")
    assert error_of(server.client.post("/v1/files", json={})) == (415, "unsupported_media_type", None)
    without = server.client.post("/v1/files", files={"other": (None, b"x")})
    assert error_of(without) == (400, "missing_required_parameter", "file")
    first = upload(server, bytes(1000))
    assert first.status_code == 200
    assert error_of(upload(server, bytes(501))) == (413, "full", "file")
    for _ in range(5):
        assert upload(server).status_code == 200
    assert error_of(upload(server)) == (413, "too_many_files", "file")
    delete_all(server)
    assert not list((state_dir / "files").iterdir())


@pytest.mark.full  # by default test_batches_killed.py kills a server that has files
def test_files_are_there_after_the_server_was_killed(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"))
    with HttpServer(*flags, has_model=False) as server:
        file = upload(server, b"content").json()
        os.kill(server.process.pid, signal.SIGKILL)
    (tmp_path / "state/files/part-left").touch()
    with HttpServer(*flags, has_model=False) as server:
        assert server.client.get(f"/v1/files/{file['id']}").json() == file
        assert server.client.get(f"/v1/files/{file['id']}/content").content == b"content"
    assert [path.name for path in (tmp_path / "state/files").iterdir()] == [file["id"]]


def sent_in(*pieces: bytes, is_cut: bool = False) -> Any:
    """Return an ASGI `receive` of these pieces of a body; `is_cut`: the client leaves after them."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.disconnect"} if is_cut else {"type": "http.request"})

    async def receive() -> Message:
        return messages.pop(0)

    return receive


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nab\r\n--b-\r\n--b--\r\n'
)
KIND = b"multipart/form-data; boundary=b"


async def test_a_form_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    pieces = [FORM[at : at + 1] for at in range(len(FORM))]
    found = await receive_upload(sent_in(*pieces), KIND, tmp_path / "f", 100)
    assert found == Upload(fields={"purpose": "batch"}, filename="f", num_bytes=8)
    assert (tmp_path / "f").read_bytes() == b"ab\r\n--b-"


async def test_a_client_that_leaves_has_uploaded_nothing(tmp_path: Path) -> None:
    assert await receive_upload(sent_in(FORM[:-5], is_cut=True), KIND, tmp_path / "f", 100) is None


@pytest.mark.parametrize(
    ("kind", "body", "status", "message"),
    [
        (KIND, FORM[:-5], 400, "ends before its last boundary"),
        (KIND, b"no form", 400, "not valid multipart/form-data"),
        (b"multipart/form-data", FORM, 400, "names no boundary"),
        (KIND.replace(b"=b", b"=" + b"b" * 500), FORM, 400, "Boundary length"),
        (KIND, FORM.replace(b"; name=", b"; nom="), 400, "a part has no name"),
        (KIND, FORM.replace(b'; filename="f"', b""), 400, "not a text"),
        (KIND, FORM.replace(b"batch", b"b" * 5000), 400, "At most 4096 bytes"),
        (KIND, FORM[:-5] + FORM[FORM.index(b'\r\n--b\r\nContent-Disposition: form-data; name="file"') :], 400, "twice"),
        (KIND, FORM[: FORM.index(b"--b", 3)] * 20 + FORM, 400, "more than 16 fields"),
    ],
)
async def test_forms_that_are_refused(kind: bytes, body: bytes, status: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        await receive_upload(sent_in(body), kind, tmp_path / "f", 100)
    assert caught.value.status == status


async def test_expired_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = StateDatabase(tmp_path / "db")
    store = FileStore(database, tmp_path / "files", ServerArgs(max_file_days=1.0))
    part = store.new_part()
    part.write_bytes(b"x")
    file = await store.add_upload("", Upload(fields={"purpose": "batch"}, filename="f", num_bytes=1), part)
    assert file.expires_at == file.created_at + 86400
    await store.sweep()
    assert await store.get("", file.id) == file
    monkeypatch.setattr("time.time", lambda: file.created_at + 86400.0)
    with pytest.raises(ApiError, match="No such file"):
        await store.get("", file.id)
    await store.sweep()
    assert not list((tmp_path / "files").iterdir())
    database.close()


async def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    database = StateDatabase(tmp_path / "db")
    add = "INSERT INTO files (id, owner, purpose, num_bytes, body) VALUES ('a', '', '', 1, '')"
    await database.run(lambda db: db.execute(add).fetchone())
    with pytest.raises(StateError, match="no such table"):
        await database.run(lambda db: [db.execute("DELETE FROM files"), db.execute("DELETE FROM missing")])
    assert await database.run(lambda db: db.execute("SELECT count(*) FROM files").fetchone()) == (1,)
    database.close()


def test_a_database_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 100)
    with pytest.raises(InvalidParameterError, match="db cannot be used: file is not a database"):
        StateDatabase(tmp_path / "db")
    database = StateDatabase(tmp_path / "new")
    database.run_now(lambda db: db.execute("SELECT 1").fetchone())
    database.close()
    with sqlite3.connect(tmp_path / "new") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(InvalidParameterError, match="is of version 99"):
        StateDatabase(tmp_path / "new")
