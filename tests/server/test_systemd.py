"""A service manager is told when the model is loaded and when draining begins."""

import socket
from pathlib import Path

import pytest
from tests.server.http_server import HttpServer

from octavo.server.systemd import notify


def test_started_means_loaded_and_the_end_is_announced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        with HttpServer(has_model=False, environ={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as server:
            ready, status = manager.recv(4096).decode().splitlines()
            assert server.client.get("/health").status_code == 200
            server.process.terminate()
            assert manager.recv(4096) == b"STOPPING=1"
            assert server.process.wait() == 0
    assert ready == "READY=1"
    assert status.startswith("STATUS=demo is ready")


def test_a_manager_that_is_gone_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    notify("READY=1")
    assert "was not told READY=1" in caplog.text
    monkeypatch.delenv("NOTIFY_SOCKET")
    caplog.clear()
    notify("READY=1")
    assert caplog.text == ""


def test_an_abstract_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0octavo-test-notify")
        monkeypatch.setenv("NOTIFY_SOCKET", "@octavo-test-notify")
        notify("READY=1", "STATUS=x")
        assert manager.recv(100) == b"READY=1\nSTATUS=x"
