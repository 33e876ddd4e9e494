"""Tiny checkpoints with vision towers, saved at first use, and LLMs on them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Checkpoint, GetCheckpoint
from tests.multimodal.tiny import MAX_LEN, VISION_MODELS

from octavo import LLM

OpenLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> GetCheckpoint:
    """Return a model by its name in the table."""
    saved: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in saved:
            folder: Path = tmp_path_factory.mktemp(name)
            saved[name] = Checkpoint(folder=folder, reference=VISION_MODELS[name].save(folder))
        return saved[name]

    return get


@pytest.fixture
def open_llm(seeing: GetCheckpoint) -> Iterator[OpenLLM]:
    """Open LLMs; in the end none may have lost a block or hold an image's embeddings."""
    opened: list[LLM] = []

    def make(name: str, **options: Any) -> LLM:
        defaults = {"dtype": "float32", "max_model_len": MAX_LEN, "block_size": 4, "num_kv_blocks": 512}
        opened.append(LLM(str(seeing(name).folder), **{**defaults, **options}))
        return opened[-1]

    yield make
    for llm in opened:
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_integrity()
        llm.exit()
