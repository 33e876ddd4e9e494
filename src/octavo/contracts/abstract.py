"""Structs with abstract methods."""

from abc import ABCMeta

import msgspec


class AbstractStructMeta(msgspec.StructMeta, ABCMeta):
    """The metaclass of a `msgspec.Struct` whose subclasses must define what is abstract."""
