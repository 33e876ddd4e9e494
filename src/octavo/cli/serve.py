"""`octavo serve`: an OpenAI-compatible HTTP server around one model."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS, EngineOptions, ServerOptions, with_derived_flags
from octavo.errors import InvalidParameterError

app = typer.Typer(**TYPER_SETTINGS)

Config = Annotated[
    Path | None, typer.Option("--config", help="YAML file of options: `max-num-seqs: 64`", metavar="<path>")
]


@app.command()
@with_derived_flags
def serve(
    model: Annotated[str | None, typer.Argument(help="the model; the same as --model", show_default=False)] = None,
    config: Config = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="print all options as YAML, each with where it came from, and leave")
    ] = False,
    *,
    server: ServerOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Every option is also an environment variable (OCTAVO_MAX_NUM_SEQS=64) and a key of the YAML file. A flag wins over
    the environment, the environment over the file.
    """
    from octavo.server.settings import resolve_settings

    if model is not None and engine.setdefault("model_name", model) != model:
        raise InvalidParameterError("model", model, f"--model says {engine['model_name']!r}: give one of them")
    settings = resolve_settings({**engine, **server}, os.environ, config)
    if show_settings:
        print("\n".join(settings.lines(with_defaults=True)))
        return
    from octavo.server.listen import serve as run_server
    from octavo.server.logs import configure_logging

    configure_logging(settings.server.log_level, settings.server.log_format)
    settings.log()
    if settings.server.log_format == "json":  # then nothing else may stand between the log's lines
        run_server(settings)
    else:
        run_server(settings, _announce)


def _announce(url: str) -> None:
    print(f"octavo: listening on {url}", file=sys.stderr, flush=True)
