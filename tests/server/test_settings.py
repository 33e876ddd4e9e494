"""Flag over environment over file over default; what names no option is an error; secrets are not shown."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.config.args import EngineArgs
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.server.args import ServerArgs
from octavo.server.settings import Settings, resolve_settings


def resolve(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    return resolve_settings(flags or {}, environ or {}, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "octavo.yaml"
    path.write_text("port: 1\nmax-waiting: 1\nmodel: from-file\nmax_num_seqs: 7\napi_key: [one, two]\nauth: no\n")
    return path


def test_each_layer_wins_over_the_one_below(file: Path) -> None:
    settings = resolve({"port": 3}, {"OCTAVO_PORT": "2", "OCTAVO_MAX_WAITING": "2"}, file)
    assert (settings.server.port, settings.server.max_waiting, settings.engine.max_num_seqs) == (3, 2, 7)
    assert settings.server.drain_timeout_s == ServerArgs().drain_timeout_s
    assert settings.origins["port"] == "--port"
    assert settings.origins["max_waiting"] == "OCTAVO_MAX_WAITING"
    assert settings.origins["max_num_seqs"] == str(file)
    assert "drain_timeout_s" not in settings.origins


def test_the_level_of_the_kernels_is_no_option_of_the_server() -> None:
    assert resolve(environ={"OCTAVO_CPU_LEVEL": "avx2"}) == resolve()


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    assert resolve({}, {"OCTAVO_CONFIG": str(file)}).engine.model_name == "from-file"


def test_every_option_can_be_set_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    """The defaults, written out by `lines`, read back as themselves, each from where it was put."""
    shown = resolve().lines(with_defaults=True)
    table = yaml.safe_load("\n".join(shown))
    assert set(table) == {s.name for s in (*fields(EngineArgs), *fields(ServerArgs))} - {"model_name"} | {"model"}
    (tmp_path / "all.yaml").write_text("\n".join(shown))
    again = resolve(file=tmp_path / "all.yaml")
    assert (again.engine, again.server) == (resolve().engine, ServerArgs())
    assert again.engine == EngineArgs(
        engine_process=True, step_target_s=0.25, prefix_cache_disk=2.0, spare_process=True
    )
    assert set(again.origins) == set(table)
    texts = {f"OCTAVO_{name.upper()}": str(value) for name, value in table.items() if value not in (None, [], "")}
    from_environment = resolve(environ=texts)
    assert (from_environment.engine, from_environment.server) == (again.engine, again.server)


def test_a_file_that_leaves_the_length_of_a_step_open_gets_the_default(tmp_path: Path) -> None:
    (tmp_path / "open.yaml").write_text("step_target_s: null\n")
    assert resolve(file=tmp_path / "open.yaml").engine.step_target_s == 0.25


def test_lists_and_switches_in_the_environment() -> None:
    server = resolve(environ={"OCTAVO_API_KEY": "a, b,", "OCTAVO_ACCESS_LOG": "Off", "OCTAVO_UDS": ""}).server
    assert (server.api_key, server.access_log, server.uds) == (("a", "b"), False, None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OCTAVO_PROT": "1"}, "did you mean 'OCTAVO_PORT'"),
        ({"OCTAVO_PORT": "many"}, "OCTAVO_PORT='many': must be an integer"),
        ({"OCTAVO_PORT": "70000"}, "from OCTAVO_PORT"),
        ({"OCTAVO_DTYPE": "float8"}, "from OCTAVO_DTYPE"),
        ({"OCTAVO_MODEL": "m", "OCTAVO_MAX_MODEL_LEN": "1"}, "from OCTAVO_MAX_MODEL_LEN"),
        ({"OCTAVO_ACCESS_LOG": "maybe"}, "true or false"),
    ],
)
def test_a_mistake_in_the_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises((InvalidParameterError, UnknownOptionError)) as caught:
        resolve(environ=environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("port: '1'", "must be an integer"),
        ("port: 1\nport: 2", "duplicate key"),
        ("- port", "must be a mapping"),
        ("port: [", "cannot be read"),
        ("? [a, b]\n: 1", "unhashable"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises((InvalidParameterError, UnknownOptionError)) as caught:
        resolve(file=path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        resolve(file=tmp_path / "none.yaml")


def test_secrets_are_not_shown(file: Path, tmp_path: Path) -> None:
    assert not any("one" in line or "two" in line for line in resolve(file=file).lines())
    assert 'api_key: "(hidden)"  # ' in "\n".join(resolve(file=file).lines())
    (tmp_path / "bad.yaml").write_text("api_key: [12345]")
    with pytest.raises(InvalidParameterError) as caught:
        resolve(file=tmp_path / "bad.yaml")
    assert "12345" not in str(caught.value)


def test_kubernetes_service_links_set_nothing(caplog: pytest.LogCaptureFixture) -> None:
    links = {
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT_HTTP": "8000",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert resolve(environ=links).origins == {}
    assert len(caplog.records) == len(links)
