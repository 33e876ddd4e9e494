"""Converts the metadata of a GGUF file to the model's equivalent `config.json`.

Settings are parsed in one place for all formats: names are translated here, `config/hf.py` checks the values. What one
family has beside these is in its `GgufFacts`. Keys are those of ggml's docs/gguf.md and of llama.cpp
(`gguf-py/gguf/constants.py`, `common/sampling.cpp`).
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from octavo.config import families
from octavo.config.family import Family, GgufFacts, GgufKeys
from octavo.config.hf_layers import yarn_attention_factor
from octavo.config.hf_quantization import GGUF_SAMPLING, GGUF_TYPES
from octavo.config.json_fields import JsonFields
from octavo.config.pooling import GGUF_DENSE, GGUF_POOLING
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf.file import GgufFile
from octavo.gguf.names import IGNORED, TensorNames

logger = logging.getLogger(__name__)

_ROPE_TYPES = {"none": None, "linear": "linear", "yarn": "yarn"}
# Further settings of YaRN, and the values that leave it as it is.
_YARN_NEUTRAL = MappingProxyType(
    {"rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}
)
# What ends an answer, by its text: files name one such token, and models have several.
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
    *("<|im_end|>", "<|endoftext|>"),  # Qwen, SmolLM, and what others fine-tuned with ChatML
    *("<end_of_turn>", "<turn|>", "<|tool_response>"),  # Gemma, Gemma 4
    *("<|return|>", "<|call|>"),  # gpt-oss
    "<|observation|>",  # GLM
)
_TABLE, _HEAD = "model.embed_tokens", "lm_head"
_FACTORS = "rope_freqs.weight"
# By key under general.sampling: its name in generation_config.json, and the bounds of values that have an effect.
_SAMPLING = {
    "temp": ("temperature", -math.inf, math.inf),
    "top_k": ("top_k", -math.inf, 2**31),
    "top_p": ("top_p", 1e-9, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 1e-9, math.inf),
}
# Samplers that Octavo does not have, and the values that turn them off. The others only tune these.
_OTHER_SAMPLERS = {"xtc_probability": 0.0, "mirostat": 0}


def read_gguf_fields(path: Path) -> JsonFields:
    """Return the settings of a GGUF model, under the names of `config.json`."""
    return _Translation(GgufFile.read(path)).fields()


class _Translation:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        architecture = file.architecture
        if architecture == "clip":  # whatever the tower is
            why = "an image projector (mmproj) without a language model; of GGUF files, only text models are supported"
            hint = "load models that take images from a folder or repository with safetensors"
            raise UnsupportedModelError(f"{file.path}: {why}; {hint}")
        self._prefix = architecture + "."
        own = {key.removeprefix(self._prefix): key for key in file.metadata if key.startswith(self._prefix)}
        values = {name: _plain_float(file.metadata[key]) for name, key in own.items()}
        self._own = GgufKeys(
            f"{file.path}: {architecture}", values, {name: tensor.shape for name, tensor in file.tensors.items()}
        )
        self._family, self._facts = self._find_family()

    def fields(self) -> JsonFields:
        """Translate everything; what is absent in the file stays absent."""
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{self._file.path}: no matrix token_embd.weight")
        heads = self._get("attention.head_count")
        hidden = self._get("embedding_length")
        is_divisor = isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads == 0
        head_dim = self._get("attention.key_length", hidden // heads if is_divisor else None)
        kinds_of_texts = self._file.tensors.get("token_types.weight")
        is_centered = self._family.norm_kind != "rms"
        kinds = {tensor.type.name for tensor in self._file.tensors.values() if len(tensor.shape) > 1}
        values = {
            "architectures": [self._family.name],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get(
                f"attention.layer_norm_{'' if is_centered else 'rms_'}epsilon", *([None] * self._has_layer_norms)
            ),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._file.tensors,
            "sliding_window": self._get("attention.sliding_window", None),
            # The original dtype of quantized weights is not in the file; nearly all models are bfloat16.
            "dtype": {"F32": "float32", "F16": "float16"}.get("".join(kinds), "bfloat16"),
            "bos_token_id": self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_ids(),
            **self._experts(),
            GGUF_TYPES: self._types(),
            GGUF_POOLING: self._get("pooling_type", None),
            GGUF_DENSE: {
                name.removesuffix(".weight"): list(tensor.shape)
                for name, tensor in self._file.tensors.items()
                if name in ("dense_2.weight", "dense_3.weight")
            },
            "type_vocab_size": None if kinds_of_texts is None else kinds_of_texts.shape[0],
            GGUF_SAMPLING: _sampling_settings(self._file.path, self._file.metadata),
        }
        values |= self._facts.settings(self._own, values)
        if self._usual("attention.value_length", head_dim) != head_dim:
            raise self._unsupported("attention.value_length", f"it must be that of keys ({head_dim}) as well")
        return JsonFields(str(self._file.path), values)

    def _get(self, key: str, *default: Any) -> Any:
        """Return a setting of the architecture; absent and without a default, raise an error."""
        found = self._file.metadata.get(self._prefix + key, *default)
        if found is None and not default:
            raise CheckpointError(f"{self._file.path}: {self._prefix + key} is missing")
        return _plain_float(found)

    @property
    def _has_layer_norms(self) -> bool:
        return f"{self._prefix}attention.layer_norm_epsilon" in self._file.metadata

    def _usual(self, key: str, default: Any) -> Any:
        """Return a setting as others have it: the default where it means something else in this family's files."""
        return default if key in self._facts.own_keys else self._get(key, default)

    def _unsupported(self, key: str, why: str) -> UnsupportedModelError:
        value = self._file.metadata.get(self._prefix + key)
        return UnsupportedModelError(f"{self._file.path}: {self._prefix + key}={value!r} is not supported: {why}")

    def _find_family(self) -> tuple[Family, GgufFacts]:
        """Return the family and what is known of such files: the one that fits of those with this architecture."""
        known = [(family, family.gguf) for family in families.FAMILIES.values() if family.gguf is not None]
        for family, facts in known:
            if self._file.architecture in facts.architectures and facts.fits(self._own):
                return family, facts
        names = ", ".join(sorted({name for _, facts in known for name in facts.architectures}))
        what = f"architecture {self._file.architecture!r} is not supported"
        raise UnsupportedModelError(f"{self._file.path}: {what}; known: {names}")

    def _end_ids(self) -> list[Any]:
        metadata = self._file.metadata
        found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if found[0] is None and metadata.get("tokenizer.ggml.model") == "llama":
            found[0] = 2  # SentencePiece's end
        found += metadata.indices_of("tokenizer.ggml.tokens", _ENDS)
        inner = self._facts.inner_ends and metadata.indices_of("tokenizer.ggml.tokens", self._facts.inner_ends)
        return list(dict.fromkeys(each for each in found if each is not None and each not in inner))

    def _experts(self) -> dict[str, Any]:
        if not self._get("expert_count", 0):
            return {}
        return {
            "num_experts": self._get("expert_count"),
            "num_experts_per_tok": self._get("expert_used_count"),
            "moe_intermediate_size": self._get("expert_feed_forward_length", None),
            "shared_expert_intermediate_size": self._get("expert_shared_feed_forward_length", None),
        }

    def _types(self) -> dict[str, str]:
        """Return the types of quantized tensors by layer."""
        names, types = TensorNames(self._file.path, self._facts.names), dict[str, str]()
        for tensor in self._file.tensors.values():
            if tensor.type.is_quantized and not tensor.type.is_decoded and tensor.name not in IGNORED:
                _, wanted = names.translate(tensor)
                types.update({name.rpartition(".")[0]: tensor.type.name for name in wanted})
        if "output.weight" not in self._file.tensors and _TABLE in types:
            types[_HEAD] = types[_TABLE]
        return types

    def _rope(self, head_dim: object) -> dict[str, Any]:
        dimensions = self._usual("rope.dimension_count", head_dim)
        if self._family.has_partial_rotary and isinstance(head_dim, int) and isinstance(dimensions, int):
            partial = {"partial_rotary_factor": dimensions / head_dim}
            return {**self._whole_rope(dimensions), **partial, **self._long_rope(dimensions)}
        if dimensions != head_dim:
            raise self._unsupported("rope.dimension_count", f"all {head_dim} dimensions of a head must be rotated")
        return self._whole_rope(dimensions)

    def _long_rope(self, dimensions: int) -> dict[str, Any]:
        """Return LongRoPE's two lists of divisors, if the file has them."""
        names = {key: f"rope_factors_{key}.weight" for key in ("short", "long")}
        if not names.keys() <= {key for key, name in names.items() if name in self._file.tensors}:
            return {}
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
            "attention_factor": self._get("rope.scaling.attn_factor", 1.0),
            **{f"{key}_factor": self._divisors(dimensions, name) for key, name in names.items()},
        }

    def _whole_rope(self, dimensions: Any) -> dict[str, Any]:
        theta = self._get("rope.freq_base", 10000.0)
        divisors = self._divisors(dimensions) if _FACTORS in self._file.tensors else None
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", None))  # the older name
        name = self._get("rope.scaling.type", "linear" if factor else "none")
        if name not in _ROPE_TYPES:
            raise self._unsupported("rope.scaling.type", "known: " + ", ".join(_ROPE_TYPES))
        if _ROPE_TYPES[name] is None:
            return {"rope_theta": theta, "rope_type": "default", **({"divisors": divisors} if divisors else {})}
        if divisors is not None:
            raise self._unsupported("rope.scaling.type", f"the file also has {_FACTORS}, which is no {name} scaling")
        scaling = {
            "rope_theta": theta,
            "rope_type": _ROPE_TYPES[name],
            "factor": self._get("rope.scaling.factor") if factor is None else factor,
            "original_max_position_embeddings": self._get("rope.scaling.original_context_length", None),
            **(self._yarn(factor) if name == "yarn" else {}),
        }
        return {key: value for key, value in scaling.items() if value is not None}

    def _yarn(self, factor: Any) -> dict[str, Any]:
        """Return what only YaRN has. Files multiply its own factor of attention, where checkpoints replace it."""
        for key, neutral in _YARN_NEUTRAL.items():
            if self._usual(key, neutral) != neutral:
                raise self._unsupported(key, f"only {neutral:g} is, which is what its absence means")
        times = self._get("rope.scaling.attn_factor", 1.0)
        is_scaled = isinstance(factor, float) and isinstance(times, float) and times != 1
        return {
            "attention_factor": _plain_float(times * yarn_attention_factor(factor)) if is_scaled else None,
            "beta_fast": self._get("rope.scaling.yarn_beta_fast", None),
            "beta_slow": self._get("rope.scaling.yarn_beta_slow", None),
        }

    def _divisors(self, dimensions: int, name: str = _FACTORS) -> list[float]:
        """Return the numbers that the frequencies are divided by."""
        tensor = self._file.tensors[name]
        if tensor.type.name != "F32" or tensor.shape != (dimensions // 2,):
            raise CheckpointError(f"{self._file.path}: {name}: {dimensions // 2} numbers in F32 are expected")
        found = tensor.data.view(np.float32).astype(np.float64)
        if not np.all(np.isfinite(found) & (found > 0)):
            raise CheckpointError(f"{self._file.path}: {name}: finite numbers above 0 are expected")
        return cast(list[float], found.tolist())


def _plain_float(value: Any) -> Any:
    """Undo float32 rounding: 1e-6 was stored as the nearest float32, while config.json says 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _sampling_settings(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default sampling parameters that are present; log those that have no effect here."""
    settings: dict[str, Any] = {}
    prefix = "general.sampling."
    for key, (name, lowest, highest) in _SAMPLING.items():
        value = metadata.get(prefix + key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest or math.isinf(value):
            logger.warning("%s: %s%s=%r has no effect: it is out of range", path, prefix, key, value)
        elif key == "top_k":
            settings[name] = max(int(value), -1)  # 0 and less: all tokens
        else:  # stored as float32: 0.95 is meant; a temperature below 0 is greedy
            settings[name] = max(float(str(np.float32(value))), 0.0)
    for key, neutral in _OTHER_SAMPLERS.items():
        if metadata.get(prefix + key, neutral) != neutral:
            logger.warning("%s: %s%s=%r has no effect: unsupported", path, prefix, key, metadata[prefix + key])
    return settings
