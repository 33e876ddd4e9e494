"""The CPU's captured graph: all layers of a step as one native call. Recorded once, replayed for every step.

A guard rejects torch ops while layers are recorded: they would run once and be missing from every replay.

Legend: T = tokens of the step, D = hidden size.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode sees more, but imports Triton at startup

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache
from octavo.attention.native import NativeAttention, NativePlan
from octavo.errors import RecordingError
from octavo.kernels.native import NativeKernels, Tape
from octavo.layers.linear import MergedLinear
from octavo.layers.moe import MixtureOfExperts
from octavo.models.interfaces import CausalLM, IntermediateTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recording:
    """The layers as native calls, and the tensors that these read and write; a replay uses the first rows of each."""

    tape: Tape
    result: IntermediateTensors  # [max_tokens, D] each, output of the last call
    # [2, max_tokens] int64, read by adapted layers: `adapter_ids` of a step's tokens, and of those kept after the last
    # layer's attention. None: of steps in which no token has an adapter.
    adapter_ids: torch.Tensor | None


class StepGraph:
    """Replays `model.run_stage` for up to `max_tokens` tokens, with the same bits.

    Where layers have slots for adapters, there are two recordings: linears that adapters change are not fused with
    their neighbors, and steps without adapters do not pay for that.
    """

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerCache], block_size: int, max_tokens: int) -> None:
        self._model, self._kv_caches, self._block_size = model, kv_caches, block_size
        attention = model.context.attention
        assert isinstance(attention, NativeAttention), "only this backend is recorded"
        assert isinstance(model.context.kernels, NativeKernels), "only these kernels record"
        self._attention, self._kernels, self._group_sizes = attention, model.context.kernels, model.group_sizes
        dtype = model.context.dtype
        self._x = torch.empty(max_tokens, model.input_size, dtype=dtype)  # input of the first call
        # [max_tokens, D] residual stream from the previous stage
        is_first, hidden_size = model.stage.is_first, model.config.hidden_size
        self._residual = None if is_first else torch.empty(max_tokens, hidden_size, dtype=dtype)
        self._plain = self._record(None)
        # With slots for adapters in linears, and none in experts: theirs are not recorded.
        layers = list(model.modules())
        has_slots = any(isinstance(layer, MergedLinear) and layer.adapters is not None for layer in layers)
        has_slots &= not any(isinstance(layer, MixtureOfExperts) and layer.has_adapters for layer in layers)
        self._adapted = self._record(torch.empty(2, max_tokens, dtype=torch.int64)) if has_slots else None

    @classmethod
    def capture(cls, model: CausalLM, kv_caches: Sequence[LayerCache], block_size: int, max_tokens: int) -> Self | None:
        """Record the layers, without computing anything; None, and a log line, if they cannot be recorded.

        Raises RecordingError: a layer runs an op that a recording would miss.
        """
        if (obstacle := model.recording_obstacle) is not None:
            logger.info("steps run op by op: %s", obstacle)
            return None
        return cls(model, kv_caches, block_size, max_tokens)

    def serves(self, batch: ForwardBatch) -> bool:
        """Return whether a replay reads everything that this batch gives to layers."""
        return not batch.has_inputs_inside and (batch.adapter_ids is None or self._adapted is not None)

    def run(self, batch: ForwardBatch, incoming: IntermediateTensors | None) -> IntermediateTensors:
        """Run the stage and return its output; the next run overwrites it."""
        recording, num_tokens = self._prepared(batch), len(batch.input_ids)
        if incoming is None:
            self._x[:num_tokens] = self._model.embed(batch)
        else:
            assert self._residual is not None, "the first stage has no incoming tensors"
            self._x[:num_tokens], self._residual[:num_tokens] = incoming.hidden, incoming.residual
        step, make_step = self._model.attention_step(batch), self._attention.make_step
        sizes = zip(step.plans, self._group_sizes, strict=True)
        steps = [make_step(plan, step.rotary, group_size) for plan, group_size in sizes]
        recurrent = (group for group, of in enumerate(batch.groups) if of.state_slots is not None)
        state_steps = [self._kernels.state_step(batch.state_step(of)) for of in recurrent]
        recording.tape.replay(num_tokens, steps, state_steps, batch.kept_indices)
        num_rows = num_tokens
        if self._model.stage.is_last and batch.kept_indices is not None:
            num_rows = len(batch.kept_indices)
        result = recording.result
        aux = tuple(states[:num_tokens] for states in result.aux)
        return IntermediateTensors(result.hidden[:num_rows], result.residual[:num_rows], aux)

    def _record(self, adapter_ids: torch.Tensor | None) -> _Recording:
        model, kernels = self._model, self._kernels
        groups, nothing = model.config.kv_groups, torch.empty(0, dtype=torch.int64)
        batch = ForwardBatch(  # without tokens: each replay supplies its own
            input_ids=nothing,
            positions=nothing,
            query_start_loc=nothing,
            seq_lens=nothing,
            slot_mapping=nothing,
            block_table=nothing.view(0, 0),
            logits_indices=nothing,
            block_size=self._block_size,
            query_start_loc_list=[0],
            seq_lens_list=[],
        ).shared_by(groups)
        plan = NativePlan(batch)
        plan.step = self._attention.make_step(plan, (), 1)
        ids, kept_ids = (None, None) if adapter_ids is None else adapter_ids
        step = AttentionMetadata(
            batch=batch, plans=(plan,) * len(groups), rotary=(), adapter_ids=ids, kept_adapter_ids=kept_ids
        )
        with torch.inference_mode(), refuse_torch_ops(model), kernels.recording() as tape:
            result = model.run_layers(self._x, self._residual, self._kv_caches, step)
        return _Recording(tape=tape, result=result, adapter_ids=adapter_ids)

    def _prepared(self, batch: ForwardBatch) -> _Recording:
        """Return the recording for a batch; it knows the adapters by now."""
        if batch.adapter_ids is None:
            return self._plain
        recording = self._adapted
        assert recording is not None and recording.adapter_ids is not None, "see `serves`"  # noqa: PT018 - both or none
        for to, ids in zip(recording.adapter_ids, (batch.adapter_ids, batch.kept_adapter_ids), strict=True):
            assert ids is not None, "a step without adapters has a recording of its own"
            to[: len(ids)] = ids
        return recording


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch ops on `count` threads: on the calling one in steps whose layers are native calls.

    Torch's remaining ops are small, but from 32,768 elements on they use OpenMP threads, which then spin for a
    millisecond on cores that the kernels' own threads need. Setting and restoring takes 0.3 us. It is not set
    permanently: a program that embeds the engine may use torch itself, with its own number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
# What may be asked of a tensor besides its values: `__get__` is any property, such as shape.
_METADATA = frozenset(
    {"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr"}
    | {"element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device", "untyped_storage"}
)
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"})


@contextmanager
def refuse_torch_ops(model: nn.Module) -> Iterator[None]:
    """Allow torch to allocate memory, create views of it and describe tensors, and nothing else.

    Raises RecordingError: another op was called; the message names it and the innermost running layer.
    """
    inside = [type(model).__name__]  # running layers, innermost last

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)).remove)
                leave = module.register_forward_hook(lambda *_: _leave(inside), always_call=True)
                hooks.callback(leave.remove)
        with _Refusal(inside):
            yield


def _leave(inside: list[str]) -> None:  # a hook that returned something would replace the layer's output
    inside.pop()


class _Refusal(TorchFunctionMode):
    """Allows ops that allocate, return a view of their arguments, or return metadata."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        result = func(*args, **kwargs)
        is_write = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or kwargs.get("out") is not None
        if name not in _ALLOCATIONS | _METADATA and (is_write or not _is_view(result, (args, kwargs))):
            raise RecordingError(
                f"{name} in {self._inside[-1]}: a recording of the step would miss it; "
                "use a kernel, or set is_recordable = False on the layer: its model then runs op by op"
            )
        return result


def _is_view(result: Any, arguments: Any) -> bool:
    """Return whether `result` consists of tensors in the memory of tensors in `arguments`; a number is a value read."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    found = [tensor.untyped_storage().data_ptr() for tensor in _tensors(result)]
    return bool(found) and known.issuperset(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
