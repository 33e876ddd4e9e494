"""`octavo serve`: an OpenAI-compatible HTTP server for one model, or several."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import EngineOptions, ServerOptions, with_derived_flags
from octavo.errors import InvalidParameterError


@with_derived_flags
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="the model, same as --model; others are as --also-serve", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with options: `max-num-seqs: 64`", metavar="<path>")
    ] = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="print all options as YAML with their sources, and exit")
    ] = False,
    *,
    server: ServerOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model, or several that are loaded when they are asked for, over HTTP with an OpenAI-compatible API.

    Every option is also an environment variable (OCTAVO_MAX_NUM_SEQS=64) and a key of the YAML file. Flags override the
    environment, the environment overrides the file.
    """
    from octavo.server.settings import resolve_settings

    if models:
        model, *others = models
        if engine.setdefault("model_name", model) != model:
            raise InvalidParameterError("model", model, f"conflicts with --model {engine['model_name']!r}")
        if others:
            server["also_serve"] = [*others, *server.get("also_serve", ())]
    settings = resolve_settings({**engine, **server}, os.environ, config)
    if show_settings:
        print("\n".join(settings.lines(with_defaults=True)))
        return
    from octavo.server.listen import configure_logging
    from octavo.server.listen import serve as run_server

    configure_logging(settings.server.log_level, settings.server.log_format)
    settings.log()
    if settings.server.log_format == "json":  # standard error must contain nothing but JSON lines
        run_server(settings)
    else:
        run_server(settings, lambda text: print(f"octavo: {text}", file=sys.stderr, flush=True))
