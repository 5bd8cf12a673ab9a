"""Draw what ``performance_analysis.py`` measured: every stage and queue over time.

Shows: how a statistics file becomes pictures (``plot_stats``), for all of a run or for some stages
and a span of time.

Prints: the paths of two pictures. ``task_stats_combined.png`` has, for every stage, the rates of
tasks and of failures (1/s) and the time that tasks took (mean, p90, p99, ms);
``queue_stats_combined.png`` has, for every queue, the throughput (items/s), the occupancy (% of the
time), and how long puts and gets waited (mean, p90, p99, ms). Garbage collections are marked, and a
sentence above the panels names the bottleneck.

Times are seconds since 1970, or after the start of the run (``+90``). Of several runs in the file
the last one is drawn.

    python examples/performance_analysis_plot.py --db-path FILE [--output-dir DIR]
        [--stage-name NAME ...] [--start-time TIME] [--end-time TIME]
    python examples/performance_analysis_plot.py --smoke
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import performance_analysis

from spdl_torch.observe import plot_stats


def main() -> None:
    """Parse the command line, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--db-path", type=Path, metavar="FILE", help="statistics file of SQLiteStatsWriter")
    add("--output-dir", type=Path, metavar="DIR", help="of the pictures (default: FILE's folder)")
    add("--stage-name", nargs="+", metavar="NAME", help="only these stages and their queues")
    add("--start-time", metavar="TIME", help="intervals that end then or later")
    add("--end-time", metavar="TIME", help="intervals that end then or earlier")
    add("--smoke", action="store_true", help="measure a little, and draw that")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if options.smoke:
            options.db_path = Path(made, "stats.db")
            performance_analysis.main(["--smoke", "--db-path", str(options.db_path)])
        if options.db_path is None:
            parser.error("--db-path FILE is required (or --smoke)")
        try:
            paths = plot_stats(
                options.db_path,
                options.output_dir or options.db_path.parent,
                stages=options.stage_name,
                start_time=options.start_time,
                end_time=options.end_time,
            )
        except (OSError, ValueError, ModuleNotFoundError) as error:
            parser.error(str(error))
        print(*paths, sep="\n")


if __name__ == "__main__":
    main()
