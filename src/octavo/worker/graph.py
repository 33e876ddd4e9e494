"""The CPU's captured graph: all layers of a step as one native call. Recorded once, replayed for every step.

A guard rejects torch ops while layers are recorded: they would run once and be missing from every replay.

Legend: T = tokens of the step, D = hidden size.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode  # a TorchDispatchMode sees more, but imports Triton at startup

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache
from octavo.attention.native import NativeAttention, NativePlan
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import RecordingError
from octavo.kernels.native import NativeKernels
from octavo.kernels.tape import Tape
from octavo.models.interfaces import CausalLM, IntermediateTensors

logger = logging.getLogger(__name__)


class StepGraph:
    """Replays `model.run_stage` for up to `max_tokens` tokens, with the same bits."""

    def __init__(
        self,
        model: CausalLM,
        tape: Tape,
        x: torch.Tensor,  # [max_tokens, D] input of the first call
        residual: torch.Tensor | None,  # [max_tokens, D] residual stream from the previous stage
        result: IntermediateTensors,  # [max_tokens, D] each, output of the last call
    ) -> None:
        self._model, self._tape = model, tape
        self._x, self._residual, self._result = x, residual, result
        self._attention = model.context.attention
        self._group_size = model.heads.group_size

    @classmethod
    def capture(cls, model: CausalLM, kv_caches: Sequence[LayerCache], block_size: int, max_tokens: int) -> Self | None:
        """Record the layers, without computing anything; None, and a log line, if they cannot be recorded.

        Raises:
            RecordingError: a layer runs an op that a recording would miss.
        """
        if (obstacle := model.recording_obstacle) is not None:
            logger.info("steps run op by op: %s", obstacle)
            return None
        kernels, attention = model.context.kernels, model.context.attention
        assert isinstance(kernels, NativeKernels), "only these kernels record"
        assert isinstance(attention, NativeAttention), "only this backend is recorded"
        x = torch.empty(max_tokens, model.config.hidden_size, dtype=model.context.dtype)
        residual = None if model.stage.is_first else torch.empty_like(x)
        with torch.inference_mode(), refuse_torch_ops(model), kernels.recording() as tape:
            step = _blank_step(attention, block_size, model.config.kv_groups)
            result = model.run_layers(x, residual, kv_caches, step)
        return cls(model, tape, x, residual, result)

    def run(self, batch: ForwardBatch, incoming: IntermediateTensors | None) -> IntermediateTensors:
        """Run the stage and return its output; the next run overwrites it."""
        num_tokens = len(batch.input_ids)
        if incoming is None:
            self._x[:num_tokens] = self._model.embed(batch)
        else:
            assert self._residual is not None, "the first stage has no incoming tensors"
            self._x[:num_tokens], self._residual[:num_tokens] = incoming.hidden, incoming.residual
        step = self._model.attention_step(batch)
        assert isinstance(self._attention, NativeAttention)
        make_step = self._attention.make_step
        self._tape.replay(num_tokens, [make_step(plan, step.rotary, self._group_size) for plan in step.plans])
        num_rows = num_tokens
        if self._model.stage.is_last and batch.kept_indices is not None:
            num_rows = len(batch.kept_indices)
        return IntermediateTensors(self._result.hidden[:num_rows], self._result.residual[:num_rows])


def _blank_step(attention: NativeAttention, block_size: int, groups: tuple[KVGroup, ...]) -> AttentionMetadata:
    """Return a step without tokens, for recording: each replay supplies its own."""
    nothing = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=nothing,
        seq_lens=nothing,
        slot_mapping=nothing,
        block_table=nothing.view(0, 0),
        logits_indices=nothing,
        block_size=block_size,
        query_start_loc_list=[0],
        seq_lens_list=[],
    ).shared_by(groups)
    plan = NativePlan(batch)
    plan.step = attention.make_step(plan, (), 1)
    return AttentionMetadata(batch=batch, plans=(plan,) * len(groups), rotary=())


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch ops on the calling thread, for steps whose layers are native calls.

    Torch's remaining ops are small, but from 32,768 elements on they use OpenMP threads, which then spin for a
    millisecond on cores that the kernels' own threads need. Setting and restoring takes 0.3 us. It is not set
    permanently: a program that embeds the engine may use torch itself, with its own number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"})


@contextmanager
def refuse_torch_ops(model: nn.Module) -> Iterator[None]:
    """Allow torch to allocate memory and create views of it, and nothing else.

    Raises:
        RecordingError: another op was called; the message names it and the innermost running layer.
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


def _leave(inside: list[str]) -> None:
    inside.pop()


class _Refusal(TorchFunctionMode):
    """Allows ops that allocate, return a view of their arguments, or return no tensor at all."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        result = func(*args, **kwargs)
        if name not in _ALLOCATIONS and (_touches_values(name, kwargs) or not _is_view(result, (args, kwargs))):
            raise RecordingError(
                f"{name} in {self._inside[-1]}: a recording of the step would miss it; "
                "use a kernel, or set is_recordable = False on the layer: its model then runs op by op"
            )
        return result


def _touches_values(name: str, kwargs: dict[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _READS or name in _WRITES or kwargs.get("out") is not None


def _is_view(result: Any, arguments: Any) -> bool:
    """Return whether all tensors in `result` are in the memory of tensors in `arguments`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    return all(tensor.untyped_storage().data_ptr() in known for tensor in _tensors(result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
