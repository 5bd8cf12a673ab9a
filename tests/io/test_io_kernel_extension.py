"""The batch kernel's extension: built by a command, and loaded only if it fits. Its pixels are held
equal to the others' where those are tested."""

import re

import pytest
import torch
from support.jpegs import WAYS, running

from spdl_torch.__main__ import main
from spdl_torch.io._image import extension, kernel


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs build-kernel with a compiler, a line of shell to which $1 is the library, that builds in
    a folder of its own; returns status and output."""

    def run(line):
        (compiler := tmp_path / "compiler").write_text(
            f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; shift\n{line}\n'
        )
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        status = main(["build-kernel"])
        return status, "".join(capfd.readouterr())

    (tmp_path / "library").mkdir()
    path = tmp_path / "library" / extension.library_path().name
    monkeypatch.setattr(extension, "library_path", lambda: path)
    return run


def test_failed_build_leaves_nothing(command, monkeypatch):
    """What a compiler wrote before it failed is not loaded; no compiler is an error, too."""
    status, said = command('echo half > "$1"; echo it is broken >&2; exit 3')
    assert status == 1
    assert re.search(r"it is broken(?s:.*)exit status 3.*CXX", said)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build-kernel"]) == 1
    assert [*extension.library_path().parent.iterdir()] == []


def test_library_that_cannot_be_loaded_is_passed_over(command, monkeypatch):
    """The command says so; a program loads its pictures in another way."""
    monkeypatch.setattr(extension, "load", extension.load.__wrapped__)
    status, said = command('echo no library > "$1"')
    assert status == 1
    assert "cannot be loaded" in said
    assert [*extension.library_path().parent.iterdir()] == [extension.library_path()]
    assert kernel._compiled.__wrapped__() is not None  # TorchScript's


@pytest.mark.skipif("extension" not in WAYS, reason="there is no c++")
def test_extension_is_preferred_when_it_is_built(command):
    """The command prints where it lies; from then on it is what runs."""
    choose = kernel._compiled.__wrapped__
    with running("extension"):
        assert command('echo library > "$1"') == (0, f"{extension.library_path()}\n")
        assert choose() is extension.load()
        assert kernel.is_extension()


@pytest.mark.parametrize("what", ["torch", "source"])
def test_library_for_another_torch_or_source_is_not_found(what, monkeypatch, tmp_path):
    """Its name tells."""
    path = extension.library_path()
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        (tmp_path / "kernel.cpp").write_text("another")
        monkeypatch.setattr(extension, "_SOURCE", tmp_path / "kernel.cpp")
    assert extension.library_path().name != path.name
