"""What a request log keeps of each request, its file, and how it is read. `server/logged/log.py` writes it."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from octavo._version import __version__
from octavo.config.args import EngineArgs
from octavo.engine.front import EngineFront
from octavo.errors import InvalidParameterError
from octavo.server.args import ServerArgs
from octavo.server.openai.birth import Birth
from octavo.server.state.database import Layout

FILE_NAME = "requests.sqlite3"
# What is looked for has a column; `facts` has the rest, contents are apart so that a list reads none of them.
LOG = Layout(
    option="request_log",
    version=1,
    schema="""
CREATE TABLE identities (id INTEGER PRIMARY KEY, body BLOB NOT NULL UNIQUE);
CREATE TABLE requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, reply_id TEXT NOT NULL, ended_s REAL NOT NULL,
    num_bytes INTEGER NOT NULL, identity INTEGER NOT NULL, facts BLOB NOT NULL
);
CREATE INDEX requests_by_id ON requests (request_id);
CREATE INDEX requests_by_reply ON requests (reply_id);
CREATE TABLE contents (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, answer BLOB NOT NULL, token_ids BLOB NOT NULL);
CREATE TABLE totals (num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0);
""",
    pragmas=("secure_delete = ON",),  # prompts do not stay in free pages
)
_SAMPLED_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "*.tensors")
_WHOLE_FILES = ("config.json", "generation_config.json", "tokenizer*", "*.jinja")
_NUM_PIECES, _PIECE_BYTES = 64, 64 * 1024  # of a large file
# Options that answers depend on, or whether there is one; those of scheduling, memory and speculation change no byte.
ENGINE_SETTINGS = (
    *("tokenizer", "chat_template", "dtype", "quantization", "device", "max_model_len", "kv_cache_dtype"),
    *("generation_config", "load_format", "tensorizer_uri", "seed", "enforce_eager", "deterministic"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_experts", "tensor_parallel_size", "pipeline_parallel_size"),
    *("enable_expert_parallel", "distributed_executor_backend"),
)
SERVER_SETTINGS = (
    *("served_model_name", "tool_call_parser", "reasoning_parser", "lora_modules", "max_n", "max_temperature"),
    *("model_alias", "keep_billing_header"),
    *("max_prompts", "max_images", "max_image_bytes", "max_image_pixels", "max_videos", "max_video_bytes"),
    *("allow_remote_media", "media_timeout_s"),
)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What computes answers: equal ones give the same request the same bytes."""

    version: str
    profile: str  # device, dtype and kernels
    model: str  # as the option names it, and on the wire unless `served_model_name` is set
    path: str  # of the checkpoint
    weights: str  # see `checkpoint_content`
    settings: dict[str, Any]  # those above that are not the default

    @classmethod
    def of(cls, front: EngineFront, model: str, settings: Mapping[str, object]) -> "Identity":
        """Return the identity of a loaded engine with these options; reads a part of its checkpoint. Raises OSError."""
        path = Path(front.config.model.path)
        chosen = {
            spec.name: settings[spec.name]
            for spec in (*fields(EngineArgs), *fields(ServerArgs))
            if spec.name in (*ENGINE_SETTINGS, *SERVER_SETTINGS)
            and settings.get(spec.name, spec.default) != spec.default
        }
        return cls(
            version=__version__,
            profile=front.core.profile,
            model=model,
            path=str(path.absolute()),
            weights=checkpoint_content(path),
            settings=msgspec.to_builtins(chosen),
        )

    def differences(self, other: "Identity") -> dict[str, tuple[object, object]]:
        """Return what differs, by name: of this one and of the other. A checkpoint may be elsewhere."""
        names = [name for name in self.__struct_fields__ if name not in ("path", "settings")]
        pairs: dict[str, tuple[object, object]] = {name: (getattr(self, name), getattr(other, name)) for name in names}
        for name in (*ENGINE_SETTINGS, *SERVER_SETTINGS):
            pairs[name] = (self.settings.get(name), other.settings.get(name))
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A request and how it ended, without its contents."""

    request_id: str  # X-Request-Id
    reply_id: str = ""  # empty: it has none, or was refused before it was prepared
    path: str
    owner: str  # digest of its API key; empty: the server has none
    is_stream: bool
    started_s: float  # since 1970
    ended_s: float
    status: int
    error: str | None  # what a client was told; None: the answer is complete
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    birth: Birth


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body and its answer: the events of a stream or one body; of one that failed, as far as it went."""

    body: bytes
    answer: bytes
    token_ids: list[list[int]]  # of each choice

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.answer) + 4 * sum(map(len, self.token_ids))


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a log."""

    facts: Facts
    contents: Contents
    identity: Identity


class LogReader:
    """A request log, read while a server may be writing it."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidParameterError: there is no log in the folder, or this version cannot read it."""
        self._folder = folder
        path = folder / FILE_NAME
        if not path.is_file():
            raise self._error(f"there is no {FILE_NAME}: `octavo serve --request-log` writes it")
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            [version] = self._connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            raise self._error(f"{FILE_NAME} cannot be read: {error}") from error
        if version != LOG.version:
            self._connection.close()
            raise self._error(f"{FILE_NAME} is of version {version}, this is Octavo's version {LOG.version}")

    def close(self) -> None:
        self._connection.close()

    def facts(self) -> list[tuple[int, Facts]]:
        """Return all requests, the oldest first, with their numbers. Raises InvalidParameterError: it is damaged."""
        rows = self._rows("SELECT seq, facts FROM requests ORDER BY seq", ())
        return [(number, msgspec.msgpack.decode(facts, type=Facts)) for number, facts in rows]

    def numbers_of(self, name: str) -> list[int]:
        """Return the requests with this `X-Request-Id` or reply id. Raises InvalidParameterError: there is none."""
        rows = self._rows("SELECT seq FROM requests WHERE request_id = ? OR reply_id = ? ORDER BY seq", (name, name))
        if not rows:
            raise InvalidParameterError("request_id", name, f"not in the log of {self._folder}; --list shows what is")
        return [number for (number,) in rows]

    def read(self, number: int) -> LoggedRequest | None:
        """Return a request; None if it has gone meanwhile. Raises InvalidParameterError: the file is damaged."""
        columns = "requests.facts, contents.body, contents.answer, contents.token_ids, identities.body"
        joins = "JOIN contents USING (seq) JOIN identities ON identities.id = requests.identity"
        rows = self._rows(f"SELECT {columns} FROM requests {joins} WHERE requests.seq = ?", (number,))
        if not rows:
            return None
        [(facts, body, answer, token_ids, identity)] = rows
        return LoggedRequest(
            facts=msgspec.msgpack.decode(facts, type=Facts),
            contents=Contents(
                body=body, answer=answer, token_ids=msgspec.msgpack.decode(token_ids, type=list[list[int]])
            ),
            identity=msgspec.json.decode(identity, type=Identity),
        )

    def _rows(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        try:
            with closing(self._connection.execute(query, values)) as rows:
                return rows.fetchall()
        except sqlite3.Error as error:
            raise self._error(f"{FILE_NAME} cannot be read: {error}") from error

    def _error(self, limit: str) -> InvalidParameterError:
        return InvalidParameterError("request_log", str(self._folder), limit)


def checkpoint_content(path: Path) -> str:
    """Return a digest of what a checkpoint contains, the same for a copy of it elsewhere. Raises OSError.

    Settings and tokenizer count whole, of each file with weights its size and 64 pieces that are spread over it:
    reading all of a large one would take minutes, and other weights differ everywhere.
    """
    digest = blake2b(digest_size=16)
    for patterns, num_pieces in ((_WHOLE_FILES, 0), (_SAMPLED_FILES, _NUM_PIECES)):
        files = {file for pattern in patterns for file in path.glob(pattern)}
        if path.is_file():
            files = {path} if num_pieces else set()
        for file in sorted(each for each in files if each.is_file()):
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            _add_content(digest, file, num_pieces)
    return digest.hexdigest()


def _add_content(digest: "blake2b", path: Path, num_pieces: int) -> None:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if num_bytes <= num_pieces * _PIECE_BYTES or not num_pieces:
            digest.update(file.read())
            return
        for piece in range(num_pieces):
            file.seek(piece * (num_bytes - _PIECE_BYTES) // (num_pieces - 1))
            digest.update(file.read(_PIECE_BYTES))
