"""Whole engines on tiny random checkpoints that transformers wrote, and on the bundled demo model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import saved as read_only

from octavo import LLM
from octavo.engine import inproc_client, input_processor
from octavo.engine.core import EngineCore
from octavo.structured.checker import StructuredOutputChecker
from octavo.testing import KnownDrafter

BLOCK_SIZE = 4
MAX_LEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A folder, and transformers' model of it."""

    folder: Path
    reference: Any


GetCheckpoint = Callable[[str], Checkpoint]
MakeLLM = Callable[..., LLM]
Sequences = list[list[int]]
DraftFrom = Callable[[Sequences], KnownDrafter]


@pytest.fixture(scope="module", autouse=True)
def one_checker() -> Iterator[None]:
    """A file's engines share the process that validates constraints: each would start one, which takes 0.3 s."""
    checker = StructuredOutputChecker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "close", lambda: None)
        patch.setattr(input_processor, "StructuredOutputChecker", lambda: checker)
        yield
    checker.close()


@pytest.fixture(scope="session")
def checkpoint() -> GetCheckpoint:
    """Return a tiny model by its name in the table, saved at first use."""
    saved: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in saved:
            folder, reference = read_only(name)
            reference.generation_config.eos_token_id = None  # these tests end by count; see test_requests for ends
            saved[name] = Checkpoint(folder=folder, reference=reference)
        return saved[name]

    return get


@pytest.fixture
def make_llm(checkpoint: GetCheckpoint) -> Iterator[MakeLLM]:
    """Build LLMs on a tiny model or `demo`; in the end no block may be lost."""
    made: list[LLM] = []

    def make(name: str, **options: Any) -> LLM:
        made.append(open_llm(checkpoint, name, **options))
        return made[-1]

    yield make
    for llm in made:
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_integrity()
        llm.exit()


@pytest.fixture(scope="module")
def _one_llm(checkpoint: GetCheckpoint) -> Iterator[LLM]:
    with open_llm(checkpoint, "qwen3") as made:
        yield made


@pytest.fixture
def llm(_one_llm: LLM) -> Iterator[LLM]:
    """One of a tiny model for all tests of a file, without cached prefixes; none may leave anything in it."""
    yield _one_llm
    assert not _one_llm.engine.has_unfinished_requests()
    _one_llm.engine.check_integrity()
    _one_llm.engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def model(checkpoint: GetCheckpoint) -> Checkpoint:
    """transformers' side of `llm`."""
    return checkpoint("qwen3")


def open_llm(checkpoint: GetCheckpoint, name: str, **options: Any) -> LLM:
    """Load a tiny model or `demo`, in float32 (or "demo in bfloat16") and with small blocks unless told otherwise."""
    name, _, dtype = name.partition(" in ")
    model = name if name == "demo" else str(checkpoint(name).folder)
    defaults = {
        "tokenizer": "demo",
        "dtype": dtype or "float32",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 512,
        "deterministic": torch.cuda.is_available(),  # CPUs always are
    }
    return LLM(model, **{**defaults, **options})


@pytest.fixture
def draft_from(monkeypatch: pytest.MonkeyPatch) -> DraftFrom:
    """Give engines that are made from now on a drafter that knows these sequences, and return it."""

    def give(known: Sequences) -> KnownDrafter:
        drafter = KnownDrafter.of_sequences(known, vocab_size=max(map(max, known)) + 1)
        monkeypatch.setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))
        return drafter

    return give
