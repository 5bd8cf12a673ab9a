"""Train a video classifier on clips that one child process cuts out and decodes, epoch by epoch.

Decoding keeps several cores busy, and now and then the interpreter. In a child process it holds up
no step of the training:

    embed_shuffle(DistributedRandomSampler(...))   which videos this rank gets; anew every epoch
        -> load        a random stretch of the video, a few frames of it, at their size; on threads
        -> aggregate   as many clips as a batch has
        -> collate     one tensor of bytes, and the labels

``add_source(..., continuous=True)`` keeps the pipeline going from one epoch to the next: while the
last steps of an epoch are made, the first clips of the next are decoded. Each pass over the loader
is one epoch. Validation looks at the middle of every video, by a pipeline on threads of this
process that is built for each pass: ``DistributedDeterministicSampler``, nothing shuffled, every
video once.

    python examples/train_video_classifier.py --data DIR [--epochs N] [--frames N] [...]
    torchrun --nproc-per-node 8 examples/train_video_classifier.py --data DIR [...]
    python examples/train_video_classifier.py --smoke [--data DIR]

DIR has ``train/<class>/*.mp4`` and ``val/<class>/*.mp4``, or is one folder of class folders, of
which every fifth video is held out. Without it, the program makes some videos.

Prints: what there is to train on; after every epoch the clips, the loss and the accuracy over
them, clips a second, the share of the time that training waited for data, and the accuracy of the
validation. Videos that cannot be decoded are left out and logged; training fails if more than one
in ten cannot.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _k400 import Video, list_videos, write_videos
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from spdl_torch.io import load_clip, random_clip, uniform_frames
from spdl_torch.pipeline import Pipeline
from spdl_torch.spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess
from spdl_torch.spdl.source import DistributedDeterministicSampler, DistributedRandomSampler
from spdl_torch.spdl.source.utils import embed_shuffle

Sample = tuple[Tensor, int]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadClip:
    """Turns a video's number into some of its frames, uint8 (T, H, W, 3), and its label. Goes to
    the child process, with the list of the videos.
    """

    videos: Sequence[Video]
    num_frames: int
    pixels: int
    seconds: float | None
    """Length of a stretch that is drawn at random; None = the whole video."""

    def __call__(self, index: int) -> Sample:
        video = self.videos[index]
        if self.seconds is None:
            sampler = uniform_frames(self.num_frames)
        else:
            sampler = random_clip(self.num_frames, self.seconds)
        clip = load_clip(video.path, sampler, width=self.pixels, height=self.pixels)
        return clip.frames, video.label


def collate(samples: Sequence[Sample]) -> Batch:
    """Return clips, uint8 (N, T, H, W, 3), and labels, int64 (N,)."""
    clips, labels = zip(*samples, strict=True)
    return torch.stack(clips), torch.tensor(labels)


def make_loader(
    options: argparse.Namespace, videos: Sequence[Video], rank: int, world_size: int
) -> Iterable[Batch]:
    """Return the loader; each pass over it is an epoch. The child process starts here, and serves
    them all."""
    sampler = DistributedRandomSampler(
        len(videos), rank=rank, world_size=world_size, seed=options.seed
    )
    load = LoadClip(
        videos=videos, num_frames=options.frames, pixels=options.pixels, seconds=options.seconds
    )
    config = (
        PipelineBuilder()
        .add_source(embed_shuffle(sampler), continuous=True)
        .pipe(load, name="load", concurrency=options.num_threads)
        .aggregate(options.batch_size, drop_last=True)
        .pipe(collate)
        .add_sink(buffer_size=3)
        .get_config()
    )
    return run_pipeline_in_subprocess(config, num_threads=options.num_threads)


def make_validation(
    options: argparse.Namespace, videos: Sequence[Video], rank: int, world_size: int
) -> Pipeline:
    """Return a pass over this rank's videos; some ranks may have one more."""
    sampler = DistributedDeterministicSampler(
        len(videos),
        rank=rank,
        world_size=world_size,
        ddp_drop_last_distributed_round=False,
    )
    load = LoadClip(videos=videos, num_frames=options.frames, pixels=options.pixels, seconds=None)
    return (
        PipelineBuilder()
        .add_source(sampler)
        .pipe(load, name="load", concurrency=options.num_threads)
        .aggregate(options.batch_size)
        .pipe(collate)
        .add_sink()
        .build(num_threads=options.num_threads)
    )


class Classifier(nn.Module):
    """A few convolutions over space and time: uint8 (N, T, H, W, 3) -> (N, classes)."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_convolution(3, width, stride=(1, 2, 2)),
            *_convolution(width, 2 * width, stride=(2, 2, 2)),
            *_convolution(2 * width, 4 * width, stride=(2, 2, 2)),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )

    def forward(self, clips: Tensor) -> Tensor:
        """Make floats here, on the device: as bytes, the clips are a quarter of the size in
        transit."""
        return self.layers(clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1)


def _convolution(
    channels_in: int, channels_out: int, stride: tuple[int, ...]
) -> Iterator[nn.Module]:
    yield nn.Conv3d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    yield nn.BatchNorm3d(channels_out)
    yield nn.ReLU(inplace=True)


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train for all epochs."""
    listings = list_videos(options.data)
    training, validation = listings["train"].videos, listings["val"].videos
    classes = listings["train"].classes
    say = partial(print, flush=True) if rank == 0 else lambda line: None
    say(
        f"{len(training):,} videos to train on and {len(validation):,} to validate, "
        f"{len(classes):,} classes"
    )
    if len(training) < options.batch_size * world_size:
        raise SystemExit(
            f"--batch-size: {options.batch_size} videos for each of {world_size} rank(s) are more "
            f"than the {len(training)} that there are."
        )
    torch.manual_seed(options.seed)  # also seeds the stretches that the child process draws
    model = Classifier(len(classes), options.width).to(options.device)
    trained = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    loader = make_loader(options, training, rank, world_size)
    for epoch in range(1, options.epochs + 1):
        model.train()
        sums = torch.zeros(5, dtype=torch.float64, device=options.device)
        begin = asked = time.perf_counter()
        waited = 0.0
        for clips, labels in loader:
            waited += time.perf_counter() - asked
            clips, labels = clips.to(options.device), labels.to(options.device)
            logits = trained(clips)
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += len(labels)
            sums[1] += loss.detach() * len(labels)
            sums[2] += (logits.argmax(1) == labels).sum()
            asked = time.perf_counter()
        seconds = time.perf_counter() - begin
        model.eval()
        pipeline = make_validation(options, validation, rank, world_size)
        with torch.no_grad(), pipeline.auto_stop():
            for clips, labels in pipeline:
                found = model(clips.to(options.device)).argmax(1)
                sums[3] += len(labels)
                sums[4] += (found == labels.to(options.device)).sum()
        if world_size > 1:
            dist.all_reduce(sums)
        count, loss_sum, num_hits, num_validated, num_right = sums.tolist()
        say(
            f"epoch {epoch}  {count:.0f} clips  loss {loss_sum / count:.4f}  "
            f"accuracy {num_hits / count:.0%}  {count / seconds:.1f} clips/s  {seconds:.1f} s, "
            f"waited for data {waited / seconds:.0%}  validation "
            f"{num_right / max(num_validated, 1):.0%}"
        )


def main() -> None:
    """Parse the command line, join the other ranks, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder, see above; default: some is made up")
    add("--epochs", type=int, default=10, metavar="N")
    add("--batch-size", type=int, default=8, metavar="N", help="of each rank")
    add("--lr", type=float, default=0.05)
    add("--frames", type=int, default=8, metavar="N", help="of a clip")
    add("--seconds", type=float, default=2.0, help="stretch that a clip's frames are spread over")
    add("--pixels", type=int, default=112, metavar="N", help="height and width of a frame")
    add("--width", type=int, default=16, metavar="N", help="of the model")
    add("--num-threads", type=int, default=4, metavar="N", help="of the pipeline")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="little data and a small model, for a few seconds")
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.batch_size, options.pixels, options.width = 3, 2, 32, 4
        options.seconds = 1.0
    if "LOCAL_RANK" in os.environ:  # torchrun started this process
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            options.data = Path(made)
            write_videos(options.data, num_classes=2, per_class=6)
        train(options, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
