"""Errors of the library `tokenizers`: bare exceptions, and panics, which are no `Exception` at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.errors import CheckpointError, OctavoError

_PANIC = "PanicException"  # pyo3 makes a class of this name in each library


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise what the library raises as `CheckpointError`, which begins with `what`: the file, and what is wrong."""
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise CheckpointError(f"{what}: {str(error).partition(chr(10))[0]}") from error
