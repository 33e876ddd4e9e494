"""The adapters of one rank: a host cache, and slots in every layer, which steps compute with.

Legend: S = slots, R = the largest rank.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from octavo.config.engine import LoadConfig, LoraConfig
from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import SlotFill
from octavo.errors import AdapterError, InsufficientMemoryError
from octavo.layers.linear import MergedLinear
from octavo.layers.vocabulary import Embedding, LogitsHead
from octavo.lora.files import content_hash
from octavo.lora.read import AdapterReader, AdapterTargets, RankAdapter
from octavo.models.interfaces import CausalLM


def slot_bytes(model: CausalLM, max_rank: int, *, experts: bool = False) -> int:
    """Return the size of one slot on this rank: also the maximum size of an adapter of linears on the host."""
    layers = _pooled(AdapterTargets(model, experts=experts)).values()
    sizes = (len(layer.parts) * layer.inputs.size + sum(of.size for of in layer.parts.values()) for layer in layers)
    return sum(sizes) * max_rank * model.context.dtype.itemsize


class AdapterPool:
    """Gives every layer that adapters can change slots of the largest rank, allocated once, refilled in place.

    Changes of the vocabulary (embedding, logits head) have no slots: they take memory when they are loaded, as long as
    `free_bytes` of the device are left.
    """

    def __init__(self, model: CausalLM, lora: LoraConfig, load: LoadConfig, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._context, targets = model.context, AdapterTargets(model, experts=lora.experts)
        context, self._layers = self._context, _pooled(targets)
        self._embeddings = {path: layer for path, layer in targets.layers.items() if isinstance(layer, Embedding)}
        self._heads = {path: layer for path, layer in targets.layers.items() if isinstance(layer, LogitsHead)}
        self._reader = AdapterReader(model, targets, load, lora.max_lora_rank, context.dtype)
        self._host: dict[str, RankAdapter] = {}  # by content hash
        for layer in self._layers.values():
            layer.adapters = context.kernels.empty_lora(
                lora.max_loras,
                lora.max_lora_rank,
                layer.inputs.size,
                tuple(share.size for share in layer.parts.values()),
                dtype=context.dtype,
                device=context.device,
            )

    def load(self, adapter: AdapterRef, evicted: Sequence[str] = ()) -> None:
        """Drop the `evicted` from the host cache, where they are in it, and read an adapter into it.

        Callable from any thread while steps run. Slots keep their copies. Raises CheckpointError, AdapterError: see
        `AdapterReader.read`; or the files are no longer those of the reference. InsufficientMemoryError: no memory for
        its own vocabulary.
        """
        for content in evicted:
            self._host.pop(content, None)
        read = self._reader.read(Path(adapter.path))
        if read.vocabulary_bytes and read.vocabulary_bytes > (free := self._free_bytes()):
            needs = f"its embedding and logits head need {read.vocabulary_bytes / 2**20:,.0f} MiB"
            raise InsufficientMemoryError(f"{adapter.path}: {needs}, and {free / 2**20:,.0f} MiB are free")
        if content_hash(Path(adapter.path)) != adapter.content_hash:
            raise AdapterError(f"{adapter.path}: the files have changed since {adapter.name!r} was registered")
        self._host[adapter.content_hash] = read

    def fill(self, fills: Iterable[SlotFill]) -> None:
        """Copy adapters from the host cache to slots, between steps."""
        for fill in fills:
            adapter = self._host[fill.content_hash]
            for path, layer in self._layers.items():
                slots, own = layer.adapters, adapter.layers.get(path)
                assert slots is not None
                rank = 0 if own is None else own.up.shape[0]  # 0: its tokens get the layer's own output
                if own is not None:
                    by_part = slots.down[fill.slot].view(len(slots.parts), slots.max_rank, -1)  # [P, R, K]
                    by_part[:, :rank] = own.down
                    slots.up[fill.slot, :rank] = own.up
                slots.ranks[fill.slot] = rank
            for path, embedding in self._embeddings.items():
                embedding.slots.pop(fill.slot, None)
                if path in adapter.embeddings:
                    embedding.slots[fill.slot] = adapter.embeddings[path].to(self._context.device)
            for path, head in self._heads.items():
                head.slots.pop(fill.slot, None)
                if path in adapter.heads:
                    head.slots[fill.slot] = adapter.heads[path].on_device(self._context)


def _pooled(targets: AdapterTargets) -> dict[str, MergedLinear]:
    """Return the layers whose adapters are in the pool."""
    linears = ((path, layer) for path, layer in targets.layers.items() if isinstance(layer, MergedLinear))
    return {path: layer for path, layer in linears if not isinstance(layer, LogitsHead)}
