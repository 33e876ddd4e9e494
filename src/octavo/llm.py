"""`LLM`: offline batches. The engine core runs in the caller's process, on the engine's own thread."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from octavo.engine.front import ModelName
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import InvalidParameterError
from octavo.inputs import ChatMessage, Prompt
from octavo.lora_request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams, RequestPriority, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer


class LLM:
    """A loaded language model for offline use.

        llm = LLM("Qwen/Qwen3-0.6B")            # Hub id, checkpoint folder, or nothing: the demo model
        llm.generate("Hello, world!")[0].text

    Keyword options are those of `octavo.config.args.EngineArgs` (`dtype`, `max_model_len`, ...).
    Any thread may call it; calls of several threads run as one batch. An exception from a signal handler, such as
    Ctrl-C, ends a call at once: its requests are aborted, and the next call is not affected.

    Raises UserError: an invalid option, or a model that is missing, broken, unsupported or too large.
    """

    def __init__(self, model_name: ModelName | None = None, **options: Any) -> None:
        self.engine = LLMEngine(model_name, **options)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.engine.front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without `SamplingParams`: the checkpoint's own defaults, if it has any."""
        return self.engine.front.inputs.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; always returns a list, in the order of the prompts.

        `sampling_params` is one object for all prompts, or a list with one for each. So is `lora_request`; None is the
        base model. All prompts run as one batch, as far as memory allows.

        Raises UserError: names the field, its value and the limit; in this case no prompt was started.
        """
        return self.engine.generate(prompts, sampling_params, priority, use_tqdm, lora_request=lora_request)

    def generate_single(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Complete one prompt and return its output."""
        return self.engine.generate([prompt], sampling_params, priority, lora_request=lora_request)[0]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Reply to one conversation or many. Without `sampling_params`, `max_tokens` is the rest of the context.

        A conversation is a list of `{"role": ..., "content": ...}`; content may have images, see `generate_multimodal`.
        `template_options` are passed to the chat template (`tools`, `enable_thinking`, `add_generation_prompt`, ...).

        Raises InvalidParameterError: malformed messages, or a model without a chat template.
        """
        prompts = [self.engine.chat_prompt(chat, **template_options) for chat in as_conversations(messages)]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params().replace(max_tokens=None)
        return self.engine.generate(prompts, sampling_params, priority, use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per prompt, whose `embedding` is one vector, made as the model's files say it.

        Without such files it is the hidden state of the prompt's last token, of length 1: models that were not trained
        for that give vectors of less use.

        Raises InvalidParameterError: names the field, its value and the limit; in this case no prompt was started.
        """
        return self.engine.embed(prompts, pooling_params, priority, use_tqdm, lora_request)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = True,
        *,
        instruction: str | None = None,
    ) -> list[float]:
        """Return how well documents fit one query, or each its own: a reranker's probability, an embedder's cosine.

        `instruction` says what fits, for models that read one.

        Raises InvalidParameterError: names the text, its value and the limit; in this case no pair was started.
        """
        return self.engine.score(queries, documents, priority, use_tqdm, instruction=instruction)

    def decide(
        self,
        state: object,
        questions: Mapping[str, Mapping[str, object]],
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        *,
        images: Mapping[str, object] | None = None,
    ) -> dict[str, dict[str, object]]:
        """Answer typed questions about a state, a text or what JSON has, by probabilities; no text is written.

        Questions have names, and are of three types: `{"type": "noul", "instructions": "Is it spam?"}`, yes or no;
        `{"type": "choice", "criteria": {"calm": "a description", "angry": None}, ...}`, and
        `{"type": "score", "criteria": ["can wait", "today"], ...}`, levels, the lowest first. Answers are as those of
        the route /v1/systemone: `noul` has the probability of true, the others all `probabilities`. Models that see
        take `images`, as `generate_multimodal` does, each by the placeholder that stands for it in any text of state
        and questions.

        Raises InvalidParameterError: names every question at fault, or an image that cannot be read or has no place.
        """
        return self.engine.decide(state, questions, priority, use_tqdm, images=images)

    def generate_multimodal(
        self,
        requests: Sequence[Mapping[str, object]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        processor: Any = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for requests with images, in the order of the requests, all as one batch.

        A request is `{"messages": [...]}`, as `chat` takes them, or `{"prompt": ..., "images": [...], "videos": [...]}`
        with a placeholder in the text for each. An image is a PIL image, an array [height, width, 3] of uint8, a file,
        or a `data:` URL; in messages it is a part `{"type": "image", "image": ...}`, or `image_url` as in the OpenAI
        API. `processor` may be one of transformers' processors, to use it instead of our own.

        Raises InvalidParameterError: a malformed request, an unreadable image, images that do not match the
        placeholders, or a model that takes text only. In this case no request was started.
        """
        return self.engine.generate_multimodal(
            requests, sampling_params, processor, use_tqdm, lora_request=lora_request
        )

    def exit(self) -> None:
        """Release the model and its memory. Idempotent; also runs at interpreter exit."""
        self.engine.exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()


def as_conversations(messages: object) -> list[Sequence[Mapping[str, object]]]:
    """Return a list of conversations; one conversation becomes a list of one.

    Raises InvalidParameterError: it is neither.
    """
    if isinstance(messages, Sequence) and messages and not isinstance(messages, (str, bytes)):
        if all(isinstance(message, Mapping) for message in messages):
            return [messages]
        if all(isinstance(chat, Sequence) and not isinstance(chat, (str, bytes)) for chat in messages):
            return list(messages)
    raise InvalidParameterError("messages", messages, "a non-empty list of messages, or a list of such lists")
