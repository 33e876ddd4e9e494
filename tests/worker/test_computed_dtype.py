"""Float16 is computed as it is by the C++ kernels, and in bfloat16 where a CPU has kernels for that alone."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.hub import resolve_model
from octavo.device.manager import DeviceManager
from octavo.kernels import dispatch
from octavo.kernels.dispatch import native_kernels
from octavo.worker.worker import Worker

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="needs the C++ kernels")
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.fixture
def without_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without C++ kernels, on which oneDNN computes bfloat16."""
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")
    monkeypatch.setattr(dispatch, "has_onednn", lambda dtype: dtype != torch.float16)


def worker(
    folder: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], **options: Any
) -> tuple[Worker, str]:
    """Return a rank for the demo's configuration with `changes`, stored in float16, and what it warned of."""
    demo = resolve_model("demo", with_weights=False)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    settings = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "float16"} | changes))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        rank = Worker(EngineArgs(model_name=str(folder), load_format="dummy", device="cpu", **options).resolve())
    return rank, caplog.text


@pytest.mark.parametrize(
    ("changes", "options", "form"),
    [
        ({}, {}, ""),
        ({}, {"quantization": "int8"}, "int8"),
        ({}, {"kv_cache_dtype": "int8"}, "int8-kv"),
        ({"quantization_config": _GPTQ}, {}, "gptq"),
    ],
)
def test_auto_keeps_it(
    changes: dict[str, Any], options: dict[str, Any], form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank, text = worker(tmp_path, caplog, changes, **options)
    assert rank.profile.startswith("cpu-float16-native-")
    assert form in rank.profile
    assert (rank.config.model.dtype, text) == ("float16", "")


@pytest.mark.usefixtures("without_float16")
def test_auto_computes_in_bfloat16_where_only_that_has_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank, text = worker(tmp_path, caplog, {}, speculative_config={"model": str(tmp_path)})
    assert rank.profile.startswith("cpu-bfloat16-onednn-")
    assert rank.config.model.dtype == "bfloat16"
    assert rank.config.draft_model is not None
    assert rank.config.draft_model.model.dtype == "bfloat16"
    assert text.count("stored in float16, for which this CPU has no kernels: computing in bfloat16") == 1


@pytest.mark.usefixtures("without_float16")
def test_float16_by_name_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank, text = worker(tmp_path, caplog, {}, dtype="float16")
    assert rank.profile == "cpu-float16-torch-reference-torch-sdpa"
    assert text.count("at a small fraction of bfloat16's speed") == 1


@pytest.mark.usefixtures("without_float16")
def test_the_device_says_so() -> None:
    facts = DeviceManager("cpu").describe()
    assert facts["float16"].endswith("slow: dtype=auto computes float16 checkpoints in bfloat16")
    assert "slow" not in facts["float32"] + facts["bfloat16"]
