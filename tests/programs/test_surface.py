"""The public surface is what ``surface.txt`` says: it changes by a line there that a reader sees.

The file is written by hand and never by a program: one line a name, under the heading of what it
is. A test compares each list with what the running code has.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.datasets import MapData
from support.folders import ROOT
from support.tuners import RandomTuner, auto

import spdl_torch
from spdl_torch.__main__ import _parser
from spdl_torch.observe import query_event_stats, recording
from spdl_torch.pipeline import PipelineBuilder

SURFACE = Path(__file__).with_name("surface.txt")


def lists():
    """The file's lists, by their headings."""
    found = {}
    for line in SURFACE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = found.setdefault(line.strip("[]"), [])
        elif line:
            names.append(line)
    return found


def pages_of_site():
    """The public modules, each with the page on which the documentation's site has its entries."""
    tree = ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (pages,) = [ast.literal_eval(n.value) for n in assigned if ast.unparse(n.targets[0]) == "PAGES"]
    return pages


MODULES = [each for each in lists() if each.startswith("spdl_torch")]
CALLABLES = {
    "arguments of DataLoader": spdl_torch.DataLoader,
    "arguments of PipelineDataset": spdl_torch.PipelineDataset,
    "arguments of ImageFolder": spdl_torch.ImageFolder,
    "arguments of PipelineBuilder.add_source": PipelineBuilder.add_source,
    "arguments of PipelineBuilder.pipe": PipelineBuilder.pipe,
    "arguments of PipelineBuilder.aggregate": PipelineBuilder.aggregate,
    "arguments of PipelineBuilder.add_sink": PipelineBuilder.add_sink,
    "arguments of PipelineBuilder.build": PipelineBuilder.build,
    "arguments of recording": recording,
}


def assert_is(heading, names):
    """A list of the file, without an order."""
    assert sorted(lists()[heading]) == sorted(names)


@pytest.mark.parametrize("module", MODULES)
def test_module_has_the_names_of_the_list(module):
    """Each of them can be imported."""
    if module == "spdl_torch.transformers":
        pytest.importorskip("transformers")
    home = importlib.import_module(module)
    assert_is(module, home.__all__)
    for name in lists()[module]:
        assert getattr(home, name) is not None


@pytest.mark.parametrize("heading", CALLABLES)
def test_arguments_are_those_of_the_list(heading):
    """With their defaults, in their order: users give the first ones by position."""
    arguments = list(inspect.signature(CALLABLES[heading]).parameters.values())
    shown = []
    for each in arguments:
        value = getattr(each.default, "__name__", repr(each.default))
        default = "" if each.default is each.empty else f" = {value}"
        keyword = "*, " if each.kind is each.KEYWORD_ONLY else ""
        shown.append(f"{keyword}{each.name}{default}")
    assert lists()[heading] == [each for each in shown if each != "self"]


def test_commands_and_options_are_those_of_the_list():
    """A command's line, and one for each of its long options and positional arguments."""
    kind = argparse._SubParsersAction
    (commands,) = (each for each in _parser()._actions if isinstance(each, kind))
    found = []
    for name, parser in commands.choices.items():
        found.append(name)
        for action in parser._actions:
            names = action.option_strings or [action.dest]
            found += [f"{name} {each}" for each in names if not re.match("-[a-z]", each)]
    assert_is("commands", found)


def test_recording_has_what_the_lists_say(tmp_path, monkeypatch):
    """The file has their tables and views with these columns, and their events with these keys, a
    loader's that is tuned, too; loggers get their metrics; and the report as JSON has their keys: a
    list's items are alike, so its first one stands for all, and a short run predicts nothing."""
    torch.manual_seed(0)
    data, metrics = MapData(64, dict.fromkeys(range(8, 64, 9), ValueError)), set()
    monkeypatch.setattr("spdl_torch.autotune.tuning.Tuner", RandomTuner)
    auto_workers = auto(2, window_seconds=1e-6, max_threads=4)
    loaders = {
        "inline": spdl_torch.DataLoader(data, 4, on_error="skip"),
        "workers": spdl_torch.DataLoader(data, 4, num_workers=2, on_error="skip"),
        "tuned": spdl_torch.DataLoader(range(64), isolation="thread", num_workers=auto_workers),
    }
    path = tmp_path / "run.db"
    with recording(loaders, path, logger=lambda found, step: metrics.update(found)):
        for loader in loaders.values():
            list(loader)
    query = (
        "SELECT t.name || '.' || c.name FROM sqlite_master t, pragma_table_info(t.name) c"
        " WHERE t.type IN ('table', 'view')"
    )
    with closing(sqlite3.connect(path)) as file:
        assert_is("statistics file", [name for (name,) in file.execute(query)])
    events = [each for each in query_event_stats(path) if not each.event_name.startswith("gc_")]
    assert_is("events", {f"{each.event_name}.{key}" for each in events for key in each.details})
    assert_is("metrics", {each for each in metrics if "/tuned/" not in each})
    report = json.loads(loaders["workers"].report().as_json())
    assert_is("report", keys_of({**report, "predictions": []}))


def keys_of(value, path=""):
    """Every path of keys in it."""
    if isinstance(value, dict):
        return {key for name, each in value.items() for key in keys_of(each, f"{path}.{name}")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return keys_of(value[0], f"{path}[]")
    return {path.removeprefix(".")}
