"""Train and validate a video model of torchvision on Kinetics-400 (or a folder like it), Lightning.

The data: class folders, ``ROOT/train/<class>/*.mp4`` and ``ROOT/val/...`` or one ``ROOT/<class>/``,
or ``--annotations train.csv val.csv`` with the videos anywhere below ROOT; files of the lists that
are not there are counted and named (``_k400.py`` has the details).

Training takes one clip of each video, at a random time, cropped at a random place and flipped half
of the time. Validation takes ``--clips`` clips of each video, evenly spread, and averages the
model's probabilities over them: top-1 and top-5 are of videos, not of clips. A clip is
``--num-frames`` frames, every ``--stride``-th one or evenly spread over ``--seconds``. Scaling,
cropping and flipping are FFmpeg's, on the frames that are in the clip; others are not even decoded
where the codec allows it. Batches are uint8 until they are on the device, where they are scaled.

``--loader`` says who loads; the clips of the validation are equal to the byte:

- ``threads``: a map-style dataset in ``spdl_torch.DataLoader``, ``--num-workers`` threads;
- ``pipeline``: ``spdl_torch.PipelineDataset``, demuxing and decoding as stages of their own;
- ``torch``: the same dataset in torch's DataLoader, ``--num-workers`` processes.

A video that is damaged or gone ends the run with its name (``--on-error raise``), or is left out,
named and counted (``skip``): batches are then smaller, no other video takes its place, and
validation is over the videos that are left. Training leaves out what does not fill a last batch,
other videos in each epoch, and says how many.

It prints a line for the data, and after each epoch the loss, accuracies, videos per second (of
all processes, loading and model together) and the number of skipped videos; ``--predictions``
writes a csv with the prediction for each video.

    python examples/k400_video_classification.py --data ROOT [--model swin3d_t] [--loader pipeline]
    python examples/k400_video_classification.py --data ROOT --evaluate --checkpoint FILE.ckpt
    python examples/k400_video_classification.py --smoke
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

MODELS = (
    *("r3d_18", "mc3_18", "r2plus1d_18"),
    *("mvit_v1_b", "mvit_v2_s"),
    *("swin3d_t", "swin3d_s", "swin3d_b"),
)
TINY = "tiny"
LOADERS = ("threads", "pipeline", "torch")


def argument_parser() -> argparse.ArgumentParser:
    """Return a parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="ROOT", help="the folder of the videos")
    add("--annotations", type=Path, nargs="+", default=[], metavar="CSV", help="lists of videos")
    add("--smoke", action="store_true", help="tiny model, small clips; made-up videos if no --data")
    add("--model", choices=(*MODELS, TINY), default="r3d_18")
    add("--weights", help="torchvision's, such as DEFAULT or KINETICS400_V1 (downloads them)")
    add("--checkpoint", help="a .ckpt of an earlier run: go on from it, or --evaluate it")
    add("--evaluate", action="store_true", help="validate only")
    add("--loader", choices=LOADERS, default="threads")
    add("--num-workers", type=int, help="that decode; default: one per core")
    add("--on-error", choices=("raise", "skip"), default="raise", help="what a bad video does")
    add("--num-frames", type=positive, help="of a clip; default: what the model was published with")
    add("--stride", type=positive, help="frames from one of a clip to the next")
    add("--seconds", type=float, default=2.0, help="of a clip, where there is no --stride")
    add("--clips", type=positive, default=4, help="of each video in validation")
    add("--resize", type=positive, help="height of the scaled video")
    add("--crop", type=positive, help="height and width of a clip")
    add("--epochs", type=positive, default=45)
    add("--batch-size", type=positive, default=16, help="clips")
    add("--lr", type=float, default=0.01)
    add("--amp", choices=("off", "fp16", "bf16"), help="default: bf16 on a GPU, off on the CPU")
    add("--accelerator", default="auto")
    add("--devices", default="auto")
    add("--seed", type=int, default=0)
    add("--log-dir", help="for metrics.csv and checkpoints")
    add("--predictions", metavar="CSV", help="write what was predicted for each video")
    add("--progress", action="store_true", help="Lightning's progress bar")
    return parser


def positive(text: str) -> int:
    """Return an option's whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


if __name__ == "__main__":
    # --help and a wrong option are answered before the imports that take seconds.
    argument_parser().parse_args()

import lightning
import torch
import torch.utils.data
from _k400 import Listing, list_videos, write_videos
from _k400_clips import ClipDataset, ClipReader, ClipShape, Requests, collate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional

import spdl_torch
from spdl_torch.autotune import Limits
from spdl_torch.data.sources import ListSource
from spdl_torch.lightning import PipelineStatsMonitor
from spdl_torch.pipeline import PipelineBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kinetics(lightning.LightningDataModule):
    """The loaders of both splits, in one of three ways."""

    def __init__(
        self, listings: dict[str, Listing], shape: ClipShape, options: argparse.Namespace
    ) -> None:
        super().__init__()
        self.listings = listings
        self.shape = shape
        self.options = options

    def train_dataloader(self) -> Any:
        """Return the training loader: random clips, shuffled; a last partial batch is left out."""
        return self._loader("train", num_clips=1, batch_size=self.options.batch_size)

    def val_dataloader(self) -> Any:
        """Return the validation loader: evenly spread clips of all videos, as many clips in a batch
        as in training."""
        num_clips = self.options.clips
        batch_size = max(self.options.batch_size // num_clips, 1)
        return self._loader("val", num_clips=num_clips, batch_size=batch_size)

    def _loader(self, split: str, num_clips: int, batch_size: int) -> Any:
        skip_bad = self.options.on_error == "skip"
        reader = ClipReader(self.listings[split].videos, self.shape, num_clips, skip_bad)
        if self.options.loader == "pipeline":
            return self._pipeline(split, reader, batch_size)
        is_training = split == "train"
        classes = {"threads": spdl_torch.DataLoader, "torch": torch.utils.data.DataLoader}
        num_workers = self.options.num_workers
        is_process = self.options.loader == "torch" and num_workers > 0
        return classes[self.options.loader](
            ClipDataset(reader, is_random=is_training),
            batch_size=batch_size,
            shuffle=is_training,
            drop_last=is_training and len(reader.videos) >= batch_size,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="spawn" if is_process else None,
            persistent_workers=is_process,
        )

    def _pipeline(self, split: str, reader: ClipReader, batch_size: int) -> Any:
        is_training = split == "train"
        num_videos = len(reader.videos)
        if is_training:  # ranks must not differ in their number of batches
            num_videos -= num_videos % self.trainer.world_size
        order = ListSource(range(num_videos))
        seed = self.options.seed if is_training else None
        drop_last = is_training and num_videos // self.trainer.world_size >= batch_size
        builder = (
            PipelineBuilder()
            .add_source(Requests(order.shuffle(seed) if is_training else order, seed))
            .pipe(reader.demux, concurrency=2, output_order="input", max_failures=0)
            .pipe(
                reader.decode,
                concurrency=max(self.options.num_workers, 1),
                output_order="input",
                max_failures=0,
            )
            .aggregate(batch_size, drop_last=drop_last)
            .pipe(collate, max_failures=0)
            .add_sink(2)
        )
        return torch.utils.data.DataLoader(
            spdl_torch.PipelineDataset(builder),
            batch_size=None,
            num_workers=0,
            pin_memory=torch.cuda.is_available(),
        )


class Tally:
    """Sums over the videos of an epoch, on this rank."""

    SUMS = ("loss", "top1", "top5")

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(self.SUMS), device=device)
        self.counts = torch.zeros(2, device=device)
        """Videos, and those that were skipped."""
        self.began = time.perf_counter()

    def add(self, scores: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Add the model's scores for a batch of videos, without waiting for the device."""
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices
        right = best == labels[:, None]
        values = (losses.sum(), right[:, 0].sum(), right.any(1).sum())
        self.sums += torch.stack([value.detach().float() for value in values])

    def count(self, batch: dict[str, Any]) -> None:
        """Add the numbers of videos loaded and skipped."""
        self.counts[0] += len(batch["labels"])
        self.counts[1] += batch["num_skipped"]

    def figures(self, trainer: lightning.Trainer) -> dict[str, float]:
        """Return means over the videos of all ranks, and rates; only counts if none was good."""
        # Not self.log's means: those are over ranks, whose numbers of videos differ.
        reduce = partial(trainer.strategy.reduce, reduce_op="sum")
        num_videos, num_skipped = reduce(self.counts).tolist()
        figures = {"videos": num_videos, "skipped": num_skipped}
        sums = reduce(self.sums).tolist()
        if num_videos:
            figures |= {n: s / num_videos for n, s in zip(self.SUMS, sums, strict=True)}
            figures["videos_per_second"] = num_videos / (time.perf_counter() - self.began)
        return figures


class Classifier(lightning.LightningModule):
    """Cross-entropy on clips to train, probabilities averaged over clips to validate.

    Logs ``<split>/videos, skipped, loss, top1, top5, videos_per_second`` once an epoch.
    """

    def __init__(
        self, model: nn.Module, mean: Sequence[float], std: Sequence[float], lr: float, epochs: int
    ) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.epochs = epochs
        self.tallies: dict[str, Tally] = {}
        self.figures: dict[str, dict[str, float]] = {}
        self.predictions: dict[int, tuple[int, float]] = {}
        """Class and probability by the video's place in the list, of the last validation."""
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1, 1), persistent=False)

    def forward(self, clips: Tensor) -> Tensor:
        """Score uint8 (videos, clips, frames, height, width, 3) as (videos * clips, classes)."""
        channels_first = clips.flatten(0, 1).permute(0, 4, 1, 2, 3)
        return self.model((channels_first - self.mean) / self.std)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD, with its learning rate on half a cosine."""
        optimizer = torch.optim.SGD(
            self.parameters(), self.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss; a batch of nothing but skipped videos teaches nothing."""
        tally, labels = self.tallies["train"], batch["labels"]
        tally.count(batch)
        if not len(labels):  # not None: other ranks wait for this one's gradients
            return 0.0 * sum(parameter.sum() for parameter in self.parameters())
        scores = self(batch["clips"])
        losses = functional.cross_entropy(scores, labels, reduction="none")
        tally.add(scores, labels, losses)
        return losses.mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Score whole videos."""
        tally, labels = self.tallies["val"], batch["labels"]
        tally.count(batch)
        if not len(labels):
            return
        scores = self(batch["clips"]).float()
        chances = scores.softmax(1).unflatten(0, (len(labels), -1)).mean(1)
        losses = functional.nll_loss(chances.clamp_min(1e-12).log(), labels, reduction="none")
        tally.add(chances, labels, losses)
        best = chances.max(1)
        answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self.predictions.update(zip(batch["indices"], answers, strict=True))

    def on_train_epoch_start(self) -> None:
        """Start counting."""
        self.tallies["train"] = Tally(self.device)

    def on_validation_epoch_start(self) -> None:
        """Log the training part of the epoch, which is over, and start counting anew."""
        if "train" in self.tallies:
            self.log_rates("train", f"epoch {self.current_epoch} training")
        self.predictions.clear()
        self.tallies["val"] = Tally(self.device)

    def on_validation_epoch_end(self) -> None:
        """Gather what the ranks have seen and predicted."""
        is_fitting = self.trainer.state.fn == "fit"
        self.log_rates(
            "val", f"epoch {self.current_epoch} validation" if is_fitting else "validation"
        )
        self.log_figures("val")
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, self.predictions)
            self.predictions = {index: best for part in parts for index, best in part.items()}

    def on_train_epoch_end(self) -> None:
        """Log training's metrics: Lightning takes them here, after the validation."""
        self.log_figures("train")

    def log_rates(self, split: str, what: str) -> None:
        """Close the tally and print a line."""
        figures = self.figures[split] = self.tallies.pop(split).figures(self.trainer)
        line = f"{what}: {figures['videos']:.0f} videos"
        if "loss" in figures:
            line += ", loss {loss:.3f}, top-1 {top1:.1%}, top-5 {top5:.1%}".format(**figures)
            line += f", {figures['videos_per_second']:.1f} videos/s"
            num_left = len(self.trainer.datamodule.listings[split].videos)
            num_left -= int(figures["videos"] + figures["skipped"])
            if split == "train" and num_left > 0:
                line += f", {num_left} left out, which would not fill a batch"
        if self.trainer.is_global_zero:
            print(f"{line}, {figures['skipped']:.0f} skipped", flush=True)

    def log_figures(self, split: str) -> None:
        """Log the metrics; they are the same on all ranks."""
        named = {f"{split}/{name}": value for name, value in self.figures[split].items()}
        self.log_dict(named)


def make_model(name: str, num_classes: int, weights: str | None) -> nn.Module:
    """Return the network, with a new last layer if the weights have another number of classes."""
    if name == TINY:
        return nn.Sequential(
            nn.Conv3d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d((2, 4, 4)),
            nn.Flatten(),
            nn.Linear(8 * 2 * 4 * 4, num_classes),
        )
    from torchvision.models import get_model

    model = get_model(name, weights=weights)
    last_name, last = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ][-1]
    if last.out_features != num_classes:
        parent, _, child = last_name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Linear(last.in_features, num_classes))
    return model


def clip_shape(options: argparse.Namespace) -> tuple[ClipShape, list[float], list[float]]:
    """Return sizes, mean and deviation, by default those of the model's published weights."""
    crop, resize, num_frames = 32, [36, 48], 4
    mean, std = [0.45] * 3, [0.225] * 3
    if options.model != TINY:
        from torchvision.models import get_model_weights

        preset = get_model_weights(options.model).DEFAULT.transforms()
        crop, resize, mean, std = preset.crop_size[0], preset.resize_size, preset.mean, preset.std
        num_frames = 32 if options.model.startswith("swin3d") else 16
    height = options.resize or resize[0]
    # Where a preset gives only the short side, the long one is that of a 4:3 picture.
    width = resize[1] if len(resize) > 1 and not options.resize else (height * 4 // 3 + 1) // 2 * 2
    shape = ClipShape(
        num_frames=options.num_frames or num_frames,
        stride=options.stride,
        seconds=options.seconds,
        resize=(height, width),
        crop=options.crop or min(crop, height),
    )
    if shape.crop > height:
        raise SystemExit(f"--crop {shape.crop}: must not be larger than --resize {height}.")
    return shape, mean, std


def make_trainer(options: argparse.Namespace) -> lightning.Trainer:
    """Return a Trainer that logs and checkpoints only where there is a place for it."""
    precisions = {"off": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
    callbacks: list[Callback] = []
    if options.log_dir:
        save = partial(
            ModelCheckpoint, Path(options.log_dir, "checkpoints"), enable_version_counter=False
        )
        callbacks += [save(filename="last"), save(filename="best", monitor="val/top1", mode="max")]
        callbacks.append(PipelineStatsMonitor())  # data/wait_ratio, data/decode/busy_ratio, ...
    return lightning.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        precision=precisions[options.amp],
        callbacks=callbacks,
        logger=CSVLogger(options.log_dir) if options.log_dir else False,
        enable_checkpointing=bool(options.log_dir),
        enable_progress_bar=options.progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1 if options.smoke else 50,
    )


def write_predictions(path: str, listing: Listing, module: Classifier) -> None:
    """Write a line for each video that was validated."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("path", "label", "predicted", "probability"))
        for index, (label, chance) in sorted(module.predictions.items()):
            video = listing.videos[index]
            names = listing.classes[video.label], listing.classes[label]
            lines.writerow((video.path, *names, f"{chance:.6f}"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; ``--smoke`` fills in small ones."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if options.data is None and not options.smoke:
        parser.error("--data ROOT is needed, or --smoke")
    if options.smoke:
        options.model, options.epochs, options.batch_size, options.clips = TINY, 2, 4, 2
        options.accelerator, options.devices = "cpu", "1"
    if options.num_workers is None:
        options.num_workers = (
            2 if options.smoke else max(1, int(Limits.of_this_machine().num_cores))
        )
    if options.amp is None:
        on_gpu = torch.cuda.is_available() and options.accelerator != "cpu"
        options.amp = "bf16" if on_gpu else "off"
    return options


def quiet() -> None:
    """Suppress warnings about what this program's user already knows."""
    for message in (
        ".*does not have many workers",  # a pipeline has its threads, whatever num_workers is
        "Your `IterableDataset` has `__len__` defined",  # true of each rank's part
        ".*LeafSpec",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> None:
    """List, train, validate."""
    options = parse(arguments)
    logging.basicConfig(format="%(message)s")
    quiet()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.data
        if root is None:
            root = Path(temporary)
            write_videos(root, num_classes=2, per_class=6)
        listings = list_videos(root, options.annotations)
        train_and_validate(options, listings)


def train_and_validate(options: argparse.Namespace, listings: dict[str, Listing]) -> None:
    """Run Lightning once."""
    shape, mean, std = clip_shape(options)
    for split, listing in listings.items():
        if rank_zero_only.rank == 0:
            print(f"{split}: {listing}", flush=True)
    lightning.seed_everything(options.seed, verbose=False)
    model = make_model(options.model, len(listings["train"].classes), options.weights)
    module = Classifier(model, mean, std, options.lr, options.epochs)
    data = Kinetics(listings, shape, options)
    trainer = make_trainer(options)
    if options.evaluate:
        if options.checkpoint:
            saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
            module.load_state_dict(saved["state_dict"])
        trainer.validate(module, data, verbose=False)
    else:
        trainer.fit(module, data, ckpt_path=options.checkpoint)
    if options.predictions and trainer.is_global_zero:
        write_predictions(options.predictions, listings["val"], module)


if __name__ == "__main__":
    main()
