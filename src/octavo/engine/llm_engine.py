"""`LLMEngine`: text in, text out, in whole batches or step by step."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.engine.batch_runner import BatchRunner, OwnerThread
from octavo.engine.decisions import decisions_about
from octavo.engine.front import EngineFront, ModelName, engine_args, one_per_prompt
from octavo.engine.ranking import PairScoring
from octavo.errors import InvalidParameterError
from octavo.inputs import as_prompt_list
from octavo.lora_request import LoRARequest
from octavo.metrics.collect import EngineMetrics
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams, RequestPriority, SamplingParams


class LLMEngine:
    """An engine for callers that wait. A thread of its own does all the work; callers may be in any thread.

        engine = LLMEngine("demo")
        engine.add_request("Hi", SamplingParams())
        outputs, num_tokens = engine.step()

    An exception from a signal handler, such as Ctrl-C, ends the wait of the caller in the main thread at once. The
    requests of its call are aborted before the next call begins; a step's outputs are returned by the next step.

    Options are those of `octavo.config.args.EngineArgs`. Raises UserError: about them, the model or the memory.
    """

    def __init__(self, model_name: ModelName | None = None, **options: Any) -> None:
        self._front = EngineFront(engine_args(model_name, options))
        try:
            self._runner = BatchRunner(self._front)
            self._thread = OwnerThread(self._runner)
            self._close = weakref.finalize(self, self._thread.stop)  # also when the program ends
        except BaseException:
            self._front.close()
            raise

    @property
    def front(self) -> EngineFront:
        """Configuration, tokenizer and processors. Raises RuntimeError after `exit`."""
        if not self._close.alive:
            raise RuntimeError("this engine has exited")
        return self._front

    def add_request(
        self,
        prompt: object,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = RequestPriority.NORMAL,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt (text or token ids); return its request id.

        Raises UserError: names the field, its value and the limit; nothing was queued.
        """
        make = partial(
            self._front.process,
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        return self._owner.ask(lambda call: self._runner.start_request(call, make))

    def step(self) -> tuple[list[RequestOutput], int]:
        """Run one step. Return the changed requests, each with its output so far, and the number of tokens computed."""
        return self._owner.ask(self._runner.start_step)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would return something."""
        return self._owner.run(self._runner.has_unfinished)

    def abort_request(self, request_id: str) -> None:
        """End a request; the next step returns its output with finish_reason `abort`. Unknown ids are ignored."""

        def abort(front: EngineFront = self._front) -> None:
            if (state := front.outputs.find(request_id)) is not None:
                front.client.abort(state.unfinished_core_ids())

        self._owner.run(abort)

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams | PoolingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return outputs in the order of the prompts.

        All prompts are validated before the first one starts. Calls from several threads run as one batch.

        Raises UserError: names the field, its value and the limit.
        """
        prompt_list = as_prompt_list(prompts)
        params_list = one_per_prompt(sampling_params, SamplingParams, len(prompt_list), "sampling_params")
        loras = one_per_prompt(lora_request, LoRARequest, len(prompt_list), "lora_request")
        make = [
            partial(self._front.process, prompt, params, priority=priority, cache_salt=cache_salt, lora_request=lora)
            for prompt, params, lora in zip(prompt_list, params_list, loras, strict=True)
        ]
        return self._owner.ask(lambda call: self._runner.start_batch(call, make, shows_progress=use_tqdm))

    def embed(
        self,
        prompts: object,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Return outputs with embeddings; see `LLM.embed`."""
        prompt_list = as_prompt_list(prompts)
        given = one_per_prompt(pooling_params, PoolingParams, len(prompt_list), "pooling_params")
        params_list = [params or PoolingParams() for params in given]
        return self.generate(prompt_list, params_list, priority, use_tqdm, lora_request=lora_request)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        *,
        instruction: str | None = None,
    ) -> list[float]:
        """Return the scores of pairs; see `LLM.score`."""
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (queries, documents))
        scoring = self._owner.run(lambda: PairScoring(self._front, first, second, instruction))
        return scoring.scores(self.generate(scoring.prompts, scoring.params, priority, use_tqdm))

    def decide(
        self,
        state: object,
        questions: Mapping[str, Mapping[str, object]],
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        *,
        images: Mapping[str, object] | None = None,
    ) -> dict[str, dict[str, object]]:
        """Answer typed questions about a state; see `LLM.decide`."""
        decisions = self._owner.run(lambda: decisions_about(self._front, state, questions, images))
        answers = decisions.answers(self.generate(decisions.prompts, decisions.params, priority, use_tqdm))
        return {answer.question.name: answer.as_dict for answer in answers}

    def generate_multimodal(
        self,
        requests: Sequence[Mapping[str, object]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        processor: Any = None,
        use_tqdm: bool = False,
        priority: int = RequestPriority.NORMAL,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for requests with images; see `LLM.generate_multimodal`."""
        if isinstance(requests, (str, Mapping)) or not isinstance(requests, Sequence):
            raise InvalidParameterError("requests", type(requests).__name__, "a list of requests is expected")
        multimodal = self.front.inputs.multimodal
        prompts = self._owner.run(lambda: [multimodal.of_request(request, processor) for request in requests])
        return self.generate(prompts, sampling_params, priority, use_tqdm, lora_request=lora_request)

    def chat_prompt(self, messages: Sequence[Mapping[str, object]], **template_options: Any) -> object:
        """Return a conversation as a prompt, by the model's chat template."""
        return self._owner.run(lambda: self._front.inputs.chat_prompt(messages, **template_options))

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics; still available after `exit`."""
        return self._front.outputs.metrics

    def warmup_model(self) -> None:
        """Run a prefill and a decode step without side effects, timed and logged. The constructor does so once."""
        self._owner.run(lambda: self._front.client.call("warmup_model"))

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self._owner.run(lambda: self._front.client.call("reset_prefix_cache"))

    def check_integrity(self) -> None:
        """Assert that the core has lost no KV block. For tests."""
        self._owner.run(lambda: self._front.client.call("check_integrity"))

    def exit(self) -> None:
        """Shut down the core and free its memory. Idempotent; also runs when the program ends."""
        self._close()

    @property
    def _owner(self) -> OwnerThread:
        if not self._close.alive:
            raise RuntimeError("this engine has exited")
        return self._thread
