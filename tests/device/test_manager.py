"""The device manager: choosing, refusing, describing."""

import logging
from pathlib import Path

import pytest
import torch
from tests.models.paged import make_context
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.device.cpu import CpuKind
from octavo.device.gpu import CudaKind
from octavo.device.manager import DeviceManager
from octavo.errors import DeviceUnavailableError, InvalidParameterError, UnknownOptionError
from octavo.kernels.native import NativeKernels
from octavo.loader.registry import get_model_loader
from octavo.models.registry import initialize_model
from octavo.models.weights import load_weights


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_auto_falls_back_to_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.device.manager"):
        assert DeviceManager().device == torch.device("cpu")
    assert "cpu (no cuda, xpu, mps here)" in caplog.text


@pytest.mark.usefixtures("_no_gpu")
def test_auto_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert DeviceManager.detect_device() == "xpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert DeviceManager.detect_device() == "cuda"


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_a_named_device_that_is_not_here_is_an_error(device: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=rf"'{device}'.*only: cpu"):
        DeviceManager(device)


def test_an_unknown_device_is_an_error_with_a_hint() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'cuda'"):
        DeviceManager("cude")


def test_dtypes() -> None:
    devices = DeviceManager("cpu")
    assert devices.resolve_dtype("auto", "bfloat16") == torch.bfloat16
    assert devices.resolve_dtype("float16", "bfloat16") == torch.float16
    assert devices.resolve_dtype("float16", "float16") == torch.float16
    with pytest.raises(InvalidParameterError, match="one of auto, float32"):
        devices.resolve_dtype("float8", "bfloat16")


def test_a_dtype_that_the_device_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKind, "supports", lambda self, dtype: dtype == torch.float32)
    with pytest.raises(InvalidParameterError, match="this cpu device cannot"):
        DeviceManager("cpu").resolve_dtype("auto", "bfloat16")
    assert DeviceManager("cpu").describe()["bfloat16"] == "not supported"


def test_kernels_and_attention_belong_together() -> None:
    devices = DeviceManager("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert devices.kernels(dtype).is_batch_invariant == devices.attention(dtype).is_batch_invariant


def test_describe_says_what_holds() -> None:
    facts = DeviceManager("cpu").describe()
    assert facts["device"] == "cpu"
    assert int(facts["cores"]) >= 1
    assert facts["threads"] == str(torch.get_num_threads())
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    for name, dtype in dtypes.items():
        is_invariant = DeviceManager("cpu").kernels(dtype).is_batch_invariant
        assert (": batch-invariant" in facts[name]) == is_invariant


def test_optimize_for_device_packs_every_layer(tmp_path: Path) -> None:
    case = next(case for case in TINY_MODELS if case.name == "llama-tied")  # nothing is loaded for its last map
    case.save(tmp_path)
    config = read_model_config(tmp_path, model="tiny", dtype="float32")
    model = initialize_model(config, make_context())
    load_weights(model, get_model_loader(LoadConfig(load_format="safetensors", seed=0)).tensors(model))
    x = torch.zeros(1, config.hidden_size)
    with pytest.raises(AssertionError, match="process_weights_after_loading"):
        model.compute_logits(x)
    DeviceManager("cpu").optimize_for_device(model)
    assert model.compute_logits(x).shape == (1, config.vocab_size)


@pytest.mark.gpu
def test_a_cuda_device_describes_itself() -> None:
    devices = DeviceManager("cuda")
    memory = devices.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    devices.synchronize()
    assert devices.describe()["processor"]
    assert CudaKind().supports(torch.float16)


def test_threads_are_the_kernels_threads() -> None:
    before = torch.get_num_threads()
    try:
        kernels = DeviceManager("cpu", threads=3).kernels(torch.bfloat16)
        assert torch.get_num_threads() == 3
        if isinstance(kernels, NativeKernels):
            assert kernels.native.num_threads == 3
            assert DeviceManager("cpu", threads=3).kernels(torch.bfloat16) is kernels
    finally:
        torch.set_num_threads(before)


def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for index in range(2):
        DeviceManager("cuda", index=index)
    assert taken == [0, 1]
    with pytest.raises(DeviceUnavailableError, match="there are 2"):
        DeviceManager("cuda", index=2)
