"""Reads the YAML file of settings: one flat table, every key once."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from octavo.errors import InvalidParameterError


class _Loader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; a file of settings should not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_settings_file(path: Path) -> dict[Any, Any]:
    """Return the table in a YAML file; an empty file is an empty table.

    Raises:
        InvalidParameterError: the file cannot be read, is not YAML, or holds something else than a table.
    """
    try:
        table = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameterError("config", str(path), f"cannot be read: {error}") from error
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise InvalidParameterError("config", str(path), "must be a table of options: `port: 8000`")
    return table
