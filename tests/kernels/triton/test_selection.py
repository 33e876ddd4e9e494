"""Who computes with Triton, and what is said to those who cannot."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE

from octavo.attention.selector import select_attention
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import select_kernels
from octavo.layers.quant.registry import make_schemes

CPU = torch.device("cpu")


def test_a_switch_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    assert select_kernels(DEVICE, torch.bfloat16).name == "triton"
    assert select_attention(DEVICE, torch.bfloat16, is_exact=False).name == "triton"
    assert select_attention(DEVICE, torch.bfloat16).name == "triton-deterministic"
    assert select_kernels(DEVICE, torch.float64).name == "torch-reference"
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "torch")
    assert select_kernels(torch.device("cuda"), torch.bfloat16).name == "torch-reference"
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "tritn")
    with pytest.raises(UnknownOptionError, match="triton"):
        select_kernels(DEVICE, torch.bfloat16)


def test_weights_in_few_bits_say_whether_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    int4, fp8 = (make_schemes(None, name).forms for name in ("int4", "fp8"))
    assert select_kernels(DEVICE, torch.float16, int4).is_batch_invariant
    assert not select_kernels(DEVICE, torch.float16, int4 | {None}).is_batch_invariant  # some layers are dense
    floats = [select_kernels(DEVICE, torch.float16, fp8, deterministic=is_on) for is_on in (False, True)]
    assert [each.is_batch_invariant for each in floats] == [False, True]
    assert floats[0].name != floats[1].name


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidParameterError, match="TRITON_INTERPRET=1"):
        select_kernels(CPU, torch.bfloat16)


def test_8_bit_floats_are_kept_by_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_GPU_KERNELS", raising=False)
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype='fp8'"):
        select_attention(CPU, torch.bfloat16, kv_cache_dtype="fp8")
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    backend = select_attention(DEVICE, torch.bfloat16, kv_cache_dtype="fp8", is_exact=False)
    assert (backend.name, backend.kv_layout(64).dtype) == ("triton-fp8-kv", torch.float8_e4m3fn)
