"""Speculative decoding in a scrape, under our names and vLLM's, replicas added up."""

from tests.metrics.test_experts import engine_of
from tests.metrics.test_prometheus import samples

from octavo.contracts.engine import SpecDecodeStats
from octavo.metrics.collect import HttpMetrics
from octavo.metrics.prometheus import Exposition


def scraped(*replicas: SpecDecodeStats) -> dict[str, float]:
    engine = engine_of([{"spec_decode": each} for each in replicas])
    table = samples(Exposition(HttpMetrics(), lambda: engine, "m", with_vllm_names=True))
    return {
        name + "".join(f"[{value}]" for label, value in labels if label == "position"): count
        for (name, labels), count in table.items()
        if "spec_decode" in name
    }


def test_counts_of_all_replicas() -> None:
    table = scraped(
        SpecDecodeStats(proposed=[10, 6], accepted=[5, 1], draft_s=1.5),
        SpecDecodeStats(proposed=[2, 0], accepted=[1, 0], draft_s=0.25),
    )
    for prefix in ("octavo_", "vllm:"):
        assert table[f"{prefix}spec_decode_num_drafts_total"] == 12
        assert table[f"{prefix}spec_decode_num_draft_tokens_total"] == 18
        assert table[f"{prefix}spec_decode_num_accepted_tokens_total"] == 7
        assert table[f"{prefix}spec_decode_num_accepted_tokens_per_pos_total[0]"] == 6
        assert table[f"{prefix}spec_decode_num_accepted_tokens_per_pos_total[1]"] == 1
    assert table["octavo_spec_decode_draft_seconds_total"] == 1.75
    assert table["octavo_spec_decode_num_draft_tokens_per_pos_total[0]"] == 12
    assert table["octavo_spec_decode_num_draft_tokens_per_pos_total[1]"] == 6
    assert len(table) == 2 * 5 + 1 + 2


def test_engines_without_a_drafter_have_none() -> None:
    assert not scraped()
