"""The ops that `module.cpp` binds. Addresses are those of tensors; shapes are in `ops.h`."""

import enum

class DType(enum.Enum):
    BFLOAT16 = 0
    FLOAT16 = 1
    FLOAT32 = 2

class Output(enum.Enum):
    PLAIN = 0
    FLOAT32 = 1
    GATED = 2
    UNGATED = 3
    GATES_AND_UPS = 4

def levels() -> list[str]: ...
def packed_size(in_size: int, out_size: int, is_gated: bool, /) -> int: ...
def decode_blocks(type: int, blocks: int, count: int, to: int, /) -> None: ...

class AttentionLayer:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        sliding_window: int,
        query_norm: int,
        key_norm: int,
        sinks: int,
        norm_eps: float,
        scale: float,
        soft_cap: float,
        rotary: int,
        has_int8_kv: bool,
        computes_kept_only: bool,
        kv_group: int,
        normalizes_values: bool,
        num_parts: int,
        gate_heads: int,
        latent_size: int,
        rotates_pairs: bool,
        norms_behind: bool,
        query_rotary: int,
        chunk_size: int,
    ) -> None: ...

class RowBlocks:
    def __init__(self, count: int, of: int, /) -> None: ...

class RotaryTable:
    def __init__(self, cos: int, sin: int, num_pairs: int, /) -> None: ...

class AttentionStep:
    def __init__(
        self,
        num_tokens: int,
        num_kept: int,
        num_blocks_per_request: int,
        rotary_tables: list[RotaryTable],
        slots: int,
        query_start_loc: int,
        seq_lens: int,
        block_table: int,
        kept: int,
        visible_ends: int,
        all_blocks: RowBlocks,
        kept_blocks: RowBlocks,
    ) -> None: ...

class GatedDelta:
    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_size: int,
        value_size: int,
        conv_size: int,
        conv: int,
        decay_rates: int,
        dt_bias: int,
        norm: int,
        eps: float,
    ) -> None: ...

class ShortConv:
    def __init__(self, num_channels: int, conv_size: int, conv: int, bias: int) -> None: ...

class StateSpace:
    def __init__(
        self,
        num_groups: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        conv_size: int,
        conv: int,
        conv_bias: int,
        decay_rates: int,
        dt_bias: int,
        skip: int,
        least_dt: float,
        most_dt: float,
        dt_scale: float,
        gate_scale: float,
        applies_gates: bool,
    ) -> None: ...

class GroupNorm:
    def __init__(
        self,
        x: int,
        gates: int,
        gate_stride: int,
        gate_scale: float,
        num_rows: int,
        width: int,
        group_size: int,
        first_column: int,
        num_groups: int,
        weight: int,
        eps: float,
        sums: int,
        only_sums: bool,
        out: int,
    ) -> None: ...

class StateStep:
    def __init__(
        self,
        num_requests: int,
        query_start_loc: int,
        slots: int,
        begins: int,
        num_replayed: int,
        num_drafts: int,
        rows: int,
    ) -> None: ...

class Activation:
    def __init__(self, kind: str, limit: float, alpha: float, /) -> None: ...

class Fused:
    def __init__(
        self,
        residual: int,
        norm_weight: int,
        eps: float,
        norm_offset: float,
        activation: Activation,
        is_centered: bool = False,
        norm_bias: int = 0,
    ) -> None: ...

class Rows:
    def __init__(self, x: int, rows: int, size: int, /) -> None: ...
    @staticmethod
    def fused(x: int, rows: int, size: int, fused: Fused, total: int, /) -> Rows: ...

class PackedWeight:
    def __init__(self, out_size: int, weight: int, bias: int, /) -> None: ...
    @staticmethod
    def of_integers(integers: Integers, values: int, scales: int, offsets: int, bias: int, /) -> PackedWeight: ...
    @staticmethod
    def of_blocks(blocks: Blocks, values: int, bias: int, /) -> PackedWeight: ...
    @property
    def out_size(self) -> int: ...

class Blocks:
    def __init__(
        self,
        types: list[int],
        sizes: list[int],
        is_gated: bool,
        row_inputs: int,
        first_input: int,
        in_size: int,
        span: int,
    ) -> None: ...
    @property
    def packed_size(self) -> int: ...

class Integers:
    def __init__(
        self,
        bits: int,
        group_size: int,
        is_two_level: bool,
        is_rotated: bool,
        mixes_blocks: bool,
        in_size: int,
        out_size: int,
        is_gated: bool,
        is_logits_head: bool,
    ) -> None: ...
    @property
    def packed_size(self) -> int: ...
    @property
    def scales_size(self) -> int: ...

class LoraSlots:
    def __init__(self, down: int, up: int, ranks: int, count: int, max_rank: int, parts: list[int]) -> None: ...

class Heads:
    def __init__(self, linears: list[PackedWeight], in_size: int) -> None: ...

class Experts:
    def __init__(self, up: list[PackedWeight], down: list[PackedWeight], /) -> None: ...

class Routing:
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        renormalizes: bool,
        has_shared: bool,
        chooses_by_logit: bool,
        is_softmax: bool,
        num_groups: int,
        top_groups: int,
        group_best: int,
        correction: int,
        scale: float,
        epsilon: float,
        gates_shared: bool,
    ) -> None: ...

class Tape:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...

class Collective:
    def __init__(self, level: str, file: int, offset: int, rank: int, size: int, num_spins: int, /) -> None: ...
    @staticmethod
    def memory_size(size: int, /) -> int: ...
    def all_reduce(self, x: int, rows: int, size: int, dtype: DType, /) -> None: ...
    def all_gather(self, x: int, out: int, rows: int, row_bytes: list[int], /) -> None: ...
    def exchange_counts(self, counts: list[int], /) -> list[list[int]]: ...
    def all_to_all(self, x: int, out: int, row_bytes: int, counts: list[list[int]], /) -> None: ...
    def barrier(self) -> None: ...

class Kernels:
    def __init__(self, level: str, num_threads: int, dtype: DType) -> None: ...
    @property
    def level(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def pack_linear(self, weight: int, in_size: int, out_size: int, is_gated: bool, packed: int, /) -> None: ...
    def quantize(self, integers: Integers, weight: int, values: int, scales: int, multipliers: int, /) -> None: ...
    def pack_weight(self, integers: Integers, weight: int, packed: int, packed_scales: int, /) -> None: ...
    def pack_integers(
        self,
        integers: Integers,
        values: int,
        scales: int,
        offsets: int,
        multipliers: int,
        packed: int,
        packed_scales: int,
        packed_offsets: int,
        /,
    ) -> None: ...
    def pack_blocks(self, blocks: Blocks, parts: list[int], packed: int, /) -> None: ...
    def linear(self, rows: Rows, packed: PackedWeight, output: Output, out: int, /) -> None: ...
    def head_linears(self, rows: Rows, heads: Heads, out: int, /) -> None: ...
    def argmax(self, rows: Rows, packed: PackedWeight, out: int, /) -> None: ...
    def mlp(self, rows: Rows, up: PackedWeight, down: PackedWeight, out: int, /) -> None: ...
    def activate(self, rows: Rows, out: int, /) -> None: ...
    def gated_product(self, rows: Rows, factors: int, stride: int, out: int, /) -> None: ...
    def scaled_sum(self, rows: Rows, scale: float, out: int, /) -> None: ...
    def add_lora(self, rows: Rows, slots: LoraSlots, adapter_ids: int, base: int, /) -> None: ...
    def route(self, rows: Rows, router: PackedWeight, routing: Routing, expert_ids: int, weights: int, /) -> None: ...
    def expert_rows(
        self, rows: Rows, experts: Experts, num_pairs: int, token_ids: int, expert_ids: int, out: int, /
    ) -> None: ...
    def combine_experts(
        self, answers: int, weights: int, num_tokens: int, num_choices: int, size: int, out: int, /
    ) -> None: ...
    def moe(
        self, rows: Rows, router: PackedWeight, routing: Routing, experts: Experts, load: int, out: int, /
    ) -> None: ...
    def rms_norm(self, rows: Rows, out: int, /) -> None: ...
    def part_squares(self, rows: Rows, sizes: list[int], num_counted: int, squares: int, /) -> None: ...
    def scale_parts(
        self, rows: Rows, sizes: list[int], squares: int, weights: list[int], totals: list[float], eps: float, /
    ) -> None: ...
    def gated_delta(
        self,
        step: StateStep,
        layer: GatedDelta,
        kv_group: int,
        rows: int,
        gates: int,
        conv_states: int,
        matrices: int,
        log: int,
        log_tokens: int,
        out: int,
        /,
    ) -> None: ...
    def short_conv(
        self,
        step: StateStep,
        layer: ShortConv,
        kv_group: int,
        rows: int,
        conv_states: int,
        log: int,
        log_tokens: int,
        out: int,
        /,
    ) -> None: ...
    def state_space(
        self,
        step: StateStep,
        layer: StateSpace,
        kv_group: int,
        rows: int,
        conv_states: int,
        matrices: int,
        log: int,
        log_tokens: int,
        out: int,
        /,
    ) -> None: ...
    def norm_groups(self, norm: GroupNorm, /) -> None: ...
    def gate(self, x: int, logits: int, num_rows: int, size: int, stride: int, together: int, out: int, /) -> None: ...
    def keep_rows(self, x: int, row_bytes: int, out: int, /) -> None: ...
    def select_columns(self, rows: Rows, order: int, num_columns: int, out: int, /) -> None: ...
    def packed_rows(self, packed: PackedWeight, size: int, num_ids: int, ids: int, out: int, /) -> None: ...
    def draw(self, logits: int, num_rows: int, vocab_size: int, rows: int, token_ids: int, largest: int, /) -> None: ...
    def begin_recording(self, tape: Tape, /) -> None: ...
    def end_recording(self) -> None: ...
    def replay(
        self,
        tape: Tape,
        num_rows: int,
        num_kept: int,
        kept: int,
        steps: list[AttentionStep],
        state_steps: list[StateStep],
        /,
    ) -> None: ...
    def start_phases(self) -> None: ...
    def phase_seconds(self) -> dict[str, float]: ...
    def latent_attention(
        self, step: AttentionStep, layer: AttentionLayer, queries: int, vectors: int, pool: int, out: int, /
    ) -> None: ...
    def attention(
        self, step: AttentionStep, layer: AttentionLayer, qkv: int, keys: int, values: int, out: int, /
    ) -> None: ...
