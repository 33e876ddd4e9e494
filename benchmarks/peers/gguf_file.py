"""A safetensors checkpoint as GGUF, for llama.cpp: written by the `gguf` package, quantized by llama.cpp itself.

    python -m benchmarks.peers.gguf_file FOLDER [--precision q4_0]

Runs in llama.cpp's environment. The vocabulary in the file is a dummy of the right size: prompts come as token ids.
"""

import argparse
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.cells import vocabulary

FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "q2_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "q3_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "iq4_xs": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
}
PRECISIONS = ["bf16", *FILE_TYPES]
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Of Qwen3.5, whose full attention is named like Qwen3's.
_INNER_OF_HYBRIDS = _INNER | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
# Numbers of a head that three axes of positions have, and a fourth that nobody uses.
_SECTIONS = [11, 11, 10, 0]


def make(folder: Path, precision: str) -> Path:
    """Return the GGUF file of this precision beside the checkpoint, written if there is none yet.

    Raises:
        RuntimeError: when llama.cpp cannot quantize it.
    """
    target = folder / f"{precision}.gguf"
    if target.exists():
        return target
    unfinished = target.with_suffix(".new")
    if precision == "bf16":
        write(folder, unfinished)
    else:
        quantize(make(folder, "bf16"), unfinished, FILE_TYPES[precision])
    return unfinished.rename(target)


def quantize(source: Path, target: Path, file_type: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 2
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama.cpp does not quantize {source}: code {code}")


def write(folder: Path, target: Path) -> None:
    """Write the checkpoint in bfloat16, vectors and convolutions in float32."""
    config = json.loads((folder / "config.json").read_text())
    is_hybrid = "linear_num_value_heads" in config
    writer = gguf.GGUFWriter(str(target), "qwen35" if is_hybrid else "qwen3")
    add_hyperparameters(writer, config)
    if is_hybrid:
        add_hyperparameters_of_states(writer, config)
    add_dummy_vocabulary(writer, config["vocab_size"])
    for name, bits in read_safetensors(folder / "model.safetensors"):
        written = gguf_name(name, _INNER_OF_HYBRIDS if is_hybrid else _INNER)
        if bits.ndim == 2:
            writer.add_tensor(written, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
            continue
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(written, as_in_hybrids(written, values) if is_hybrid else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_in_hybrids(name: str, values: np.ndarray) -> np.ndarray:
    """Return vectors and convolutions as llama.cpp wants them: norms whole, rates of forgetting without a logarithm.

    There are as many value heads as key heads, so none changes its place.
    """
    result: np.ndarray = values
    if name.endswith(".ssm_a"):
        result = -np.exp(values)
    elif name.endswith(".ssm_conv1d.weight"):
        result = values[:, 0]
    elif "norm" in name and ".ssm_norm" not in name:
        result = values + np.float32(1)
    return result


def add_hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_hyperparameters_of_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_dimension_sections(_SECTIONS)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def add_dummy_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A vocabulary that llama.cpp accepts."""
    tokens = vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(size - 1)


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the bfloat16 tensors of a file as their bits (uint16): numpy has no bfloat16, so the file is read by hand.

    Format: 8 bytes length, a JSON header with the place of each tensor, then the data.
    """
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    data = np.memmap(path, mode="r", offset=8 + header_size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}: only BF16 is read here")
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def gguf_name(name: str, inner_names: dict[str, str]) -> str:
    if name in _OUTER:
        return _OUTER[name]
    has_ending = name.endswith(".weight")
    _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{inner_names[inner]}" + ".weight" * has_ending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    options = parser.parse_args()
    print(make(options.folder, options.precision))


if __name__ == "__main__":
    main()
