"""`deterministic` is accepted if kernels are batch-invariant and rejected otherwise."""

import logging

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.device.manager import DeviceManager
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import native_kernels
from octavo.worker.worker import Worker


def worker(dtype: str, *, deterministic: bool) -> Worker:
    return Worker(EngineArgs.from_options({"dtype": dtype, "device": "cpu", "deterministic": deterministic}).resolve())


@pytest.mark.skipif(native_kernels() is None, reason="needs the C++ kernels")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_changes_nothing_where_it_is_so_already(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert worker(dtype, deterministic=True).profile == worker(dtype, deterministic=False).profile
    assert caplog.text.count("deterministic: so it is") == 1


def test_it_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")
    worker("float16", deterministic=False)
    with pytest.raises(InvalidParameterError, match=r"deterministic.*cpu with float16.*sdpa"):
        worker("float16", deterministic=True)


def test_other_kernels_are_taken_where_the_fastest_promise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    devices = DeviceManager("cpu")
    assert not devices.kernels(torch.bfloat16).is_batch_invariant
    assert devices.kernels(torch.bfloat16, deterministic=True).is_batch_invariant
