"""spdl_torch.spdl: every public module and name of SPDL's, with SPDL's signature, or a hint."""

import copy
import functools
import importlib
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
from support.folders import ROOT

import spdl_torch
from spdl_torch import spdl
from spdl_torch.lazy_names import all_left_out
from spdl_torch.pipeline import PipelineBuilder

LEFT_OUT = {home: each for home, each in all_left_out().items() if home.startswith("spdl_torch")}

MODULES = [
    *("io", "io.utils", "pipeline", "pipeline.defs", "dataloader"),
    *("source", "source.utils", "source.imagenet", "source.local_directory"),
]

OTHER_DEFAULTS = {
    "io.load_image": "filter_desc",
    "io.load_video": "filter_desc",
    "io.decode_packets": "filter_desc",
    "io.sample_decode_video": "filter_desc",
    "io.transfer_tensor": "num_caches",
    "io.transfer_tensor_h2d": "num_caches",
    "pipeline.PipelineBuilder.build": "max_failures report_stats_interval",
    "pipeline.build_pipeline": "max_failures report_stats_interval",
    "pipeline.run_pipeline_in_subprocess": "max_failures report_stats_interval",
    "pipeline.StageInfo": "concurrency",
    "pipeline.StatsQueue": "buffer_size interval",
    "pipeline.TaskStatsHook": "interval",
}
NOT_TAKEN = {
    "io.load_audio": "demux_config decode_config device_config filter_desc",
    "io.load_image_batch": "demux_config decode_config filter_desc",
    "io.load_npy": "copy",
    "io.load_npz": "copy",
    "io.demux_image": "demux_config bsf",
    "io.demux_video": "demux_config bsf",
    "io.load_image": "demux_config",
    "io.load_video": "demux_config",
    "io.get_video_filter_desc": "frame_rate timestamp scale_mode crop_width crop_height num_frames "
    "pad_mode",
    "pipeline.build_pipeline": "background_tasks",
    "pipeline.run_pipeline_in_subprocess": "background_tasks",
    "pipeline.iterate_in_subprocess": "arena",
}
"""Arguments of SPDL's with another default, and those that are not accepted here; the page of the
reference says why, and what to do instead."""

NOT_HERE = {
    *("pipeline.PipelineBuilder.path_variants", "pipeline.PipelineBuilder.to"),
    *("pipeline.StatsQueue.get", "pipeline.StatsQueue.put"),
}
"""Methods of SPDL's classes that are not here or differ."""


def pair(module):
    """A module of SPDL's and ours in its place."""
    peer = pytest.importorskip(f"spdl.{module}", reason="SPDL, an optional peer, is not installed")
    return peer, importlib.import_module(f"spdl_torch.spdl.{module}")


def test_tree_is_spdl_s():
    """Every public module of SPDL's is at the same path, but for those that the page names."""
    peer = pytest.importorskip("spdl.io").__path__[0]
    found = {
        name.removeprefix("spdl.")
        for part in ("pipeline", "io", "source", "dataloader")
        for info in pkgutil.walk_packages([str(Path(peer).parent / part)], f"spdl.{part}.")
        if "._" not in (name := info.name) and not name.startswith("spdl.io.lib")
    }
    assert found | {"pipeline", "io", "source", "dataloader"} == {*MODULES, "pipeline.config"}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_spdl_s_is_here_or_left_out_on_purpose(module):
    """And no other."""
    peer, ours = pair(module)
    public = {name for name in peer.__all__ if not name.startswith("_")}
    assert set(ours.__all__) <= public
    assert all(hasattr(ours, name) for name in ours.__all__)
    left_out = set(LEFT_OUT.get(ours.__name__, ())) - {"config"}
    assert public - set(ours.__all__) == left_out
    with pytest.raises(AttributeError, match=r"has no attribute 'nonesuch'$"):
        _ = ours.nonesuch


def test_reference_names_all_that_is_left_out():
    """And says that of spdl.pipeline.config there is nothing."""
    page = ROOT / "docs/reference/spdl.md"
    text = page.read_text(encoding="utf-8")
    assert "all of `spdl.pipeline.config`" in text
    names = set(re.findall(r"`\.?(\w+)", text))
    of_spdl = {n for module, each in LEFT_OUT.items() if ".spdl" in module for n in each}
    assert of_spdl - {"config"} <= names


@pytest.mark.parametrize(
    ("module", "name"), [(home, name) for home, names in LEFT_OUT.items() for name in names]
)
def test_what_is_left_out_says_what_to_use_in_both_ways_of_asking(module, name):
    """``from module import name`` as ``module.name``, which alone is an AttributeError."""
    hint = re.escape(LEFT_OUT[module][name])
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}'. {hint}"):
        exec(f"from {module} import {name}")
    home = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. {hint}"):
        getattr(home, name)
    assert not hasattr(home, name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("path_variants", ". A pipeline is a line of stages: let an op choose by itself."),
        ("to", ". Use run_pipeline_in_subprocess, or executor= of one stage."),
        ("pype", ""),
    ],
)
def test_method_that_is_left_out_says_what_to_use(name, hint):
    """As a module's name does, and it is not there for ``hasattr``, copies and pickles."""
    builder = PipelineBuilder().add_source([1])
    text = f"'PipelineBuilder' object has no attribute '{name}'{hint}"
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
        getattr(builder, name)
    assert not hasattr(builder, name)
    assert list(pickle.loads(pickle.dumps(copy.deepcopy(builder))).add_sink().build()) == [1]


def callables_of(module):
    """Functions, and classes with their public methods, of SPDL's and of ours, by dotted name."""
    peer, ours = pair(module)
    for name in ours.__all__:
        found = getattr(peer, name)
        if name in MADE_HERE or not (inspect.isfunction(found) or inspect.isclass(found)):
            continue
        yield name, found, getattr(ours, name)
        for method, value in vars(found).items():
            if inspect.isclass(found) and not method.startswith("_") and callable(value):
                dotted = f"{name}.{method}"
                if f"{module}.{dotted}" not in NOT_HERE:
                    yield dotted, getattr(found, method), getattr(getattr(ours, name), method)


MADE_HERE = {
    *("ArrayInterface", "CUDAArrayInterface", "CPUBuffer", "CUDABuffer", "CPUStorage"),
    *("CUDAConfig", "DecodeConfig", "NpzFile", "ImageCodec", "VideoCodec"),
    "decode_config",  # which takes a number of threads alone
    *("ImageFrames", "ImagePackets", "VideoFrames", "VideoPackets"),
    *("Pipeline", "QueuePerfStats", "TaskPerfStats", "PipelineFailure"),
    "PipeConfig",
    *("IterableWithShuffle", "SizedIterable", "SizedIterableWithShuffle"),
}
"""Types that programs name and read, and functions make; protocols, which nobody calls."""


@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_spdl_s_by_name_place_and_default(module):
    """What SPDL's functions and methods take, ours take; some have more."""
    num_compared = 0
    for name, theirs, ours in callables_of(module):
        there, here = (inspect.signature(each).parameters for each in (theirs, ours))
        for place, wanted in enumerate(there.values()):
            function = f"{module}.{name}"
            where = f"{function}: {wanted.name}"
            if wanted.name in NOT_TAKEN.get(function, "").split():
                assert wanted.name not in here, f"{where} is taken by now"
                continue
            if wanted.kind in (wanted.VAR_KEYWORD, wanted.VAR_POSITIONAL):
                continue
            if wanted.kind is wanted.POSITIONAL_ONLY:
                assert list(here.values())[place].kind is not wanted.KEYWORD_ONLY, where
                continue
            assert wanted.name in here, where
            given = here[wanted.name]
            if wanted.kind is wanted.POSITIONAL_OR_KEYWORD:
                assert list(here).index(wanted.name) == place, where
            assert given.kind in (wanted.kind, given.POSITIONAL_OR_KEYWORD), where
            if wanted.default not in (wanted.empty, given.default):
                assert wanted.name in OTHER_DEFAULTS.get(function, "").split(), where
            num_compared += 1
    assert num_compared > 0 or module == "source.imagenet"


def test_modules_are_found_without_an_import_of_their_own():
    """As by programs whose ``import spdl.io.utils`` has become ``from spdl_torch import spdl``."""
    assert spdl_torch.spdl is spdl
    for module in MODULES:
        found = functools.reduce(getattr, module.split("."), spdl)
        assert found is importlib.import_module(f"spdl_torch.spdl.{module}")
    with pytest.raises(AttributeError, match=r"has no attribute 'nonesuch'$"):
        _ = spdl.nonesuch
