"""``video-decoders``: 16 frames out of 2 seconds of a video by the decoders alone, on two threads.

Every row does the same work: open a video file, seek to a random place, decode what is needed for
16 frames spread over the next 2 seconds, resize them to 224 x 224 and put them into one tensor. The
threads share the list of clips; FFmpeg has one thread per decoder. ``PSNR`` is that of the first
clips against RGB frames resized by ``interpolate(antialias=True)`` in floating point.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from . import videos
from .loaders import Work, bare_threads
from .passes import tree_cpu_seconds
from .report import Goal, Metric
from .tables import Contender, Refused, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .reporter import Reporter
    from .tables import BenchOptions

_CLIPS_COMPARED = 4
_PER_SECOND = 40
METRICS = (
    Metric(key="per_second", heading="clips/s"),
    Metric(key="cpu_ms", heading="CPU ms/clip", digits=1, higher_is_better=False),
    Metric(key="psnr", heading="PSNR, dB", digits=1),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with videos.videos_for_all(options) as found:
        yield {
            **found,
            "clips": 4 if options.smoke else round(_PER_SECOND * options.seconds),
            "compared": 1 if options.smoke else _CLIPS_COMPARED,
        }


class Clips:
    """The clips of one decoder."""

    def __init__(self, requests: list[videos.Request], load: Callable[[Any], Any]) -> None:
        self.requests = requests
        self.load = load

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Any:
        frames = self.load(self.requests[index])
        assert frames.shape == (videos.FRAMES, videos.PIXELS, videos.PIXELS, 3), frames.shape
        return frames


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the clips."""
    import torch

    torch.set_num_threads(1)
    load, count = contender.run, settings["clips"]
    clips = Clips(videos.clips_of(settings["folder"], count), load)
    for index in range(min(2, count)):
        _first(clips, index, contender.name)  # imports, caches
    work = Work(dataset=clips, num_samples=count, batch_size=1, num_workers=settings["num_workers"])
    reporter.phase("measuring", count)
    cpu, start = tree_cpu_seconds(), time.perf_counter()
    for done, _ in enumerate(bare_threads(work, lambda group: clips[group[0]])(), 1):
        reporter.done(done)
    wall, cpu = time.perf_counter() - start, tree_cpu_seconds() - cpu
    compared = clips.requests[: settings["compared"]]
    return {
        "per_second": count / wall,
        "cpu_ms": cpu / count * 1e3,
        "psnr": min(_psnr(load(request), _reference(request)) for request in compared),
    }


def _first(clips: Clips, index: int, name: str) -> None:
    """Load one clip. Raises: Refused: torchcodec is installed, but finds no FFmpeg."""
    try:
        clips[index]
    except (ImportError, OSError, RuntimeError) as error:
        if name.startswith("torchcodec"):
            raise Refused("torchcodec found no FFmpeg.") from error
        raise


def _our_calls(request: videos.Request) -> Any:
    """Decode by our functions, called like SPDL's."""
    import spdl_torch.io

    return videos.sampled(request, spdl_torch.io)


def _reference(request: videos.Request) -> Any:
    """Decode everything with PyAV and resize in floating point."""
    import av
    import torch

    wanted = set(request.numbers)
    with av.open(request.path) as container:
        frames = [
            torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for number, frame in enumerate(container.decode(video=0))
            if number in wanted
        ]
    return videos.antialiased(torch.stack(frames).float()).round()


def _psnr(frames: Any, expected: Any) -> float:
    """Return the PSNR in decibels, at most 99."""
    error = (frames.float() - expected).square().mean().item()
    return 99.0 if error == 0 else min(99.0, 10 * math.log10(255**2 / error))


def _torchcodec(name: str, mode: str, *, own_resize: bool = True) -> Contender:
    run = partial(videos.torchcodec_clip, mode=mode, own_resize=own_resize)
    return Contender(name=f"torchcodec, {name}", run=run, needs=("torchcodec",))


def _spdl(name: str, run: Callable[[Any], Any]) -> Contender:
    return Contender(name=f"SPDL, {name}", run=run, needs=("spdl",), decodes_with_spdl=True)


_goal = partial(Goal, metric="per_second", row="ours, load_clip")
TABLES = {
    "video-decoders": Table(
        name="video-decoders",
        title="16 frames out of 2 seconds of a video, at 224 x 224, by the decoders alone",
        metrics=METRICS,
        contenders=(
            Contender(name="ours, load_clip", run=videos.our_clip, smoke=True),
            Contender(
                name="ours, load_clip, antialias",
                run=partial(videos.our_clip, resize="antialias"),
            ),
            Contender(name="ours, SPDL's calls", run=_our_calls, smoke=True),
            _spdl("sample_decode_video", videos.spdl_sampled),
            _spdl("load_video", videos.spdl_loaded),
            _torchcodec("approximate", "approximate"),
            _torchcodec("exact", "exact"),
            _torchcodec("approximate, interpolate", "approximate", own_resize=False),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            _goal(over="SPDL*", at_least=1.8),
            _goal(over="torchcodec*", at_least=1.3),
            _goal(row="ours, load_clip, antialias", over="SPDL*"),
            _goal(row="ours, load_clip, antialias", over="torchcodec*"),
            _goal(row="ours, SPDL's calls", over="SPDL*"),
            _goal(row="ours, SPDL's calls", over="torchcodec*"),
            Goal(metric="psnr", row="ours, load_clip", at_least=42),
        ),
    )
}
