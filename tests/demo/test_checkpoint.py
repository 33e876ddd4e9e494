"""The bundled checkpoint is whole, small, of the promised shape, and means what `transformers` takes it to mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tools.demo_model.calls import SKILLS
from tools.demo_model.checkpoint import load_checkpoint
from tools.demo_model.template import render
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.demo import demo_model_path

MAX_BYTES = 16_000_000
FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_checkpoint_is_whole_and_small(folder: Path) -> None:
    assert all((folder / file).is_file() for file in FILES)
    assert sum((folder / file).stat().st_size for file in FILES) <= MAX_BYTES


def test_sizes_fit_every_kernel_and_two_ranks(config: dict[str, Any]) -> None:
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    sizes = (config["hidden_size"], config["intermediate_size"], config["vocab_size"], q_size, kv_size)
    assert [size % 128 for size in sizes] == [0] * len(sizes)
    assert config["num_key_value_heads"] % 2 == 0
    assert config["max_position_embeddings"] >= 2048


def test_weights_are_those_that_the_config_describes(folder: Path, config: dict[str, Any]) -> None:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"BF16"}
    assert len(shapes) == 2 + 11 * config["num_hidden_layers"]
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    assert "lm_head.weight" not in shapes


def test_vocabulary_is_as_large_as_the_embedding(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    assert tokenizer.get_vocab_size() == config["vocab_size"]


def test_both_ends_of_text_stop_generation(folder: Path, tokenizer: Tokenizer) -> None:
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_transformers_computes_the_logits_that_were_trained(folder: Path, tokenizer: Tokenizer, reference: Any) -> None:
    ids = torch.tensor([tokenizer.encode("What is 12 + 30? A block holds keys and values.").ids])  # [1, T]
    with torch.inference_mode():
        expected = reference(ids).logits[0]  # [T, V]
        model = load_checkpoint(folder)
        logits = model.logits(model.hidden(ids)[0])  # [T, V]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_transformers_reads_tokenizer_and_template_alike(folder: Path, tokenizer: Tokenizer) -> None:
    peer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Hello, wörld 42!"}]
    tools = [SKILLS[0].schema()]
    text = peer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == render(messages, tools, is_prompt=True)
    assert peer(text)["input_ids"] == tokenizer.encode(text).ids


def test_context_up_to_the_limit_stays_finite(config: dict[str, Any], reference: Any) -> None:
    ids = torch.arange(config["max_position_embeddings"])[None] % config["vocab_size"]  # [1, T]
    with torch.inference_mode():
        assert torch.isfinite(reference(ids).logits).all()
