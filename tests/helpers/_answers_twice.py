"""A measuring process with two answers, the second when its named pipe is closed."""

import sys
from pathlib import Path

from bench.reporter import Reporter, end_with_the_parent

if __name__ == "__main__":
    end_with_the_parent()
    reporter = Reporter(sys.stdout)
    reporter.write(done=0)
    reporter.write(answer={"number": 1})
    reporter.write(done=1)
    Path(sys.argv[1]).read_bytes()  # a named pipe: waits for whoever opens it for writing
    reporter.write(answer={"number": 2})
