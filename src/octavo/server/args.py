"""`ServerArgs`: the single definition of every server option.

Flags, environment variables (`OCTAVO_PORT=...`) and keys of the YAML file are all derived from the fields below; see
`server/settings.py`. Engine options are in `config/args.py`.
"""

import ipaddress
from dataclasses import dataclass
from typing import Literal

from octavo.config.option_types import AMOUNT, COUNT, FRACTION, POSITIVE_FINITE, Limit, check_options, option
from octavo.errors import InvalidParameterError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
# The formats of `server/openai/answer_plan.py`, which is not imported here to keep --help fast.
ToolCallParserName = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "pythonic",
    "qwen3_coder",
    "glm",
    "deepseek_v3",
    "deepseek_v31",
    "kimi",
    "gemma4",
    "granite",
    "phi4",
    "hunyuan_a13b",
    "cohere",
    "minimax_m2",
    "olmo3",
    "harmony",
]
RequestLogOnly = Literal["all", "failed"]
ReasoningParserName = Literal["auto", "none", "think", "qwen3", "deepseek_r1", "mistral", "cohere", "gemma4", "harmony"]

_PORT: Limit = ("between 0 and 65535", lambda value: 0 <= value < 2**16)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """All server options. Raises InvalidParameterError: names the option, its value and the limit."""

    # listening
    host: str = option("127.0.0.1", "address to listen on; beyond loopback, an API key is required")
    port: int = option(8000, "port to listen on; 0: any free port", _PORT)
    uds: str | None = option(None, "listen on this Unix socket instead of host and port")
    ssl_certfile: str | None = option(None, "TLS certificate (PEM, with its chain); requires ssl_keyfile")
    ssl_keyfile: str | None = option(None, "private key of the certificate (PEM)")
    root_path: str = option("", "path prefix under which a proxy exposes this server, such as /llm")
    cors_allow_origins: tuple[str, ...] = option((), "allowed CORS origins; * for all; default: none")

    ui: bool = option(True, "serve the page at /: a chat, and a view of the engine; --no-ui does not")

    # authentication
    api_key: tuple[str, ...] = option((), "key that clients must send; may be repeated", is_secret=True)
    api_key_file: str | None = option(None, "file with more keys, one per line; # starts a comment")
    keys_file: str | None = option(
        None, "YAML file of keys with names, limits, models and priorities; read again on SIGHUP (docs/operations.md)"
    )
    auth: bool = option(True, "require a key when listening beyond loopback; --no-auth does not")

    # the model, as clients see it
    served_model_name: tuple[str, ...] = option((), "model names for clients, the main one first")
    model_alias: tuple[str, ...] = option(
        (), "NAME=MODEL: another name for a model or adapter, such as claude-*=demo; may be repeated"
    )
    also_serve: tuple[str, ...] = option(
        (), "another model, loaded when a request asks for it; the same as a further argument of `octavo serve`"
    )
    max_loaded: int = option(1, "maximum models loaded at once, where there are several", COUNT)
    idle_unload_s: float | None = option(
        None, "seconds after which a model that nobody uses is unloaded, until the next request", POSITIVE_FINITE
    )
    keep_billing_header: bool = option(
        False, "keep the line of Claude Code's system prompt that changes with every request, so no prefix is reused"
    )
    tool_call_parser: ToolCallParserName = option("auto", "format of tool calls; auto: detect from the chat template")
    reasoning_parser: ReasoningParserName = option("auto", "format of reasoning; auto: detect from the chat template")

    # adapters
    lora_modules: tuple[str, ...] = option(
        (), 'adapter to serve: name=path, or {"name": ..., "path": ..., "base_model_name": ...}; may be repeated'
    )
    allow_runtime_lora: bool = option(
        False, "offer /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters below lora_root"
    )
    lora_root: str | None = option(None, "folder below which adapters may be loaded over HTTP")

    # limits
    max_waiting: int = option(1024, "maximum samples in the queue; above it, requests get 429", AMOUNT)
    max_wait_s: float | None = option(
        None, "expected seconds in the queue above which a request gets 429, as above its deadline", POSITIVE_FINITE
    )
    max_body_bytes: int = option(32 * 2**20, "maximum size of a request body; larger ones get 413", COUNT)
    max_header_bytes: int = option(32 * 2**10, "maximum size of the request headers; larger ones get 431", COUNT)
    max_n: int = option(128, "maximum samples per prompt", COUNT)
    max_temperature: float = option(2.0, "maximum temperature of a request; higher ones get 400", POSITIVE_FINITE)
    max_prompts: int = option(1024, "maximum prompts per request", COUNT)
    max_images: int = option(16, "maximum images per request", COUNT)
    max_image_bytes: int = option(20 * 2**20, "maximum size of an image file", COUNT)
    max_image_pixels: int = option(64_000_000, "maximum pixels of an image, and of a video's frame", COUNT)
    max_videos: int = option(4, "maximum videos per request", COUNT)
    max_video_bytes: int = option(
        64 * 2**20, "maximum size of a video file; in a request, max_body_bytes is lower", COUNT
    )
    allow_remote_media: bool = option(
        False, "fetch images and videos that requests name by http(s) URL, from public addresses only"
    )
    media_timeout_s: float = option(20.0, "maximum seconds to fetch one image or video", POSITIVE_FINITE)
    request_timeout_s: float | None = option(None, "maximum seconds per request; default: no limit", POSITIVE_FINITE)
    read_timeout_s: float = option(60.0, "maximum seconds to receive the headers, and then the body", POSITIVE_FINITE)
    write_timeout_s: float = option(
        120.0, "maximum seconds that a client may stop reading; then it is dropped", POSITIVE_FINITE
    )
    keep_alive_s: int = option(65, "seconds before an idle connection is closed", POSITIVE_FINITE)
    drain_timeout_s: float = option(30.0, "seconds for running requests to finish after SIGTERM", AMOUNT)

    # what outlives the server
    state_dir: str | None = option(
        None, "folder for what must outlive the server; one server at a time; created if missing, for its user only"
    )

    max_batch_running: int | None = option(
        None, "maximum samples of batches that run at once; default: half of max_num_seqs", COUNT
    )
    max_batch_lines: int = option(50_000, "maximum lines of a batch", COUNT)
    max_file_bytes: int = option(200 * 2**20, "maximum size of an uploaded file; larger ones get 413", COUNT)
    max_files: int = option(10_000, "maximum number of files, those that batches write included", COUNT)
    max_stored_bytes: int = option(16 * 2**30, "total size of files above which no other is taken", COUNT)
    max_file_days: float = option(30.0, "days after which files and batches that have ended go", POSITIVE_FINITE)

    # the Responses API
    response_store_mib: int = option(
        64,
        "maximum MiB of responses kept for previous_response_id; above it, those not used longest go; 0: none",
        AMOUNT,
    )
    response_store_days: float = option(30.0, "days after which kept responses go", POSITIVE_FINITE)

    # clients that come back
    resume_s: float = option(
        0.0,
        "seconds that a stream goes on without its client, which returns with Last-Event-ID; 0: it is aborted",
        AMOUNT,
    )
    idempotency_s: float = option(
        600.0,
        "seconds that an answer is kept for its Idempotency-Key when nobody reads it; 0: keys have no effect",
        AMOUNT,
    )
    keep_mib: int = option(64, "maximum MiB of memory for the answers of clients that may come back", COUNT)

    # requests to replay
    request_log: str | None = option(
        None, "folder for a log of requests, with prompts and answers, which `octavo replay` computes again"
    )
    request_log_only: RequestLogOnly = option("all", "all, or failed: requests that ended with an error")
    request_log_sample: float = option(1.0, "fraction of requests that are logged, chosen at random", FRACTION)
    request_log_days: float = option(7.0, "days after which logged requests go", POSITIVE_FINITE)
    request_log_mib: int = option(256, "maximum MiB of logged requests; above it, the oldest go", COUNT)

    # logs and metrics
    log_level: LogLevel = option("info", "minimum level of log messages")
    log_format: LogFormat = option("text", "text, or one JSON object per line")
    access_log: bool = option(True, "log each request, except /health and /ready: status, time, tokens")
    expert_metrics: bool = option(False, "export token counts per expert, not only their balance")
    vllm_metrics: bool = option(False, "also export metrics under vLLM's names, for its dashboards")

    def __post_init__(self) -> None:
        check_options(self)
        self._check_texts()
        if self.allow_runtime_lora and self.lora_root is None:
            raise InvalidParameterError("allow_runtime_lora", True, "requires lora_root")
        if self.is_open_to_all and self.auth:
            limit = "listening beyond loopback requires an API key (api_key, api_key_file, keys_file), or --no-auth"
            raise InvalidParameterError("host", self.host, limit)

    @property
    def is_open_to_all(self) -> bool:
        """True when other machines can reach the server without a key."""
        return (
            self.uds is None
            and not is_loopback(self.host)
            and not (self.api_key or self.api_key_file or self.keys_file)
        )

    def _check_texts(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise InvalidParameterError(missing, None, "certificate and key go together")
        if any(not key.isascii() or not key.isprintable() or key != key.strip() or not key for key in self.api_key):
            raise InvalidParameterError("api_key", "(hidden)", "printable ASCII without surrounding whitespace")
        for name in ("state_dir", "request_log"):
            if getattr(self, name) == "":
                raise InvalidParameterError(name, "", "must not be empty")
        for alias in self.model_alias:
            if not all(alias.partition("=")):
                raise InvalidParameterError("model_alias", alias, "NAME=MODEL, such as claude-*=demo")
        if any(not name for name in self.also_serve):
            raise InvalidParameterError("also_serve", self.also_serve, "names must not be empty")
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
    except ValueError:  # a name: do not guess where it resolves to
        return False
