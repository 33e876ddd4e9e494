"""`Birth`: what a request is given when it arrives. With it, the same request gives the same bytes once more."""

import time
import uuid
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from secrets import token_bytes

import msgspec

from octavo.server.http.errors import ApiError


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """All that is not in the body, and that the answer depends on."""

    name: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)  # of the reply, unless the client names it
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    call_key: bytes = msgspec.field(default_factory=lambda: token_bytes(16))  # what the ids of calls are drawn from
    seeds: list[int] = []  # one per prompt; empty: drawn while the request is prepared
    model_key: str | None = None  # of what computes it, see `model_key`; None: not known yet

    def call_ids(self, choice: int) -> Callable[[], bytes]:
        """Return what draws the ids of the calls of one choice, in order."""
        numbers = count()
        return lambda: blake2b(b"%d %d" % (choice, next(numbers)), key=self.call_key).digest()

    def of_reply(self, seeds: list[int], model_key: str) -> "Birth":
        """Return it with what the reply was given while it was prepared."""
        return msgspec.structs.replace(self, seeds=seeds, model_key=model_key)

    def check_model(self, model_key: str) -> None:
        """Raise ApiError, 409, if what would compute the request is not what has begun it."""
        if self.model_key not in (None, model_key):
            text = "The model has changed since this request began, so its answer cannot be continued."
            raise ApiError(409, text, code="model_changed")
