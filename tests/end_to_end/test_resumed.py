"""A request that comes with output it already has goes on as if it had never stopped: same tokens, same end."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import EngineCoreRequest, FinishedRequest, TokenLogprobs
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.executor.base import make_executor
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput
from octavo.tokenizer.tokenizer import Tokenizer

Outcome = tuple[list[int], list[TokenLogprobs], FinishedRequest]


class Engine:
    """A core, and the input processor that makes its requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, make_executor(config))
        self.inputs = InputProcessor(config, Tokenizer.from_path(config.tokenizer_path))

    def request(self, prompt: object, params: SamplingParams) -> EngineCoreRequest:
        return self.inputs.process(prompt, params, request_id="a").samples[0]

    def outcomes(self, requests: list[EngineCoreRequest]) -> list[Outcome]:
        """Return what is new of each request: output from its first index on, and how it ended."""
        found: dict[str, Outcome] = {}
        for request in requests:
            self.core.add_request(request)
        while self.core.has_work():
            outputs = self.core.step()
            start = 0
            for name, count, first in zip(outputs.req_ids, outputs.num_new_tokens, outputs.first_indices, strict=True):
                [request] = [each for each in requests if each.request_id == name]
                tokens, logprobs, _ = found.setdefault(name, ([], [], FinishedRequest(finish_reason="")))
                assert first == len(request.resumed_token_ids) + len(tokens)
                tokens += outputs.new_token_ids[start : start + count]
                logprobs += outputs.logprobs.get(name, [])
                start += count
            for name, report in outputs.finished.items():
                ended = msgspec.structs.replace(report, num_drafts=0, num_accepted_drafts=0)  # they come as they will
                found[name] = (*found[name][:2], ended)
        self.core.check_integrity()
        return [found[request.request_id] for request in requests]

    def check_resumed(self, requests: list[EngineCoreRequest]) -> None:
        """Assert that each request gives the same from wherever it goes on, all at once and in one batch."""
        whole = self.outcomes(requests)
        resumed, expected = [], []
        for request, (tokens, logprobs, report) in zip(requests, whole, strict=True):
            for at in sorted({1, len(tokens) // 2, len(tokens) - 1} - {0}):
                name = f"{request.request_id} from {at}"
                resumed.append(msgspec.structs.replace(request, request_id=name, resumed_token_ids=tokens[:at]))
                expected.append((tokens[at:], logprobs[at:], report))
        assert self.outcomes(resumed) == expected


@pytest.fixture(params=["qwen3-mixed-windows", "demo with drafts", *pick([], ["demo", "qwen2-moe-windows"])])
def engine(request: pytest.FixtureRequest, checkpoint: GetCheckpoint) -> Iterator[Engine]:
    name, _, with_drafts = request.param.partition(" with ")
    model = name if name == "demo" else str(checkpoint(name).folder)
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "tokenizer": "demo"}
    if with_drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    args = EngineArgs.from_options(
        {"model_name": model, "dtype": "float32", "block_size": BLOCK_SIZE, "num_kv_blocks": 512, **options}
    )
    engine = Engine(args.resolve())
    yield engine
    engine.core.close()
    engine.inputs.close()


def test_every_way_of_sampling_goes_on(engine: Engine) -> None:
    single = [(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True) if params.n == 1]
    engine.check_resumed([engine.request(prompt, params) for prompt, params in single])


def test_a_grammar_goes_on(engine: Engine) -> None:
    constraints = [StructuredOutput(regex="(ab|ba)+[0-9]{4}"), StructuredOutput(choice=["a cat", "a canary", "no"])]
    params = [SamplingParams(seed=7, max_tokens=20, structured_output=constraint) for constraint in constraints]
    engine.check_resumed([engine.request(PROMPTS[3], each) for each in params])
