import pytest
from tests.end_to_end.conftest import open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.models.recurrent import use_recurrent_layers

from octavo.config.args import EngineArgs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_kinds(monkeypatch, checkpoint, make_llm, dtype):
    use_recurrent_layers(monkeypatch, (2,))
    name = f"qwen3-mixed-windows in {dtype}"
    config = EngineArgs(model_name=str(checkpoint("qwen3-mixed-windows").folder), tokenizer="demo").resolve().model
    kinds = {(g.kind, g.sliding_window) for g in config.kv_groups}
    print(kinds)
    assert len(kinds) == 3
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        alone = one_by_one(llm)
    for options in (
        {},
        {"max_num_batched_tokens": 14},
        {"num_kv_blocks": 16, "max_num_batched_tokens": 14},
        {"block_size": 16, "max_num_batched_tokens": 30},
    ):
        llm = make_llm(name, **options)
        for _ in range(2):
            out = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert answers(out) == alone
        print(options, sum(o.metrics.num_preemptions for o in out), sum(o.metrics.num_cached_tokens for o in out))
