"""The demo model that sees: its pictures show what is said of them, and it answers those that it has never seen."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from tests.breadth import pick
from tokenizers import Tokenizer
from tools.demo_model.seeing.batches import IMAGE_START, KINDS, Batches
from tools.demo_model.seeing.conversations import APART, row
from tools.demo_model.seeing.drawing import draw, random_size
from tools.demo_model.seeing.evaluate import mean, message, scores
from tools.demo_model.seeing.held_out import held_out
from tools.demo_model.seeing.model import Seeing, image_processor
from tools.demo_model.seeing.questions import TASKS
from tools.demo_model.seeing.scenes import BROAD, COLOURS, CROWDED, SIMPLE, random_scene, scene
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo import LLM, SamplingParams
from octavo.demo import demo_vl_model_path
from octavo.multimodal.placeholders import rotary_positions

MAX_BYTES = 8_000_000
SPAN = (IMAGE_START + 1, (1, 3, 3), 1.0)  # of every picture
FOLDER = demo_vl_model_path()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-vl", dtype="float32", num_kv_blocks=512, block_size=16) as opened:
        yield opened


def test_the_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MAX_BYTES


def test_pictures_show_their_scenes() -> None:
    rng = random.Random(0)
    for _ in range(100):
        drawn = random_scene(rng, BROAD)
        picture, marks = draw(drawn, random_size(rng), rng)
        if drawn.number:
            assert [mark.kind for mark in marks] == list(drawn.number)
            continue
        assert [mark.kind for mark in marks] == [thing.shape for thing in drawn.things]
        for mark, thing in zip(marks, drawn.things, strict=True):
            pixel = picture.getpixel((int(mark.x * picture.width), int(mark.y * picture.height)))
            assert isinstance(pixel, tuple)
            far = {name: max(abs(a - b) for a, b in zip(pixel, COLOURS[name], strict=True)) for name in COLOURS}
            assert 1.5 * far.pop(thing.colour) < min(far.values())  # whatever its tint, and after JPEG
            assert (int(3 * mark.y), int(3 * mark.x)) == divmod(thing.place, 3)


def test_pictures_of_any_size_have_a_token_for_each_place() -> None:
    processor = image_processor(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    for size in ((16, 20), (64, 50), (83, 84), (224, 224), (640, 500), (1000, 1300)):
        assert processor.process([Image.new("RGB", size)], "picture").grid == (1, 6, 6), size


def test_training_draws_nothing_that_is_held_out() -> None:
    rng = random.Random(1)
    assert not any(scene(rng, BROAD, held_out=False).is_held_out for _ in range(200))
    assert all(scene(rng, SIMPLE, held_out=True).is_held_out for _ in range(5))


def test_the_engine_reads_what_was_trained(llm: LLM) -> None:
    [item] = held_out("describe", 1)
    [output] = llm.generate_multimodal([{"messages": [message(item)]}], SamplingParams(max_tokens=1), use_tqdm=False)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    processor = image_processor(tokenizer)
    _, rows, columns = processor.process([item.picture], "picture").grid
    trained = row(tokenizer, [item.question], rows * columns // processor.vision.spatial_merge_size**2)
    assert output.prompt_token_ids == trained.ids[: trained.answers.index(1)]


def test_questions_asked_apart_are_each_the_first() -> None:
    """In refining, one row has several conversations; their logits are those that each has alone."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    model = Seeing(tokenizer, len(KINDS) + 1, len(COLOURS) + 1)
    model.load(FOLDER)
    batch = Batches(tokenizer, image_processor(tokenizer), seed=3, num_rows=2, blind_every=16).batch(0, CROWDED, APART)
    assert batch.sees is not None
    assert batch.patches is not None
    with torch.no_grad():
        together, _ = model(batch)
    answers = batch.answers[batch.answers > 0]
    for number, task in enumerate(batch.tasks, 1):
        [[at, last]] = [[int(row), int(column)] for row, column in (batch.answers == number).nonzero()[-1:]]
        kept = batch.sees[at, 0, last].nonzero().flatten()  # the question's conversation
        alone = replace(
            batch,
            ids=batch.ids[at : at + 1, kept],
            answers=torch.where(batch.answers == number, 1, 0)[at : at + 1, kept],
            positions=torch.from_numpy(rotary_positions(len(kept), [SPAN])).long()[:, None],
            sees=None,
            patches=batch.patches.view(2, -1, batch.patches.shape[-1])[at],
        )
        with torch.no_grad():
            expected, _ = model(alone)
        torch.testing.assert_close(together[answers == number], expected, atol=1e-3, rtol=0, msg=task)


def test_it_answers_pictures_that_it_has_never_seen(llm: LLM) -> None:
    assert mean(scores(llm, TASKS, pick(12, 200))) >= 0.95
    assert mean(scores(llm, TASKS, pick(6, 200), BROAD)) >= 0.9


def test_transformers_gives_the_same_answers(llm: LLM) -> None:
    reference = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(FOLDER)
    for task in pick(("where", "describe"), TASKS):
        [item] = held_out(task, 1)
        params = SamplingParams(temperature=0, max_tokens=24)
        [ours] = llm.generate_multimodal([{"messages": [message(item)]}], params, use_tqdm=False)
        made = processor(images=[item.picture], return_tensors="pt")
        ids = torch.tensor([ours.prompt_token_ids])
        types = (ids == reference.config.image_token_id).int()
        theirs = reference.generate(input_ids=ids, mm_token_type_ids=types, **made, max_new_tokens=24, do_sample=False)
        assert theirs[0, ids.shape[1] :].tolist() == list(ours.outputs[0].token_ids)


def test_without_a_picture_it_asks_for_one(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0, max_tokens=32))
    assert output.text == "Please show me a picture of coloured shapes or of a number."


def test_its_card_has_the_scores(llm: LLM) -> None:
    card = Path(FOLDER / "README.md").read_text()
    assert all(f"| {task} |" in card for task in TASKS)
