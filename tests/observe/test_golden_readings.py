"""Readings of made-up, simulated and real runs: the verdict on each stays what it is; and the ranks
of one run beside each other."""

from __future__ import annotations

import json
import re
from contextlib import closing
from inspect import signature
from operator import itemgetter
from pathlib import Path

import pytest
from support.readings import pipeline_stats, reading, stage, stage_stats

from spdl_torch import DataLoader
from spdl_torch.__main__ import main
from spdl_torch.data import cached
from spdl_torch.data.sources import TarShards
from spdl_torch.observe import Cause, Probes, judge, make_report, recording
from spdl_torch.observe.verdict.ranks import on_ranks
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


@pytest.mark.parametrize("rule", [it for it in READINGS if "rule" in it], ids=itemgetter("rule"))
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


def reports(*waits, num_batches=None):
    """One for each rank: 10 s, in which it waits for this share."""
    counts = num_batches or [100] * len(waits)
    return {
        rank: make_report(reading(wait, stage("fetch", busy=wait, num_delivered=count)))
        for rank, (wait, count) in enumerate(zip(waits, counts, strict=True))
    }


def said(**ranks):
    """What stands below the table, in one line."""
    return " ".join(on_ranks(reports(*ranks.pop("waits"), **ranks)).split("RANKS")[1].split())


def test_rank_that_makes_the_others_wait_is_named_with_what_it_costs():
    """A step of 100 ms ends when the last one has its data: 60 ms of it, where 15 would do."""
    found = said(waits=[0.1, 0.6, 0.15])
    assert found.startswith("Rank 1 makes the others wait: in a step of 100 ms it waits 60 ms")
    assert "they 15 ms at most" in found
    assert found.endswith("a step would take at most 45 ms (45 %) less.")


def test_table_has_a_row_for_each_rank():
    """In their order, with milliseconds."""
    lines = on_ranks(reports(0.1, 0.6)).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["0", "100", "100.0", "10.0"],
        ["1", "100", "100.0", "60.0"],
    ]
    (alone,) = reports(0.1).values()
    assert alone.across_ranks().startswith(on_ranks({0: alone}))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({"waits": [0.5, 0.52]}, "No rank makes the others wait"),
        ({"waits": [0.5]}, "No rank makes the others wait"),
        ({"waits": [0.1, 0.6], "num_batches": [100, 50]}, "The ranks do not step together"),
        ({"waits": [0.1, 0.6], "num_batches": [100, 0]}, "Not every rank has loaded a batch"),
    ],
)
def test_ranks_that_do_not_wait_for_one_another_are_not_blamed(ranks, words):
    """They wait for as long, or each for itself, or nothing is known yet."""
    assert said(**ranks).startswith(words)


def test_command_shows_the_ranks_of_recorded_files(tmp_path, capsys):
    """As a text, or a line of JSON for each, which says whose it is."""
    for rank in range(2):
        loader = DataLoader(range(64), batch_size=4)
        with closing(loader), recording(loader, tmp_path / "run.db", rank=rank, world_size=2):
            assert len(list(loader)) == 16
    files = sorted(map(str, tmp_path.iterdir()))
    assert main(["report", *files]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()[1:3]] == [["0", "16"], ["1", "16"]]
    assert printed.count("VERDICT") == 1
    assert main(["report", *files, "--format", "json"]) == 0
    told = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [each["rank"] for each in told if each["verdict"]] == [0, 1]
