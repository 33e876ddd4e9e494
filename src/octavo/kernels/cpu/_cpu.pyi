"""The ops of `module.cpp`. Addresses are those of tensors; shapes are in `ops.h`."""

import enum

class Output(enum.Enum):
    BF16 = 0
    FLOAT32 = 1
    GATED = 2

def levels() -> list[str]: ...
def packed_size(in_size: int, out_size: int, is_gated: bool, /) -> int: ...

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
        norm_eps: float,
        scale: float,
        is_float32: bool,
        has_int8_kv: bool,
    ) -> None: ...

class AttentionStep:
    def __init__(
        self,
        num_tokens: int,
        num_row_blocks: int,
        num_blocks_per_request: int,
        cos: int,
        sin: int,
        slots: int,
        query_start_loc: int,
        seq_lens: int,
        block_table: int,
        row_blocks: int,
    ) -> None: ...

class Rows:
    def __init__(
        self, x: int, rows: int, size: int, residual: int, norm_weight: int, eps: float, total: int, /
    ) -> None: ...

class PackedWeight:
    def __init__(self, out_size: int, weight: int, bias: int, /) -> None: ...
    @staticmethod
    def of_integers(integers: Integers, values: int, scales: int, offsets: int, bias: int, /) -> PackedWeight: ...
    @property
    def out_size(self) -> int: ...

class Integers:
    def __init__(self, bits: int, group_size: int, in_size: int, out_size: int, is_gated: bool) -> None: ...
    @property
    def packed_size(self) -> int: ...
    @property
    def scales_size(self) -> int: ...

class Tape:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...

class Kernels:
    def __init__(self, level: str, num_threads: int, /) -> None: ...
    @property
    def level(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def pack_linear(self, weight: int, in_size: int, out_size: int, is_gated: bool, packed: int, /) -> None: ...
    def quantise(self, integers: Integers, weight: int, values: int, scales: int, /) -> None: ...
    def pack_weight(self, integers: Integers, weight: int, packed: int, packed_scales: int, /) -> None: ...
    def pack_integers(
        self,
        integers: Integers,
        values: int,
        scales: int,
        offsets: int,
        packed: int,
        packed_scales: int,
        packed_offsets: int,
        /,
    ) -> None: ...
    def linear(self, rows: Rows, packed: PackedWeight, output: Output, out: int, /) -> None: ...
    def mlp(self, rows: Rows, gate_up: PackedWeight, down: PackedWeight, out: int, /) -> None: ...
    def rms_norm(self, rows: Rows, out: int, /) -> None: ...
    def begin_recording(self, tape: Tape, /) -> None: ...
    def end_recording(self) -> None: ...
    def replay(self, tape: Tape, num_rows: int, step: AttentionStep, /) -> None: ...
    def attention(
        self, step: AttentionStep, layer: AttentionLayer, qkv: int, keys: int, values: int, out: int, /
    ) -> None: ...
