"""`octavo env`: versions, hardware and kernels. The first thing to paste into a bug report."""

import json as json_codec
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

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
    """Versions, the device and its memory, and the kernels for each dtype."""
    facts = software() | hardware(device)
    if json:
        print(json_codec.dumps(facts))
    else:
        print_table({name: [value] for name, value in facts.items()})


def software() -> dict[str, str]:
    """Return versions by name."""
    own = {"octavo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return own | {name: _version_of(name) for name in PACKAGES}


def hardware(device: str) -> dict[str, str]:
    """Return the device manager's description of a device.

    Raises:
        DeviceUnavailableError, UnknownOptionError: about `device`.
    """
    from octavo import DeviceManager

    return DeviceManager(device).describe()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
