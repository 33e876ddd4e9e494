"""`ServerArgs`: the one definition of every option of the server.

Flags, environment variables (`OCTAVO_PORT=...`) and keys of the YAML file are all derived from the fields below; see
`server/settings.py`. Options of the engine are beside them, in `config/args.py`.
"""

import ipaddress
import math
from dataclasses import dataclass, fields
from typing import Literal

from octavo.config.args import check_type, option
from octavo.errors import InvalidParameterError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
# The formats of `server/openai/parsers/registry.py`, which is not imported for the sake of a help page.
ToolCallParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder"
]
ReasoningParserName = Literal["auto", "none", "think", "qwen3", "deepseek_r1", "mistral"]

_AT_LEAST_ONE = ("max_body_bytes", "max_header_bytes", "max_n", "max_prompts")
_POSITIVE_SECONDS = ("request_timeout_s", "read_timeout_s", "write_timeout_s", "keep_alive_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """Everything an operator may set about the server.

    Raises:
        InvalidParameterError: naming the option, its value and the limit.
    """

    # where it listens
    host: str = option("127.0.0.1", "address to listen on; beyond loopback, an API key is needed")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = option(None, "listen on this Unix socket instead of host and port")
    ssl_certfile: str | None = option(None, "TLS certificate (PEM, with its chain); needs ssl_keyfile")
    ssl_keyfile: str | None = option(None, "private key of the certificate (PEM)")
    root_path: str = option("", "path under which a proxy shows this server, such as /llm")
    cors_allow_origins: tuple[str, ...] = option((), "origins whose web pages may call; * for all; default: none")

    # who may call
    api_key: tuple[str, ...] = option((), "key that clients must send; several are allowed", is_secret=True)
    api_key_file: str | None = option(None, "file of further keys, one per line; # begins a comment")
    auth: bool = option(True, "refuse to listen beyond loopback without a key; --no-auth allows it")

    # the model as clients see it
    served_model_name: tuple[str, ...] = option((), "names by which clients may ask for the model, the main one first")
    tool_call_parser: ToolCallParserName = option("auto", "form of tool calls in the text; auto: as the template says")
    reasoning_parser: ReasoningParserName = option("auto", "form of thoughts in the text; auto: as the template says")

    # limits
    max_waiting: int = option(1024, "most requests waiting for their turn; more are answered 429")
    max_body_bytes: int = option(32 * 2**20, "largest body of a request; larger ones are answered 413")
    max_header_bytes: int = option(32 * 2**10, "most bytes of a request's head; more are answered 431")
    max_n: int = option(128, "most samples per prompt")
    max_prompts: int = option(1024, "most prompts per request")
    request_timeout_s: float | None = option(None, "most seconds a request may take; default: no limit")
    read_timeout_s: float = option(60.0, "most seconds a request's head, and then its body, may take to arrive")
    write_timeout_s: float = option(120.0, "most seconds a client may leave its answer unread; then it is cut off")
    keep_alive_s: int = option(65, "seconds that an idle connection is kept")
    drain_timeout_s: float = option(30.0, "seconds that running requests get to finish after SIGTERM")

    # what it tells
    log_level: LogLevel = option("info", "least important messages to log")
    log_format: LogFormat = option("text", "lines for people, or JSON for programs")
    access_log: bool = option(True, "log each request (but no probe of /health or /ready): status, time, tokens")
    expert_metrics: bool = option(False, "show in metrics how many tokens chose each expert, not only how evenly")
    vllm_metrics: bool = option(False, "show metrics under vLLM's names too, for its dashboards")

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_type(spec.name, spec.type, getattr(self, spec.name))
        self._check_numbers()
        self._check_texts()
        if self.is_open_to_all and self.auth:
            limit = "listening beyond loopback needs an API key (api_key, api_key_file), or --no-auth"
            raise InvalidParameterError("host", self.host, limit)

    @property
    def has_keys(self) -> bool:
        """True when clients must send a key."""
        return bool(self.api_key or self.api_key_file)

    @property
    def is_open_to_all(self) -> bool:
        """True when other machines can reach the server and no key is asked for."""
        return self.uds is None and not is_loopback(self.host) and not self.has_keys

    def _check_numbers(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InvalidParameterError("port", self.port, "between 0 and 65535")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise InvalidParameterError(name, getattr(self, name), "an integer of at least 1")
        if self.max_waiting < 0:
            raise InvalidParameterError("max_waiting", self.max_waiting, "an integer of at least 0")
        for name in _POSITIVE_SECONDS:
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:  # also catches NaN
                raise InvalidParameterError(name, value, "a finite number greater than 0")
        if not 0.0 <= self.drain_timeout_s < math.inf:
            raise InvalidParameterError("drain_timeout_s", self.drain_timeout_s, "a finite number of at least 0")

    def _check_texts(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise InvalidParameterError(missing, None, "certificate and key go together")
        if any(not key.isascii() or not key.isprintable() or key != key.strip() or not key for key in self.api_key):
            raise InvalidParameterError("api_key", "(hidden)", "printable ASCII without blanks around it")
        if any(not name for name in self.served_model_name):
            raise InvalidParameterError("served_model_name", self.served_model_name, "names must not be empty")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidParameterError("root_path", self.root_path, "must begin with / and not end with it")


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it leads is not ours to guess
        return False
