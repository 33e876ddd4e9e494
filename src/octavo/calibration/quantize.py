"""Turns a checkpoint into one with low-bit weights: the options of `octavo convert --quantize`, the text, and the work.

Legend: N = outputs, K = inputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from octavo.calibration.inputs import RecordedModel
from octavo.calibration.rounding import round_to_two_level
from octavo.config.model import CheckpointQuantization
from octavo.convert.source import Checkpoint
from octavo.errors import InvalidParameterError
from octavo.kernels.quantization import ROTATION_BLOCK, QuantizedWeight, rotated
from octavo.kernels.quantize import quantize as round_to_nearest
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.names import LayerNames
from octavo.layers.quant.octavo import FORMS, METHOD, VERSION, stored_tensors
from octavo.layers.quant.packing import stack
from octavo.models.interfaces import CausalLM
from octavo.models.weights import spelt_as_in_table, weight_slots
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.worker.memory import empty_model

_MAX_PASSAGE, _MAX_TOKENS, _MIN_TOKENS = 512, 4096, 64


def read_text(path: Path | None) -> str:
    """Return a file's text; None: the bundled one, with prose, chats, code, tables and several languages."""
    if path is None:
        return files("octavo.calibration").joinpath("text.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("calibration_text", str(path), f"a UTF-8 text: {error}") from error


def passages_of(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the passages of a text, separated by lines of five hyphens: at most 512 tokens each, 4,096 in total."""
    passages: list[list[int]] = []
    for passage in text.split("\n-----\n"):
        tokens = tokenizer.encode(passage, add_special_tokens=False)
        passages += [tokens[start : start + _MAX_PASSAGE] for start in range(0, len(tokens), _MAX_PASSAGE)]
    while sum(map(len, passages)) > _MAX_TOKENS:
        passages.pop()
    if (count := sum(map(len, passages))) < _MIN_TOKENS:
        raise InvalidParameterError("calibration_text", f"{count} tokens", f"at least {_MIN_TOKENS} tokens")
    return passages


# Layers that are merged need one form.
_COMPUTED_AS_ONE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsPlan:
    """Bits of every layer: `bits`, but for layers whose name contains a key of `bits_for`."""

    bits: int = 4
    bits_for: Mapping[str, int] = field(default_factory=dict)  # by name or part of one: "down_proj", "layers.0.mlp"

    def __post_init__(self) -> None:
        for bits in (self.bits, *self.bits_for.values()):
            if bits not in FORMS:
                raise InvalidParameterError("bits_for", bits, "one of " + ", ".join(map(str, sorted(FORMS))))

    @classmethod
    def parse(cls, text: str) -> "BitsPlan":
        """Read "down_proj=8,lm_head=8"; empty: 4 bits for all. Raises InvalidParameterError: malformed."""
        bits_for: dict[str, int] = {}
        for entry in filter(None, text.split(",")):
            name, _, bits = entry.partition("=")
            if not name or not bits.isdecimal():
                raise InvalidParameterError("bits_for", entry, "NAME=BITS, such as down_proj=8")
            bits_for[name] = int(bits)
        return cls(bits_for=bits_for)

    def of_layers(self, layers: Iterable[str]) -> dict[str, int]:
        """Return the bits of each layer of a model, by checkpoint name."""
        layers, result = list(layers), {}
        named = {name: LayerNames([name]) for name in self.bits_for}
        for name, matches in named.items():
            if not any(layer in matches for layer in layers):
                limit = "a part of some layer's name, such as down_proj or lm_head"
                raise InvalidParameterError("bits_for", name, limit)
        for layer in layers:
            found = [bits for name, bits in self.bits_for.items() if any(one in named[name] for one in _as_one(layer))]
            result[layer] = max(found, default=self.bits)
        return result


def _as_one(layer: str) -> list[str]:
    """Return the names of all layers that are merged with this one."""
    stem, _, part = layer.rpartition(".")
    for parts in _COMPUTED_AS_ONE:
        if part in parts:
            return [f"{stem}.{one}" for one in parts]
    return [layer]


_HEAD = "lm_head"
_WEIGHT = ".weight"
_ROWS = 1 << 14  # outputs that a thread rounds at a time: heads have many more


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose linear layers are rounded already."""

    layers: Mapping[str, QuantizedWeight]  # by name in the checkpoint

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Checkpoint.tensors`. Stacked experts of the source become separate tensors."""
        for name, tensor in spelt_as_in_table(empty_model(self.model), Checkpoint.tensors(self)):
            if name.removesuffix(_WEIGHT) not in self.layers:
                yield name, tensor
        for layer, weight in self.layers.items():  # scales stay in float32
            yield from ((f"{layer}.{name}", tensor) for name, tensor in stored_tensors(weight).items())

    @property
    def bits_per_weight(self) -> float:
        """The mean over all quantized weights, including their scales."""
        num_weights = sum(weight.values.numel() for weight in self.layers.values())
        num_bytes = sum(weight.format.num_bytes(*weight.values.shape) for weight in self.layers.values())
        return 8.0 * num_bytes / num_weights


def quantized(checkpoint: Checkpoint, form: str, bits_for: str, calibration_text: Path | None) -> QuantizedCheckpoint:
    """Quantize a checkpoint, with a progress bar."""
    if form != "int4":
        raise InvalidParameterError("quantize", form, "int4; int8 needs no calibration: serve with --quantization int8")
    plan = BitsPlan.parse(bits_for)
    passages = passages_of(read_text(calibration_text), Tokenizer.from_path(checkpoint.path))
    return quantize(checkpoint, plan, passages, shows_progress=True)


def quantize(
    checkpoint: Checkpoint, plan: BitsPlan, passages: list[list[int]], *, shows_progress: bool
) -> QuantizedCheckpoint:
    """Round the linear layers of a checkpoint for the inputs that they get on a text, given in tokens.

    Block by block: a block's inputs are recorded after all earlier blocks have been rounded, so that later layers
    compensate for the errors of earlier ones. The model is in memory in float32.
    """
    if checkpoint.model.quantization is not None:
        limit = f"for dense weights; these are quantized (quant_method {checkpoint.model.quantization.method})"
        raise InvalidParameterError("quantize", "int4", limit)
    bits = plan.of_layers(_linear_names(empty_model(checkpoint.model)))
    settings = {"quant_method": METHOD, "version": VERSION, "bits": plan.bits}
    settings["bits_for"] = {layer: own for layer, own in bits.items() if own != plan.bits}
    model = replace(
        checkpoint.model,
        tie_word_embeddings=False,
        quantization=CheckpointQuantization(method=METHOD, origin="quantization_config", values=settings),
    )
    empty_model(model)  # its layers check their forms
    config = replace(checkpoint.model, dtype="float32")
    recorded = RecordedModel(config, checkpoint.tensors(), passages)
    layers = dict(_round_layers(recorded, bits, shows_progress=shows_progress))
    dtype = checkpoint.dtype or torch.bfloat16  # of what stays dense; a CPU's kernels for integers compute in bfloat16
    changed = {"quantization_config": settings, "dtype": str(dtype).removeprefix("torch.")}
    unchanged = {key: value for key, value in checkpoint.settings.items() if key != "torch_dtype"}
    return QuantizedCheckpoint(
        path=checkpoint.path,
        model=model,
        settings={**unchanged, "tie_word_embeddings": False, **changed},
        load_format=checkpoint.load_format,
        dtype=dtype,
        layers=layers,
    )


def _linear_names(model: CausalLM) -> dict[str, tuple[MergedLinear, str]]:
    """Return the linears that are quantized and their parts, by name in the checkpoint. A tied head is one of them."""
    names = {
        name.removesuffix(_WEIGHT): (slot.owner, slot.name.removesuffix("weight").removesuffix("."))
        for name, slot in weight_slots(model).items()
        if name.endswith(_WEIGHT) and isinstance(slot.owner, MergedLinear) and slot.owner.role != "router"
    }
    head = model.get_submodule("logits_head")
    assert isinstance(head, MergedLinear)
    return {**names, _HEAD: (head, "")}


def _round_layers(
    recorded: RecordedModel, bits: Mapping[str, int], *, shows_progress: bool
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Round all linears, those of a block concurrently, and yield each part by its name in the checkpoint."""
    by_layer: dict[MergedLinear, dict[str, str]] = {}  # names in the checkpoint by part
    for name, (layer, part) in _linear_names(recorded.model).items():
        by_layer.setdefault(layer, {})[part] = name

    threads = ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))
    with threads, tqdm(total=len(by_layer), desc="Quantizing", unit="layer", disable=not shows_progress) as bar:
        for recorded_grams in chain(recorded.blocks(), recorded.head()):
            # Those that take longest first.
            grams = dict(sorted(recorded_grams.items(), key=lambda item: -len(item[1])))
            jobs = [
                (rows, gram, bits[next(iter(by_layer[layer].values()))])
                for layer, gram in grams.items()
                for rows in torch.split(layer.packed.weight, _ROWS)
            ]
            rounded = threads.map(_round, *zip(*jobs, strict=True))
            for layer in grams:
                num_jobs = -(-len(layer.packed.weight) // _ROWS)
                weight = stack([next(rounded) for _ in range(num_jobs)], torch.float32, torch.device("cpu"))
                assert isinstance(weight, QuantizedWeight)
                layer.packed.weight.copy_(weight.dequantized())
                sizes = [layer.parts[part].size for part in by_layer[layer]]
                yield from zip(by_layer[layer].values(), _parts(weight, sizes), strict=True)
                bar.update()


def _round(weight: torch.Tensor, gram: torch.Tensor, bits: int) -> QuantizedWeight:
    """Round weight [N, K], given x.T @ x [K, K] of its inputs."""
    form = FORMS[bits]
    if not form.is_two_level or form.rotation is None:
        return round_to_nearest(weight, form)  # of 8 bits, rounding costs less than that of activations
    assert form.rotation == "blocks"
    return round_to_two_level(_rotated(weight), _rotated(_rotated(gram).T), form)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Do what `rotated` does with blocks, to x [., K], by matrix products: different last bits, a tenth of the time."""
    whole = x.shape[1] // ROTATION_BLOCK * ROTATION_BLOCK
    mixed = x[:, :whole].reshape(-1, ROTATION_BLOCK) @ rotated(torch.eye(ROTATION_BLOCK), "blocks")
    return torch.cat((mixed.view(len(x), whole), x[:, whole:]), dim=1)


def _parts(weight: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    multipliers = [None] * len(sizes) if weight.multipliers is None else torch.split(weight.multipliers, sizes)
    return [
        QuantizedWeight(format=weight.format, values=values, scales=scales, multipliers=of_groups)
        for values, scales, of_groups in zip(
            torch.split(weight.values, sizes), torch.split(weight.scales, sizes), multipliers, strict=True
        )
    ]
