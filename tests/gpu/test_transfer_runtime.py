"""The transfer on torch's own allocator, streams and events, over a stand-in for CUDA's runtime."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from _folders import HELPERS

REQUIRED = "SPDL_TORCH_REQUIRE_CUDART"

HOST_DEFINES = """
#define CUDARTAPI
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a program over the stand-in."""
    headers = pathlib.Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    compiler = shutil.which("g++")
    if compiler is None or not headers.is_dir() or not (torch.version.cuda or "").startswith("13."):
        missing = "needs g++, and a wheel of torch for CUDA 13 with the headers of its runtime"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but this {missing}", pytrace=False)
        pytest.skip(missing)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which there are other tests")
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    library = folder / "libcuda.so.1"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{headers}"]
    subprocess.run([*command, str(HELPERS / "_cudart.cpp"), "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}

    def run(name):
        command = [sys.executable, str(HELPERS / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def facts(run):
    """What the program found, in a process of its own."""
    return json.loads(run("_cudart_program.py")[-1])


@pytest.fixture(scope="module")
def checked(run):
    """The lines of check-gpu."""
    return run("_cudart_check.py")


def test_it_is_the_stand_in_that_runs(facts):
    """With the code that would run on a GPU."""
    assert facts["device"] == "stand-in"
    assert facts["backend"] == "spdl_torch.io._transfer.cuda"


def test_batches_are_right_however_late_they_are_read(facts):
    """Packed, made in pinned memory, in shared memory of processes."""
    for setting, wrong in facts["wrong"].items():
        assert wrong == dict.fromkeys(wrong, 0), setting
    assert len(facts["wrong"]["far"]) == 35
    assert set(facts["wrong"]) == {"near", "far", "unregistered", "default", "side", "external"}


def test_streams_of_the_check_are_of_three_kinds(facts):
    """The default one, one of torch's 32, and one that torch knows by its handle alone."""
    assert facts["is_torchs"] == {"default": False, "side": True, "external": False}


def test_memory_of_the_device_is_used_again(facts):
    """It does not grow with the number of batches, 900 of 64 KiB and 80 of up to 1 MiB."""
    assert facts["reserved"] <= 30


def test_loop_goes_on_when_the_device_was_full(facts):
    """A device of 64 MiB; the error says where, and is torch's own."""
    assert 5 <= facts["out_of_memory"]["kept"] < 16
    assert "in the transfer to cuda:0" in facts["out_of_memory"]["notes"][0]
    lost = facts["out_of_memory"]["lost"]
    assert 1 <= lost <= 4  # and what was copied ahead before the loop let go
    assert facts["out_of_memory"]["next"] == facts["out_of_memory"]["kept"] + lost


@pytest.mark.parametrize(("seat", "most"), [("none", 5), ("threads", 7), ("persistent", 9)])
def test_pages_are_locked_once(facts, seat, most):
    """In four epochs no more than one may need."""
    assert sum(facts["locks"][seat]) <= most


def test_other_device_is_asked_for_nothing(facts):
    """By a trainer on the second of two; on its threads, and those of its processes' batches."""
    assert facts["calls_of_the_first"] == [0] * 4
    assert facts["calls_without_a_device"] > 0


@pytest.mark.long
def test_check_gpu_runs_as_a_whole(checked):
    """Every group; what needs a kernel is skipped and says so, and the rest passes."""
    lines = [line for line in checked if not line.startswith("#")]
    outcomes = {line.split()[0]: line.rsplit(maxsplit=1)[1] for line in lines}
    assert {*outcomes.values()} == {"PASS", "SKIP"}
    by_kernels = [line.split()[0] for line in lines if "(it runs no kernels)" in line]
    assert by_kernels == [
        *("race_allocators", "exits", "capture", "compiled"),
        *("launches", "hand_over", "copies", "training"),
    ]
    skipped = {name for name, outcome in outcomes.items() if outcome == "SKIP"}
    assert skipped <= {*by_kernels}
    assert len(outcomes) - len(skipped) >= 40
