"""torch uses one thread in steps of native calls, and the user's number elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.kernels.dispatch import native_kernels
from octavo.models.interfaces import CausalLM
from octavo.sampling.rows import SamplingRows
from octavo.worker.graph import torch_threads

# What a step calls: in the model, and after it.
STEP_CALLS = [(CausalLM, "embed"), (SamplingRows, "step")]


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of_steps(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[int]:
    """Return with how many of torch's threads the steps of an engine compute."""
    monkeypatch.setattr("octavo.device.cpu.usable_cores", lambda: 3)
    seen: set[int] = set()

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any) -> Any:
            seen.add(torch.get_num_threads())
            return original(*args)

        monkeypatch.setattr(owner, name, watched)

    llm = LLM("demo", num_kv_blocks=64, **options)
    for owner, name in STEP_CALLS:
        watch(owner, name)
    llm.generate(["Octavo is"], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
    llm.exit()
    return seen


@pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels are recorded")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_recorded_steps_take_one(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of_steps(monkeypatch, dtype=dtype) == {1}
    assert torch.get_num_threads() == 3


def test_steps_on_torch_operations_take_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_of_steps(monkeypatch, dtype="bfloat16", enforce_eager=True) == {3}
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")
    assert threads_of_steps(monkeypatch, dtype="float32") == {3}


def test_the_number_comes_back_after_a_failure() -> None:
    def fail() -> None:
        with torch_threads(1):
            raise ValueError(f"a step on {torch.get_num_threads()}")

    with pytest.raises(ValueError, match="a step on 1"):
        fail()
    assert torch.get_num_threads() == 3
