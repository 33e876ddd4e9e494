"""Constrained answers of whole engines. Random weights are the hard test: only the masks hold them to a constraint."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answers
from tests.structured.support import SCHEMAS, is_valid, parse

from octavo import LLM, AsyncLLM, StructuralTag, StructuredOutput
from octavo.demo import demo_model_path
from octavo.errors import InvalidParameterError, UserError
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams
from octavo.structured.llguidance_backend import LLGuidanceBackend

PROMPT = "Tell me about Rome."
CONSTRAINTS = [StructuredOutput(json_schema=schema) for schema in SCHEMAS.values()]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 3.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 4},
    {"repetition_penalty": 1.3, "min_p": 0.05},
]
MODELS: dict[str, dict[str, Any]] = {"demo": {}, "random": {"load_format": "dummy"}}
# Over the limits only once it is compiled for the model's tokens.
TOO_COMPLEX = StructuredOutput(json_schema={"type": "integer", "multipleOf": 999_999_999})
# A minute of work for the library, and nothing that its own limits see.
SLOW = StructuredOutput(json_schema={"patternProperties": {f"^a{index}[a-z]*$": {} for index in range(1000)}})


@pytest.fixture(scope="module", params=pick(["random"], MODELS))
def llm(request: pytest.FixtureRequest, checkpoint: GetCheckpoint) -> Iterator[LLM]:
    """The demo model, trained and with random weights."""
    with open_model(checkpoint, request.param) as made:
        yield made
        made.engine.check_integrity()


@pytest.fixture(scope="module")
def trained(checkpoint: GetCheckpoint) -> Iterator[LLM]:
    with open_model(checkpoint, "demo") as made:
        yield made
        made.engine.check_integrity()


def open_model(checkpoint: GetCheckpoint, name: str, **options: Any) -> LLM:
    return open_llm(checkpoint, "demo", **{"max_model_len": 512, **MODELS[name], **options})


def ask(llm: LLM, constraint: StructuredOutput, **options: Any) -> CompletionOutput:
    params = SamplingParams.from_options({"max_tokens": 300, "seed": 1, "structured_output": constraint, **options})
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]


def mixed_params() -> list[SamplingParams]:
    """Constraints and ways of sampling in one batch, some without a constraint."""
    constraints = [
        *CONSTRAINTS,
        None,
        StructuredOutput(choice=["yes", "no", "perhaps"]),
        StructuredOutput(regex="[a-f]{2,9}!"),
    ]
    return [
        SamplingParams.from_options(
            {
                "seed": index,
                "max_tokens": pick(48, 300) if constraint else 20,
                "structured_output": constraint,
                "logprobs": 2,
                **way,
            }
        )
        for index, (constraint, way) in enumerate((constraint, way) for constraint in constraints for way in WAYS[:4])
    ]


def test_every_answer_matches_its_constraint(llm: LLM) -> None:
    params = [
        SamplingParams.from_options({"seed": seed, "max_tokens": 400, "structured_output": constraint, **way})
        for constraint in CONSTRAINTS
        for way in WAYS[:: pick(2, 1)]
        for seed in range(pick(1, 3))
    ]
    for output, asked in zip(llm.generate([PROMPT] * len(params), params, use_tqdm=False), params, strict=True):
        answer = output.outputs[0]
        assert asked.structured_output is not None
        assert answer.finish_reason == "stop", answer
        assert is_valid(parse(answer.text), parse(str(asked.structured_output.json_schema))), answer.text


def test_patterns_choices_and_grammars(llm: LLM) -> None:
    pattern, choices = "[a-c]{2,5}-[0-9]{3}", ["one", "two", "two and a half"]
    for seed in range(pick(2, 6)):
        assert re.fullmatch(pattern, ask(llm, StructuredOutput(regex=pattern), seed=seed).text)
        assert ask(llm, StructuredOutput(choice=choices), seed=seed).text in choices
        for grammar in ('start: "(" /[0-9]{1,2}/ ")"', 'root ::= "(" [0-9] [0-9]? ")"'):
            assert re.fullmatch(r"\([0-9]{1,2}\)", ask(llm, StructuredOutput(grammar=grammar), seed=seed).text)


def test_tool_calls(llm: LLM) -> None:
    tag = StructuralTag(
        begin='<tool_call>\n{"name": "look", "arguments": ',
        json_schema=SCHEMAS["tree"],
        end="}\n</tool_call>",
        trigger="<tool_call>",
    )
    constraint = StructuredOutput(tags=[tag], free_text=False, min_tags=1, max_tags=2, separator="\n")
    for seed in range(pick(2, 3)):
        answer = ask(llm, constraint, seed=seed, skip_special_tokens=False, temperature=2.0, max_tokens=400)
        calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer.text, re.DOTALL)
        assert 1 <= len(calls) <= 2
        for call in calls:
            assert parse(call)["name"] == "look"
            assert is_valid(parse(call)["arguments"], SCHEMAS["tree"])


def test_alone_and_in_a_batch(checkpoint: GetCheckpoint) -> None:
    params = mixed_params()[:: pick(5, 1)]  # all constraints and ways, not each by each
    with open_model(checkpoint, "random", enable_prefix_caching=False) as llm:
        alone = [answers(llm.generate(PROMPT, one, use_tqdm=False))[0] for one in params]
        together = answers(llm.generate([PROMPT] * len(params), params, use_tqdm=False))
    assert together == alone
    memory = pick({"max_model_len": 96, "num_kv_blocks": 25}, {"max_model_len": 240, "num_kv_blocks": 61})
    options = {**memory, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with open_model(checkpoint, "random", **options) as llm:  # chunked, cached, preempted
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert answers(outputs) == alone
    assert any(output.metrics.num_preemptions for output in outputs)
    assert any(output.metrics.num_cached_tokens for output in outputs)


def test_the_tokenizer_option_decides_which_tokens_fit(tmp_path: Path) -> None:
    """A model folder whose own tokenizer has digits and letters swapped, or that has none at all."""
    digits = StructuredOutput(regex="[0-9]{8}")
    with LLM("demo", dtype="float32") as llm:
        expected = ask(llm, digits, temperature=3.0).text
    tokenizer_file = tmp_path / "tokenizer.json"
    for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(demo_model_path() / file, tmp_path / file)
    tokenizer = json.loads(tokenizer_file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for digit, letter in zip("0123456789", "abcdefghij", strict=True):
        vocab[digit], vocab[letter] = vocab[letter], vocab[digit]
    tokenizer_file.write_text(json.dumps(tokenizer))
    for own_tokenizer in (True, False):
        if not own_tokenizer:
            tokenizer_file.unlink()
        with LLM(str(tmp_path), tokenizer="demo", dtype="float32") as llm:
            answer = ask(llm, digits, temperature=3.0)
        assert (answer.text, answer.finish_reason) == (expected, "stop")
        assert re.fullmatch("[0-9]{8}", answer.text)


@pytest.mark.full  # by default servers of tests/server have their engines in processes
async def test_in_a_process_of_its_own() -> None:
    params = SamplingParams(structured_output=CONSTRAINTS[0], max_tokens=300, seed=5)
    with LLM("demo", dtype="float32") as llm:
        expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    async with AsyncLLM("demo", dtype="float32") as engine:
        assert (await engine.generate(PROMPT, params)).outputs[0].text == expected
        with pytest.raises(InvalidParameterError, match=r"at \$: Invalid type"):
            await engine.generate(PROMPT, SamplingParams(structured_output=StructuredOutput(json_schema={"type": "x"})))


def test_many_samples_of_one_prompt(trained: LLM) -> None:
    params = SamplingParams(structured_output=CONSTRAINTS[0], n=6, seed=3, max_tokens=300, temperature=2.0)
    samples = trained.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert all(is_valid(parse(sample.text), SCHEMAS["person"]) for sample in samples)
    assert len({sample.text for sample in samples}) > 1


def test_a_cut_is_called_a_cut(trained: LLM) -> None:
    answer = ask(trained, CONSTRAINTS[0], max_tokens=4)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 4)
    whole = ask(trained, CONSTRAINTS[0])
    exactly = ask(trained, CONSTRAINTS[0], max_tokens=len(whole.token_ids))
    assert (exactly.finish_reason, exactly.text) == ("stop", whole.text)


def test_stop_strings_cut_too(trained: LLM) -> None:
    answer = ask(trained, CONSTRAINTS[0], stop=['"age"'])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", '"age"')
    assert '"age"' not in answer.text


def test_min_tokens_hold_off_an_end_that_may_come(trained: LLM) -> None:
    constraint = StructuredOutput(regex="a+")
    assert all(
        len(ask(trained, constraint, min_tokens=20, max_tokens=40, seed=seed).token_ids) >= 20
        for seed in range(pick(2, 5))
    )


def test_a_complete_constraint_ends_before_min_tokens(trained: LLM) -> None:
    answer = ask(trained, StructuredOutput(choice=["yes"]), min_tokens=20)
    assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_ignore_eos_goes_on_as_long_as_the_constraint_allows(trained: LLM) -> None:
    long = ask(trained, StructuredOutput(regex="[ab]+"), ignore_eos=True, max_tokens=50)
    assert (long.finish_reason, len(long.token_ids)) == ("length", 50)
    assert re.fullmatch("[ab]+", long.text)
    assert ask(trained, StructuredOutput(regex="[ab]{4}"), ignore_eos=True).finish_reason == "stop"


def test_a_constraint_and_bans_that_leave_nothing(trained: LLM) -> None:
    answer = ask(trained, StructuredOutput(choice=["yes"]), bad_words=["y", "ye", "yes"])
    assert (answer.finish_reason, answer.text) == ("error", "")
    assert "structured_output" in str(answer.error)


@pytest.mark.parametrize(
    ("constraint", "place"),
    [
        (StructuredOutput(json_schema={"properties": {"a": {"type": "x"}}}), r"json_schema.*at \$.properties.a: "),
        (StructuredOutput(json_schema={"type": "array", "minItems": 10**9}), r"at \$.minItems: "),
        (StructuredOutput(regex="a{1000000000}"), "regex.*repeats"),
        pytest.param(
            StructuredOutput(json_schema={"patternProperties": {f"^a{i}[a-z]*$": {} for i in range(1000)}}),
            "too much time",
            marks=pytest.mark.full,  # by default tests/structured/test_checker.py waits for it
        ),
    ],
)
def test_a_bad_constraint_is_refused_before_any_work(trained: LLM, constraint: StructuredOutput, place: str) -> None:
    with pytest.raises(UserError, match=place):
        ask(trained, constraint)
    assert not trained.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "constraint", pick([TOO_COMPLEX], [TOO_COMPLEX, StructuredOutput(regex="((a{1000}){1000}){1000}")])
)
def test_a_bomb_that_only_the_core_can_see_fails_alone(trained: LLM, constraint: StructuredOutput) -> None:
    params = [SamplingParams(structured_output=constraint, seed=1, max_tokens=300)]
    params += [SamplingParams(structured_output=CONSTRAINTS[1], seed=seed, max_tokens=300) for seed in range(3)]
    params += [SamplingParams(seed=2)]
    bomb, *others = [output.outputs[0] for output in trained.generate([PROMPT] * 5, params, use_tqdm=False)]
    assert (bomb.finish_reason, bomb.error_type) == ("error", "GrammarTooComplexError")
    assert all(is_valid(parse(other.text), SCHEMAS["list"]) for other in others[:3])
    assert others[3].finish_reason in ("stop", "length")


def test_a_constraint_is_compiled_once(trained: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[StructuredOutput] = []
    compile_constraint = LLGuidanceBackend.compile

    def watched(self: LLGuidanceBackend, constraint: StructuredOutput) -> Any:
        compiled.append(constraint)
        return compile_constraint(self, constraint)

    monkeypatch.setattr(LLGuidanceBackend, "compile", watched)
    constraint = StructuredOutput(regex="once[0-9]")
    params = SamplingParams(structured_output=constraint, n=3)
    for _ in range(2):
        trained.generate([PROMPT] * 4, params, use_tqdm=False)
    assert compiled == [constraint]


def test_without_masks_these_tests_would_fail(trained: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that allows everything: the answer violates its constraint at once, and the request fails."""
    monkeypatch.setattr(LLGuidanceBackend, "fill_masks", allow_everything)
    answer = ask(trained, StructuredOutput(regex="[0-9]{30}"))
    assert (answer.finish_reason, answer.error_type) == ("error", "GrammarError")


def allow_everything(self: LLGuidanceBackend, matchers: list[object], words: np.ndarray[Any, Any]) -> list[None]:
    words[:] = -1
    return [None] * len(matchers)
