"""Maps tensor names of GGUF files to those of other checkpoints. They follow llama.cpp's converter."""

import re
from collections.abc import Mapping
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
        "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
        "ffn_up_exps": "mlp.experts.{expert}.up_proj",
        "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    }
)
# Per block; in old files each expert is a tensor of its own.
_IN_BLOCK = re.compile(
    r"blk\.(?P<layer>\d+)\.(?P<part>(?:nextn\.|shortconv\.)?\w+)(?:\.(?P<expert>\d+))?(?:\.(?P<what>weight|bias|scale))?"
)
_OUTSIDE = re.compile(r"(?P<part>\w+)\.(?P<what>weight|bias)")
# Settings, which `config/gguf.py` reads; and rows of the logits head's, of yes and no, in decoders that rank.
IGNORED = ("cls.output.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class TensorNames:
    """Maps tensor names of a GGUF file to checkpoint names."""

    def __init__(self, path: Path, own: Mapping[str, str | tuple[str, ...]]) -> None:
        """`own` are a family's names where they differ from the usual ones: of a part of a block, behind
        "model.layers.{layer}.", without suffix; of a whole name in a block, such as "ffn_gate_inp.scale", with the
        suffix that it has; "ssm_a." is that of one without. Those of stacks of experts contain {expert}; several are
        rows one after the other.
        """
        self._path, self._names = path, {**_PLAIN, **own}

    def translate(self, tensor: GgufTensor) -> tuple[str, list[str]]:
        """Return the part of a block, and the names of the tensor: one, or one per expert, or several of each."""
        found = _OUTSIDE.fullmatch(tensor.name)
        if found is not None and isinstance(name := self._names.get(found["part"]), str):
            return found["part"], [f"{name}.{found['what']}"]
        found = _IN_BLOCK.fullmatch(tensor.name)
        if found is None:
            raise self._unknown(tensor)
        part, what = found["part"], found["what"] or ""
        key = part if found["expert"] is None else f"{part}_exps"
        whole = self._names.get(f"{key}.{what}")
        names, suffix = (whole, "") if whole is not None else (self._names.get(key), f".{what}")
        if names is None or not (what or whole) or (found["expert"] is not None and "{expert}" not in "".join(names)):
            raise self._unknown(tensor)
        several = [names] if isinstance(names, str) else names
        all_names = [f"model.layers.{found['layer']}.{name}{suffix}" for name in several]
        if "{expert}" not in all_names[0]:
            return part, all_names
        experts = range(tensor.shape[0]) if found["expert"] is None else [int(found["expert"])]
        return part, [name.replace("{expert}", str(expert)) for expert in experts for name in all_names]

    def _unknown(self, tensor: GgufTensor) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {tensor.name!r} has no place in this model")
