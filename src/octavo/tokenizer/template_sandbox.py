"""Jinja's immutable sandbox with a limit on work: templates are untrusted code, and one that loops must not hang.

Iterations of loops, calls and repeated text count as steps. Real templates take some ten steps a message.
"""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000  # half a second of empty loops
_CHARACTERS_PER_STEP = 16  # of text that is repeated, as in "-" * 40
_STEPS_PER_MACRO = 10
_MAX_POWER_BITS = 4096
_COUNTED = "counted by the sandbox"  # no template can spell this filter

_steps_left: ContextVar[list[int]] = ContextVar("_steps_left")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment are rendered by `render_limited`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_COUNTED] = _counted
        del self.globals["lipsum"]  # makes text, as much as it is asked for

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return template

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function or macro for a template."""
        _spend(_STEPS_PER_MACRO if isinstance(function, Macro) else 1)
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply, or raise to a power, for a template."""
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                    _spend(len(repeated) * max(times, 0) // _CHARACTERS_PER_STEP)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise TemplateRuntimeError(f"{operator} of numbers that large")
        return super().call_binop(context, operator, left, right)


def render_limited(template: Any, variables: dict[str, Any]) -> str:
    """Render a template of a `LimitedEnvironment`.

    Raises:
        TemplateRuntimeError: it took more than `MAX_STEPS`; besides whatever a template may raise.
    """
    token = _steps_left.set([MAX_STEPS])
    try:
        text: str = template.render(variables)
        return text
    finally:
        _steps_left.reset(token)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(1)
        yield item


def _spend(num_steps: int) -> None:
    left = _steps_left.get()
    left[0] -= num_steps
    if left[0] < 0:
        raise TemplateRuntimeError(f"it takes more than {MAX_STEPS:,} steps: it loops")
