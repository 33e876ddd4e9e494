"""A worker in miniature: runs a model on requests whose KV blocks lie scattered over the pool.

Legend: T = tokens of the step, W = those kept behind the last layer's attention, D = hidden size, V = vocabulary.
"""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from octavo.attention.metadata import ForwardBatch, GroupSlots
from octavo.attention.selector import select_attention
from octavo.config.engine import LoadConfig, LoadFormat
from octavo.config.hf import read_model_config
from octavo.config.model import CheckpointQuantization
from octavo.config.parallel import RankPlace
from octavo.contracts.kv_cache import KVGroup
from octavo.distributed.groups import ParallelGroups
from octavo.kernels.dispatch import select_kernels
from octavo.layers.context import BuildContext
from octavo.layers.quant.registry import make_schemes
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.worker.graph import StepGraph
from octavo.worker.kv_cache import allocate_kv_caches, make_kv_cache_spec
from octavo.worker.memory import sharded_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = torch.device("cpu")


def make_context(
    dtype: torch.dtype = torch.float32,
    groups: ParallelGroups | None = None,
    quantization: str | None = None,
    checkpoint: CheckpointQuantization | None = None,
) -> BuildContext:
    """Return the build context of a CPU, for one rank of these groups."""
    schemes = make_schemes(checkpoint, quantization)
    kernels, attention = select_kernels(CPU, dtype, schemes.forms), select_attention(CPU, dtype)
    groups = groups or ParallelGroups()
    return BuildContext(kernels=kernels, attention=attention, dtype=dtype, device=CPU, groups=groups, schemes=schemes)


def load(
    folder: Path,
    *,
    dtype: str = "float32",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    groups: ParallelGroups | None = None,
    quantization: str | None = None,
) -> CausalLM:
    """Load a checkpoint as the worker does."""
    load_config = LoadConfig(load_format=load_format, seed=seed)
    model_config = read_model_config(folder, model=str(folder), dtype=dtype)
    context = make_context(DTYPES[dtype], groups, quantization, model_config.quantization)
    return get_model_loader(load_config).load_model(model_config, context)


class PagedRunner:
    """Holds the KV pool and each request's blocks. Requests are numbered 0, 1, ..."""

    def __init__(self, model: CausalLM, *, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> None:
        self._model, self._block_size = model, block_size
        groups = model.context.groups.tensor
        place = RankPlace(rank=groups.rank, tp_rank=groups.rank, tp_size=groups.size, pp_rank=0, pp_size=1)
        part = sharded_config(model.config, place)
        layers = range(model.config.num_layers)
        spec = make_kv_cache_spec(part, layers, block_size, model.context.attention.kv_layout)
        self._caches = allocate_kv_caches(spec, [num_blocks] * len(spec.groups), CPU)
        for cache in self._caches:
            for pool in cache.pools:  # rubbish in unwritten slots must not show, so it is large
                pool.fill_(1e4 if pool.dtype.is_floating_point else torch.iinfo(pool.dtype).max)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self._blocks: dict[int, list[int]] = {}
        self._lens: dict[int, int] = {}
        self.adapter_slots: dict[int, int] = {}  # of requests with an adapter
        self._graph: StepGraph | None = None

    def record(self, max_tokens: int) -> None:
        """Replay steps from now on, of up to `max_tokens` tokens."""
        self._graph = StepGraph.capture(self._model, self._caches, self._block_size, max_tokens)
        assert self._graph is not None, "the model cannot be recorded"

    def step(self, tokens: dict[int, list[int]]) -> list[torch.Tensor]:
        """Append tokens to requests; return each one's logits, [its new tokens, V]."""
        logits = self.step_for(tokens, None)  # [T, V]
        return list(torch.split(logits, [len(new) for new in tokens.values()]))

    def step_for(self, tokens: dict[int, list[int]], kept: list[int] | None) -> torch.Tensor:
        """Append tokens to requests; return the logits of those T tokens, [T, V], or of the W at `kept`, [W, V]."""
        batch = self._make_batch(tokens)
        if kept is not None:
            batch = replace(batch, logits_indices=torch.tensor(kept), kept_indices=torch.tensor(kept))
        with torch.inference_mode():
            if self._graph is not None:
                assert self._graph.serves(batch)
                hidden = self._graph.run(batch, None).hidden  # [W, D]
            else:
                hidden = self._model.forward(batch, self._caches)
            return self._model.compute_logits(*batch.head_inputs(hidden))

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Decode greedily, all prompts in one batch."""
        results: list[list[int]] = [[] for _ in prompts]
        step = dict(enumerate(prompts))
        for _ in range(num_tokens):
            for result, logits in zip(results, self.step(step), strict=True):
                result.append(int(logits[-1].argmax()))
            step = {request: [result[-1]] for request, result in enumerate(results)}
        return results

    def _make_batch(self, tokens: dict[int, list[int]]) -> ForwardBatch:
        positions: list[int] = []
        slots: list[int] = []
        for request, new in tokens.items():
            start = self._lens.get(request, 0)
            self._grow(request, start + len(new))
            positions += range(start, start + len(new))
            slots += [self._slot(request, position) for position in range(start, start + len(new))]
        starts = [0, *accumulate(len(new) for new in tokens.values())]
        seq_lens = [self._lens[request] for request in tokens]
        adapters = [self.adapter_slots.get(request, -1) for request, new in tokens.items() for _ in new]
        batch = ForwardBatch(
            input_ids=torch.tensor([token for new in tokens.values() for token in new]),
            positions=torch.tensor(positions),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_table=self._block_table(list(tokens)),
            logits_indices=torch.arange(starts[-1]),
            block_size=self._block_size,
            query_start_loc_list=starts,
            seq_lens_list=seq_lens,
            adapter_ids=torch.tensor(adapters) if self.adapter_slots else None,
        )
        return batch.with_groups([self._slots_of(batch, group, list(tokens)) for group in self._model.config.kv_groups])

    def _slots_of(self, batch: ForwardBatch, group: KVGroup, requests: list[int]) -> GroupSlots:
        """A request's state is in its first block, and in no other."""
        if group.kind != "recurrent":
            return GroupSlots(batch.slot_mapping, batch.block_table)
        states = torch.tensor([self._blocks[request][0] for request in requests])
        starts = batch.query_start_loc[:-1].long()
        is_new = batch.positions[starts] == 0
        slots = torch.full_like(batch.slot_mapping, -1).index_copy_(0, batch.query_start_loc[1:].long() - 1, states)
        return GroupSlots(slots, batch.block_table, states.masked_fill(is_new, -1))

    def _grow(self, request: int, length: int) -> None:
        blocks = self._blocks.setdefault(request, [])
        while len(blocks) * self._block_size < length:
            blocks.append(self._free.pop())
        self._lens[request] = length

    def _slot(self, request: int, position: int) -> int:
        return self._blocks[request][position // self._block_size] * self._block_size + position % self._block_size

    def _block_table(self, requests: list[int]) -> torch.Tensor:
        most = max(len(self._blocks[request]) for request in requests)
        rows = [self._blocks[request] + [0] * (most - len(self._blocks[request])) for request in requests]
        return torch.tensor(rows, dtype=torch.int32)
