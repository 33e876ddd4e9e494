"""Random LoRA adapters for benchmarks: the speed depends on their number, rank and modules, not on their values."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config.model import ModelConfig
    from octavo.lora_request import LoRARequest

_SEED = 0
_SCALE = 1e-3


def adapter_options(count: int, rank: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Return engine options that serve `count` adapters of `rank` at once, unless given."""
    return {"enable_lora": True, "max_loras": count, "max_lora_rank": rank, **engine} if count else engine


@contextmanager
def random_adapters(config: "ModelConfig", count: int, rank: int) -> "Iterator[list[LoRARequest]]":
    """Write adapters for all linears of a model's layers, or for attention alone where there are experts.

    They share one file of weights and differ in alpha, so that each is an adapter of its own to the engine.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-adapters-") as folder:
        yield _written(config, count, rank, Path(folder)) if count else []


def _written(config: "ModelConfig", count: int, rank: int, folder: Path) -> "list[LoRARequest]":
    from safetensors.numpy import save_file

    from octavo.lora_request import LoRARequest

    weights = folder / "weights.safetensors"
    save_file(_tensors(config, rank), weights)
    adapters = []
    for number in range(1, count + 1):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / "adapter_model.safetensors").symlink_to(weights)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number / 1024}
        (own / "adapter_config.json").write_text(json.dumps(settings))
        adapters.append(LoRARequest(own.name, number, own))
    return adapters


def _tensors(config: "ModelConfig", rank: int) -> dict[str, Any]:
    import numpy as np

    random, tensors = np.random.default_rng(_SEED), {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in _linears(config).items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{name}.lora_{kind}.weight"] = _SCALE * random.standard_normal(shape, dtype=np.float32)
    return tensors


def _linears(config: "ModelConfig") -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a layer's linears."""
    width, of_heads, of_kv = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    attention = {
        "self_attn.q_proj": (of_heads, width),
        "self_attn.k_proj": (of_kv, width),
        "self_attn.v_proj": (of_kv, width),
        "self_attn.o_proj": (width, of_heads),
    }
    if config.moe is not None:
        return attention
    inner = config.intermediate_size
    gates = {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    return attention | gates
