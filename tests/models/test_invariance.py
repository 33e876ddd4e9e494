"""Same request, same bits: logits in float32 do not depend on chunking, on neighbors, or on where blocks lie."""

import pytest
import torch
from tests.breadth import pick
from tests.models.paged import DTYPES, PagedRunner, load, make_context
from tests.models.test_exactness import random_tokens
from tests.models.tiny import TINY_MODELS, TinyModel, saved

from octavo.kernels.dispatch import native_kernels

NUM_NEIGHBOURS = 20


@pytest.mark.parametrize("case", TINY_MODELS[:: pick(3, 1)], ids=lambda case: case.name)
def test_logits_have_the_same_bits_alone_and_in_company(case: TinyModel) -> None:
    context = make_context()
    if not (context.kernels.is_batch_invariant and context.attention.is_batch_invariant):
        pytest.skip(f"{context.kernels.name} does not promise it")
    model = load(saved(case.name)[0])
    tokens = random_tokens(40, seed=1)
    [alone] = PagedRunner(model).step({0: tokens})

    runner = PagedRunner(model, num_blocks=256, block_size=8, seed=1)
    neighbors = {request: random_tokens(2 + request, seed=request) for request in range(1, NUM_NEIGHBOURS)}
    pieces = [runner.step({0: tokens[:7], **neighbors})[0], runner.step({0: tokens[7:8]})[0]]
    pieces.append(runner.step({3: [5], 0: tokens[8:30]})[1])
    pieces += [runner.step({4: [9], 0: [token], 5: [11]})[1] for token in tokens[30:]]
    assert torch.equal(torch.cat(pieces), alone)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "bfloat16") for case in TINY_MODELS[:: pick(4, 1)]]
    + [(case, "float32") for case in TINY_MODELS[1 :: pick(12, 1)]],
    ids=lambda part: getattr(part, "name", part),
)
def test_what_the_last_layer_leaves_out_does_not_show(case: TinyModel, dtype: str) -> None:
    """Tokens whose hidden state nobody wants leave their keys and values, and others have the same bits."""
    context = make_context(DTYPES[dtype])
    if not (context.kernels.is_batch_invariant and context.attention.is_batch_invariant):
        pytest.skip(f"{context.kernels.name} does not promise it")
    model = load(saved(case.name)[0], dtype=dtype)
    steps = [{0: random_tokens(21, seed=1), 1: random_tokens(5, seed=2)}, {1: [7], 2: random_tokens(9, seed=3), 0: [8]}]
    whole, some = PagedRunner(model), PagedRunner(model)
    for tokens, kept in zip(steps, ([3, 4, 20], [0, 9]), strict=True):
        assert torch.equal(some.step_for(tokens, kept), whole.step_for(tokens, None)[kept])
    assert torch.equal(some.step({0: [1, 2], 1: [3]})[0], whole.step({0: [1, 2], 1: [3]})[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [case.name for case in TINY_MODELS if "deepseek" in case.name][:: pick(3, 1)])
def test_latent_attention_is_recorded(name: str, dtype: str) -> None:
    """A replay has the bits of steps op by op."""
    if native_kernels(DTYPES[dtype]) is None:
        pytest.skip("only the C++ kernels record")
    model, tokens = load(saved(name)[0], dtype=dtype), random_tokens(40, seed=1)
    replayed, by_op = PagedRunner(model), PagedRunner(model)
    replayed.record(40)
    for step in ({0: tokens[:20], 1: tokens[:3]}, {0: tokens[20:21], 1: tokens[3:4]}, {0: tokens[21:]}):
        assert torch.equal(torch.cat(replayed.step(step)), torch.cat(by_op.step(step)))


@pytest.mark.parametrize("name", ["qwen3", "llama-biases"])
def test_logits_have_the_same_bits_in_a_step_that_threads_share(name: str) -> None:
    """With enough tokens, torch cuts elementwise ops between threads, in the middle of a row."""
    context = make_context()
    if not (context.kernels.is_batch_invariant and context.attention.is_batch_invariant):
        pytest.skip(f"{context.kernels.name} does not promise it")
    model = load(saved(name)[0])
    prompts = {request: random_tokens(31, seed=request) for request in range(67)}
    together = PagedRunner(model, num_blocks=67 * 8).step(prompts)
    for request in (0, 31, 33, 66):
        assert torch.equal(together[request], PagedRunner(model).step({0: prompts[request]})[0])
