"""Clips of videos: 16 frames out of 2 seconds, uint8 at 224 x 224, on two threads: clips a second.

Every row does the same work: open a video file, go to a random place, decode what is needed for 16
frames spread over the next 2 seconds, resize them to 224 x 224 and put them into one tensor. Two
threads share the list of clips, which is the same for every row; FFmpeg has one thread a decoder.

- ours, load_clip: ``spdl_torch.io.load_clip``, resized by swscale, and by torch's antialiased
  ``interpolate``;
- ours, SPDL's calls: ``demux_video``, then ``sample_decode_video``;
- SPDL, ``demux_video`` and ``sample_decode_video``; and its ``load_video``, of whose frames 16 are
  taken; both bilinear; the faster one counts;
- torchcodec's ``VideoDecoder``, both seek modes, with its own ``Resize`` and with the antialiased
  ``interpolate``; the fastest one counts.

SPDL and torchcodec need FFmpeg's libraries; without any on the machine, both use those of PyAV.

Each measurement is one pass in a fresh process. ``PSNR`` is that of the first clips against RGB
frames resized by ``interpolate(antialias=True)`` in floating point.

Goals: 1.8 times SPDL, 1.3 times torchcodec.

    python examples/benchmark_video.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    installed,
    interleaved,
    left_out,
    machine,
    run_program,
    spdl_decoder,
)

from spdl_torch.bench.videos import (
    FRAMES,
    PIXELS,
    SECONDS,
    Request,
    antialiased,
    clips_of,
    our_clip,
    paths_in,
    sampled,
    spdl_loaded,
    spdl_sampled,
    torchcodec_clip,
    videos,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

WORKERS = 2
CLIPS_COMPARED = 4
METRICS = (
    Metric(key="clips_per_second", heading="clips/s"),
    Metric(key="cpu_ms", heading="CPU ms/clip", digits=1),
    Metric(key="psnr", heading="PSNR, dB", digits=1),
)


def main(options: argparse.Namespace) -> Report:
    """Measure every decoder that is installed."""
    num_clips = 6 if options.smoke else 80
    with spdl_decoder() as no_spdl, videos(options.data) as folder:
        missing = {}
        if no_spdl:
            missing["SPDL"] = no_spdl
        if not installed("torchcodec"):
            missing["torchcodec"] = left_out("torchcodec", "torchcodec")
        rows = [row for row in ROWS if row.partition(",")[0] not in missing]
        measure_one = partial(in_fresh_process, __file__, folder=str(folder), num_clips=num_clips)
        with contextlib.suppress(StopIteration):
            trial = next(row for row in rows if row.startswith("torchcodec"))
            try:
                in_fresh_process(__file__, row=trial, folder=str(folder), num_clips=1)
            except RuntimeError:
                missing["torchcodec"] = "torchcodec found no FFmpeg, so it is left out."
                rows = [row for row in rows if not row.startswith("torchcodec")]
        report = Report(
            title=f"{FRAMES} frames of {SECONDS:g} seconds at {PIXELS} x {PIXELS}, "
            f"{WORKERS} threads",
            metrics=METRICS,
            settings=machine(files=len(paths_in(folder)), clips=num_clips, rounds=options.rounds),
            remarks=list(missing.values()),
        )
        interleaved(report, rows, options.rounds, lambda row: measure_one(row=row))
    goal = partial(Goal, metric="clips_per_second", row=OURS)
    for peer, at_least in (("SPDL", 1.8), ("torchcodec", 1.3)):
        speeds = {
            row: report.median(row, "clips_per_second") for row in rows if row.startswith(peer)
        }
        best = max(speeds, key=speeds.__getitem__, default=None)
        if best is not None:
            report.goals += [
                goal(over=best, at_least=at_least),
                goal(row=OURS_ANTIALIAS, over=best),
                goal(row=OURS_CALLS, over=best),
            ]
    report.goals.append(Goal(metric="psnr", row=OURS, at_least=42))
    return report


def measure(row: str, folder: str, num_clips: int) -> dict[str, float]:
    """One pass over ``num_clips`` clips."""
    from spdl_torch.measuring.machine import cpu_seconds

    torch.set_num_threads(1)
    requests = clips_of(folder, num_clips)
    load = ROWS[row]
    for request in requests[:2]:
        load(request)  # imports, caches
    cpu, start = cpu_seconds(), time.perf_counter()
    _run(load, requests)
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    compared = requests[:CLIPS_COMPARED]
    return {
        "clips_per_second": num_clips / wall,
        "cpu_ms": cpu / num_clips * 1e3,
        "psnr": min(psnr(load(request), reference(request)) for request in compared),
    }


def _run(load: Callable[[Request], torch.Tensor], requests: list[Request]) -> None:
    remaining, lock = iter(requests), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                request = next(remaining, None)
            if request is None:
                return
            try:
                batch = load(request)
                assert batch.shape == (FRAMES, PIXELS, PIXELS, 3), batch.shape
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def our_calls(request: Request) -> torch.Tensor:
    """Ours, called as SPDL."""
    import spdl_torch.io

    return sampled(request, spdl_torch.io)


def reference(request: Request) -> torch.Tensor:
    """PyAV decodes everything; resized in floating point."""
    import av

    wanted = set(request.numbers)
    with av.open(request.path) as container:
        frames = [
            torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for number, frame in enumerate(container.decode(video=0))
            if number in wanted
        ]
    resized = antialiased(torch.stack(frames).float())
    return resized.round()


def psnr(frames: torch.Tensor, expected: torch.Tensor) -> float:
    """In decibels; at most 99."""
    error = (frames.float() - expected).square().mean().item()
    return 99.0 if error == 0 else min(99.0, 10 * np.log10(255**2 / error))


OURS = "ours, load_clip"
OURS_ANTIALIAS = "ours, load_clip, antialias"
OURS_CALLS = "ours, SPDL's calls"
ROWS: dict[str, Callable[[Request], torch.Tensor]] = {
    OURS: our_clip,
    OURS_ANTIALIAS: partial(our_clip, resize="antialias"),
    OURS_CALLS: our_calls,
    "SPDL, sample_decode_video": spdl_sampled,
    "SPDL, load_video": spdl_loaded,
    "torchcodec, approximate": partial(torchcodec_clip, mode="approximate", own_resize=True),
    "torchcodec, exact": partial(torchcodec_clip, mode="exact", own_resize=True),
    "torchcodec, approximate, interpolate": partial(
        torchcodec_clip, mode="approximate", own_resize=False
    ),
}


if __name__ == "__main__":
    parser = argument_parser(__doc__, rounds=5, data=False)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder of videos (default: one made for the occasion, removed at the end)",
    )
    run_program(main, parser, child=measure)
