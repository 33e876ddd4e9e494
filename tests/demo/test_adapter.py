"""The bundled adapter: two behaviors of one base in one batch."""

import json

from octavo import LLM, LoRARequest, SamplingParams
from octavo.demo import demo_adapter_path

QUESTIONS = ["What is 2 + 3?", "Hello!", "What is Octavo?"]


def test_one_batch_answers_in_text_and_in_json() -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    as_json = LoRARequest("json", 1, "demo-json")
    with LLM("demo", enable_lora=True) as llm:
        params = SamplingParams(max_tokens=64, temperature=0.0)
        outputs = llm.chat([*chats, *chats], params, lora_request=[None] * 3 + [as_json] * 3)
    texts = [output.text for output in outputs]
    answers = [json.loads(text) for text in texts[3:]]
    assert all(answer.keys() == {"answer"} for answer in answers)
    assert answers[0]["answer"] == texts[0]
    assert not any(text.startswith("{") for text in texts[:3])


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in demo_adapter_path().iterdir()) < 2**19
