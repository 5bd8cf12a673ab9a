"""A measuring process with a worker of its own, which never answers: ``run_child`` runs it."""

import subprocess
import sys

from bench.child import end_with_the_parent

if __name__ == "__main__":
    end_with_the_parent()
    subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], check=False)
