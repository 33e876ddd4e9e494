"""Information about a server for tools: its load, settings and tokenizer."""

from dataclasses import fields
from typing import Any

import msgspec

from octavo._version import __version__
from octavo.config.args import EngineArgs
from octavo.engine.front import EngineFront
from octavo.server.args import ServerArgs

Settings = dict[str, Any]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /server_info`. Secrets are left out of the settings."""

    version: str
    profile: str  # device, dtype and kernels: what the exact bits of an output depend on
    max_model_len: int
    kv_cache_tokens: int
    settings: Settings


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /tokenizer_info`, for programs that render prompts themselves, such as lm-eval."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


def server_info(front: EngineFront, engine: EngineArgs, server: ServerArgs) -> ServerInfo:
    """Return the settings as they are in effect."""
    settings = {
        spec.name: getattr(args, spec.name)
        for args in (engine, server)
        for spec in fields(args)
        if not spec.metadata["is_secret"]
    }
    return ServerInfo(
        version=__version__,
        profile=front.client.profile,
        max_model_len=front.config.model.max_model_len,
        kv_cache_tokens=front.client.kv_tokens,
        settings=settings,
    )


def tokenizer_info(front: EngineFront) -> TokenizerInfo:
    """Return what renders and ends a prompt of this model."""
    tokenizer, named = front.tokenizer, front.tokenizer.named_tokens
    return TokenizerInfo(
        vocab_size=tokenizer.vocab_size,
        model_max_length=front.config.model.max_model_len,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        chat_template=None if tokenizer.chat_template is None else tokenizer.chat_template.source,
    )
