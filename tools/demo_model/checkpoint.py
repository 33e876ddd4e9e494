"""Saves the trained model as a Hugging Face checkpoint folder, which `LLM("demo")` and `transformers` load."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tools.demo_model.qwen3 import Qwen3, Shape
from torch import Tensor


def model_config(shape: Shape, eos: int, end_of_text: int) -> dict[str, object]:
    """Return `config.json`, in the format of Qwen3 checkpoints."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": end_of_text,
        "torch_dtype": "bfloat16",
    }


def generation_config(eos: int, end_of_text: int) -> dict[str, object]:
    """Return `generation_config.json`: two EOS tokens, and a low temperature, because most answers are exact."""
    return {
        "eos_token_id": [eos, end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.95,
    }


def checkpoint_tensors(model: Qwen3) -> dict[str, Tensor]:
    """Return the weights in bfloat16 under checkpoint names; the tied LM head is not stored twice."""
    return {f"model.{name}": value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}


def save_checkpoint(model: Qwen3, eos: int, end_of_text: int, folder: Path) -> None:
    """Write configuration and weights; `bpe.save_tokenizer` writes the tokenizer."""
    save_file(checkpoint_tensors(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for file, content in (
        ("config.json", model_config(model.shape, eos, end_of_text)),
        ("generation_config.json", generation_config(eos, end_of_text)),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path) -> Qwen3:
    """Load the model from a checkpoint folder, in float32."""
    model = Qwen3(Shape())
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model.eval()
