"""Which long forms a run takes: parts that do not overlap, and that are all of them together."""

import sys

import conftest
import pytest
from conftest import NUM_PARTS

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_short(number):
    pass

@pytest.mark.long
@pytest.mark.parametrize("number", range({}))
def test_long(number):
    pass
"""


class Collected:
    """A plugin that keeps the names of the tests that a run takes."""

    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A run, as far as the choice of tests, of 5 short ones and many long ones."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # looking for them takes longest
    options = ["--collect-only", "--import-mode=importlib", "--rootdir", str(tmp_path)]
    for plugin in ("cacheprovider", "faulthandler", "unraisableexception", "threadexception"):
        options += ["-p", f"no:{plugin}"]
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")

    def collect(*more, num_long=100):
        (tmp_path / "test_some.py").write_text(TESTS.format(num_long))
        found, known = Collected(), set(sys.modules)
        assert pytest.main([*options, str(tmp_path), *more], plugins=[conftest, found]) == 0
        for name in set(sys.modules) - known:
            del sys.modules[name]
        return found.names, capsys.readouterr().out

    return collect


def is_long(name):
    return name.startswith("test_long")


def test_parts_are_disjoint_and_all_of_the_long_forms(run):
    """Successive numbers, from any one on: each test is in one of them, the short ones in each."""
    everything, _ = run("--long")
    runs = [run("--rotation", str(20_000 + number))[0] for number in range(NUM_PARTS)]
    taken = [name for names in runs for name in names if is_long(name)]
    assert all(any(map(is_long, names)) for names in runs)
    assert sorted(taken) == sorted(filter(is_long, everything))
    short = [name for name in everything if not is_long(name)]
    assert all([name for name in names if not is_long(name)] == short for names in runs)
    assert run()[0] == short


def test_test_stays_in_its_part(run):
    """Whatever is added beside it; else successive days could miss it for ever."""
    fewer, more = (set(run("--rotation", "7", num_long=count)[0]) for count in (60, 100))
    assert fewer < more
    assert all(is_long(name) and int(name[10:-1]) >= 60 for name in more - fewer)


@pytest.mark.parametrize("days_between", [1, 2, 3, 5, 7, 10, 14, 30])
def test_schedule_covers_all(days_between):
    """As many runs as there are parts, at any of these distances."""
    days = range(20_000, 20_000 + NUM_PARTS * days_between, days_between)
    assert {day % NUM_PARTS for day in days} == set(range(NUM_PARTS))


def test_first_lines_say_how_to_repeat_the_run(run):
    """The number, the part, and how many parts there are."""
    assert (
        f"long forms: part 3 of {NUM_PARTS}, by --rotation {2 * NUM_PARTS + 3}"
        in (run("--rotation", str(2 * NUM_PARTS + 3))[1])
    )
