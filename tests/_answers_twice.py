"""A measuring process with two answers, the second when the file that it is given is there."""

import sys
import time
from pathlib import Path

from spdl_torch.measuring.lifeline import end_with_the_parent
from spdl_torch.measuring.reporter import Reporter

if __name__ == "__main__":
    end_with_the_parent()
    reporter = Reporter(sys.stdout)
    reporter.write(done=0)
    reporter.write(answer={"number": 1})
    reporter.write(done=1)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.001)
    reporter.write(answer={"number": 2})
