"""Draw what ``performance_analysis.py`` measured: every stage and queue over time.

Shows: how a statistics file becomes pictures (``plot_stats``), for all of a run or for some stages
and a span of time.

Prints: the paths of two pictures. ``task_stats_combined.png`` has, for every stage, the rates of
tasks and of failures (1/s) and the time that tasks took (mean, p90, p99, ms);
``queue_stats_combined.png`` has, for every queue, the throughput (items/s), the occupancy (% of the
time), and how long puts and gets waited (mean, p90, p99, ms). Garbage collections are marked, and a
sentence above the panels names the bottleneck.

Times are seconds since 1970, dates (``2026-01-31 12:00``), or after the start of the run as the
pictures show it (``+90``, ``+1.5min``, ``+2h``). Of several runs in the file the last one is drawn.
With ``--smoke``, pictures for which no folder is named are removed at the end.

    python examples/performance_analysis_plot.py --db-path FILE [--output-dir DIR]
        [--stage-name NAME ...] [--start-time TIME] [--end-time TIME]
    python examples/performance_analysis_plot.py --smoke [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from spdl_torch.observe import SQLiteStatsWriter, plot_stats, recorders, recording_gc
from spdl_torch.pipeline import PipelineBuilder


def checksum(block: bytes) -> int:
    """Compute the CRC-32 of 4 MB, without the GIL: a stage that computes."""
    return zlib.crc32(block)


def record(db_path: Path) -> None:
    """Record a short run of a pipeline whose second stage is the slow one."""
    builder = PipelineBuilder().add_source(range(200))
    builder.pipe(lambda number: bytes([number]) * 4_000_000, name="make").pipe(checksum)
    with SQLiteStatsWriter(db_path) as writer, recording_gc(writer.log):
        pipeline = builder.add_sink().build(**recorders(writer.log, interval=0.05))
        with pipeline.auto_stop():
            for _ in pipeline:
                pass


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--db-path", type=Path, metavar="FILE", help="statistics file of SQLiteStatsWriter")
    add("--output-dir", type=Path, metavar="DIR", help="of the pictures (default: FILE's folder)")
    add("--stage-name", nargs="+", metavar="NAME", help="only these stages and their queues")
    add("--start-time", metavar="TIME", help="intervals that end then or later")
    add("--end-time", metavar="TIME", help="intervals that end then or earlier")
    add("--smoke", action="store_true", help="draw a short run made for the occasion")
    arguments = parser.parse_args()
    if arguments.db_path is None and not arguments.smoke:
        parser.error("--db-path FILE is required (or --smoke)")
    return arguments


def main() -> int:
    """Run the program; return the exit status."""
    arguments = parse_arguments()
    with ExitStack() as stack:
        if arguments.smoke:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            arguments.db_path = folder / "pipeline_stats.db"
            record(arguments.db_path)
        try:
            paths = plot_stats(
                arguments.db_path,
                arguments.output_dir or arguments.db_path.parent,
                stages=arguments.stage_name,
                start_time=arguments.start_time,
                end_time=arguments.end_time,
            )
        except (OSError, ValueError, ModuleNotFoundError) as error:
            print(f"performance_analysis_plot.py: {error}", file=sys.stderr)
            return 2
        print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
