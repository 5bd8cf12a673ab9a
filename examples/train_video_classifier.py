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
which every fifth video is held out; or a folder of videos, each of which is a class of its own,
trained and validated on. Without it, the program makes some videos.

Prints: what there is to train on; after every epoch the clips, the loss and the accuracy over
them, clips a second, the share of the time that training waited for data, and the accuracy of the
validation. Videos that cannot be decoded are left out and logged; training fails if more than one
in ten cannot.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _child import Ranks, Timed, argument_parser, parse, ranks


def options_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line."""
    parser = argument_parser(__doc__, epochs=10, batch_size=8, lr=0.05)
    add = parser.add_argument
    add("--frames", type=int, default=8, metavar="N", help="of a clip")
    add("--seconds", type=float, default=2.0, help="stretch that a clip's frames are spread over")
    add("--pixels", type=int, default=112, metavar="N", help="height and width of a frame")
    add("--width", type=int, default=16, metavar="N", help="of the model")
    return parser


if __name__ == "__main__":
    # --help and a wrong option are answered before the imports that take seconds.
    options_parser().parse_args()

import torch
from _k400 import SUFFIXES, Video, list_videos, write_videos
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spdl_torch.io import load_clip, random_clip, uniform_frames
from spdl_torch.spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess
from spdl_torch.spdl.source import DistributedDeterministicSampler, DistributedRandomSampler
from spdl_torch.spdl.source.utils import embed_shuffle

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from spdl_torch.pipeline import Pipeline

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
    videos: Sequence[Video], group: Ranks, options: argparse.Namespace
) -> Iterable[Batch]:
    """Return the loader; each pass over it is an epoch. The child process starts here, and serves
    them all."""
    sampler = DistributedRandomSampler(
        len(videos), rank=group.rank, world_size=group.world_size, seed=options.seed
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


def make_validation(videos: Sequence[Video], group: Ranks, options: argparse.Namespace) -> Pipeline:
    """Return a pass over this rank's videos; some ranks may have one more."""
    sampler = DistributedDeterministicSampler(
        len(videos),
        rank=group.rank,
        world_size=group.world_size,
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


def train(options: argparse.Namespace, group: Ranks) -> None:
    """Train for all epochs."""
    classes, training, validation = find_videos(options.data)
    group.say(
        f"{len(training):,} videos to train on and {len(validation):,} to validate, "
        f"{len(classes):,} classes"
    )
    if len(training) < options.batch_size * group.world_size:
        raise SystemExit(
            f"--batch-size: {options.batch_size} videos for each of {group.world_size} rank(s) are "
            f"more than the {len(training)} that there are."
        )
    torch.manual_seed(options.seed)  # also seeds the stretches that the child process draws
    model = Classifier(len(classes), options.width).to(options.device)
    trained = group.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    loader = make_loader(training, group, options)
    for epoch in range(1, options.epochs + 1):
        model.train()
        batches = Timed(loader)
        sums = torch.zeros(3, dtype=torch.float64, device=options.device)
        for clips, labels in batches:
            clips, labels = clips.to(options.device), labels.to(options.device)
            logits = trained(clips)
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = (logits.argmax(1) == labels).sum()
            sums += torch.stack([torch.tensor(len(labels)), loss.detach() * len(labels), hits])
        count, loss_sum, num_hits = group.sums(*sums.tolist())
        accuracy = validate(model, validation, group, options)
        group.say(
            f"epoch {epoch}  {count:.0f} clips  loss {loss_sum / count:.4f}  "
            f"accuracy {num_hits / count:.0%}  {count / batches.seconds:.1f} clips/s  {batches}  "
            f"validation {accuracy:.0%}"
        )


@torch.no_grad()
def validate(
    model: nn.Module, videos: Sequence[Video], group: Ranks, options: argparse.Namespace
) -> float:
    """Return the share of the videos whose class was found, over all ranks."""
    model.eval()
    num_hits = num_clips = 0
    pipeline = make_validation(videos, group, options)
    with pipeline.auto_stop():
        for clips, labels in pipeline:
            found = model(clips.to(options.device)).argmax(1).cpu()
            num_hits += int((found == labels).sum())
            num_clips += len(labels)
    hits, clips = group.sums(num_hits, num_clips)
    return hits / max(clips, 1)


def find_videos(folder: Path) -> tuple[Sequence[str], list[Video], list[Video]]:
    """Return the classes, and the videos to train on and to validate. Raises: SystemExit: there is
    none."""
    alone = sorted(path for path in folder.glob("*.*") if path.suffix.lower() in SUFFIXES)
    if alone:
        videos = [Video(str(path), label) for label, path in enumerate(alone)]
        return [path.stem for path in alone], videos, videos
    try:
        listings = list_videos(folder)
    except FileNotFoundError as error:
        raise SystemExit(f"--data: {error}") from error
    training, validation = listings["train"], listings["val"]
    return training.classes, training.videos, validation.videos


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    options = parse(options_parser(), argv)
    if options.smoke:
        options.epochs, options.batch_size, options.pixels, options.width = 3, 2, 32, 4
        options.seconds = 1.0
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = parse_arguments(argv)
    with ExitStack() as stack:
        if options.data is None:
            options.data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_videos(options.data, num_classes=2, per_class=6)
        train(options, stack.enter_context(ranks(options.device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
