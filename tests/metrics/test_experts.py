"""Loads of experts in a scrape: few numbers for a layer, each expert's when asked for, replicas added up."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.metrics.test_prometheus import samples

from octavo.contracts.engine import EngineCoreOutputs, ExpertLoad
from octavo.metrics.collect import EngineMetrics, HttpMetrics
from octavo.metrics.prometheus import Exposition

MODEL = ("model_name", "m")


def load(*counts: int, layers: tuple[int, ...] = (1, 3)) -> ExpertLoad:
    return ExpertLoad(layers=list(layers), counts=array("q", counts).tobytes())


def engine_of(steps: Sequence[Mapping[str, Any]]) -> EngineMetrics:
    """Return metrics after one step of each replica, whose outputs have these fields."""
    engine = EngineMetrics()
    for replica, fields in enumerate(steps):
        outputs = EngineCoreOutputs(
            req_ids=[],
            num_new_tokens=[],
            first_indices=[],
            new_token_ids=[],
            num_scheduled_tokens=1,
            replica=replica,
            **fields,
        )
        engine.record_step(outputs, {}, 1.0)
    return engine


def shown(*loads: ExpertLoad | None, with_each_expert: bool) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    engine = engine_of([{"expert_load": each} for each in loads])
    exposition = Exposition(
        HttpMetrics(), lambda: engine, "m", with_vllm_names=False, with_each_expert=with_each_expert
    )
    return {key: value for key, value in samples(exposition).items() if key[0].startswith("octavo_expert")}


def test_a_layer_has_three_numbers() -> None:
    first, second = (("layer", "1"), MODEL), (("layer", "3"), MODEL)
    assert shown(load(4, 0, 2, 2, 2, 2), with_each_expert=False) == {
        ("octavo_expert_choices_total", first): 6,
        ("octavo_expert_choices_total", second): 6,
        ("octavo_expert_busiest_ratio", first): 2.0,
        ("octavo_expert_busiest_ratio", second): 1.0,
        ("octavo_experts_unchosen", first): 1,
        ("octavo_experts_unchosen", second): 0,
    }


def test_replicas_are_added_up_and_each_expert_is_shown_on_request() -> None:
    found = shown(load(4, 0, layers=(0,)), load(1, 2, layers=(0,)), with_each_expert=True)
    each = [found["octavo_expert_tokens_total", (("expert", expert), ("layer", "0"), MODEL)] for expert in "01"]
    assert each == [5, 2]
    assert found["octavo_expert_choices_total", (("layer", "0"), MODEL)] == 7


def test_before_the_first_token_loads_are_even() -> None:
    assert shown(load(0, 0, layers=(0,)), with_each_expert=False)[
        "octavo_expert_busiest_ratio", (("layer", "0"), MODEL)
    ] == pytest.approx(1.0)


def test_models_without_experts_show_nothing() -> None:
    assert shown(None, with_each_expert=True) == {}
