"""`EngineFront`: the frontend, everything around the core that `LLMEngine` and `AsyncLLMEngine` share."""

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from octavo.config.args import DEFAULT_MODEL, EngineArgs
from octavo.config.model import ModelConfig
from octavo.config.speculative import DraftModelConfig
from octavo.device.process import without_garbage_collection
from octavo.engine.core_client import make_client
from octavo.engine.input_processor import InputProcessor, ProcessedRequest
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.errors import InvalidParameterError
from octavo.metrics.collect import EngineMetrics
from octavo.sampling_params import PoolingParams, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineFront:
    """The frontend of one engine, loaded and warmed up."""

    def __init__(self, args: EngineArgs, on_stage: Callable[[str], None] = logger.debug) -> None:
        """Find the model, read the tokenizer, load the weights, warm up; `on_stage` is called with the next stage.

        Raises UserError: about the options, the model or the memory.
        """
        on_stage("finding the model's files (1 of 3)")
        self.config = config = args.resolve()
        on_stage("reading the weights (2 of 3)")
        self.client = make_client(config, own_process=bool(args.engine_process))
        try:
            self.tokenizer = read_tokenizer(config.tokenizer_path, args.chat_template)  # while the core process loads
            if config.draft_model is not None and config.draft_model.mtp is None:  # which has no tokenizer of its own
                check_draft_tokenizer(config.draft_model, config.model, self.tokenizer)
            with without_garbage_collection():
                self.core = self.client.load()
            on_stage("warming up (3 of 3)")
            self.client.call("warmup_model")
            max_loras = None if config.lora is None else config.lora.max_loras
            cache_info = {field.name: str(getattr(config.cache, field.name)) for field in fields(config.cache)}
            metrics = EngineMetrics(args.stats_interval_s, cache_info, max_loras)
            self.inputs, self.outputs = InputProcessor(config, self.tokenizer), OutputProcessor(self.tokenizer, metrics)
            self._request_numbers = itertools.count()
        except BaseException:
            self.client.close()
            raise

    def process(
        self,
        prompt: object,
        params: SamplingParams | PoolingParams | None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> ProcessedRequest:
        """Validate one prompt; nothing is started. Options and errors as `InputProcessor.process`."""
        if request_id is None:
            names = (f"request-{number}" for number in self._request_numbers)
            request_id = next(name for name in names if name not in self.outputs)
        if not isinstance(request_id, str):
            raise InvalidParameterError("request_id", request_id, "a string, or None")
        self.outputs.check_free(request_id)
        return self.inputs.process(prompt, params, request_id=request_id, **options)

    def start(self, processed: ProcessedRequest) -> RequestState:
        """Hand a request to the core. If that fails, whatever the reason, nothing of it is left."""
        state = self.outputs.add(processed)
        try:
            self.client.add(processed.samples)
        except BaseException:
            self.outputs.withdraw(state)
            raise
        return state

    def close(self) -> None:
        """Shut down the core, which frees its memory, and the helper processes of the input processor."""
        self.client.close()
        self.inputs.close()


def check_draft_tokenizer(draft: DraftModelConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise InvalidParameterError unless ids that both the draft model's tokenizer and the model's have are one text.

    One of them may have more tokens: vocabularies of one family are padded in different ways. A checkpoint without a
    tokenizer must have a vocabulary of the same size.
    """

    def error(limit: str) -> InvalidParameterError:
        return InvalidParameterError("speculative_config", {"model": draft.model.model}, limit)

    path = Path(draft.tokenizer_path)
    if not (path.is_file() or (path / "tokenizer.json").is_file()):
        if draft.model.vocab_size != model.vocab_size:
            sizes = f"{draft.model.vocab_size} tokens, but {model.model} has {model.vocab_size}"
            raise error(f"it has no tokenizer, and a vocabulary of {sizes}")
        return
    theirs, ours = (
        {id_: text for text, id_ in each.vocabulary.items()} for each in (Tokenizer.from_path(path), tokenizer)
    )
    if different := sorted(id_ for id_ in theirs.keys() & ours.keys() if theirs[id_] != ours[id_]):
        at = different[0]
        what = f"{len(different)} tokens differ; id {at} is {theirs[at]!r}, and {ours[at]!r} for {model.model}"
        raise error(f"not the same tokenizer: {what}")


def read_tokenizer(path: str, chat_template: str | None) -> Tokenizer:
    """Return a model's tokenizer; `chat_template` names a file that overrides its template. Raises UserError."""
    tokenizer = Tokenizer.from_path(path)
    if chat_template is None:
        return tokenizer
    try:
        return tokenizer.with_chat_template(Path(chat_template).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("chat_template", chat_template, f"cannot be read: {error}") from error


ModelName = str | os.PathLike[str]
ValueT = TypeVar("ValueT")


def engine_args(model_name: ModelName | None, options: Mapping[str, Any]) -> EngineArgs:
    """Return an engine's options. Without a model name, uses the bundled model and logs it."""
    if model_name is None:
        logger.info("no model given: using the bundled model %r", DEFAULT_MODEL)
        model_name = DEFAULT_MODEL
    return EngineArgs.from_options({"model_name": os.fspath(model_name), **options})


def one_per_prompt(given: object, kind: type[ValueT], num_prompts: int, name: str) -> list[ValueT | None]:
    """Return the value of option `name` for each prompt: given is one for all, None, or a list with one for each."""
    if given is None or isinstance(given, kind):
        return [given] * num_prompts
    if isinstance(given, (list, tuple)):
        if len(given) != num_prompts:
            limit = f"one {kind.__name__}, or as many as there are prompts ({num_prompts})"
            raise InvalidParameterError(name, f"a list of {len(given)}", limit)
        return list(given)
    raise InvalidParameterError(name, given, f"a {kind.__name__}, a list of them, or None")
