"""Decode a folder of videos, keep the statistics of every stage in a file, and sum them up.

Shows: how a pipeline's figures get into SQLite while it runs (``recording``), full garbage
collections among them, and how to read them. Every ``*.mp4`` below the folder, as in
Kinetics-400's layout, is decoded whole, scaled to 128 x 128, by 10 threads.

Prints: the videos and frames a second, then for every stage its tasks, failures, average time and
success rate, and for every queue its items, QPS, how long puts and gets waited and how often
something was there; and the report, which names the bottleneck.
``performance_analysis_plot.py`` draws the same file.

Ctrl-C ends the run with the figures so far. Videos that cannot be decoded are counted and logged;
the run fails if more than ``--max-failures`` of them cannot.

    python examples/performance_analysis.py --dataset-dir DIR [--db-path FILE]
        [--log-interval SECONDS] [--concurrency N] [--max-failures SHARE] [--smoke]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _moving_noise import write_video
from torch import Tensor

import spdl_torch.io
from spdl_torch import PipelineFailure
from spdl_torch.observe import log_stats_summary, recording
from spdl_torch.pipeline import PipelineBuilder

SIZE = 128


def decode(path: Path) -> Tensor:
    """Decode all frames of a video: uint8, (N, 3, 128, 128)."""
    packets = spdl_torch.io.demux_video(path)
    filter_desc = spdl_torch.io.get_filter_desc(
        packets, scale_width=SIZE, scale_height=SIZE, pix_fmt="rgb24"
    )
    frames = spdl_torch.io.decode_packets(packets, filter_desc=filter_desc)
    return spdl_torch.io.to_torch(spdl_torch.io.convert_frames(frames)).permute(0, 3, 1, 2)


def run(videos: Sequence[Path], options: argparse.Namespace) -> int:
    """Decode all videos by a pipeline whose statistics are recorded; return the exit status."""
    status = 0
    builder = PipelineBuilder().add_source(videos)
    builder.pipe(decode, concurrency=options.concurrency).add_sink()
    pipeline = builder.build(max_failures=options.max_failures)
    config = {"concurrency": options.concurrency, "videos": len(videos)}
    record = recording(
        pipeline, options.db_path, interval_seconds=options.log_interval, config=config
    )
    try:
        with record, pipeline.auto_stop():
            begun = time.monotonic()
            counts = [len(frames) for frames in pipeline]
            seconds = time.monotonic() - begun
            print(f"{len(counts) / seconds:.1f} videos/s, {sum(counts) / seconds:,.0f} frames/s")
    except PipelineFailure as failure:
        print(f"stopped: {failure}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted; the figures so far:", file=sys.stderr)
        status = 130
    log_stats_summary(options.db_path, write=print)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset-dir", type=Path, metavar="DIR", help="folder of *.mp4 files, at any depth")
    add("--db-path", type=Path, default=Path("pipeline_stats.db"), metavar="FILE")
    add("--log-interval", type=float, default=60.0, metavar="SECONDS", help="between two entries")
    add("--concurrency", type=int, default=10, metavar="N", help="videos decoded at once")
    add("--max-failures", type=float, default=0.1, metavar="SHARE", help="that may fail, 0 to 1")
    add("--smoke", action="store_true", help="a few small videos made for the occasion")
    with tempfile.TemporaryDirectory() as made:
        if parser.parse_args(argv).smoke:
            parser.set_defaults(
                dataset_dir=Path(made), db_path=Path(made, "stats.db"), log_interval=0.2
            )
            for number in range(6):
                write_video(Path(made, f"{number}.mp4"), seconds=1)
        options = parser.parse_args(argv)
        if options.dataset_dir is None:
            parser.error("--dataset-dir DIR is required (or --smoke)")
        videos = sorted(options.dataset_dir.rglob("*.mp4"))
        if not videos:
            parser.error(f"--dataset-dir: {options.dataset_dir} must hold *.mp4 files, found none.")
        return run(videos, options)


if __name__ == "__main__":
    sys.exit(main())
