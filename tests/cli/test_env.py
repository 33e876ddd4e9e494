"""`octavo env` says what a bug report needs."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo import __version__
from octavo.cli.main import PACKAGES, app
from octavo.device.manager import DeviceManager
from octavo.device.self_check import self_check
from octavo.kernels.reference import Kernels
from octavo.kernels.types import PackedLinear


def env(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["env", *arguments], env={"COLUMNS": "400"})
    return result.exit_code, result.stdout, result.stderr


def test_json_has_versions_device_and_numerics() -> None:
    code, text, _ = env("--json", "--device", "cpu")
    assert code == 0
    facts = json.loads(text)
    assert facts["octavo"] == __version__
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["device"] == "cpu"
    assert "batch-invariant" in facts["float32"]
    assert {"float32", "bfloat16", "float16", "memory", "processor", *PACKAGES} <= set(facts)


def test_the_table_says_the_same_without_colours() -> None:
    _, text, _ = env("--device", "cpu")
    facts = json.loads(env("--json", "--device", "cpu")[1])
    assert "\x1b" not in text
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    assert {name: value.strip() for name, value in lines.items() if name != "memory"} == {
        name: value for name, value in facts.items() if name != "memory"
    }


@pytest.mark.parametrize("device", ["cdua", "nonsense"])
def test_an_unknown_device_is_the_users_mistake(device: str) -> None:
    code, text, complaint = env("--device", device)
    assert (code, text) == (2, "")
    assert "cuda" in complaint


def test_the_self_check_is_one_block() -> None:
    code, text, _ = env("--json", "--device", "cpu", "--check")
    assert code == 0
    facts = json.loads(text)
    assert "the same bits in every batch" in facts["exactness"]
    assert "WRONG" not in text
    assert "FAILED" not in text
    assert "this processor has" in facts["kernel level"] or "torch's ops" in facts["kernel level"]
    assert "GB/s" in facts["memory bandwidth"]
    assert "cores" in facts["limits"]
    assert "writes" in facts["cache folder"] or "too full" in facts["cache folder"]
    assert "not installed" in facts["extras"]


def test_a_check_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(self: Kernels, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return torch.full((len(x), packed.num_outputs), float(len(x)), dtype=x.dtype)

    monkeypatch.setattr(type(DeviceManager("cpu").kernels(torch.float32)), "linear", wrong)
    (tmp_path / "file").touch()
    facts = self_check(DeviceManager("cpu"), tmp_path / "file")
    assert "float32 WRONG" in facts["exactness"]
    assert facts["cache folder"].startswith("FAILED: FileExistsError")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
