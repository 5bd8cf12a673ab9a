"""Readings of made-up, simulated and real runs: the verdict on each stays what it is."""

from __future__ import annotations

import json
import re
from inspect import signature
from operator import itemgetter
from pathlib import Path

import pytest
from support.readings import pipeline_stats, stage_stats

from spdl_torch import DataLoader
from spdl_torch.data import cached
from spdl_torch.data.sources import TarShards
from spdl_torch.observe import Cause, Probes, judge
from spdl_torch.observe.verdict.verdict import RULES
from spdl_torch.pipeline import PipelineBuilder, QueuePerfStats, TaskPerfStats

READINGS = json.loads(Path(__file__).with_name("golden_readings.json").read_bytes())

TASKS = {"num_tasks": 0, "num_failures": 0, "ave_time": 0.0, "p90_time": 0.0, "p99_time": 0.0}
QUEUE = {"elapsed": 0.0, "num_items": 0, "ave_put_time": 0.0, "ave_get_time": 0.0}
QUEUE |= {"occupancy_rate": 0.0}


def reading_of(content):
    """The statistics, the probes and the pooled stages; what is 0 is not stored."""
    stages = [
        stage_stats(
            **{
                **stage,
                "tasks": TaskPerfStats(**{**TASKS, **stage.get("tasks", {})}),
                "queue": QueuePerfStats(**{**QUEUE, **stage.get("queue", {})}),
            }
        )
        for stage in content["stats"].get("stages", [])
    ]
    stats = {"elapsed": 0.0, "consumer_wait_ratio": 0.0, **content["stats"]}
    probes = Probes(**content["probes"]) if "probes" in content else None
    return pipeline_stats(**{**stats, "stages": tuple(stages)}), probes, content["pooled"]


def test_verdicts_stay():
    """The cause, the stage, what limits the gain, and whether more workers are advised."""
    changed = []
    for number, content in enumerate(READINGS):
        stats, probes, pooled = reading_of(content)
        verdict = judge(stats, probes, pooled=pooled)
        found = {"cause": verdict.cause.value, "stage": verdict.stage, "limit": verdict.limit}
        if "raises" in content["answer"]:
            found["raises"] = "Raise" in verdict.action
        if found != content["answer"]:
            changed.append((number, content["answer"], found))
    assert not changed


@pytest.mark.parametrize(
    "rule", [each for each in READINGS if "rule" in each], ids=itemgetter("rule")
)
def test_rule(rule):
    """What the finding and the action say, and the gain."""
    stats, probes, pooled = reading_of(rule)
    verdict = judge(stats, probes, pooled=pooled)
    finding, action = rule["says"]
    assert finding in verdict.finding
    assert action in verdict.action
    assert verdict.gain == pytest.approx(float(rule["gain"]), rel=1e-4)


def test_settings_that_an_action_names_are_there():
    """So that it can be followed."""
    users = DataLoader, PipelineBuilder.pipe, TarShards, cached
    known = {name for each in users for name in signature(each).parameters}
    actions = [rule.action for rule in RULES]
    for content in READINGS:
        stats, probes, pooled = reading_of(content)
        actions.append(judge(stats, probes, pooled=pooled).action)
    named = {name for each in actions for name in re.findall(r"\b([a-z_]+)=", each)}
    assert {"isolation", "executor", "num_workers", "ahead", "transform"} <= named <= known


def test_causes_and_advice_are_those_of_the_reference_and_of_the_rules():
    """Each cause has a row there, which says what its rules do, and is named by a rule."""
    page = Path(__file__).parents[2] / "docs/reference/reports.md"
    (table,) = re.findall(r"\| `Cause` \|.*?\n\n", page.read_text("utf-8"), re.DOTALL)
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \|.*\| (.*) \|$", table, re.MULTILINE))
    assert sorted(rows) == sorted(cause.name for cause in Cause)
    assert {rule.cause for rule in RULES} == {*Cause}
    for rule in RULES:
        advice = re.split("[:,.(]", re.sub("{.*?}", "", rule.action))[0].strip().lower()
        assert advice in rows[rule.cause.name].lower().replace("`", ""), rule.cause
