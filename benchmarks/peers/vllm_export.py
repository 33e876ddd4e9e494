"""A checkpoint with int8 linear layers in the form that vLLM reads (compressed-tensors, W8A8), made by rounding.

    python -m benchmarks.peers.vllm_export FOLDER [--precision w8a8]

A scale per row of weights; activations are quantized per token as they come. Embedding and LM head stay in bfloat16.
Runs in vLLM's environment.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PRECISIONS = ["bf16", "w8a8"]
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS}},
}


def make(folder: Path, precision: str) -> Path:
    """Return the checkpoint of this precision, made if there is none yet."""
    if precision == "bf16":
        return folder
    target = folder / f"vllm-{precision}"
    if not target.exists():
        unfinished = folder / f"vllm-{precision}.new"
        unfinished.mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(folder / name, unfinished)
        config = json.loads((folder / "config.json").read_text())
        (unfinished / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}, indent=1))
        save_file(quantized(load_file(folder / "model.safetensors")), unfinished / "model.safetensors")
        unfinished.rename(target)
    return target


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with every linear layer as int8 [N, K] and scales [N, 1]."""
    results = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            results[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127  # [N, 1]
        results[name] = (tensor.float() / scale).round().to(torch.int8)
        results[f"{name}_scale"] = scale.to(torch.bfloat16)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="w8a8")
    options = parser.parse_args()
    print(make(options.folder, options.precision))


if __name__ == "__main__":
    main()
