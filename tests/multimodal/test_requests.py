"""What a request with images may not be."""

import json
from typing import Any

import pytest
import typer
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import PLACE, picture
from typer.testing import CliRunner

from octavo import LLM, SamplingParams
from octavo.cli import checkpoints
from octavo.errors import InvalidParameterError, PromptTooLongError
from octavo.multimodal.media import Source

app = typer.Typer()
app.command()(checkpoints.inspect)

IMAGE = {"type": "image", "image": picture(8, 8)}


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ("text", "requests='str'"),
        ({"messages": [], "prompt": ""}, r"requests=\['messages', 'prompt'\]"),
        ({"prompt": 3}, "prompt=3"),
        ({"prompt": "a", "images": "file.png"}, "images='str'"),
        ({"prompt": "a", "images": [picture(8, 8)]}, "images='1 images'.*placeholders for 0"),
        ({"prompt": PLACE}, "another one"),
        ({"prompt": PLACE, "images": [picture(1, 300)]}, r"images\[0\].*200 times"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": None}, "messages='NoneType': a list of objects"),
        ({"messages": ["What?"]}, "messages='list': a list of objects"),
        (
            {"messages": [{"role": "user", "content": [{**IMAGE, "detail": "huge"}]}]},
            r"content\[0\].detail='huge': one of None, auto, low, high",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE, {"type": "audio", "audio": "AAAA"}]}]},
            r"content\[1\]=.'type': 'audio'.: \"text\"",
        ),
    ],
)
def test_a_malformed_request_is_refused_by_name(request_: Any, names: str, open_llm: OpenLLM) -> None:
    llm = open_llm("qwen2-vl")
    fine = {"prompt": PLACE, "images": [picture(8, 8)]}
    with pytest.raises(InvalidParameterError, match=names):
        llm.generate_multimodal([fine, request_], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_limits_on_tokens(open_llm: OpenLLM) -> None:
    llm = open_llm("qwen2-vl", max_model_len=64, encoder_cache_tokens=20)
    with pytest.raises(InvalidParameterError, match=r"images\[0\]='40 tokens': at most 20 .encoder_cache_tokens"):
        llm.generate_multimodal([{"prompt": PLACE, "images": [picture(64, 40)]}], use_tqdm=False)
    with pytest.raises(PromptTooLongError, match="maximum context length is 64"):
        llm.generate_multimodal([{"prompt": PLACE * 4, "images": [picture(32, 40)] * 4}], use_tqdm=False)


def test_low_detail_takes_fewer_tokens(open_llm: OpenLLM) -> None:
    reader = open_llm("qwen2-vl").engine.front.inputs.multimodal._reader
    for detail, width in (("low", 512), ("high", 1024), ("original", 1024), (None, 1024)):
        source = Source(name="image", content=picture(1024, 8), detail=detail)
        assert reader.picture(source).width == width


def test_a_model_of_text_takes_no_images() -> None:
    llm = LLM("demo")
    message = {"role": "user", "content": [IMAGE]}
    with pytest.raises(InvalidParameterError, match="takes text only"):
        llm.chat([message])
    with pytest.raises(InvalidParameterError, match="takes text only"):
        llm.generate_multimodal([{"messages": [message]}])
    llm.exit()


def test_samples_of_one_prompt_share_its_image(open_llm: OpenLLM) -> None:
    for engine_process in pick([False], [False, True]):  # by default tests/multimodal/test_storm.py has a core
        llm = open_llm("qwen2-vl", engine_process=engine_process)
        params = SamplingParams(n=3, seed=2, max_tokens=5, ignore_eos=True)
        [output] = llm.generate_multimodal([{"prompt": PLACE, "images": [picture(30, 30)]}], params, use_tqdm=False)
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen2-vl", "a token for each 8 x 8 pixels"), ("gemma3", "9 tokens for 24 x 24 pixels")],
)
def test_inspect_tells_of_the_tower(name: str, tokens: str, seeing: GetCheckpoint) -> None:
    said = CliRunner().invoke(app, [str(seeing(name).folder), "--json"], catch_exceptions=False)
    assert json.loads(said.output)["images"] == f"3 layers of 32, 2 heads; {tokens}"
