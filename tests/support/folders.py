"""Where things are: the repository, the helpers of its tests, data where there are any."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DATA = ROOT.parent / "shared" / "data"
PHOTOGRAPHS = DATA / "imagenet"
