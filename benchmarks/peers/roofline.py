"""The most tokens per second that memory and units of this machine allow in a cell, whoever computes it.

Decode reads all weights once a step, and the keys and values of every request. Prefill is limited by the matrix unit:
products with the weights at the rate of their precision, attention (half of all pairs of positions) at bf16's.
"""

from typing import Any

from benchmarks.geometry import kv_bytes_per_token, num_attending, parameter_counts, state_bytes
from benchmarks.machine.probe import Machine
from benchmarks.peers.cells import Capacity, Cell

# int4 with a 16-bit scale for each 32 weights, as in Q4_0; groups of 128 take 4.125. gguf: types of 2.6 to 6 bits.
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.5, "gguf": 4.5}
EVERYTHING_ELSE = 500e6


def weight_bytes(geometry: dict[str, Any], group: str) -> float:
    """Return the bytes of all weights, the embedding table once: it is the LM head too."""
    return sum(parameter_counts(geometry)) * BITS[group] / 8


def limit(geometry: dict[str, Any], cell: Cell, group: str, kv_bytes: int, machine: Machine) -> float:
    """Return tokens per second. `kv_bytes` is the size of one stored number of a key or value.

    Recurrent states are read and written at each step.
    """
    if cell.kind == "decode":
        context = cell.num_in + cell.num_out / 2
        of_request = context * kv_bytes_per_token(geometry, kv_bytes) + 2 * state_bytes(geometry)
        num_bytes = weight_bytes(geometry, group) + cell.num_requests * of_request
        by_memory = num_bytes / machine.bytes_per_s
        by_units = cell.num_requests * 2 * sum(parameter_counts(geometry)) / unit_rate(group, machine)
        return cell.num_requests / max(by_memory, by_units)
    layers, _ = parameter_counts(geometry)
    products_s = 2 * cell.num_in * layers / unit_rate(group, machine)
    return cell.num_in / (products_s + attention_operations(geometry, cell.num_in) / machine.bf16_per_s)


def memory_bytes(geometry: dict[str, Any], group: str, kv_bytes: int, capacity: Capacity) -> float:
    """Return what an engine may take: weights, all that `capacity` keeps, and 500 MB for everything else."""
    of_requests = capacity.total_tokens * kv_bytes_per_token(geometry, kv_bytes)
    of_requests += capacity.num_requests * state_bytes(geometry)
    return weight_bytes(geometry, group) + of_requests + EVERYTHING_ELSE


def unit_rate(group: str, machine: Machine) -> float:
    return machine.bf16_per_s if group == "bf16" else machine.int8_per_s


def attention_operations(geometry: dict[str, Any], num_tokens: int) -> float:
    """Return products and sums of causal attention over one prompt in all layers: scores and values."""
    width: int = geometry["num_attention_heads"] * geometry["head_dim"]
    return float(2 * 2 * num_attending(geometry) * width * num_tokens * (num_tokens + 1) / 2)
