"""The system's files on a machine with several sockets, in a folder."""

from __future__ import annotations

import os

import pytest

from spdl_torch.machine import numa


def write_nodes(folder, cpulists, *, gpus=(), online=None, has_memory=None):
    """Write the files of nodes with these cores, and of GPUs at the nodes with these numbers.

    online, has_memory: what these files say; None = all nodes. False = there is no such file.
    """
    nodes = folder / "sys/devices/system/node"
    everything = ",".join(map(str, cpulists))
    for name, said in {"online": online, "has_memory": has_memory}.items():
        if said is not False:
            _write(nodes / name, everything if said is None else said)
    for number, cpulist in cpulists.items():
        (nodes / f"node{number}").mkdir(parents=True, exist_ok=True)
        if cpulist is not None:
            _write(nodes / f"node{number}" / "cpulist", cpulist)
    for index, node in enumerate(gpus):
        _write(folder / f"sys/bus/pci/devices/{pci_address(index)}/numa_node", node)
    return folder


def pci_address(index):
    """Of the GPUs of both stand-ins."""
    return f"0000:{0x1A + index:02x}:00.0"


def two_cores():
    """Two that this process may run on: the first one is near the GPU, the second one is not."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        pytest.skip("needs two cores, and Linux, to run on one of them alone")
    return cores[:2]


def install_nodes(monkeypatch, folder, *, gpu=1, count=2):
    """On a machine of two nodes, or one; return the core near the GPU, which has node 1.

    gpu: what the system says of the GPU's node.
    """
    near, _ = two_cores()
    allowed = os.sched_getaffinity(0)
    others = ",".join(map(str, sorted(allowed - {near})))
    lists = {0: others, 1: near} if count == 2 else {0: ",".join(map(str, sorted(allowed)))}
    monkeypatch.setattr(numa, "_ROOT", write_nodes(folder, lists, gpus=[gpu] * 4))
    return near


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
