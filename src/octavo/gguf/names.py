"""Maps tensor names of GGUF files to those of other checkpoints. They follow llama.cpp's converter."""

import re
from pathlib import Path
from types import MappingProxyType

from octavo.errors import CheckpointError
from octavo.gguf.file import GgufTensor

_PLAIN = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_EXPERTS = MappingProxyType({"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"})
_MIXTRAL = MappingProxyType({"ffn_gate_inp": "block_sparse_moe.gate"})
_MIXTRAL_EXPERTS = MappingProxyType({"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"})
_GEMMA3 = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
# Per block; in old files each expert is a tensor of its own.
_IN_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)(?:\.(?P<expert>\d+))?\.(?P<what>weight|bias)")
_OUTSIDE = re.compile(r"(?P<part>token_embd|output_norm|output)\.(?P<what>weight|bias)")
IGNORED = ("rope_freqs.weight",)  # settings: `config/gguf.py` reads them


class TensorNames:
    """Maps tensor names of a GGUF file to checkpoint names."""

    def __init__(self, path: Path, architecture: str) -> None:
        is_mixtral = architecture == "MixtralForCausalLM"
        self._path = path
        self._plain: dict[str, str] = dict(_PLAIN)
        if is_mixtral:
            self._plain |= _MIXTRAL
        elif architecture == "Gemma3ForCausalLM":
            self._plain |= _GEMMA3
        self._experts = _MIXTRAL_EXPERTS if is_mixtral else _EXPERTS
        self._expert_place = "block_sparse_moe.experts" if is_mixtral else "mlp.experts"

    def translate(self, tensor: GgufTensor) -> tuple[str, list[str]]:
        """Return the part of a block, and the names of the tensor: one, or one per expert."""
        if found := _OUTSIDE.fullmatch(tensor.name):
            return found["part"], [f"{self._plain[found['part']]}.{found['what']}"]
        found = _IN_BLOCK.fullmatch(tensor.name)
        if found is None:
            raise self._unknown(tensor)
        part, prefix, what = found["part"], f"model.layers.{found['layer']}", found["what"]
        stacked = part if found["expert"] is None else f"{part}_exps"
        if stacked in self._experts:
            numbers = range(tensor.shape[0]) if found["expert"] is None else [int(found["expert"])]
            place = f"{prefix}.{self._expert_place}"
            return part, [f"{place}.{number}.{self._experts[stacked]}.{what}" for number in numbers]
        if part not in self._plain:
            raise self._unknown(tensor)
        return part, [f"{prefix}.{self._plain[part]}.{what}"]

    def _unknown(self, tensor: GgufTensor) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {tensor.name!r} has no place in this model")
