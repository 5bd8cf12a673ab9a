"""``report`` of several files: the ranks of one run beside each other."""

import json
from contextlib import closing

import pytest
from support.readings import reading, stage

from spdl_torch import DataLoader
from spdl_torch.__main__ import main
from spdl_torch.observe import make_report, recording
from spdl_torch.observe.verdict.ranks import on_ranks


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


@pytest.fixture
def files(tmp_path):
    """Those of two ranks."""
    for rank in range(2):
        loader = DataLoader(range(64), batch_size=4)
        with closing(loader), recording(loader, tmp_path / "run.db", rank=rank, world_size=2):
            assert len(list(loader)) == 16
    return sorted(map(str, tmp_path.iterdir()))


def test_command_shows_the_ranks_of_recorded_files(files, capsys):
    """As a text, or a line of JSON for each, which says whose it is."""
    assert main(["report", *files]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()[1:3]] == [["0", "16"], ["1", "16"]]
    assert printed.count("VERDICT") == 1
    assert main(["report", *files, "--format", "json"]) == 0
    told = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [each["rank"] for each in told if each["verdict"]] == [0, 1]
