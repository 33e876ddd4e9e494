"""The state folder: made for its owner only, and held by one server at a time."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import InvalidParameterError
from octavo.server.args import ServerArgs
from octavo.server.state.folder import holding_state_dir

HOLDER = """
import sys
from octavo.server.state.folder import holding_state_dir
with holding_state_dir(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_it_is_made_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "a/state"
    with holding_state_dir(str(folder)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_second_server_is_told_who_holds_it_until_that_one_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InvalidParameterError, match=rf"state_dir=.*process {holder.pid}\)"):
            holding_state_dir(str(tmp_path)).__enter__()
        holder.kill()
    with holding_state_dir(str(tmp_path)):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_an_open_folder_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o750)
    with caplog.at_level(logging.WARNING), holding_state_dir(str(tmp_path)):
        assert "mode 050 of 077" in caplog.text


def test_what_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(InvalidParameterError, match=r"state_dir=.*: cannot be used: "):
            holding_state_dir(str(tmp_path / name)).__enter__()
    with pytest.raises(InvalidParameterError, match="state_dir='': must not be empty"):
        ServerArgs(state_dir="")
