"""The parent's log tells what the engine's process said."""

import logging
import subprocess
import sys

import pytest

from octavo.engine.child_output import relay_lines


def test_lines_become_log_records_and_the_pipe_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "octavo.engine.process")
    program = r"import sys; sys.stderr.buffer.write(b'one\ntwo \xff\nlast, without an end')"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        relay_lines(child.stderr).join()
        assert child.stderr.closed
    assert [record.getMessage() for record in caplog.records] == ["one", "two \ufffd", "last, without an end"]
