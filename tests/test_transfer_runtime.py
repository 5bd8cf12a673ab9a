"""The transfer on torch's own allocator, streams and events, over a stand-in for CUDA's runtime."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent

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
def facts(tmp_path_factory):
    """What the program found, in a process of its own."""
    headers = pathlib.Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    compiler = shutil.which("g++")
    if compiler is None or not headers.is_dir() or not (torch.version.cuda or "").startswith("13."):
        pytest.skip("needs g++, and a wheel of torch for CUDA 13 with the headers of its runtime")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which there are other tests")
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    library = folder / "libcuda.so.1"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{headers}"]
    subprocess.run([*command, str(HERE / "_cudart.cpp"), "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(HERE / "_cudart_program.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_stand_in_that_runs(facts):
    """With the code that would run on a GPU."""
    assert facts["device"] == "stand-in"
    assert facts["backend"] == "spdl_torch.io._transfer.cuda"


def test_batches_are_right_however_late_they_are_read(facts):
    """Packed, made in pinned memory, in shared memory of processes; on two streams. The loop's
    thread synchronises with nothing."""
    assert facts["wrong"] == dict.fromkeys(facts["wrong"], 0)
    assert len(facts["wrong"]) == 5


def test_memory_of_the_device_is_used_again(facts):
    """It does not grow with the number of batches, 200 of 1 MiB."""
    assert facts["reserved"] <= 60


def test_guard_that_is_taken_out_is_missed(facts):
    """The tests before can fail."""
    assert set(facts["without"]) == {"record_stream", "wait_event", "wait"}
    assert min(facts["without"].values()) >= 1
