"""Resolves each option: flag, else environment, else YAML file, else default.

All three are derived from the fields of `EngineArgs` and `ServerArgs`: the option `max_num_seqs` is `--max-num-seqs`,
`OCTAVO_MAX_NUM_SEQS` and `max_num_seqs:` (or `max-num-seqs:`). `model_name` is called `model` everywhere else.
"""

import logging
import re
from collections.abc import Hashable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import yaml

from octavo.config.args import EngineArgs, for_streaming
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.server.args import ServerArgs

logger = logging.getLogger(__name__)

_ArgsT = TypeVar("_ArgsT", EngineArgs, ServerArgs)

PREFIX = "OCTAVO_"
CONFIG_VARIABLE = "OCTAVO_CONFIG"  # path of the YAML file, if there is no flag
# Octavo's variables that are not options. kernels/dispatch.py reads the second.
_OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "OCTAVO_CPU_LEVEL", "OCTAVO_CACHE"})
HIDDEN = "(hidden)"
_FIELDS: dict[str, "Field[Any]"] = {
    "model" if spec.name == "model_name" else spec.name: spec for spec in (*fields(EngineArgs), *fields(ServerArgs))
}
_SWITCH_WORDS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
# Kubernetes sets these in every container if there is a Service named `octavo`.
_SERVICE_LINK = re.compile(r"OCTAVO_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All options of one server, and the origin of each."""

    engine: EngineArgs
    server: ServerArgs
    origins: Mapping[str, str]  # by option, those that were set: `--port`, `OCTAVO_PORT`, or the file's path

    def lines(self, *, with_defaults: bool = False) -> list[str]:
        """Return one line of YAML for each option, with its origin as a comment. Secrets are hidden."""
        lines = []
        for name, spec in _FIELDS.items():
            if with_defaults or name in self.origins:
                value = getattr(self.server if hasattr(self.server, spec.name) else self.engine, spec.name)
                is_hidden = spec.metadata["is_secret"] and value != spec.default
                shown = f'"{HIDDEN}"' if is_hidden else msgspec.json.encode(value).decode()
                lines.append(f"{name}: {shown}  # {self.origins.get(name, 'default')}")
        return lines

    def log(self) -> None:
        for line in self.lines():
            logger.info("setting %s", line)


def resolve_settings(flags: Mapping[str, Any], environ: Mapping[str, str], config_file: Path | None = None) -> Settings:
    """Merge all sources. `flags` contains, by field name, only what was given on the command line.

    Raises UnknownOptionError: a variable or a key of the file that is not an option; the message suggests the closest;
    InvalidParameterError: names the option, its value and the limit, and where the value came from.
    """
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_file is not None:
        values = _from_file(config_file)
        origins = dict.fromkeys(values, str(config_file))
    for variable, text in _own_variables(environ).items():
        name = variable.removeprefix(PREFIX).lower()
        values[name], origins[name] = _parse(variable, text, _FIELDS[name].type), variable
    for field_name, value in flags.items():
        name = "model" if field_name == "model_name" else field_name
        values[name] = tuple(value) if isinstance(value, list) else value
        origins[name] = f"--{name.replace('_', '-')}"
    engine = _build(EngineArgs, for_streaming({"engine_process": True, **values}), origins)
    server = _build(ServerArgs, values, origins)
    for name in ("lora_modules", "allow_runtime_lora"):
        if getattr(server, name) and not engine.enable_lora:
            raise InvalidParameterError(name, getattr(server, name), "requires enable_lora")
    return Settings(engine=engine, server=server, origins=origins)


def _build(kind: type[_ArgsT], values: Mapping[str, Any], origins: Mapping[str, str]) -> _ArgsT:
    own = {_FIELDS[name].name: value for name, value in values.items() if _FIELDS[name] in fields(kind)}
    try:
        return kind(**own)
    except InvalidParameterError as error:
        name = "model" if error.field == "model_name" else error.field
        origin = f" (from {origins[name]})" if name in origins else ""
        value = HIDDEN if _FIELDS[name].metadata["is_secret"] else error.value
        raise InvalidParameterError(name, value, error.limit + origin) from None


def _from_file(path: Path) -> dict[str, Any]:
    values = {}
    for key, value in read_settings_file(path).items():
        name = str(key).replace("-", "_")
        if name not in _FIELDS:
            raise UnknownOptionError(f"option in {path}:", str(key), _FIELDS)
        parts = [value] if isinstance(value, str) and get_origin(_FIELDS[name].type) is tuple else value
        values[name] = tuple(parts) if isinstance(parts, list) else parts
    return values


def _own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set an option. An empty one counts as unset."""
    known = {PREFIX + name.upper() for name in _FIELDS}
    own = {}
    ignored = "%s comes from Kubernetes and is ignored; set `enableServiceLinks: false` to avoid it"
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or not text:
            continue
        if _SERVICE_LINK.match(variable) or text.startswith("tcp://"):
            logger.warning(ignored, variable)
        elif variable not in known:
            raise UnknownOptionError("environment variable", variable, known | _OTHER_VARIABLES)
        else:
            own[variable] = text
    return own


def _parse(variable: str, text: str, annotation: Any) -> Any:
    if get_origin(annotation) is tuple:
        return tuple(item for item in (part.strip() for part in text.split(",")) if item)
    kind = (get_args(annotation) or (annotation,))[0]
    if kind is bool:
        if text.lower() not in _SWITCH_WORDS:
            raise InvalidParameterError(variable, text, "must be true or false")
        return _SWITCH_WORDS[text.lower()]
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        limit = f"must be {'an integer' if kind is int else 'a number'}"
        raise InvalidParameterError(variable, text, limit) from None


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is a duplicate key", node.start_mark)
        return super().construct_mapping(node, deep)


def read_settings_file(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file; an empty file is an empty mapping."""
    try:
        table = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameterError("config", str(path), f"cannot be read: {error}") from error
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise InvalidParameterError("config", str(path), "must be a mapping of options: `port: 8000`")
    return table
