"""Checkpoints name their towers and language models in several ways; and what their settings may not be."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from safetensors.torch import load_file, save_file
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import MAX_LEN, VISION_MODELS, picture

from octavo import LLM, SamplingParams
from octavo.errors import UnsupportedModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def as_on_the_hub(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def as_in_memory(name: str) -> str:
    name = name.replace("language_model.model.", "language_model.").replace("language_model.lm_head", "lm_head")
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.mark.parametrize("rename", [as_on_the_hub, as_in_memory])
@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_other_names(
    name: str, rename: Callable[[str], str], seeing: GetCheckpoint, open_llm: OpenLLM, tmp_path: Path
) -> None:
    request = {"prompt": f"a{VISION_MODELS[name].place}b", "images": [picture(9, 9)]}
    [expected] = open_llm(name).generate_multimodal([request], GREEDY, use_tqdm=False)
    folder = tmp_path / "renamed"
    copytree(seeing(name).folder, folder)
    tensors = {rename(key): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder), dtype="float32", max_model_len=MAX_LEN, block_size=4, num_kv_blocks=64)
    [found] = llm.generate_multimodal([request], GREEDY, use_tqdm=False)
    llm.exit()
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_placeholders_are_in_the_vocabulary(seeing: GetCheckpoint, tmp_path: Path) -> None:
    folder = tmp_path / "beyond"
    copytree(seeing("llava").folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "image_token_index": 270}))
    with pytest.raises(UnsupportedModelError, match="tokens 270 and None, but the vocabulary has 270"):
        LLM(str(folder))
