"""The model's names for clients."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.contracts.engine import AdapterRef
from octavo.server.errors import ApiError

_MAX_SHOWN = 20  # names in an error


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    created: int
    max_model_len: int
    root: str  # what was loaded
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class ModelNames:
    """All names of the model, and its adapters. A name matches in any case, as does its last part: `qwen3-0.6b` finds
    `Qwen/Qwen3-0.6B`. Names of adapters match exactly.
    """

    def __init__(self, model_name: str, aliases: Sequence[str], max_model_len: int) -> None:
        self.names = tuple(aliases) or (model_name,)
        self._cards = [
            ModelCard(id=name, created=int(time.time()), max_model_len=max_model_len, root=model_name)
            for name in self.names
        ]
        self._adapters: dict[str, tuple[AdapterRef, ModelCard]] = {}
        self._max_model_len = max_model_len
        self._by_key: dict[str, str] = {}  # case-folded -> the name for replies; the first wins
        for name in (*self.names, model_name):
            for key in (name.casefold(), Path(name).name.casefold()):
                self._by_key.setdefault(key, name if name in self.names else self.names[0])

    def find(self, name: str | None) -> str:
        """Return the model's name for replies; none means the served model.

        Raises:
            ApiError: 404, listing the known names.
        """
        if not name:  # as null; some clients send an empty name when none was chosen
            return self.names[0]
        if name in self._adapters:
            return name
        key = name.casefold()
        found = self._by_key.get(key) or self._by_key.get(key.rstrip("/"))
        if found is None:
            shown = name if len(name) <= 100 else name[:100] + "..."
            known = ", ".join([*self.names, *self._adapters][:_MAX_SHOWN])
            text = f"The model '{shown}' does not exist. Available: {known}."
            raise ApiError(404, text, param="model", code="model_not_found")
        return found

    def card(self, name: str) -> ModelCard:
        """Return one model's card. Raises ApiError, 404."""
        found = self.find(name)
        return next(card for card in self.cards if card.id == found)

    @property
    def cards(self) -> list[ModelCard]:
        """The cards of all names, adapters last."""
        return [*self._cards, *(card for _, card in self._adapters.values())]

    def adapter(self, name: str | None) -> AdapterRef | None:
        """Return the adapter of this very name; None: it is a name of the base model, or of nothing."""
        found = self._adapters.get(name) if name is not None else None
        return None if found is None else found[0]

    def is_taken(self, name: str) -> bool:
        """Whether a model or an adapter has this name."""
        return name in self._adapters or name.casefold() in self._by_key

    def add_adapter(self, adapter: AdapterRef, parent: str | None = None) -> None:
        """Serve an adapter under its name; one that had it is replaced."""
        card = ModelCard(
            id=adapter.name,
            created=int(time.time()),
            max_model_len=self._max_model_len,
            root=adapter.path,
            parent=parent or self.names[0],
        )
        self._adapters[adapter.name] = adapter, card

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter's name."""
        del self._adapters[name]
