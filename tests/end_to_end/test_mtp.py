"""MTP heads: drafts are those of a plain implementation, and no bit of an answer changes, whatever they are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, Checkpoint
from tests.end_to_end.support import answers
from tests.end_to_end.test_draft_model import drafts_of
from tests.end_to_end.test_eagle3 import Drafted, drafted  # noqa: F401 - a fixture
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.end_to_end.test_storm import weather_storm
from tests.models.hybrid import keep_states_often
from tests.models.mtp import ReferenceMtp, add_tensors, make_ideal, make_mtp
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM
from octavo.errors import CheckpointError, InvalidParameterError, OctavoError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.models import shortlist
from octavo.sampling_params import SamplingParams

ALWAYS = {"method": "mtp", "adaptive": False}
OFF = {"method": "none"}
NO_CACHE = {"speculative_config": ALWAYS, "enable_prefix_caching": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
FAMILIES = pick(["qwen3-5", "deepseek-v3"], ["qwen3-5", "qwen3-5-moe", "qwen3-next", "deepseek-v3", "glm4-moe-lite"])
DTYPES = ["float32"] if native_kernels() is None else ["float32", "bfloat16"]
CHUNKED_AND_PREEMPTED = {"max_num_batched_tokens": 18, "num_kv_blocks": MAX_LEN // BLOCK_SIZE}


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint with a head that has seen some of its answers."""

    folder: Path
    reference: ReferenceMtp


Open = Callable[..., LLM]


@pytest.fixture(scope="module", autouse=True)
def _states_are_kept_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_states_often(monkeypatch)
        yield


def open_model(folder: Path, **options: Any) -> LLM:
    defaults = {
        "tokenizer": "demo",
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 512,
    }
    return LLM(str(folder), **{**defaults, **options})


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open LLMs; in the end no block may be lost."""
    made: list[LLM] = []

    def make(folder: Path, **options: Any) -> LLM:
        made.append(open_model(folder, **options))
        return made[-1]

    yield make
    for llm in made:
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_integrity()
        llm.exit()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    saved: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in saved:
            folder, reference = tmp_path_factory.mktemp(name), make_mtp(name)
            reference.target.save_pretrained(folder)
            llm = open_model(folder, speculative_config=OFF)
            outputs = llm.generate(PROMPTS[1::3], PARAMS[1::3], use_tqdm=False)
            llm.exit()
            said = [(each.prompt_token_ids + each.outputs[0].token_ids, len(each.prompt_token_ids)) for each in outputs]
            reference.learn([(tokens, length) for tokens, length in said if len(tokens) > max(length, 2)])
            add_tensors(folder, reference.tensors())
            saved[name] = Model(folder, reference)
        return saved[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_a_plain_implementation(
    name: str,
    model_of: Callable[[str], Model],
    opened: Open,
    drafted: list[Drafted],  # noqa: F811
) -> None:
    """In a batch, with prompts in chunks, with accepted drafts and rejected ones, and with prefixes from the cache."""
    model = model_of(name)
    llm = opened(model.folder, max_num_batched_tokens=30, speculative_config=ALWAYS)
    drafted.clear()
    for _ in range(2):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(drafted) > 80
    for context, drafts in drafted[:: pick(61, 1)]:
        assert drafts == model.reference.drafts(context, len(drafts)), f"after {len(context)} tokens"


@pytest.mark.parametrize("name", FAMILIES[: pick(1, None)])
def test_the_state_that_a_head_reads(name: str, opened: Open, tmp_path: Path) -> None:
    """An ideal head: every draft is right if the state is the one after the final norm, and none if it is another."""
    make_ideal(reference := make_mtp(name))
    reference.save(tmp_path)
    llm = opened(tmp_path, speculative_config={**ALWAYS, "num_speculative_tokens": 1})
    for _ in range(2):
        num_drafts, num_accepted = drafts_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert num_accepted == num_drafts > 2 * len(PROMPTS)


def test_drafts_from_a_shortlist(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first tokens are drafted, until too many others come; no answer changes."""
    make_ideal(reference := make_mtp("qwen3-5"))
    reference.save(tmp_path)
    params = GREEDY.replace(seed=1)
    expected = answers(opened(tmp_path, speculative_config=OFF).generate(PROMPTS, params, use_tqdm=False))
    for most_missed, misses in ((1.0, True), (0.0, False)):
        monkeypatch.setattr(shortlist, "_LEAST_VOCAB", 1)
        monkeypatch.setattr(shortlist, "_MOST_MISSED", most_missed)
        llm = opened(tmp_path, speculative_config={**ALWAYS, "num_speculative_tokens": 1})
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert answers(outputs) == expected
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert answers(outputs) == expected
        num_drafts, num_accepted = drafts_of(outputs)
        assert (num_accepted < num_drafts) == misses


@dataclass(frozen=True, slots=True)
class Known:
    """A model in a dtype, and what it answers alone, without drafts and cache."""

    model: Model
    dtype: str
    alone: list[Any]


BYTES = pick(
    [("qwen3-5", DTYPES[-1])],
    [(name, dtype) for name in FAMILIES for dtype in ("float32", "bfloat16")],
)


@pytest.fixture(scope="module", params=[pair for pair in BYTES if pair[1] in DTYPES], ids=" in ".join)
def known(request: pytest.FixtureRequest, model_of: Callable[[str], Model]) -> Known:
    name, dtype = request.param
    model = model_of(name)
    llm = open_model(model.folder, dtype=dtype, speculative_config=OFF, enable_prefix_caching=False)
    alone = one_by_one(llm)
    llm.exit()
    return Known(model, dtype, alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="by default", marks=pytest.mark.full),
        pytest.param({"speculative_config": ALWAYS, **CHUNKED_AND_PREEMPTED}, id="chunked and preempted"),
        pytest.param({"speculative_config": ALWAYS}, id="batched", marks=pytest.mark.full),
        pytest.param(
            {"speculative_config": ALWAYS, "enable_prefix_caching": False}, id="no cache", marks=pytest.mark.full
        ),
        pytest.param({"speculative_config": ALWAYS, "block_size": 16}, id="large blocks", marks=pytest.mark.full),
        pytest.param({"speculative_config": ALWAYS, "enforce_eager": True}, id="op by op", marks=pytest.mark.full),
    ],
)
def test_answers_are_those_without_drafts(known: Known, options: dict[str, Any], opened: Open) -> None:
    """Greedy and sampled; the second time, behind prefixes that requests with drafts have left."""
    llm = opened(known.model.folder, dtype=known.dtype, **options)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert answers(outputs) == known.alone
        num_drafts, num_accepted = drafts_of(outputs)
        if "speculative_config" in options:  # else it is a matter of time
            assert num_drafts > num_accepted > num_drafts // 16, (num_drafts, num_accepted)


@pytest.mark.parametrize("name", pick(FAMILIES[1:2], FAMILIES))
def test_on_two_ranks(
    name: str, model_of: Callable[[str], Model], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads look tokens up and rate them by parts of the model, of which each rank has a share."""
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    folder, step = model_of(name).folder, pick(2, 1)
    options = {"tensor_parallel_size": 2, "dtype": DTYPES[-1]}
    expected = one_by_one(opened(folder, **options, speculative_config=OFF, enable_prefix_caching=False), step)
    llm = opened(folder, **options, speculative_config=ALWAYS, **CHUNKED_AND_PREEMPTED)
    for _ in range(2):
        outputs = llm.generate(PROMPTS[::step], PARAMS[::step], use_tqdm=False)
        assert answers(outputs) == expected
        num_drafts, num_accepted = drafts_of(outputs)
        assert num_drafts > num_accepted > num_drafts // 16


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES[:2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_storm(name: str, seed: int, model_of: Callable[[str], Model]) -> None:
    """Aborts, preemptions, stop strings, minimum lengths and prompt logprobs, at any moment."""
    model = model_of(name)
    checkpoint = Checkpoint(folder=model.folder, reference=model.reference.target)
    weather_storm(seed, lambda _: checkpoint, speculative_config=ALWAYS)


def test_heads_draft_by_default(
    model_of: Callable[[str], Model], opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """And say so; prompt lookup, or nothing, takes their place if it is asked for."""
    folder = model_of("qwen3-5").folder
    with caplog.at_level("INFO"):
        assert opened(folder).engine.front.config.draft_model is not None
    assert "drafting with the MTP head" in caplog.text
    for asked in (OFF, {"method": "ngram"}):
        assert opened(folder, speculative_config=asked).engine.front.config.draft_model is None


@pytest.mark.full
def test_names_of_other_publishers(model_of: Callable[[str], Model], opened: Open, tmp_path: Path) -> None:
    """vLLM's names of the method; names that begin with `model.`; an embedding and logits head of its own."""
    model = model_of("qwen3-5")
    tensors = {f"model.{name}": tensor for name, tensor in model.reference.tensors().items()}
    embedding, logits_head = model.reference.target.get_input_embeddings().weight, model.reference.target.lm_head.weight
    tensors |= {"model.mtp.embed_tokens.weight": embedding.detach().clone()}
    tensors |= {"model.mtp.lm_head.weight": logits_head.detach().clone()}
    model.reference.target.save_pretrained(tmp_path)
    add_tensors(tmp_path, tensors)
    config = {**ALWAYS, "method": "qwen3_next_mtp"}
    found = [opened(folder, speculative_config=config).generate(PROMPTS, PARAMS, use_tqdm=False) for folder in (
        model.folder, tmp_path)]  # fmt: skip
    assert answers(found[0]) == answers(found[1])
    assert drafts_of(found[0]) == drafts_of(found[1])


def test_heads_that_do_not_fit(
    model_of: Callable[[str], Model], opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error if they are asked for; else a warning, and no drafts."""
    reference = model_of("qwen3-5").reference
    reference.target.save_pretrained(tmp_path)
    cases: list[tuple[dict[str, torch.Tensor], type[OctavoError], str]] = [
        ({}, InvalidParameterError, "there is no MTP head for Qwen3_5ForCausalLM in"),
        (
            {name: tensor for name, tensor in reference.tensors().items() if "q_norm" not in name},
            CheckpointError,
            r"mtp\.layers\.0\.self_attn\.q_norm\.weight' of shape \[10\] is missing",
        ),
        (
            {**reference.tensors(), "mtp.layers.1.input_layernorm.weight": torch.ones(36)},
            UnsupportedModelError,
            "an MTP head of several layers",
        ),
    ]
    for tensors, error, message in cases:
        add_tensors(tmp_path, tensors)
        with pytest.raises(error, match=message):
            opened(tmp_path, speculative_config=ALWAYS)
        with caplog.at_level("INFO"):
            llm = opened(tmp_path)
        assert drafts_of(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == (0, 0)
        if tensors:
            assert "has an MTP head, which does not draft" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pipeline_parallel_size": 2}, "1 with method mtp: a head reads hidden states of several stages"),
        ({"speculative_config": {**ALWAYS, "model": 3}}, "a GGUF file with an MTP head"),
        ({"speculative_config": {**ALWAYS, "prompt_lookup_max": 3}}, "only for method ngram, not mtp"),
        ({"speculative_config": {**OFF, "model": "x"}}, "only for methods draft_model, eagle3 and mtp, not none"),
    ],
)
def test_bad_settings(options: dict[str, Any], error: str, model_of: Callable[[str], Model], opened: Open) -> None:
    with pytest.raises(InvalidParameterError, match=error):
        opened(model_of("qwen3-5").folder, **{"speculative_config": ALWAYS, **options})
