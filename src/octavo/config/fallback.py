"""Models of families that Octavo does not know, computed by the installed transformers' own code: their configuration.

A process of its own finds out what the layers keep (`models/fallback_probe.py`): here, there is no torch.
"""

import json
import subprocess
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.config.family import Family
from octavo.config.json_fields import JsonFields
from octavo.config.layers import AttentionSpec, DenseSpec, LayerSpec, RopeConfig, RotarySpec
from octavo.errors import UnsupportedModelError
from octavo.working_folder import child_command, child_environment

_ENDINGS = ("ForCausalLM", "LMHeadModel")  # of names of language models
HINT = "transformers' own code may run it: pip install 'octavo[transformers]'"


def may_be_known(fields: JsonFields) -> bool:
    """Return whether transformers is installed and has a folder for this kind of model, of language by its name.

    Nothing is imported.
    """
    found, kind = find_spec("transformers"), fields.text("model_type", "").replace("-", "_").removesuffix("_text")
    names = fields.values.get("architectures") or [_ENDINGS[0]]
    is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if found is None or not kind.isidentifier() or not is_named or not str(names[0]).endswith(_ENDINGS):
        return False
    return any((Path(home) / "models" / kind).is_dir() for home in found.submodule_search_locations or ())


def way_out(fields: JsonFields, asked: str, known: Iterable[str]) -> str:
    """Say what a checkpoint of no `known` family is or may be meant to be, and what can be done."""
    if fields.values.get("is_encoder_decoder"):
        return (
            "it has an encoder and a decoder, which transformers' `generate` runs; Octavo runs models of one of the two"
        )
    if fields.values.get("auto_map"):
        kind = fields.values.get("model_type")
        return f"its code comes with it, which Octavo never runs; a newer transformers may have {kind!r} itself"
    stems = {name.partition("For")[0].removesuffix("Model"): name for name in known}
    near = get_close_matches(asked.partition("For")[0].removesuffix("Model"), stems, n=1)
    return f"did you mean {stems[near[0]]!r}?" if near else "docs/models.md lists the families that are"


def probe_fallback(path: Path) -> dict[str, Any]:
    """Return what the library's own class for the checkpoint in folder `path` is, by running its code without weights.

    Raises UnsupportedModelError: transformers does not know it, or it cannot run with our attention.
    """
    command = [*child_command("octavo.models.fallback_probe"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UnsupportedModelError(f"{path}: transformers cannot build this model: {last}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "error" in found:
        why = f"transformers' own code cannot run it with Octavo's attention: {found['error']}"
        raise UnsupportedModelError(f"{path}: {why}")
    return found


def fallback_family(fields: JsonFields, path: Path) -> tuple[JsonFields, Family]:
    """Return the keys of `config.json` that the rest of the configuration reads, and the family.

    Raises UnsupportedModelError: see `probe_fallback`.
    """
    found = probe_fallback(path)
    keys = ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings")
    own = {key: value for key, value in fields.values.items() if not key.startswith("hidden_act")}
    family = Family(
        name=found["architecture"],
        model_type=fields.text("model_type", ""),
        model="octavo.models.fallback:FallbackForCausalLM",
        read_layers=lambda *_: (_layers(found), _rotary(found["longrope"])),
        weight_names={},
    )
    return JsonFields(fields.origin, {**own, **{key: found[key] for key in keys}}), family


def _rotary(longrope: dict[str, Any] | None) -> tuple[RotarySpec, ...]:
    """Return the library's table if a request chooses among its ranges. No layer reads it here."""
    if longrope is None:
        return ()
    short, long = tuple(longrope["short_factor"]), tuple(longrope["long_factor"])
    first_range = longrope["original_max_position_embeddings"]
    rope = RopeConfig(
        theta=longrope["rope_theta"], divisors=short, long_divisors=long, original_max_position=first_range
    )
    return (RotarySpec(rope=rope, width=2 * len(short)),)


def _layers(found: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """Return the layers as far as memory and attention need them: positions and the rest are the library's."""
    dense = DenseSpec(intermediate_size=found["intermediate_size"])
    kinds: dict[tuple[int, int], int] = {}  # sizes of what layers cache
    layers = []
    for call in found["layers"]:
        sizes = call["num_kv_heads"], call["head_dim"]
        mixer = AttentionSpec(
            num_heads=call["num_heads"],
            num_kv_heads=call["num_kv_heads"],
            head_dim=call["head_dim"],
            rotary=None,
            sliding_window=call["sliding_window"],
            scale=call["scale"],
            soft_cap=call["soft_cap"],
            entry_kind=kinds.setdefault(sizes, len(kinds)),
        )
        layers.append(LayerSpec(mixer, dense))
    return tuple(layers)
