"""Flags derived from definitions: engine flags from the fields of `EngineArgs`, and so on.

A command requests them with parameters annotated `EngineOptions`, `ServerOptions` and `SamplingOptions` (or
`AnswerOptions`, without options that a conversation cannot show), and receives dicts of what was given on the command
line and nothing else, so defaults are defined in one place; `RequestOptions` are a part of the server's. Of a dataclass
of `option`s it receives an instance.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, NewType, get_args, get_origin

import typer

from octavo.config.args import EngineArgs
from octavo.sampling_params import SamplingParams
from octavo.server.args import ServerArgs

# Plain help without panels: panels truncate long flag names on terminals of normal width.
TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

EngineOptions = NewType("EngineOptions", dict[str, Any])
ServerOptions = NewType("ServerOptions", dict[str, Any])
RequestOptions = NewType("RequestOptions", dict[str, Any])  # of the server's: what requests may ask for
SamplingOptions = NewType("SamplingOptions", dict[str, Any])
AnswerOptions = NewType("AnswerOptions", dict[str, Any])

# The sampling parameters that make sense as flags, with their help.
SAMPLING_HELP = {
    "n": "samples per prompt",
    "max_tokens": "maximum tokens to generate",
    "min_tokens": "minimum tokens to generate",
    "temperature": "sampling temperature; 0 is greedy",
    "top_p": "sample from the most likely tokens with this total probability",
    "top_k": "sample from this many most likely tokens",
    "min_p": "minimum probability, relative to the most likely token",
    "presence_penalty": "penalty on tokens that have occurred in the output",
    "frequency_penalty": "penalty on tokens for each occurrence in the output",
    "repetition_penalty": "penalty factor on tokens that have occurred; above 1 discourages repetition",
    "stop": "stop at this text (repeatable)",
    "ignore_eos": "continue after the model's EOS token",
    "logprobs": "number of top logprobs to report in JSON",
    "seed": "seed for sampling; prompts that share one share their random numbers",
}
_DEFINITIONS: dict[Any, Any] = {EngineOptions: EngineArgs, ServerOptions: ServerArgs, RequestOptions: ServerArgs}
_ONLY: dict[Any, frozenset[str]] = {
    RequestOptions: frozenset(
        {
            *("served_model_name", "tool_call_parser", "reasoning_parser", "lora_modules"),
            *("max_n", "max_temperature", "max_prompts", "max_images", "max_image_bytes", "max_image_pixels"),
            *("max_videos", "max_video_bytes", "allow_remote_media", "media_timeout_s"),
        }
    )
}
_SAMPLING_FIELDS = {
    SamplingOptions: frozenset(SAMPLING_HELP),
    AnswerOptions: frozenset(SAMPLING_HELP) - {"n", "logprobs"},
}


def with_derived_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters that stand for a group of options by one flag per option.

    If a sampling parameter and an engine option have the same name, the engine's flag is `--engine-...`.
    """
    parameters = inspect.signature(command).parameters
    kinds = {
        name: p.annotation
        for name, p in parameters.items()
        if p.annotation in _DEFINITIONS or p.annotation in _SAMPLING_FIELDS or is_dataclass(p.annotation)
    }
    taken = {field for kind in kinds.values() for field in _SAMPLING_FIELDS.get(kind, ())}
    groups = {
        name: _sampling_flags(_SAMPLING_FIELDS[kind])
        if kind in _SAMPLING_FIELDS
        else _defined_flags(name, _DEFINITIONS.get(kind, kind), taken, _ONLY.get(kind))
        for name, kind in kinds.items()
    }

    @wraps(command)
    def run(**values: Any) -> None:
        for name, flags in groups.items():
            given = {field: values.pop(flag.name) for field, flag in flags.items()}
            chosen = {field: value for field, value in given.items() if value not in (None, [])}
            if is_dataclass(kinds[name]):
                chosen = {field: tuple(v) if isinstance(v, list) else v for field, v in chosen.items()}
                values[name] = kinds[name](**chosen)
            else:
                values[name] = chosen
        command(**values)

    derived = [flag for flags in groups.values() for flag in flags.values()]
    signature = inspect.Signature([*(p for name, p in parameters.items() if name not in groups), *derived])
    run.__signature__ = signature  # type: ignore[attr-defined]  # read by typer
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return run


def _defined_flags(
    group: str, definition: Any, taken: set[str], only: frozenset[str] | None
) -> dict[str, inspect.Parameter]:
    """Return a parameter for every field of a dataclass of options, or for some, by field name."""
    flags = {}
    for spec in fields(definition):
        if only is not None and spec.name not in only:
            continue
        name = "model" if spec.name == "model_name" else f"{group}_{spec.name}" if spec.name in taken else spec.name
        is_list = get_origin(spec.type) is tuple
        help_text = f"{spec.metadata['help']} (repeatable)" if is_list else spec.metadata["help"]
        default = None if spec.default in ((), "") else spec.default
        kind = list[str] if is_list else str if str in get_args(spec.type) else spec.type  # a mapping is given as JSON
        flags[spec.name] = _flag(group, name, kind, help_text, default, spec.metadata["also"])
    return flags


def _sampling_flags(names: Collection[str]) -> dict[str, inspect.Parameter]:
    """Return a parameter for each of these fields of `SamplingParams`, by field name."""
    kinds = {spec.name: list[str] if spec.name == "stop" else spec.type for spec in fields(SamplingParams)}
    return {
        name: _flag("sampling", name, kind, SAMPLING_HELP[name], None) for name, kind in kinds.items() if name in names
    }


def _flag(
    group: str, name: str, kind: Any, help_text: str, default: object, also: str | None = None
) -> inspect.Parameter:
    spelling = f"--{name.replace('_', '-')}"
    is_switch = bool in (kind, *get_args(kind))
    if is_switch:
        spelling += f"/--no-{name.replace('_', '-')}"
    if default is not None:
        help_text += f" [default: {str(default).lower() if is_switch else default}]"
    metavar = "<str>" if kind == list[str] else None
    spellings = [spelling] if also is None else [spelling, f"--{also}"]
    option = typer.Option(*spellings, help=help_text, show_default=False, metavar=metavar)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(f"{group}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
