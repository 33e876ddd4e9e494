"""The file of named keys: YAML, one entry for each tenant.

tenants:
  - name: search
    keys: [sk-...]            # or `sha256:` and the digest of a key in hex
    priority: high            # critical, high, normal (default), low, background
    weight: 2                 # twice the share of others when there is not enough for all
    max_running: 8            # samples at once; more wait
    requests_per_minute: 600
    tokens_per_minute: 100000 # of prompts and answers
    models: [demo, "demo-*"]  # names that it may ask for, as it writes them; default: all
    own_prefix_cache: true    # share no cached prefix with other keys
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from octavo.errors import InvalidParameterError
from octavo.sampling_params import RequestPriority

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PRIORITIES = {priority.name.lower(): priority for priority in RequestPriority}


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant of the file. Limits that are None do not exist."""

    name: str
    keys: list[str]
    priority: str = "normal"
    weight: float = 1.0
    max_running: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    models: list[str] | None = None
    own_prefix_cache: bool = False

    @property
    def digests(self) -> list[bytes]:
        """The SHA-256 of each key."""
        found = [(key, _DIGEST.fullmatch(key)) for key in self.keys]
        return [bytes.fromhex(match[1]) if match else hashlib.sha256(key.encode()).digest() for key, match in found]

    @property
    def request_priority(self) -> RequestPriority:
        return _PRIORITIES[self.priority]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[TenantSpec]


def read_keys_file(path: str) -> list[TenantSpec]:
    """Return the tenants of a file. Raises InvalidParameterError: what is wrong, and where; never a key."""
    try:
        table: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)  # the error's text may quote a key
        raise _error(path, "is not YAML" + (f" (line {mark.line + 1})" if mark is not None else "")) from None
    try:
        tenants = msgspec.convert(table, _File).tenants
    except msgspec.ValidationError as error:
        raise _error(path, f"is not a file of keys: {error}") from None
    seen: dict[bytes, str] = {}
    names: set[str] = set()
    for tenant in tenants:
        _check(path, tenant)
        if tenant.name in names:
            raise _error(path, f"{tenant.name}: there are two tenants of this name")
        names.add(tenant.name)
        for digest in tenant.digests:
            if digest in seen:
                raise _error(path, f"{tenant.name}: one of its keys is also a key of {seen[digest]}")
            seen[digest] = tenant.name
    if not tenants:
        raise _error(path, "has no tenants")
    return tenants


def _check(path: str, tenant: TenantSpec) -> None:
    name = tenant.name
    if not _NAME.fullmatch(name):
        limit = "1 to 64 letters, digits and . _ -, beginning with a letter or digit"
        raise _error(path, f"name {name[:80]!r}: {limit}")
    if not tenant.keys:
        raise _error(path, f"{name}: has no keys")
    if any(not key.isascii() or not key.isprintable() or key != key.strip() or not key for key in tenant.keys):
        raise _error(path, f"{name}: keys are printable ASCII without surrounding whitespace")
    if tenant.priority not in _PRIORITIES:
        raise _error(path, f"{name}: priority {tenant.priority!r}: one of {', '.join(_PRIORITIES)}")
    for field in ("weight", "max_running", "requests_per_minute", "tokens_per_minute"):
        value = getattr(tenant, field)
        if value is not None and not 0 < value < float("inf"):
            raise _error(path, f"{name}: {field} {value!r}: a finite number greater than 0")


def _error(path: str, limit: str) -> InvalidParameterError:
    return InvalidParameterError("keys_file", path, limit)
