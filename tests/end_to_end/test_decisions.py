"""Decisions: with a checkpoint's own files those of transformers; labels of several tokens; what cannot be."""

import asyncio
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tests.end_to_end.conftest import MakeLLM
from tests.end_to_end.encoders import save

from octavo import LLM, AsyncLLM, PoolingParams
from octavo.demo import demo_vl_model_path
from octavo.engine.decision_questions import as_text
from octavo.engine.decisions import decisions_about
from octavo.errors import InvalidParameterError
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.tokenizer.tokenizer import Tokenizer

SHAPE = Path(__file__).parents[2] / "docs/pictures/shape.png"

TEMPLATE = (
    "w1 {{ state if state is string else state | tojson }} {{ question.instructions or 'w2' }} "
    "{% for option in question.options %} {{ question.labels[loop.index0] }} {{ option }} {% endfor %} w3 <|mark|> w4"
)
QUESTIONS: dict[str, dict[str, Any]] = {
    "a": {"type": "noul", "instructions": "w5 w6"},
    "b": {"type": "choice", "instructions": "w7", "criteria": {"w8": "w9", "w10": None, "w11": None}},
    "c": {"type": "score", "criteria": ["w12", "w13"]},
}
FILES = {
    "labels": {"noul": ["w20", "w21"], "choice": ["w22", "w23", "w24"], "score": ["w25", "w26"]},
    "temperature": {"choice": 2.5},
    "noul_options": ["false", "true"],
}


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_answers_are_those_of_transformers(template: str | None, tmp_path: Path) -> None:
    model = save("Qwen3", tmp_path, "ForCausalLM", head_dim=16, num_key_value_heads=2, max_position_embeddings=256)
    (tmp_path / "chat_template.jinja").write_text("<s> {{ messages[0].content }} </s>")
    (tmp_path / "decision.json").write_text(json.dumps(FILES))
    if template is not None:
        (tmp_path / "decision_template.jinja").write_text(template)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **names)
    tokenizer.chat_template = "<s> {{ messages[0].content }} </s>"
    state = {"w30": ["w31", "w32"]}
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = llm.decide(state, QUESTIONS)
        for name, question in QUESTIONS.items():
            assert llm.decide(state, {name: question}) == {name: found[name]}
    if template is None:  # the wording is our own
        assert found["b"]["choice"] in ("w8", "w10", "w11")
        return
    config = transformers.decision.DecisionConfig.from_pretrained(str(tmp_path))
    pipeline = transformers.pipeline("decision", model=model, tokenizer=tokenizer, decision_config=config)
    expected = pipeline({"state": state, "questions": QUESTIONS})
    for name, right in expected.items():
        for key, value in right.items():
            assert found[name][key] == pytest.approx(value, abs=1e-5) if key != "choice" else value, (name, key)


def test_labels_of_several_tokens_are_scored_by_all_of_them(make_llm: MakeLLM) -> None:
    llm = make_llm("demo", max_model_len=512)
    options = {f"option {number}": None for number in range(30)}
    question = {"type": "choice", "instructions": "Which?", "criteria": options}
    answer = llm.decide("Some state.", {"q": question})["q"]
    shares: Any = answer["probabilities"]
    assert sum(shares.values()) == pytest.approx(1.0)
    asked = "Some state.\n\nWhich?\n"
    letters = [first + second for first in "AB" for second in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:30]
    asked += "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
    asked += "\nReply with the label of the best option, AA to BD, and nothing else."
    tokenizer = llm.get_tokenizer()
    text = tokenizer.render_chat([{"role": "user", "content": asked}], enable_thinking=False)
    scores = []
    for letter in letters:
        total, ids = 0.0, tokenizer.encode(text, add_special_tokens=False)
        for token_id in tokenizer.encode_plain(letter):
            params = PoolingParams(label_token_ids=(token_id,))
            [logprob] = llm.embed({"prompt_token_ids": ids}, params, use_tqdm=False)[0].embedding or [math.nan]
            total, ids = total + logprob, [*ids, token_id]
        scores.append(math.exp(total))
    assert list(shares.values()) == pytest.approx([score / sum(scores) for score in scores], rel=1e-6)


def test_nothing_that_is_said_is_a_control_token(make_llm: MakeLLM) -> None:
    llm = make_llm("demo", max_model_len=512)
    front, tokenizer = llm.engine.front, llm.get_tokenizer()
    counts = []
    for said in ("nothing", "<|im_end|> <|mark|> \ue0007\ue001"):
        questions = {said: {"type": "choice", "instructions": said, "criteria": {said: said, "other": None}}}
        for prompt in decisions_about(front, {said: [said]}, questions).prompts:
            ids = prompt["prompt_token_ids"]  # type: ignore[index]  # token ids
            counts.append(sum(each in tokenizer.special_token_ids for each in ids))
            assert ("<|im_end|> <|mark|>" in tokenizer.decode(ids, skip_special_tokens=True)) == (said != "nothing")
    assert len(set(counts)) == 1


SHAPES: dict[str, dict[str, Any]] = {
    "color": {"type": "choice", "instructions": "What is the color?", "criteria": {"red": None, "blue": None}},
    "round": {"type": "noul", "instructions": "Is it round?"},
}


def test_images_in_a_state_are_those_of_a_chat(tmp_path: Path, make_llm: MakeLLM) -> None:
    images: dict[str, object] = {"<shape>": SHAPE, "<other>": np.zeros((56, 84, 3), np.uint8)}
    state = {"seen": "A <shape>, no <|image_pad|>, and <other>."}
    with LLM("demo-vl", max_model_len=512) as llm:
        together = llm.decide(state, SHAPES, images=images)
        for name, question in SHAPES.items():
            assert llm.decide(state, {name: question}, images=images) == {name: together[name]}
        assert llm.decide(state, SHAPES, images=dict(zip(images, [*images.values()][::-1], strict=True))) != together
        asked, tokenizer = decisions_about(llm.engine.front, state, SHAPES, images), llm.get_tokenizer()
        said = as_text(state) + f"\n\n{asked._questions[0].text}"
        shown: list[dict[str, object]] = [
            {"type": "text", "text": text} for text in re.split("<shape>|<other>", said.replace("<|image_pad|>", "%"))
        ]
        for at, image in ((1, images["<shape>"]), (3, images["<other>"])):
            shown.insert(at, {"type": "image", "image": image})
        chat = llm.engine.front.inputs.chat_prompt([{"role": "user", "content": shown}], enable_thinking=False)
        assert isinstance(chat, MultiModalPrompt)
        assert written(asked.prompts[0], tokenizer).replace("no <|image_pad|>", "no %") == written(chat, tokenizer)
        one, two = ({"a": image, "ab": SHAPE} for image in (SHAPE, images["<other>"]))  # one begins as the other
        assert llm.decide("ab, a", SHAPES, images=one) != llm.decide("ab, a", SHAPES, images=two)
        with pytest.raises(InvalidParameterError, match=r"images\.<b>='<b>': no text"):
            llm.decide("<a>", SHAPES, images={"<a>": SHAPE, "<b>": SHAPE})
    shutil.copytree(demo_vl_model_path(), tmp_path / "vl")  # with a template of its own
    (tmp_path / "vl/decision_template.jinja").write_text("{{ state.seen }} {{ question.instructions }} <|mark|>")
    with LLM(str(tmp_path / "vl"), max_model_len=512) as llm:
        own = decisions_about(llm.engine.front, state, SHAPES, images).prompts[1]
        seen = re.sub(r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>", "#", written(own, tokenizer))
        assert seen.strip() == "A #, no <|image_pad|>, and #. Is it round?"
        assert llm.decide(state, SHAPES, images=images).keys() == SHAPES.keys()
    with pytest.raises(InvalidParameterError, match=r"images\.<a>='an image': this model takes text only"):
        make_llm("demo", max_model_len=512).decide("<a>", SHAPES, images={"<a>": SHAPE})


def written(prompt: object, tokenizer: Tokenizer) -> str:
    assert isinstance(prompt, MultiModalPrompt)
    assert len(prompt.extra_inputs.vision) == 2
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def test_what_cannot_be_asked(make_llm: MakeLLM) -> None:
    llm = make_llm("demo", max_model_len=512)
    with pytest.raises(InvalidParameterError, match=r"questions\.x: type='y'"):
        llm.decide("a", {"x": {"type": "y"}})
    with pytest.raises(InvalidParameterError, match="1 to 255"):
        llm.decide("a", {"x": {"type": "score", "criteria": ["a"] * 256}})
    with pytest.raises(InvalidParameterError, match="state='set': a text, or what JSON has"):
        llm.decide({"a"}, {"x": {"type": "noul", "instructions": "y"}})
    with pytest.raises(InvalidParameterError, match="at least one question"):
        llm.decide("a", {})


def test_async_programs_get_the_same(make_llm: MakeLLM) -> None:
    llm, question = (
        make_llm("demo", dtype="auto", max_model_len=None),
        {"q": {"type": "noul", "instructions": "Is it so?"}},
    )
    texts = ["Hello", "What is a block?"]

    async def ask() -> tuple[list[list[float] | None], list[float], dict[str, dict[str, object]]]:
        async with AsyncLLM("demo", engine_process=False) as engine:
            vectors = [output.embedding for output in await engine.embed(texts)]
            return vectors, await engine.score(texts[0], texts), await engine.decide("Some state.", question)

    vectors, scores, answers = asyncio.run(ask())
    assert vectors == [output.embedding for output in llm.embed(texts, use_tqdm=False)]
    assert scores == llm.score(texts[0], texts, use_tqdm=False)
    assert answers == llm.decide("Some state.", question)
