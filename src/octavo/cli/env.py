"""`octavo env`: what Octavo runs on here. The first thing to paste into a bug report."""

import json as json_codec
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from octavo._version import __version__
from octavo.cli.options import TYPER_SETTINGS
from octavo.cli.report import print_table

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "msgspec", "pyzmq", "huggingface_hub")

app = typer.Typer(**TYPER_SETTINGS)


@app.command()
def env(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps or xpu", metavar="<str>")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Versions, the device and its memory, and where bit-invariance holds."""
    from octavo import DeviceManager

    found = {"octavo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    facts: dict[str, Any] = found | {"packages": _versions(), "device": DeviceManager(device).describe()}
    if json:
        print(json_codec.dumps(facts))
    else:
        print_table({name: [text] for name, text in flatten(facts).items()})


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested facts as one level of dotted names, and every value in words."""
    rows = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows |= flatten(value, f"{prefix}{name}.")
        else:
            rows[prefix + name] = _words(value)
    return rows


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _versions() -> dict[str, str | None]:
    return {name: _version_of(name) for name in PACKAGES}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
