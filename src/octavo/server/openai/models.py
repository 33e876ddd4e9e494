"""The names under which clients find the model and its adapters, and adapters that come and go over HTTP."""

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.contracts.engine import AdapterRef
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import InvalidParameterError, UserError, named_error
from octavo.lora.files import CONFIG_FILE, WEIGHTS_FILES
from octavo.lora_request import LoRARequest
from octavo.sampling_params import PoolingParams, SamplingParams
from octavo.server.http.errors import ApiError, bad_request

_MAX_SHOWN = 20  # names in an error
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_NAME_LIMIT = "1 to 128 letters, digits and . _ : / @ -, beginning with a letter or digit"
_UNLOAD_POLL_S = 0.02


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    created: int
    max_model_len: int | UnsetType = UNSET  # of a model that has not been loaded yet
    root: str  # what was loaded
    state: str = "loaded"  # loaded, loading or unloaded
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model as Codex and some other clients look for it: under each of these names the same."""

    id: str
    name: str
    model: str
    slug: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    data: list[ModelCard]
    models: list[ModelEntry]
    object: str = "list"

    @classmethod
    def of(cls, cards: list[ModelCard]) -> "ModelList":
        entries = [ModelEntry(id=card.id, name=card.id, model=card.id, slug=card.id) for card in cards]
        return cls(data=cards, models=entries)


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace an adapter of this name


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; names are enough


class AdapterReply(msgspec.Struct, frozen=True, kw_only=True):
    """A confirmation."""

    message: str
    lora_name: str
    object: str = "lora_adapter"


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True):
    """One value of `lora_modules`: `name=path`, or vLLM's JSON form."""

    name: str
    path: str
    base_model_name: str | None = None  # shown as the parent

    @classmethod
    def parse(cls, text: str) -> "AdapterModule":
        """Parse one value. Raises InvalidParameterError: it has neither form."""
        try:
            if text.lstrip().startswith("{"):
                module = msgspec.convert(json.loads(text), cls)
            else:
                name, _, path = text.partition("=")
                if not path:
                    raise ValueError("no path")
                module = cls(name=name, path=path)
        except (ValueError, msgspec.ValidationError) as error:
            limit = f'name=path, or {{"name": ..., "path": ..., "base_model_name": ...}}: {error}'
            raise InvalidParameterError("lora_modules", text, limit) from None
        if not _NAME.fullmatch(module.name):
            raise InvalidParameterError("lora_modules", module.name, f"a name is {_NAME_LIMIT}")
        return module


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What one name of a request stands for: the engine, as the base model or with an adapter."""

    engine: AsyncLLMEngine
    card: ModelCard
    adapter: AdapterRef | None = None

    def process(self, prompt: object, params: SamplingParams | PoolingParams, **options: Any) -> ProcessedRequest:
        """Validate one prompt; options and errors as `EngineFront.process`."""
        return self.engine.front.process(prompt, params, lora_request=self.adapter, **options)


class ModelAliases:
    """The values of `model_alias`: `NAME=MODEL`, where a `*` in NAME stands for any text. The first that fits wins."""

    def __init__(self, values: Sequence[str]) -> None:
        self._targets: list[tuple[str, str]] = []
        for value in values:
            name, _, target = value.partition("=")
            self._targets.append((name.casefold(), target))

    def target(self, name: str) -> str | None:
        """Return the model that a name stands for, in any case; None: it is no alias."""
        key = name.casefold()
        return next((target for alias, target in self._targets if fnmatchcase(key, alias)), None)

    def check(self, known: Sequence[str]) -> None:
        """Raise InvalidParameterError: an alias leads to none of these names."""
        for alias, target in self._targets:
            if target.casefold() not in known:
                limit = f"no model or adapter of this server is called {target!r}"
                raise InvalidParameterError("model_alias", f"{alias}={target}", limit)


class ServedModels:
    """All names of the model, and its adapters; owned by the event loop.

    A name matches in any case, as does its last part: `qwen3-0.6b` finds `Qwen/Qwen3-0.6B`. Names of adapters match
    exactly; one is listed once the engine has computed a token with it.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        model_name: str,
        names: Sequence[str],
        root: str | None,
        aliases: ModelAliases | None = None,
    ) -> None:
        self._engine, self._aliases = engine, aliases or ModelAliases(())
        self._root = None if root is None else Path(root).resolve()  # of adapters that are loaded over HTTP
        self._changing = asyncio.Lock()
        names = tuple(names) or (model_name,)
        self._models = {name: ServedModel(engine, self._card(name, model_name)) for name in names}
        self._main = self._models[names[0]]
        self._adapters: dict[str, ServedModel] = {}
        self._by_key: dict[str, ServedModel] = {}  # case-folded; the first wins
        for name in (*names, model_name):
            for key in (name.casefold(), Path(name).name.casefold()):
                self._by_key.setdefault(key, self._models.get(name, self._main))

    def _card(self, name: str, root: str, parent: str | None = None) -> ModelCard:
        model = self._engine.front.config.model
        max_model_len = model.max_model_len - (model.encoder is not None)  # whose place for an output stays empty
        return ModelCard(id=name, created=int(time.time()), max_model_len=max_model_len, root=root, parent=parent)

    def find(self, name: str | None) -> ServedModel:
        """Return what a request's name stands for; none means the main one. Raises ApiError, 404, listing the names."""
        if not name:  # as null; some clients send an empty name when none was chosen
            return self._main
        found = self._named(name)
        if found is None and (target := self._aliases.target(name)) is not None:
            found = self._named(target)
        if found is None:
            shown = name if len(name) <= 100 else name[:100] + "..."
            known = ", ".join([*self._models, *self._adapters][:_MAX_SHOWN])
            text = f"The model '{shown}' does not exist. Available: {known}."
            raise ApiError(404, text, param="model", code="model_not_found")
        return found

    def has(self, name: str) -> bool:
        """Whether a name stands for anything here, aliases left aside."""
        return self._named(name) is not None

    def _named(self, name: str) -> ServedModel | None:
        key = name.casefold()
        return self._adapters.get(name) or self._by_key.get(key) or self._by_key.get(key.rstrip("/"))

    def check_aliases(self) -> None:
        """Raise InvalidParameterError: an alias leads nowhere, now that the adapters in the options are there."""
        self._aliases.check([*self._by_key, *map(str.casefold, self._adapters)])

    @property
    def cards(self) -> list[ModelCard]:
        """The cards of all names, adapters last."""
        return [model.card for model in (*self._models.values(), *self._adapters.values())]

    def _is_taken(self, name: str) -> bool:
        return name in self._adapters or name.casefold() in self._by_key

    def _add(self, adapter: AdapterRef, parent: str | None = None) -> None:
        card = self._card(adapter.name, adapter.path, parent or self._main.card.id)
        self._adapters[adapter.name] = ServedModel(self._engine, card, adapter)

    async def add_modules(self, modules: Sequence[str]) -> None:
        """Serve the adapters in the server's options. Raises UserError: names the one that cannot be served."""
        for module in map(AdapterModule.parse, modules):
            if self._is_taken(module.name):
                raise InvalidParameterError("lora_modules", module.name, "another model has this name")
            self._add(await self._try_out(module.name, module.path), module.base_model_name)

    async def load(self, request: LoadAdapterRequest) -> AdapterReply:
        """Serve an adapter below the server's root from now on. Raises ApiError, 400: its name, its path, its files."""
        name = request.lora_name
        if not _NAME.fullmatch(name):
            raise bad_request(f"lora_name must be {_NAME_LIMIT}.", "lora_name")
        folder = self._below_root(request.lora_path)
        async with self._changing:
            is_adapter = name in self._adapters
            if self._is_taken(name) and not (is_adapter and request.load_inplace):
                what = "has already been loaded" if is_adapter else "is the name of a model"
                raise bad_request(f"The LoRA adapter '{name}' {what}.", "lora_name", "already_exists")
            try:
                self._add(await self._try_out(name, str(folder)))
            except UserError as error:  # the client knows paths from the root on
                text = str(error).replace(f"{self._root}{os.sep}", "").replace("lora_request=", "lora_name=")
                raise bad_request(text, "lora_path", "unsupported_adapter") from error
        return AdapterReply(message=f"Success: LoRA adapter '{name}' added successfully.", lora_name=name)

    async def unload(self, request: UnloadAdapterRequest) -> AdapterReply:
        """No longer serve an adapter; return when its running requests have ended. Raises ApiError, 404."""
        name = request.lora_name
        async with self._changing:
            if self._adapters.pop(name, None) is None:
                text = f"The LoRA adapter '{name[:128]}' is not loaded."
                raise ApiError(404, text, param="lora_name", code="not_found")
        while self._engine.metrics.adapters.num_unfinished(name):
            await asyncio.sleep(_UNLOAD_POLL_S)
        return AdapterReply(message=f"Success: LoRA adapter '{name}' removed successfully.", lora_name=name)

    async def _try_out(self, name: str, path: str) -> AdapterRef:
        """Read an adapter and compute a token with it: the ranks then have checked its tensors. Raises OctavoError."""
        request = LoRARequest(name, 1, path)
        ref = await asyncio.to_thread(self._engine.front.inputs.read_lora, request)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        output = (await self._engine.generate({"prompt_token_ids": [0]}, params, lora_request=request)).outputs[0]
        if output.finish_reason == "error":
            raise named_error(output.error_type or "EngineError", output.error or "the adapter cannot be used")
        return ref

    def _below_root(self, path: str) -> Path:
        """Return the folder of an adapter, which with its files must be below the root, symbolic links resolved."""
        assert self._root is not None
        refusal = bad_request("lora_path must be the folder of an adapter below the server's --lora-root.", "lora_path")
        try:
            folder = (self._root / path).resolve()
            files = [(folder / name).resolve() for name in (CONFIG_FILE, *WEIGHTS_FILES)]
            is_below = all(each.is_relative_to(self._root) for each in (folder, *files)) and folder.is_dir()
        except (OSError, ValueError, RuntimeError):
            raise refusal from None
        if not is_below:
            raise refusal
        return folder
