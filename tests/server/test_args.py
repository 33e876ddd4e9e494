"""The server's options hold themselves to their limits, and do not leave the door open by accident."""

from dataclasses import fields
from typing import Any, get_args

import pytest

from octavo.config.args import EngineArgs
from octavo.errors import InvalidParameterError
from octavo.server.args import ReasoningParserName, ServerArgs, ToolCallParserName, is_loopback
from octavo.server.openai.answer_plan import AUTO, NONE, REASONING_FORMATS, TOOL_CALL_PARSERS


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"port": 70000}, "port"),
        ({"port": "8000"}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s"),
        ({"log_format": "xml"}, "log_format"),
        ({"api_key": "one string"}, "api_key"),
        ({"api_key": ("",)}, "api_key"),
        ({"api_key": ("a\nb",)}, "api_key"),
        ({"ssl_certfile": "a.pem"}, "ssl_keyfile"),
        ({"ssl_keyfile": "a.pem"}, "ssl_certfile"),
        ({"root_path": "llm"}, "root_path"),
        ({"served_model_name": ("",)}, "served_model_name"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ServerArgs(**options)
    assert caught.value.field == field


def test_the_text_of_a_bad_key_is_not_shown() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ServerArgs(api_key=("secret\n",))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_listening_beyond_loopback_without_a_key_is_refused(host: str) -> None:
    with pytest.raises(InvalidParameterError, match="--no-auth"):
        ServerArgs(host=host)
    assert not ServerArgs(host=host, api_key=("k",)).is_open_to_all
    assert ServerArgs(host=host, auth=False).is_open_to_all
    assert not ServerArgs(host=host, uds="/tmp/s").is_open_to_all  # nothing listens on the host then


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert not ServerArgs(host=host).is_open_to_all


def test_parsers_are_those_that_there_are() -> None:
    assert set(get_args(ToolCallParserName)) == {AUTO, NONE, *TOOL_CALL_PARSERS}
    assert set(get_args(ReasoningParserName)) == {AUTO, NONE, *REASONING_FORMATS}


def test_options_of_server_and_engine_do_not_share_a_name() -> None:
    """They share one command line, one environment and one file."""
    assert not {spec.name for spec in fields(ServerArgs)} & {spec.name for spec in fields(EngineArgs)}
