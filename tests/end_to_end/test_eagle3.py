"""EAGLE-3 heads: drafts are those of a plain implementation, and no bit of an answer changes, whatever they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.end_to_end.test_draft_model import drafts_of
from tests.end_to_end.test_pipeline import ranks  # noqa: F401 - threads
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.end_to_end.test_storm import weather_storm
from tests.end_to_end.test_structured import PROMPT, mixed_params
from tests.models.eagle import ReferenceHead, TinyHead, memorizing, states_of

from octavo import LLM
from octavo.contracts.schedule import Int32Array, SchedulerOutput
from octavo.errors import CheckpointError, InvalidParameterError, OctavoError, UnsupportedModelError
from octavo.inputs import Prompt, TokensPrompt
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams
from octavo.worker.rank_drafter import RankDrafter

CHUNKED = {"max_num_batched_tokens": 18}
PREEMPTED = {"num_kv_blocks": MAX_LEN // BLOCK_SIZE}
LAYERS = (0, 1, 2)  # by default, of models of three layers
NUM_DRAFTS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
FLOAT32 = "qwen3-mixed-windows"
MODELS: list[tuple[str, dict[str, Any]]] = [(FLOAT32, {}), *pick([], [("llama", {})])]
if native_kernels() is not None:
    MODELS += pick([], [("llama in bfloat16", {"quantization": "int8"}), ("llama in bfloat16", {})])


class Drafted(NamedTuple):
    """Drafts that an engine has drawn after a context."""

    context: list[int]
    drafts: list[int]


def always(folder: Path, count: int = NUM_DRAFTS) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": count, "adaptive": False}


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Collect all drafts that are drawn in this process."""
    seen: list[Drafted] = []
    fill_in = RankDrafter._filled_in

    def watched(self: RankDrafter, step: SchedulerOutput, table: Int32Array, num_drawn: Int32Array) -> SchedulerOutput:
        num_known = step.num_computed_tokens + step.num_scheduled_tokens - num_drawn
        for at in num_drawn.nonzero()[0].tolist():
            context = self._rows.token_ids[step.rows[at], : num_known[at]].tolist()
            seen.append(Drafted(context, table[at, : num_drawn[at]].tolist()))
        return fill_in(self, step, table, num_drawn)

    monkeypatch.setattr(RankDrafter, "_filled_in", watched)
    return seen


def check_drafts(
    seen: list[Drafted], head: TinyHead, tensors: dict[str, torch.Tensor], model: Any, layers: tuple[int, ...] = LAYERS
) -> None:
    """Compare drafts with those of the plain implementation, token for token."""
    reference = ReferenceHead(head, tensors, model.get_input_embeddings().weight.detach())
    for context, drafts in seen:
        expected = reference.drafts(context, states_of(model, context, layers)[:-1], len(drafts))
        assert drafts == expected, f"after {len(context)} tokens"


SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1},
}
VARIANTS: dict[str, tuple[str, TinyHead, tuple[int, ...]]] = {
    "llama": ("llama", TinyHead(), LAYERS),
    "own embedding": ("qwen3", TinyHead(has_embedding=True, hidden_size=28, num_heads=4), LAYERS),
    "residual behind its norm": ("qwen2", TinyHead(norm_before_residual=True), LAYERS),
    "named inputs": (
        "mistral",
        TinyHead(num_states=2, settings={"eagle_aux_hidden_state_layer_ids": [2, 1]}),
        (1, 2),
    ),
    "named outputs": (
        "gemma3",
        TinyHead(num_states=1, settings={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}}),
        (1,),
    ),
    "speculators, all tokens": (
        "qwen3-mixed-windows",
        TinyHead(draft_vocab_size=97, norm_before_residual=True, settings=SPECULATORS),
        LAYERS,
    ),
    "experts": ("qwen3-moe", TinyHead(settings={"architectures": ["Eagle3Qwen3MoeForCausalLM"]}), LAYERS),
}


@pytest.mark.parametrize(
    "variant", pick(["llama", "named inputs", "speculators, all tokens", "experts"], list(VARIANTS))
)
@pytest.mark.parametrize("eager", pick([False], [False, True]))
def test_drafts_are_those_of_a_plain_implementation(
    variant: str,
    eager: bool,
    checkpoint: GetCheckpoint,
    make_llm: MakeLLM,
    tmp_path: Path,
    drafted: list[Drafted],
) -> None:
    """In a batch, with prompts in chunks, with accepted drafts and rejected ones, and with prefixes from the cache."""
    name, head, layers = VARIANTS[variant]
    tensors = head.tensors()
    head.save(tmp_path / "head", tensors, as_pickle=variant == "llama")
    options: dict[str, Any] = {"max_num_batched_tokens": 30, "enforce_eager": eager}
    llm, prompts = make_llm(name, **options, speculative_config=always(tmp_path / "head")), PROMPTS[:: pick(2, 1)]
    drafted.clear()
    for _ in range(2):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(drafted) > pick(40, 80)
    check_drafts(drafted[:: pick(11, 1)], head, tensors, checkpoint(name).reference, layers)


def test_hits_that_continue_in_another_way(
    checkpoint: GetCheckpoint, make_llm: MakeLLM, tmp_path: Path, drafted: list[Drafted]
) -> None:
    """A block's last entry depends on the token behind it, and requests that share the block may differ there."""
    head = TinyHead()
    head.save(tmp_path / "head", tensors := head.tensors())
    model = checkpoint("llama")
    llm = make_llm("llama", speculative_config=always(tmp_path / "head"))
    drafted.clear()
    stem = random_tokens(4 * BLOCK_SIZE, seed=5)
    endings = [[11, 12], [13], [14, 15, 16, 17, 18], [11, 19, 20]]
    prompts: list[Prompt] = [{"prompt_token_ids": stem + ending} for ending in endings]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.metrics.num_cached_tokens for output in outputs] == [16, 16, 20, 16]
    turns: list[Prompt] = [
        {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8]} for output in outputs
    ]
    llm.generate(turns, GREEDY, use_tqdm=False)
    assert len(drafted) > 60
    check_drafts(drafted, head, tensors, model.reference)


class Pair(NamedTuple):
    """A model, what it answers alone, and a head that has seen some of that."""

    name: str
    options: dict[str, Any]
    head: Path
    alone: list[Any]


MakePair = Callable[[str, dict[str, Any]], Pair]


@pytest.fixture(scope="module")
def pair_of(checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    made: dict[str, Pair] = {}

    def make(name: str, options: dict[str, Any]) -> Pair:
        key = f"{name} {options}"
        if key not in made:
            with open_llm(checkpoint, name, **options) as llm:
                alone = one_by_one(llm)
            reference = checkpoint(name.partition(" ")[0]).reference
            folder = tmp_path_factory.mktemp("head")
            asked = [cast("TokensPrompt", prompt)["prompt_token_ids"] for prompt in PROMPTS]
            sequences = [([*ids, *samples[0][0]], len(ids)) for ids, samples in zip(asked, alone, strict=True)]
            sequences = sequences[::2]  # half of them are right often enough
            head = TinyHead(draft_vocab_size=80)
            head.save(folder, memorizing(head, reference, sequences))
            made[key] = Pair(name, options, folder, alone)
        return made[key]

    return make


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: " ".join([model[0], *map(str, model[1].values())]))
def pair(request: pytest.FixtureRequest, pair_of: MakePair) -> Pair:
    return pair_of(*request.param)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        *pick(
            [pytest.param({**CHUNKED, **PREEMPTED}, id="chunked and preempted")],
            [pytest.param(CHUNKED, id="chunked"), pytest.param(PREEMPTED, id="preempted")],
        ),
        pytest.param({"enforce_eager": True}, id="op by op", marks=pytest.mark.full),
    ],
)
def test_answers_are_those_without_drafts(pair: Pair, options: dict[str, Any], make_llm: MakeLLM) -> None:
    llm = make_llm(pair.name, **pair.options, **options, speculative_config=always(pair.head))
    first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(first) == pair.alone
    num_drafts, num_accepted = drafts_of(first)
    assert num_drafts > num_accepted > num_drafts // 16, (num_drafts, num_accepted)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == pair.alone  # prefixes are in the cache
    step = pick(4, 1)
    assert one_by_one(llm, step) == pair.alone[::step]


def test_adaptive_drafts(pair_of: MakePair, make_llm: MakeLLM) -> None:
    """Some steps have no drafts: then states wait until a block is complete, or drafts are wanted again."""
    pair = pair_of(FLOAT32, {})
    config = {"method": "eagle3", "model": str(pair.head), "num_speculative_tokens": 5}
    llm = make_llm(pair.name, **pair.options, speculative_config=config, max_num_batched_tokens=24)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == pair.alone


def test_requests_that_decline_drafts_are_followed(
    checkpoint: GetCheckpoint, make_llm: MakeLLM, tmp_path: Path, drafted: list[Drafted]
) -> None:
    """So that others find their prefixes."""
    head = TinyHead()
    head.save(tmp_path / "head", tensors := head.tensors())
    llm = make_llm("llama", speculative_config=always(tmp_path / "head"))
    drafted.clear()
    [plain] = llm.generate(random_prompt(23, seed=9), GREEDY.replace(speculative=False), use_tqdm=False)
    assert plain.metrics.num_drafts == len(drafted) == 0
    longer: Prompt = {"prompt_token_ids": plain.prompt_token_ids + plain.outputs[0].token_ids}
    [late] = llm.generate(longer, GREEDY, use_tqdm=False)
    assert late.metrics.num_cached_tokens > 24
    check_drafts(drafted, head, tensors, checkpoint("llama").reference)


def test_contexts_longer_than_a_head_supports(
    checkpoint: GetCheckpoint, make_llm: MakeLLM, tmp_path: Path, drafted: list[Drafted]
) -> None:
    """They go on without drafts."""
    head = TinyHead(max_len=30)
    head.save(tmp_path / "head", tensors := head.tensors())
    prompts: list[Prompt] = [random_prompt(length, seed=length) for length in (5, 25, 45)]
    params = GREEDY.replace(max_tokens=15, seed=1)
    with open_llm(checkpoint, "llama") as llm:
        expected = answers(llm.generate(prompts, params, use_tqdm=False))
    llm = make_llm("llama", speculative_config=always(tmp_path / "head"))
    drafted.clear()
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert answers(outputs) == expected
    assert [output.metrics.num_drafts > 0 for output in outputs] == [True, True, False]
    assert max(len(context) + len(drafts) for context, drafts in drafted) == 31
    check_drafts(drafted, head, tensors, checkpoint("llama").reference)


def test_shards(checkpoint: GetCheckpoint, make_llm: MakeLLM, pair_of: MakePair) -> None:
    """Every rank draws the same drafts."""
    pair, step = pair_of(FLOAT32, {}), pick(2, 1)
    with open_llm(checkpoint, pair.name, tensor_parallel_size=2) as llm:
        expected = one_by_one(llm, step)
    llm = make_llm(
        pair.name,
        tensor_parallel_size=2,
        speculative_config=always(pair.head),
        num_kv_blocks=24,
        max_num_batched_tokens=24,
    )
    for _ in range(pick(1, 2)):
        outputs = llm.generate(PROMPTS[::step], PARAMS[::step], use_tqdm=False)
        assert answers(outputs) == expected
        num_drafts, num_accepted = drafts_of(outputs)
        assert num_drafts > num_accepted > num_drafts // 16


@pytest.mark.parametrize("seed", pick([2], [0, 2, 3]))
def test_a_storm(seed: int, checkpoint: GetCheckpoint, pair_of: MakePair) -> None:
    """Aborts, preemptions, stop strings, minimum lengths and prompt logprobs, at any moment."""
    weather_storm(seed, checkpoint, speculative_config=always(pair_of(FLOAT32, {}).head))


DEMO_HEAD = TinyHead(
    target_size=256,
    vocab_size=2048,
    draft_vocab_size=1500,
    hidden_size=256,
    max_len=512,
    settings={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]},
)


def test_constraints(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Greedy requests under a grammar verify drafts too, and all of them take the tokens that the grammar forces."""
    DEMO_HEAD.save(tmp_path / "head")
    params = mixed_params()[::5]
    prompts = [PROMPT] * len(params)
    expected = answers(make_llm("demo", max_model_len=512).generate(prompts, params, use_tqdm=False))
    llm = make_llm("demo", max_model_len=512, speculative_config=always(tmp_path / "head"))
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected


NOT_TOGETHER: dict[str, tuple[str, TinyHead, dict[str, Any], type[OctavoError], str]] = {
    "hidden size": ("llama", TinyHead(target_size=40), {}, InvalidParameterError, "target_hidden_size is 40, but"),
    "vocabulary": ("llama", TinyHead(vocab_size=98), {}, InvalidParameterError, "vocab_size is 98, but"),
    "layers": (
        "llama",
        TinyHead(settings={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
        {},
        CheckpointError,
        r"eagle_aux_hidden_state_layer_ids=\[0, 1, 3\]: inputs of different layers are expected, of 3",
    ),
    "several layers": (
        "llama",
        TinyHead(settings={"num_hidden_layers": 2}),
        {},
        UnsupportedModelError,
        "num_hidden_layers=2: heads of one layer",
    ),
    "EAGLE-1": (
        "llama",
        TinyHead(settings={"eagle_config": {"use_aux_hidden_state": False}}),
        {},
        UnsupportedModelError,
        "use_aux_hidden_state=False is not supported",
    ),
    "not a head": (
        "llama",
        TinyHead(settings={"architectures": ["LlamaForCausalLM"]}),
        {},
        UnsupportedModelError,
        "not an EAGLE-3 head, such as",
    ),
    "stages": (
        "llama",
        TinyHead(),
        {"pipeline_parallel_size": 2},
        InvalidParameterError,
        "1 with method eagle3: a head reads hidden states of several stages",
    ),
    "windows": ("mistral-window", TinyHead(), {}, UnsupportedModelError, "keeps only sliding windows"),
    "number of states": ("llama", TinyHead(num_states=2), {}, CheckpointError, "tensor 'fc.weight': shape"),
}


@pytest.mark.parametrize("what", NOT_TOGETHER)
def test_heads_that_do_not_fit(what: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    name, head, options, error, message = NOT_TOGETHER[what]
    head.save(tmp_path / "head")
    with pytest.raises(error, match=message):
        make_llm(name, speculative_config=always(tmp_path / "head"), **options)


def test_maps_to_tokens_that_the_model_has_not(make_llm: MakeLLM, tmp_path: Path) -> None:
    head = TinyHead()
    tensors = head.tensors()
    tensors["d2t"][-1] = 97
    head.save(tmp_path / "head", tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'd2t' maps to tokens .* but the model has 97"):
        make_llm("llama", speculative_config=always(tmp_path / "head"))


def test_models_with_images_have_no_heads(tmp_path: Path) -> None:
    TinyHead().save(tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match="has images in their place"):
        LLM("demo-vl", speculative_config=always(tmp_path / "head"))
