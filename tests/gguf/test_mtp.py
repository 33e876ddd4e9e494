"""MTP heads in GGUF files: a block behind the last one, in the model's file or in one of its own."""

from pathlib import Path

import pytest
from tests.breadth import pick
from tests.end_to_end.support import answers, random_prompt
from tests.end_to_end.test_draft_model import drafts_of
from tests.end_to_end.test_eagle3 import Drafted, drafted  # noqa: F401 - a fixture
from tests.gguf.deepseek2 import write_deepseek2
from tests.gguf.test_qwen35 import EVEN, write
from tests.models.mtp import ReferenceMtp, add_tensors, make_mtp
from tests.models.tiny import TinyModel, by_name

from octavo import LLM
from octavo.config.hub import resolve_model
from octavo.errors import UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

NUM_LAYERS = 3
NAMES = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head_norm.",
}
ALWAYS = {"method": "mtp", "adaptive": False}
PROMPTS = [random_prompt(length, seed=length) for length in (5, 17, 30)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceMtp]:
    """A checkpoint whose head is called as in GGUF files."""
    folder, reference = tmp_path_factory.mktemp("head"), make_mtp("qwen3-5")
    save(reference, folder)
    return folder, reference


def save(reference: ReferenceMtp, folder: Path) -> None:
    reference.target.save_pretrained(folder)
    tensors = {}
    for name, tensor in reference.tensors().items():
        [start] = [each for each in NAMES if name.startswith(each)]
        tensors[f"model.layers.{NUM_LAYERS}.{NAMES[start]}{name.removeprefix(start)}"] = tensor
    add_tensors(folder, tensors)


def open_file(file: Path, **options: object) -> LLM:
    sizes = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 64}
    return LLM(str(file), tokenizer="demo", **{"dtype": "float32", **sizes, **options})


@pytest.mark.parametrize("place", pick(["inside", "beside"], ["inside", "beside", "named"]))
def test_drafts(place: str, head: tuple[Path, ReferenceMtp], tmp_path: Path, drafted: list[Drafted]) -> None:  # noqa: F811
    folder, reference = head
    config, file, options = reference.target.config, tmp_path / "model-F32.gguf", {**ALWAYS}
    if place == "inside":
        write(folder, file, config, num_next=1)
    else:
        write(folder, file, config, blocks=range(NUM_LAYERS))
        apart = tmp_path / ("mtp-model-F32.gguf" if place == "beside" else "apart.gguf")
        write(folder, apart, config, num_next=1, blocks=[NUM_LAYERS])
    if place == "named":
        options["model"] = str(apart)
    with open_file(file, speculative_config={"method": "none"}) as llm:
        expected = answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with open_file(file, speculative_config=options) as llm:
        drafted.clear()
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert len(drafted) > 10
    for context, drafts in drafted[::5]:
        assert drafts == reference.drafts(context, len(drafts))
    if place != "named":
        with open_file(file) as llm:
            assert llm.engine.front.config.draft_model is not None


@pytest.mark.parametrize("is_new", pick([True], [False, True]), ids=["together", "apart"][-pick(1, 2) :])
def test_drafts_of_latent_attention(is_new: bool, tmp_path: Path, drafted: list[Drafted]) -> None:  # noqa: F811
    reference = make_mtp("deepseek-v3")
    reference.save(tmp_path)
    file = write_deepseek2(tmp_path, tmp_path / "model.gguf", is_new=is_new, has_next=True)
    with open_file(file, speculative_config=ALWAYS) as llm:
        drafted.clear()
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(drafted) > 10
    for context, drafts in drafted[::5]:
        assert drafts == reference.drafts(context, len(drafts))


def test_a_head_is_no_model_of_its_own(head: tuple[Path, ReferenceMtp], tmp_path: Path) -> None:
    """In a folder, the file beside it is the model; several heads that could be its own are none."""
    folder, reference = head
    write(folder, tmp_path / "a-F32.gguf", reference.target.config, blocks=range(NUM_LAYERS))
    for name in ("mtp-b.gguf", "mtp-c.gguf"):
        write(folder, tmp_path / name, reference.target.config, num_next=1, blocks=[NUM_LAYERS])
    assert resolve_model(str(tmp_path)) == tmp_path / "a-F32.gguf"
    with open_file(tmp_path) as llm:
        assert llm.engine.front.config.draft_model is None


def test_heads_of_other_models(head: tuple[Path, ReferenceMtp], tmp_path: Path) -> None:
    folder, reference = head
    settings = {**by_name("qwen3-5").settings, **EVEN}
    other = TinyModel(name="even", family="Qwen3_5", settings=settings).save(tmp_path)
    write(tmp_path, tmp_path / "other.gguf", other.config)
    apart = write(folder, tmp_path / "mtp-other.gguf", reference.target.config, num_next=1, blocks=[NUM_LAYERS])
    with pytest.raises(UnsupportedModelError, match="the MTP head of another model"):
        open_file(tmp_path / "other.gguf", speculative_config={**ALWAYS, "model": str(apart)})


@pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels compute with blocks")
def test_quantized(tmp_path: Path) -> None:
    """A head is computed in the blocks of its file; no bit depends on it."""
    settings = {**by_name("qwen3-5").settings, **EVEN}
    reference = make_mtp(TinyModel(name="even", family="Qwen3_5", settings=settings))
    save(reference, tmp_path)
    file = write(tmp_path, tmp_path / "model-Q8_0.gguf", reference.target.config, "Q8_0", num_next=1)
    found = []
    for config in ({"method": "none"}, ALWAYS):
        with open_file(file, dtype="auto", speculative_config=config) as llm:
            found.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert answers(found[0]) == answers(found[1])
    assert drafts_of(found[1])[0] > 20
