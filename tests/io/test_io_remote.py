"""Reading paths and URLs: file systems, retries, many reads in flight."""

import errno
import io
import pickle
import traceback
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.registry import known_implementations

from spdl_torch.data.sources import Files
from spdl_torch.io import Reader
from spdl_torch.io._remote import RetryPolicy, glob_url, is_transient, read_url
from spdl_torch.io._resuming import open_resuming


class Flaky(fsspec.AbstractFileSystem):
    """Every file holds its ``content``; raises what is waiting in ``errors`` before it reads."""

    protocol = "flaky"
    errors = None  # set by the fixture
    attempts = 0

    def __init__(self, content=b"content", **options):
        super().__init__(**options)
        self.content = content

    def cat_file(self, path, start=None, end=None, **kwargs):
        type(self).attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.content


@pytest.fixture(autouse=True)
def file_systems(monkeypatch):
    """That of this file, as new, and an empty memory://; no waits."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.errors, Flaky.attempts = [], 0
    monkeypatch.setattr("spdl_torch.io._remote.time.sleep", lambda seconds: None)
    Flaky.clear_instance_cache()
    yield
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_content_is_read_from_paths_and_urls(tmp_path, monkeypatch):
    """Local paths, whatever colons they have, file:// and memory://, empty files too; through
    fsspec's chains, and with the options of a file system; an open file from any place."""
    fsspec.filesystem("memory").pipe({"/a.bin": b"remote", "/empty": b""})
    (tmp_path / "a.bin").write_bytes(b"local")
    (tmp_path / "empty").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C:").mkdir()
    reader = Reader()
    for name in ("ab::c.jpg", "std::vector.jpg", r"C:\data\a.jpg", "C://data", "a:b"):
        (tmp_path / name).write_bytes(name.encode())
        assert reader(name) == name.encode()
    assert reader(tmp_path / "a.bin") == b"local"
    assert reader(str(tmp_path / "empty")) == b""
    assert reader(f"file://{tmp_path}/a.bin") == b"local"
    assert reader("memory://a.bin") == b"remote"
    assert reader("memory://empty") == b""
    assert reader("simplecache::memory://a.bin") == b"remote"
    assert reader(f"simplecache::{tmp_path}/a.bin") == b"local"
    reader = Reader(storage_options={"content": b"other"})
    for each in (reader, pickle.loads(pickle.dumps(reader))):
        assert each("flaky://a.bin") == b"other"
    with open_url("memory://a.bin") as file:
        file.seek(2)
        assert file.read(3) == b"mot"


def open_url(url):
    return open_resuming(url, RetryPolicy(0))


@pytest.mark.parametrize("use", [read_url, open_url, glob_url, Files, Reader()])
def test_protocol_that_nobody_knows_or_that_needs_a_package_is_fsspecs_error(use, monkeypatch):
    """With a note that names the URL, if the error does not."""
    with pytest.raises(ValueError, match="Protocol not known: nope") as caught:
        use("nope://a")
    assert "nope://a" in "".join(traceback.format_exception(caught.value))
    entry = {"class": "no_such_package.System", "err": "Install it to access Nowhere"}
    monkeypatch.setitem(known_implementations, "nowhere", entry)
    with pytest.raises(ImportError, match="Install it"):
        use("nowhere://a")


def test_read_is_repeated_when_the_error_may_pass(monkeypatch):
    """Up to `retries` times; then the last error is raised as itself, with a note that
    has the number of attempts. Each read has all its attempts."""
    Flaky.errors = [TimeoutError("slow"), ConnectionResetError("gone"), OSError(errno.EIO, "disk")]
    reader = Reader(retries=3)
    assert reader("flaky://a.bin") == b"content"
    assert Flaky.attempts == 4
    for _ in range(2):
        Flaky.errors = [OSError(f"number {n}") for n in range(4)]
        last = Flaky.errors[-1]
        with pytest.raises(OSError, match="number 3") as caught:
            # A reader within a reader leaves one note, that of the one that made the attempts.
            RetryPolicy(0).repeat(lambda: reader("flaky://a.bin"), "flaky://a.bin")
        assert caught.value is last
        assert caught.value.__notes__ == ["reading 'flaky://a.bin' failed after 4 attempts"]
    # Nor once they have taken five minutes: what a file system repeats by itself takes long.
    monkeypatch.setattr("spdl_torch.io._remote._MOST_SECONDS", -100)
    Flaky.errors, Flaky.attempts = [OSError("slow")] * 3, 0
    with pytest.raises(OSError, match="slow") as caught:
        reader("flaky://a.bin")
    assert Flaky.attempts == 1


@pytest.mark.parametrize(
    "kind", [FileNotFoundError, PermissionError, ValueError, io.UnsupportedOperation, OSError]
)
def test_read_is_not_repeated_when_the_error_will_stay(kind):
    """A missing file is missing the next time too. The note names what these errors do not."""
    error = kind(errno.ENAMETOOLONG, "name") if kind is OSError else kind("the file's")
    Flaky.errors = [error]
    with pytest.raises(kind, match=r"name|file") as caught:
        Reader()("flaky://a.bin")
    assert caught.value is error
    assert error.__notes__[0].startswith("reading 'flaky://a.bin' failed after 1 attempt")
    assert Flaky.attempts == 1


def test_missing_local_file_is_an_os_error_at_once(tmp_path):
    """As open() reports it."""
    reader = Reader()
    with pytest.raises(FileNotFoundError, match=r"missing\.bin") as caught:
        reader(tmp_path / "missing.bin")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        reader(tmp_path)


def test_wait_doubles_up_to_its_bound(monkeypatch):
    """Between half and all of 0.1 * 2**(n-1) seconds, and never more than 5."""
    waits = []
    monkeypatch.setattr("spdl_torch.io._remote.time.sleep", waits.append)
    Flaky.errors = [OSError("now and then") for _ in range(9)]
    Reader()("flaky://a.bin")
    longest = [min(5, 0.1 * 2**number) for number in range(9)]
    assert all(each / 2 <= wait <= each for each, wait in zip(longest, waits, strict=True))


def test_options_are_checked():
    """When the reader is made, not when it reads; and a number is no file's."""
    for path in (b"bytes", 5, None):
        with pytest.raises(TypeError, match="expected a path or a URL, got"):
            Reader()(path)
    with pytest.raises(ValueError, match="retries must be >= 0, got -1"):
        Reader(retries=-1)
    with pytest.raises(TypeError, match=r"retries must be an int, got 1\.5"):
        Reader(retries=1.5)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503, 400, 401, 403, 404, 410])
def test_answers_of_a_busy_server_alone_are_asked_for_again(status):
    """aiohttp, gcsfs and requests each have their own place for the status that says so."""
    answer = SimpleNamespace(status_code=status)
    for where, found in (("status", status), ("code", status), ("response", answer)):
        error = OSError("no")
        setattr(error, where, found)
        assert is_transient(error) == (status in {408, 425, 429, 500, 503})
