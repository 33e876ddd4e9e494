"""docs/operations.md is true: its flags and metrics are those of the code, and none of the server's is missing."""

import re
from dataclasses import fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from octavo.config.args import EngineArgs
from octavo.contracts.engine import ExpertLoad, SchedulerStats, SpecDecodeStats
from octavo.metrics.collect import EngineMetrics, HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.server.args import ServerArgs

GUIDE = (Path(__file__).parents[2] / "docs/operations.md").read_text()
OURS = re.sub(r"^ +curl (?:.*\\\n)*.*$", "", GUIDE, flags=re.MULTILINE)  # without commands whose flags are curl's
# What the README, docs/messages.md and docs/page.md are about.
ELSEWHERE = {
    *("served-model-name", "tool-call-parser", "reasoning-parser", "port", "model-alias", "keep-billing-header"),
    "ui",
}


def test_flags_are_those_of_the_server() -> None:
    spelt = {name: name.replace("_", "-") for name in (s.name for s in (*fields(ServerArgs), *fields(EngineArgs)))}
    named = {flag.removeprefix("no-") for flag in re.findall(r"--([a-z][a-z-]+)", OURS)}
    assert named <= {*spelt.values(), "config", "show-settings", "help"}
    assert {spelt[s.name] for s in fields(ServerArgs)} <= named | ELSEWHERE


def engine_with_all() -> EngineMetrics:
    engine = EngineMetrics()
    engine.stats = SchedulerStats(num_waiting=1, deferred={"grammar": 1})
    engine.spec_decode_by_replica = {0: SpecDecodeStats(proposed=[1], accepted=[1])}
    engine.expert_load_by_replica = {0: ExpertLoad(layers=[0], counts=bytes(16))}
    for counts in vars(engine.adapters).values():
        counts["support"] = 1
    return engine


def test_metrics_are_those_that_a_scrape_shows() -> None:
    http = HttpMetrics()
    assert http.by_key["team"].requests == 0  # now it has a key with a name
    exposition = Exposition(http, engine_with_all, "m", with_vllm_names=True, with_each_expert=True)
    text, _ = exposition.render()
    families = list(text_string_to_metric_families(text.decode()))
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    named = set(re.findall(r"`((?:octavo_|vllm:)\w+)`", GUIDE))
    assert named <= shown
    assert {name for name in shown if name.startswith("octavo_")} <= named
