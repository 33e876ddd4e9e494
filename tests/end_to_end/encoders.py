"""Tiny encoders that transformers wrote, with the files that sentence-transformers saves beside them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB_SIZE, MAX_TOKENS = 97, 128
WORDS = ("<pad>", "<unk>", "<s>", "</s>", *(f"w{number}" for number in range(VOCAB_SIZE - 4)))
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
# transformers' names, and what differs.
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {"max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "ModernBert": {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 3},
    "NomicBert": {},
    "Gemma3Text": {
        "use_bidirectional_attention": True,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}
# In both generations of its files.
OLD_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A folder, and transformers' model of it."""

    folder: Path
    reference: Any
    dense: list[Any] = field(default_factory=list)

    def states(self, token_ids: list[int], **inputs: Any) -> torch.Tensor:
        """Return the hidden states of a prompt."""
        with torch.inference_mode():
            states: torch.Tensor = self.reference(torch.tensor([token_ids]), **inputs).last_hidden_state[0]
        return states


def save(name: str, folder: Path, kind: str = "Model", **options: Any) -> Any:
    """Save a random model of a family, and a tokenizer; return it."""
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **ENCODERS.get(name, {}), **options})
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.dim() > 1 else 0.1)
            if parameter.dim() == 1:
                parameter.add_(0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save one of words, which puts marks around a text, and between two."""
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))


def save_modules(
    folder: Path, size: int, pooling: str, *, is_new: bool, normalizes: bool, dense: tuple[int, ...] = ()
) -> list[torch.nn.Linear]:
    """Save what sentence-transformers does beside a model; return its linears of pooled vectors."""
    prefix = "sentence_transformers.sentence_transformer.modules." if is_new else "sentence_transformers.models."
    names, linears = ["Transformer", "Pooling"], list[torch.nn.Linear]()
    _write(folder / "1_Pooling", {"embedding_dimension": size, "pooling_mode": pooling} if is_new else {
        "word_embedding_dimension": size, **{key: name == pooling for name, key in OLD_KEYS.items()}
    })  # fmt: skip
    for out_size in dense:
        torch.manual_seed(out_size)
        linears.append(torch.nn.Linear(size, out_size, bias=False))
        path = folder / f"{len(names)}_Dense"
        identity = "torch.nn.modules.linear.Identity"
        facts = {"in_features": size, "out_features": out_size, "bias": False, "activation_function": identity}
        _write(path, facts)
        save_file({"linear.weight": linears[-1].weight.detach()}, path / "model.safetensors")
        names.append("Dense")
        size = out_size
    names += ["Normalize"] * normalizes
    paths = ["", *(f"{at}_{name}" for at, name in enumerate(names) if at)]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"{prefix}{name.lower() + '.' if is_new else ''}{name}"}
        for at, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return linears


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def prompts(lengths: tuple[int, ...] = (1, 2, 17, 33, 70, MAX_TOKENS)) -> list[dict[str, list[int]]]:
    """Return prompts of these lengths."""
    torch.manual_seed(5)
    return [{"prompt_token_ids": torch.randint(4, VOCAB_SIZE, (length,)).tolist()} for length in lengths]
