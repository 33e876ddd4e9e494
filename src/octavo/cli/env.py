"""`octavo env`: versions, hardware and kernels. The first thing to paste into a bug report."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from octavo._version import __version__
from octavo.cli.terminal import print_facts

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "msgspec", "pyzmq", "huggingface_hub")


def env(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps or xpu", metavar="<str>")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Versions, the device and its memory, and the kernels for each dtype."""
    from octavo import DeviceManager

    own = {"octavo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    others = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            others[name] = version(name)
    print_facts(own | others | DeviceManager(device).describe(), as_json=json)
