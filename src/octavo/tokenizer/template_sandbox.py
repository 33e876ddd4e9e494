"""Jinja's immutable sandbox with a limit on work: templates are untrusted code, and one that loops must not hang.

Loop iterations, calls, output and growth of text count as steps. Real templates take about ten steps per message.
Widths that could allocate a gigabyte at once are rejected.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from string import Formatter
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000  # half a second of empty loops
_CHARACTERS_PER_STEP = 256
_STEPS_PER_MACRO = 10
_MAX_POWER_BITS = 4096
_MAX_WIDTH = 1_000_000
# String methods and filters whose numeric arguments are widths, counts or digits.
_WITH_WIDTHS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
)
_FORMATS = frozenset({"format", "format_map"})
# Formats with fields wider than _MAX_WIDTH, or of computed widths.
_WIDE_PERCENT, _WIDE_BRACES = re.compile(r"%[^a-zA-Z%]*(\*|\d{7})"), re.compile(r"\{|\d{7}")
_COUNTED, _GROWN = "counted by the sandbox", "grown in the sandbox"  # no template can spell these filters

_steps_left: ContextVar[list[int]] = ContextVar("_steps_left")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment are rendered by `render_limited`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.filters = _LimitedFilters(self.filters)
        self.filters[_COUNTED], self.filters[_GROWN] = _counted, _grown
        del self.globals["lipsum"]  # produces text of any requested length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            size = nodes.Const(sum(len(text.data) for text in loop.find_all(nodes.TemplateData)))
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [size], [], None, None, lineno=loop.lineno)
        for joined in template.find_all(nodes.Concat):
            parts = nodes.List(joined.nodes, lineno=joined.lineno)
            joined.nodes = [nodes.Filter(parts, _GROWN, [], [], None, None, lineno=joined.lineno)]
        return template

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        _spend(_STEPS_PER_MACRO if isinstance(function, Macro) else 1)
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
        text, given = getattr(method, "__self__", None), (*arguments, *named.values())
        if isinstance(text, str):
            _check_widths(method.__name__, text, given)
        return _count_growth((text, *given), super().call(context, function, *arguments, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                    _spend(_size(repeated) * max(times, 0) // _CHARACTERS_PER_STEP)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_POWER_BITS:
                raise TemplateRuntimeError(f"{operator} of numbers that large")
        elif operator == "%" and isinstance(left, str):
            _check_widths("format", left, ())
        return _count_growth((left, right), super().call_binop(context, operator, left, right))


class _LimitedFilters(dict[str, Callable[..., Any]]):
    """Filters that are checked like methods."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        @functools.wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            of_value, *given = (*arguments, *named.values())
            _check_widths(name, of_value, given)
            return _count_growth((of_value, *given), function(*arguments, **named))

        super().__setitem__(name, limited)


def render_limited(template: Any, variables: dict[str, Any]) -> str:
    """Render a template of a `LimitedEnvironment`."""
    token = _steps_left.set([MAX_STEPS])
    try:
        text: str = template.render(variables)
        return text
    finally:
        _steps_left.reset(token)


def _check_widths(name: str, value: Any, given: Iterable[Any]) -> None:
    """Reject widths that are too large, before a method or filter formats a value."""
    if name in _WITH_WIDTHS and any(isinstance(each, int) and abs(each) > _MAX_WIDTH for each in given):
        raise TemplateRuntimeError(f"{name} of more than {_MAX_WIDTH:,}")
    if name in _FORMATS:
        try:
            specs = [spec for _, _, spec, _ in Formatter().parse(str(value)) if spec]
        except ValueError:  # not of this kind, or invalid, which is left to the method
            specs = []
        if _WIDE_PERCENT.search(str(value)) or any(map(_WIDE_BRACES.search, specs)):
            raise TemplateRuntimeError(f"a format with fields of more than {_MAX_WIDTH:,}")


def _count_growth(made_of: Iterable[Any], result: Any) -> Any:
    """Count by how much a result is larger than the largest of its operands."""
    if (size := _size(result)) >= _CHARACTERS_PER_STEP:
        _spend((size - max(map(_size, made_of), default=0)) // _CHARACTERS_PER_STEP)
    return result


def _size(value: Any) -> int:
    """Return the number of characters of a text; an item of a list counts as 16."""
    if isinstance(value, str):
        return len(value)
    return 16 * len(value) if isinstance(value, list | tuple) else 0


def _counted(items: Iterable[Any], size: int) -> Iterator[Any]:
    """Count the iterations of a loop that contains `size` characters of text."""
    for item in items:
        _spend(1 + size // _CHARACTERS_PER_STEP)
        yield item


def _grown(parts: list[Any]) -> str:
    """Join what `~` joins."""
    texts = [*map(str, parts)]
    sizes = [*map(len, texts)]
    _spend((sum(sizes) - max(sizes)) // _CHARACTERS_PER_STEP)
    return "".join(texts)


def _written(value: Any) -> Any:
    """Count text that a template writes."""
    if isinstance(value, str) and len(value) >= _CHARACTERS_PER_STEP:
        _spend(len(value) // _CHARACTERS_PER_STEP)
    return value


def _spend(num_steps: int) -> None:
    """Raise if a template has no steps left. Negative counts are not refunded."""
    left = _steps_left.get()
    left[0] -= max(num_steps, 0)
    if left[0] < 0:
        raise TemplateRuntimeError(f"it takes more than {MAX_STEPS:,} steps: it loops")
