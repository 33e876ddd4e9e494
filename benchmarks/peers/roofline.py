"""The most tokens per second that memory and units of this machine allow in a cell, whoever computes it.

Decode reads all weights once a step, and the keys and values of every request. Prefill is limited by the matrix unit:
products with the weights at the rate of their precision, attention (half of all pairs of positions) at bf16's.
"""

from benchmarks.geometry import QWEN3_0_6B, kv_bytes_per_token, parameter_counts
from benchmarks.machine.probe import Machine
from benchmarks.peers.cells import Capacity, Cell

# int4 with a 16-bit scale for each 32 weights, as in Q4_0; groups of 128 take 4.125. gguf: types of 2.6 to 6 bits.
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.5, "gguf": 4.5}
EVERYTHING_ELSE = 500e6


def weight_bytes(group: str) -> float:
    """Return the bytes of all weights, the embedding table once: it is the LM head too."""
    return sum(parameter_counts(QWEN3_0_6B)) * BITS[group] / 8


def limit(cell: Cell, group: str, kv_bytes: int, machine: Machine) -> float:
    """Return tokens per second. `kv_bytes` is the size of one stored number of a key or value."""
    if cell.kind == "decode":
        context = cell.num_in + cell.num_out / 2
        num_bytes = weight_bytes(group) + cell.num_requests * context * kv_bytes_per_token(QWEN3_0_6B, kv_bytes)
        by_memory = num_bytes / machine.bytes_per_s
        by_units = cell.num_requests * 2 * sum(parameter_counts(QWEN3_0_6B)) / unit_rate(group, machine)
        return cell.num_requests / max(by_memory, by_units)
    layers, _ = parameter_counts(QWEN3_0_6B)
    products_s = 2 * cell.num_in * layers / unit_rate(group, machine)
    return cell.num_in / (products_s + attention_operations(cell.num_in) / machine.bf16_per_s)


def memory_bytes(group: str, kv_bytes: int, capacity: Capacity) -> float:
    """Return what an engine may take: weights, keys and values of `capacity`, and 500 MB for everything else."""
    keys_and_values = capacity.total_tokens * kv_bytes_per_token(QWEN3_0_6B, kv_bytes)
    return weight_bytes(group) + keys_and_values + EVERYTHING_ELSE


def unit_rate(group: str, machine: Machine) -> float:
    return machine.bf16_per_s if group == "bf16" else machine.int8_per_s


def attention_operations(num_tokens: int) -> float:
    """Return products and sums of causal attention over one prompt in all layers: scores and values."""
    width: int = QWEN3_0_6B["num_attention_heads"] * QWEN3_0_6B["head_dim"]
    return float(2 * 2 * QWEN3_0_6B["num_hidden_layers"] * width * num_tokens * (num_tokens + 1) / 2)
