"""What Ollama's API says about the model: names with tags, sizes of files, details, capabilities."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.config.families import FAMILIES
from octavo.server.http.errors import ApiError
from octavo.server.ollama.protocol import Details, ListedModel, OllamaModelInfo, OllamaModels
from octavo.server.openai.models import ServedModel
from octavo.server.openai.service import OpenAICompatibleService

LATEST = ":latest"  # the tag of a name without one
_NEVER = "2300-01-01T00:00:00Z"  # when the model is unloaded
_WEIGHTS = {".gguf": "gguf", ".safetensors": "safetensors", ".bin": "pytorch", ".pt": "pytorch", ".pth": "pytorch"}
_PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
               "repetition_penalty": "repeat_penalty"}  # fmt: skip


def find(service: OpenAICompatibleService, name: str | None) -> ServedModel:
    """Return what a name stands for; `demo:latest` means `demo`. Raises ApiError, 404."""
    try:
        return service.models.find(name)
    except ApiError as error:
        if name is not None and name.endswith(LATEST):
            return find(service, name.removesuffix(LATEST))
        known = ", ".join(tagged(card.id) for card in service.models.cards[:20])
        shown = (name or "")[:100]
        raise ApiError(404, f"model '{shown}' not found; this server has {known}", code=error.detail.code) from None


def tagged(name: str) -> str:
    """Return a model's name with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of the weights."""

    format: str
    size: int  # bytes
    modified_at: str

    @classmethod
    def at(cls, path: Path) -> "WeightFiles":
        """Look at a checkpoint, a folder or one file."""
        found = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.suffix in _WEIGHTS)
        stats = [each.stat() for each in found]
        changed_s = max((stat.st_mtime for stat in stats), default=0.0)
        return cls(
            format=_WEIGHTS.get(found[0].suffix, "") if found else "",
            size=sum(stat.st_size for stat in stats),
            modified_at=datetime.fromtimestamp(changed_s, UTC).isoformat().replace("+00:00", "Z"),
        )


class OllamaModelPages:
    """What the routes that describe the model answer."""

    def __init__(self, service: OpenAICompatibleService) -> None:
        self.service, self._config = service, service.front.config
        self._files = WeightFiles.at(Path(self._config.model.path))
        family = FAMILIES.get(self._config.model.architecture)
        self._family = self._config.model.architecture if family is None else family.model_type

    def all(self, *, is_running: bool) -> OllamaModels:
        """Return every name, adapters last; of running models with what they take."""
        running: dict[str, Any] = {}
        if is_running:
            context_length = self._config.model.max_model_len
            running = {"expires_at": _NEVER, "size_vram": self._files.size, "context_length": context_length}
        models = [
            ListedModel(
                name=tagged(card.id),
                model=tagged(card.id),
                modified_at=self._files.modified_at,
                size=self._files.size,
                digest=self._digest(card.id, card.root),
                details=self._details(card.parent),
                **running,
            )
            for card in self.service.models.cards
        ]
        return OllamaModels(models=models)

    def info(self, model: ServedModel) -> OllamaModelInfo:
        """Return what one name stands for."""
        config, front = self._config.model, self.service.front
        template = front.tokenizer.chat_template
        params = front.inputs.default_params
        given = {name: getattr(params, field) for field, name in _PARAMETERS.items()}
        return OllamaModelInfo(
            modelfile=f"FROM {model.card.root}\n",
            parameters="\n".join(f"{name:<30} {value:g}" for name, value in given.items()),
            template="" if template is None else template.source,
            details=self._details(model.card.parent),
            model_info={
                "general.architecture": self._family,
                "general.basename": model.card.id,
                f"{self._family}.context_length": config.max_model_len,
                f"{self._family}.embedding_length": config.hidden_size,
                f"{self._family}.block_count": config.num_layers,
                f"{self._family}.vocab_size": config.vocab_size,
            },
            capabilities=self._capabilities,
            modified_at=self._files.modified_at,
        )

    @property
    def _capabilities(self) -> list[str]:
        front, formats = self.service.front, self.service.formats
        template = front.tokenizer.chat_template
        shows_tools = template is not None and template.reads("tools", with_tools=True)
        has = {
            "completion": front.config.model.has_head,
            "insert": formats.infill is not None,
            "embedding": front.config.model.pooling.is_stated and front.inputs.pooling_rules.makes_vectors,
            "tools": formats.tool_calls is not None and shows_tools,
            "thinking": formats.reasoning is not None,
            "vision": front.inputs.takes_images,
        }
        return [name for name, is_there in has.items() if is_there]

    def _details(self, parent: str | None) -> Details:
        config = self._config
        quantization = config.model.quantization
        level = config.quantization or (config.model.dtype if quantization is None else quantization.method)
        return Details(
            parent_model=parent or "",
            format=self._files.format,
            family=self._family,
            families=[self._family],
            parameter_size="",
            quantization_level=level.upper(),
        )

    def _digest(self, *names: str) -> str:
        """Return what tells this model from others; the weights themselves are not read for it."""
        facts = "\n".join([*names, str(self._files.size), self._files.modified_at])
        return hashlib.sha256(facts.encode()).hexdigest()
