"""Converts user input to `EngineCoreRequest`s. All validation ends here: past it, a request is valid and fits."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AdapterRef, EngineCoreRequest, ExtraInputs, PoolingTask
from octavo.engine.pooling_rules import PoolingRules
from octavo.engine.stop_strings import StopFinder
from octavo.errors import InvalidParameterError
from octavo.inputs import TokensPrompt, parse_prompt
from octavo.lora.files import AdapterFiles
from octavo.lora_request import LoRARequest
from octavo.multimodal.media import has_images
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.multimodal.processor import MultiModalProcessor
from octavo.sampling_params import NO_SAMPLING, PoolingParams, RequestPriority, SamplingParams, derive_seed, draw_seed
from octavo.structured.checker import StructuredOutputChecker
from octavo.structured_output import StructuredOutput
from octavo.tokenizer.tokenizer import ContextLimit, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRequest:
    """One prompt, ready for the core: `n` samples of it, each a request of its own.

    The samples' ids are the engine's own: the user's name for the request never reaches the core.
    """

    request_id: str  # the user's name for it; may be used again when the request has ended
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[EngineCoreRequest]
    pooling: PoolingParams | None = None  # the answer is a vector
    new_stop_finder: Callable[[], StopFinder] | None = None  # one for each sample; None: all of the text is searched


class InputProcessor:
    """Tokenizes, applies defaults, validates. What it has counted, seeds and samples, is state; the rest are caches."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.default_params = SamplingParams()
        if config.use_generation_config:  # the checkpoint's own
            given = asdict(config.model.generation).items()
            self.default_params = SamplingParams.from_options({name: one for name, one in given if one is not None})
        self._tokenizer = tokenizer
        self._vocab_size, self._has_head = config.model.vocab_size, config.model.has_head
        self._model_name = config.model.model
        self.pooling_rules, self._is_encoder = PoolingRules(config.model), config.model.encoder is not None
        self._first_range = config.model.first_rotary_range
        self.limit = ContextLimit(tokenizer, config.model.max_model_len, has_output=config.model.encoder is None)
        self._eos_token_ids = list(tokenizer.files.end_token_ids(config.model.eos_token_ids, config.model.vocab_size))
        self._engine_seed = config.seed
        self._core_ids = itertools.count()  # never used twice, so a late message about a sample meets no other
        self._seed_numbers = itertools.count(1)  # counts correctly in several threads
        self._last_bad_words: tuple[Sequence[str], list[list[int]]] = (), []
        self._constraints = StructuredOutputChecker()
        self._multimodal: MultiModalProcessor | None = None
        if (vision := config.model.vision) is not None:
            num_encoded = config.scheduler.encoder_cache_tokens
            self._multimodal = MultiModalProcessor(config.model.path, vision, self.limit, num_encoded)
        self._adapters = None if config.lora is None else AdapterFiles(config.lora)

    def process(
        self,
        prompt: object,
        params: SamplingParams | PoolingParams | None,
        *,
        request_id: str,
        priority: int = RequestPriority.NORMAL,
        cache_salt: str | None = None,
        lora_request: LoRARequest | AdapterRef | None = None,
    ) -> ProcessedRequest:
        """Return the prompt as requests for the core. Reads the files of a `LoRARequest` that has changed.

        Raises:
            PromptTooLongError: prompt, or prompt and `min_tokens`, exceed the model's context.
            InvalidParameterError: any other error; names the field, its value and the limit.
            AdapterError, CheckpointError: `lora_request` names no adapter that is supported.
        """
        adapter = self.read_lora(lora_request) if isinstance(lora_request, LoRARequest) else lora_request
        if not (adapter is None or isinstance(adapter, AdapterRef)):
            raise InvalidParameterError("lora_request", lora_request, "a LoRARequest, or None for the base model")
        pooling, task = None, PoolingTask()
        if isinstance(params, PoolingParams):
            pooling, task = self.pooling_rules.resolve(params)
            params = NO_SAMPLING
        elif not self._has_head:
            raise InvalidParameterError("model", self._model_name, "it makes vectors, and writes no text")
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError("sampling_params", params, "must be SamplingParams")
        text, token_ids = self._tokenize(prompt, is_pooled=pooling is not None)
        if not token_ids:
            raise InvalidParameterError("prompt", "", "at least one token")
        self.limit.check(len(token_ids), params.min_tokens)
        self._check_prompt_ids(token_ids, "prompt_token_ids" if text is None else "prompt")
        for token_id in task.token_ids:
            self._check_token_id("label_token_ids", token_id)
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, field) or ():
                self._check_token_id(field, token_id)
        if params.structured_output is not None:
            self.check_structured_output(params.structured_output)
        params, seed = self._complete(params, len(token_ids))
        bad_words = self._bad_words(params)
        num_answered = params.max_tokens or 0 if pooling is None else 0
        extra_inputs = self._extra_inputs(prompt, len(token_ids), num_answered)
        samples = [
            EngineCoreRequest(
                request_id=str(next(self._core_ids)),
                prompt_token_ids=token_ids,
                sampling_params=params.for_sample(derive_seed(seed, index)) if pooling is None else None,
                pooling=task,
                priority=_check_priority(priority),
                arrival_time_s=time.time(),
                eos_token_ids=self._eos_token_ids,
                bad_words_token_ids=bad_words,
                cache_salt=_check_cache_salt(cache_salt),
                extra_inputs=extra_inputs,
                adapter=adapter,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            samples=samples,
            pooling=pooling,
        )

    def read_lora(self, request: LoRARequest) -> AdapterRef:
        """Return the adapter that a request names. Reads its files; callable from any thread. Raises as `process`."""
        if self._adapters is None:
            raise InvalidParameterError("lora_request", request.name, "requires an engine with enable_lora")
        return self._adapters.read(request)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, object]], has_to_fit: bool = True, /, **template_options: object
    ) -> TokensPrompt | MultiModalPrompt:
        """Render a conversation with the model's chat template; return a token prompt, or one with images.

        Raises:
            InvalidParameterError: malformed messages, a model without a template, or images that it cannot take.
            PromptTooLongError: it has to fit, and is much longer than the model's context.
        """
        if has_images(messages):
            return self.multimodal.of_request({"messages": messages}, **template_options)
        text = self._tokenizer.render_chat(messages, **template_options)
        if has_to_fit:
            self.limit.check_text(text)
        return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}  # the template writes them

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images, and videos if it says so."""
        return self._multimodal is not None

    @property
    def multimodal(self) -> MultiModalProcessor:
        """The processor of requests with images. Raises InvalidParameterError if the model takes text only."""
        if self._multimodal is None:
            raise InvalidParameterError("images", "an image", "this model takes text only")
        return self._multimodal

    def check_structured_output(self, constraint: StructuredOutput) -> None:
        """Validate a constraint. May take seconds; callable from any thread. `process` reuses the result.

        Raises UserError: with the location of the error, or if it takes too long.
        """
        self._constraints.check(constraint)

    def close(self) -> None:
        """Stop the process that validates constraints."""
        self._constraints.close()

    def _tokenize(self, prompt: object, *, is_pooled: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, MultiModalPrompt):
            return prompt.text, prompt.token_ids
        parsed = parse_prompt(prompt)
        if isinstance(parsed, str):
            self.limit.check_text(parsed)
            return parsed, self._tokenizer.encode(self.pooling_rules.prompt + parsed if is_pooled else parsed)
        return None, parsed

    def _extra_inputs(self, prompt: object, num_tokens: int, num_answered: int) -> ExtraInputs | None:
        extra = prompt.extra_inputs if isinstance(prompt, MultiModalPrompt) else None
        if num_tokens + num_answered <= self._first_range:
            return msgspec.structs.replace(extra or ExtraInputs(), has_short_angles=True)
        if not self._is_encoder:
            return extra
        return msgspec.structs.replace(extra or ExtraInputs(), whole_spans=[(0, num_tokens)])  # each token sees all

    def _check_prompt_ids(self, token_ids: list[int], field: str) -> None:
        """Refuse ids without a row of the embedding, whatever they come from.

        A tokenizer may have more tokens than its model, such as a [PAD] that was added without resizing the table.
        """
        if min(token_ids) >= 0 and max(token_ids) < self._vocab_size:
            return
        token_id = next(each for each in token_ids if not 0 <= each < self._vocab_size)
        text = self._tokenizer.token_text(token_id) if 0 <= token_id < self._tokenizer.vocab_size else ""
        self._check_token_id(field, token_id, text)

    def _check_token_id(self, field: str, token_id: int, text: str = "") -> None:
        if not 0 <= token_id < self._vocab_size:
            limit = f"token ids of this model are 0 to {self._vocab_size - 1}"
            only = f"; {text!r} is a token of the tokenizer only" if text else ""
            raise InvalidParameterError(field, token_id, limit + only)

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> tuple[SamplingParams, int]:
        """Fill in what the user left unset: the context length as the limit, and a seed, which is also returned."""
        room = self.limit.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if (seed := params.seed) is None:
            of_engine = self._engine_seed
            seed = draw_seed() if of_engine is None else derive_seed(of_engine, next(self._seed_numbers))
        return params.replace(max_tokens=max_tokens, seed=seed), seed

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token sequences that spell each word, at the start of a text and after a space."""
        if not params.bad_words:
            return []
        words, token_ids = self._last_bad_words
        if words != params.bad_words:
            spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
            encoded = self._tokenizer.encode_all(spellings, "bad_words")
            token_ids = [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]
            self._last_bad_words = params.bad_words, token_ids  # often the same for many prompts
        return token_ids


def _check_priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in list(RequestPriority):
        known = ", ".join(f"{level.name} ({level.value})" for level in RequestPriority)
        raise InvalidParameterError("priority", priority, f"one of {known}")
    return int(priority)


def _check_cache_salt(cache_salt: object) -> str | None:
    if cache_salt is None:
        return None
    if not isinstance(cache_salt, str):
        raise InvalidParameterError("cache_salt", cache_salt, "a string, or None")
    try:
        cache_salt.encode()
    except UnicodeEncodeError:
        limit = "must be valid Unicode text (no lone surrogates)"
        raise InvalidParameterError("cache_salt", cache_salt, limit) from None
    return cache_salt
