"""Python's collector of reference cycles, around what is loaded once and stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collections inside: to load is to make objects that stay, and looking for garbage among them is in vain.

    A tenth of the time that `import torch` takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_what_is_loaded() -> None:
    """Take all objects that are there out of the collector's sight: it walks them no more in the middle of a step.

    For processes that are the engine's own; in a program of the user's, what is garbage later should be found. Nothing
    is collected before: a fifth of a second, for what was nothing each time.
    """
    gc.freeze()
