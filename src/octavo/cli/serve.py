"""`octavo serve`: an OpenAI-compatible HTTP server around one model."""

import sys
from typing import Annotated

import typer

from octavo.cli.options import TYPER_SETTINGS, EngineOptions, ServerOptions, with_derived_flags
from octavo.errors import InvalidParameterError

app = typer.Typer(**TYPER_SETTINGS)


@app.command()
@with_derived_flags
def serve(
    model: Annotated[str | None, typer.Argument(help="the model; the same as --model", show_default=False)] = None,
    *,
    server: ServerOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    from octavo.config.args import EngineArgs
    from octavo.server.args import ServerArgs
    from octavo.server.listen import serve as run_server

    if model is not None and engine.setdefault("model_name", model) != model:
        raise InvalidParameterError("model", model, f"--model says {engine['model_name']!r}: give one of them")
    run_server(EngineArgs.from_options({"engine_process": True, **engine}), ServerArgs(**server), _announce)


def _announce(url: str) -> None:
    print(f"octavo: listening on {url}", file=sys.stderr, flush=True)
