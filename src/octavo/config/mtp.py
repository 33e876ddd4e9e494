"""MTP heads (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): a decoder layer behind a model's last one that drafts.

A head reads the embedding of a token next to the state before it. It comes with the model: in its checkpoint, its GGUF
file, or a file `mtp-*.gguf` beside that. It is found by its tensors, because configurations also count heads that were
left out.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from octavo.config import families
from octavo.config.checkpoint_files import tensor_names
from octavo.config.family import MTP_BEHIND, MtpFacts
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.hub import separate_head
from octavo.config.layers import ExpertsSpec, LayerSpec
from octavo.config.model import ModelConfig, QuantizationName
from octavo.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """What a head's tensors are called, and which of them it has that it could share with its model."""

    layer: str  # prefix of the tensors of its decoder layer
    names: dict[str, str]  # of the others, without suffix, to their places in the head
    has_embedding: bool
    has_logits_head: bool
    # Layers of a quantized checkpoint that are dense, although it may not say so: heads are often left as they were.
    dense: frozenset[str] = frozenset()


class FoundHead(NamedTuple):
    """A head in a folder or GGUF file."""

    path: Path
    config: MtpConfig
    has_several_layers: bool


def find_mtp(model: ModelConfig, path: Path | None = None) -> FoundHead | None:
    """Return the head that comes with a model, or that at `path`; None: there is none.

    Raises CheckpointError: a damaged file.
    """
    for place in _places(Path(model.path)) if path is None else (path,):
        if (facts := _facts_at(place, model)) is not None:
            names = tensor_names(place) if place.is_dir() else _names_in_gguf(place)
            if (found := _find(place, facts, names, model)) is not None:
                return found
    return None


def assumed_mtp(model: ModelConfig) -> FoundHead | None:
    """Return the head of a model whose weights are not read; None: the family has none."""
    if (facts := _facts_at(Path(model.path), model)) is None:
        return None
    [projection] = [template for template, place in facts.names.items() if place == "projection"]
    name = projection.format(number=0, behind=model.num_layers)
    return _find(Path(model.path), facts, [f"{name}.weight"], model)


def resolve_mtp(
    model: ModelConfig, found: FoundHead, asked: QuantizationName | None, of_model: QuantizationName | None
) -> tuple[ModelConfig, QuantizationName | None]:
    """Return a head as a model of one layer, and its quantization at load: `asked` for it, or that of the model.

    Raises UnsupportedModelError: a head of several layers, or of another model. InvalidParameterError: `asked` does not
    fit it.
    """
    if found.has_several_layers:
        raise UnsupportedModelError(f"{found.path}: an MTP head of several layers; those of one are supported")
    mixtures = (each.feed_forward for each in reversed(model.layers) if isinstance(each.feed_forward, ExpertsSpec))
    layer = LayerSpec(model.attending[-1], next(mixtures, model.layers[-1].feed_forward))
    head = replace(model, layers=(layer,), tie_word_embeddings=False)
    if str(found.path) == model.path:
        quantization, head = (of_model, head) if asked is None else resolve_quantization(asked, head, found.path)
        return head, quantization
    other = read_model_config(found.path, model=str(found.path), dtype=model.dtype)
    (of_head, wanted) = ((each.architecture, each.hidden_size, each.vocab_size) for each in (other, model))
    if of_head != wanted:
        what = f"{of_head} (architecture, hidden size, vocabulary), but {model.model} has {wanted}"
        raise UnsupportedModelError(f"{found.path}: the MTP head of another model: {what}")
    head = replace(head, model=str(found.path), path=str(found.path), quantization=other.quantization)
    quantization, head = resolve_quantization(asked or of_model, head, found.path)
    return head, quantization


def _places(own: Path) -> Iterator[Path]:
    yield own
    if own.is_file() and (beside := separate_head([each.name for each in own.parent.glob("*.gguf")], own.name)):
        yield own.parent / beside


def _facts_at(place: Path, model: ModelConfig) -> MtpFacts | None:
    """Return what tensors of a head are called in a folder or file; None: the family has no heads."""
    facts = None if model.impl == "transformers" else families.FAMILIES[model.architecture].mtp
    return facts if facts is None or place.is_dir() else replace(facts, **MTP_BEHIND)


def _names_in_gguf(file: Path) -> set[str]:
    """Return the names of tensors as `MTP_BEHIND` has them."""
    from octavo.gguf.file import GgufFile  # numpy, which no other start needs this early

    found = GgufFile.read(file).tensors
    return {
        name.replace("blk.", "model.layers.").replace(".nextn.", ".").replace(".shared_head_", ".shared_head.")
        for name in found
    }


def _dense(names: Collection[str], stems: Collection[str]) -> frozenset[str]:
    """Return which layers of a head have a weight in floats: nothing else is stored with it but a bias."""
    suffixes = defaultdict[str, set[str]](set)
    for name in names:
        layer, _, suffix = name.removeprefix("model." if name.startswith("model.mtp.") else "").rpartition(".")
        if f"{layer}.".startswith(tuple(f"{stem}." for stem in stems)):
            suffixes[layer].add(suffix)
    return frozenset(layer for layer, found in suffixes.items() if found <= {"weight", "bias"})


def _find(place: Path, facts: MtpFacts, names: Collection[str], model: ModelConfig) -> FoundHead | None:
    num_layers, is_quantized = model.num_layers, model.quantization is not None

    def named(template: str, number: int = 0) -> str:
        return template.format(number=number, behind=num_layers + number)

    def has(template: str, number: int = 0) -> bool:
        return any(f".{named(template, number)}." in f".{name}" for name in names)

    places = {place: template for template, place in facts.names.items()}
    if not has(places["projection"]):
        return None
    config = MtpConfig(
        layer=named(facts.layer),
        names={named(template): place for template, place in facts.names.items()},
        has_embedding=has(places["embedding"]),
        has_logits_head=has(places["logits_head"]),
    )
    if place.is_dir() and is_quantized:
        config = replace(config, dense=_dense(names, (config.layer, *config.names)))
    return FoundHead(place, config, has_several_layers=has(facts.layer, 1))
