"""Adapters made and saved by PEFT, with random weights, for tiny models."""

import warnings
from pathlib import Path
from typing import Any

import torch

from octavo.contracts.engine import AdapterRef
from octavo.lora.files import content_hash, read_adapter_config

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def save_adapter(model: Any, folder: Path, *, seed: int = 0, **settings: Any) -> Any:
    """Put an adapter into transformers' model, as large as its weights, save it and return PEFT's model."""
    import peft  # half a second, which processes that have no such test need not spend

    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ALL_LINEAR, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about embeddings
        adapted = peft.get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_((parameter if "modules_to_save" in name else 0.0) + 0.2 * noise)
        adapted.save_pretrained(folder)
    return adapted


def ref_of(folder: Path) -> AdapterRef:
    """Return what requests say of the adapter in a folder."""
    rank = read_adapter_config(folder).largest_rank
    return AdapterRef(name=folder.name, path=str(folder), content_hash=content_hash(folder), rank=rank)
