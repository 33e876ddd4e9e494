"""All families: each module here defines `FAMILIES`, and a new file is found without being listed."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from octavo.config.family import Family


def _all_families() -> Mapping[str, Family]:
    names = sorted(module.name for module in iter_modules(__path__))
    families = (family for name in names for family in import_module(f"{__name__}.{name}").FAMILIES)
    return MappingProxyType({family.name: family for family in families})


FAMILIES = _all_families()  # by their names in `config.json`
