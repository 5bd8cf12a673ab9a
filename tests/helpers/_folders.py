"""Where things are: the repository, the helpers of its tests, data where there are any."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
DATA = ROOT.parent / "shared" / "data"
PHOTOGRAPHS = DATA / "imagenet"
