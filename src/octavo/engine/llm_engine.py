"""`LLMEngine`: text in, text out, driven by the caller step by step."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.front import EngineFront, ModelName, engine_args, one_per_prompt
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.progress_bar import ProgressBar
from octavo.engine.request_state import RequestState
from octavo.errors import InvalidParameterError
from octavo.inputs import as_prompt_list
from octavo.lora_request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestPriority, SamplingParams


class LLMEngine:
    """An engine owned by one thread.

        engine = LLMEngine("demo")
        engine.add_request("Hi", SamplingParams())
        outputs, num_tokens = engine.step()

    Options are those of `octavo.config.args.EngineArgs`, as keyword arguments.

    Raises:
        UserError: about the options, the model or the memory.
    """

    def __init__(self, model_name: ModelName | None = None, **options: Any) -> None:
        self._front = EngineFront.open(engine_args(model_name, options))
        self._unseen: dict[str, RequestOutput] = {}  # changed while `generate` ran other requests; `step` returns them
        self._close = weakref.finalize(self, self._front.close)  # also when the program ends

    @property
    def front(self) -> EngineFront:
        """Configuration, tokenizer and processors. Raises RuntimeError after `exit`."""
        if not self._close.alive:
            raise RuntimeError("this engine has exited")
        return self._front

    def add_request(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = RequestPriority.NORMAL,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt (text or token ids); return its request id.

        Raises:
            InvalidParameterError: names the field, its value and the limit; nothing was queued.
            AdapterError: the adapter is not supported; nothing was queued.
        """
        processed = self.front.process(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=self.front.inputs.read_adapter(lora_request),
        )
        return self._start(processed).request_id

    def step(self) -> tuple[list[RequestOutput], int]:
        """Run one step. Return the changed requests, each with its output so far, and the number of tokens computed."""
        changed, num_tokens = self._step()
        unseen, self._unseen = self._unseen, {}
        return [*unseen.values(), *(state.snapshot() for state in changed)], num_tokens

    def has_unfinished_requests(self) -> bool:
        return len(self.front.outputs) > 0

    def abort_request(self, request_id: str) -> None:
        """End a request; the next step returns its output with finish_reason `abort`. Unknown ids are ignored."""
        self.front.client.abort(self.front.outputs.core_ids(request_id))

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        use_tqdm: bool = False,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return outputs in the order of the prompts.

        All prompts are validated before the first one starts.

        Raises:
            InvalidParameterError: names the field, its value and the limit.
            AdapterError: an adapter is not supported.
        """
        prompt_list = as_prompt_list(prompts)
        params_list = one_per_prompt(sampling_params, SamplingParams, len(prompt_list), "sampling_params")
        chosen = one_per_prompt(lora_request, LoRARequest, len(prompt_list), "lora_request")
        adapters = map(self.front.inputs.read_adapter, chosen)
        processed = [
            self.front.process(prompt, params, priority=priority, cache_salt=cache_salt, adapter=adapter)
            for prompt, params, adapter in zip(prompt_list, params_list, adapters, strict=True)
        ]
        states = [self._start(request) for request in processed]
        try:
            self._run_until_finished(states, ProgressBar(len(states), enabled=use_tqdm))
        finally:
            for state in states:
                if not state.is_finished:  # interrupted: abort the rest
                    self.abort_request(state.request_id)
        return [state.snapshot() for state in states]

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
        prompts = [self.front.inputs.multimodal.of_request(request, processor) for request in requests]
        return self.generate(prompts, sampling_params, priority, use_tqdm, lora_request=lora_request)

    def chat_prompt(self, messages: Sequence[Mapping[str, object]], **template_options: Any) -> object:
        """Return a conversation as a prompt, by the model's chat template."""
        return self.front.inputs.chat_prompt(messages, **template_options)

    def warmup_model(self) -> None:
        """Run a prefill and a decode step without side effects, timed and logged. The constructor does so once."""
        self.front.client.call("warmup_model")

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.front.client.call("reset_prefix_cache")

    def check_integrity(self) -> None:
        """Assert that the core has lost no KV block. For tests."""
        self.front.client.call("check_integrity")

    def exit(self) -> None:
        """Shut down the core and free its memory. Idempotent; also runs when the program ends."""
        self._close()

    def _start(self, processed: ProcessedRequest) -> RequestState:
        state = self.front.outputs.add(processed)
        self.front.client.add(processed.samples)
        return state

    def _step(self) -> tuple[list[RequestState], int]:
        """Run one step and wait for it; return at once if there is nothing to do."""
        front = self.front
        core_outputs = front.client.get_outputs(None if self.has_unfinished_requests() else 0.0)
        if core_outputs is None:
            return [], 0
        result = front.outputs.process(core_outputs)
        if result.to_abort:
            front.client.abort(result.to_abort)
        return result.changed, result.num_tokens

    def _run_until_finished(self, states: list[RequestState], progress: ProgressBar) -> None:
        ours = {state.request_id for state in states}
        num_left = len(states)
        with progress:
            while num_left:
                changed, _ = self._step()
                for state in changed:
                    if state.request_id not in ours:
                        self._unseen[state.request_id] = state.snapshot()
                    elif state.is_finished:
                        num_left -= 1
                        progress.finish_one(state.num_prompt_tokens, state.num_output_tokens, state.num_images)
