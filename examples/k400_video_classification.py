"""Train and validate a video model of torchvision on Kinetics-400 (or a folder like it), Lightning.

The data: class folders, ``ROOT/train/<class>/*.mp4`` and ``ROOT/val/...`` or one ``ROOT/<class>/``,
or ``--annotations train.csv val.csv`` with the videos anywhere below ROOT; files of the lists that
are not there are counted and named (``_k400.py`` has the details).

Training takes one clip of each video, at a random time, cropped at a random place and flipped half
of the time. Validation takes ``--clips`` clips of each video, evenly spread, and averages the
model's probabilities over them: top-1 and top-5 are of videos, not of clips. A clip is
``--num-frames`` frames, evenly spread over ``--seconds``, scaled to 4:3; others are not even
decoded where the codec allows it. Batches are uint8 until they are on the device.

``--loader`` says who loads; the clips of the validation are equal to the byte:

- ``threads``: a map-style dataset in ``spdl_torch.DataLoader``, ``--num-workers`` threads;
- ``pipeline``: ``spdl_torch.PipelineDataset``, loading and collation as stages of their own.

A video that is damaged or gone ends the run with its name (``--on-error raise``), or is left out,
named and counted (``skip``): batches are then smaller, no other video takes its place, and
validation is over the videos that are left. Training leaves out what does not fill a last batch,
other videos in each epoch, and says how many.

Prints a line for the data, and after each epoch the loss, accuracies, videos per second (of all
processes, loading and model together) and the number of skipped videos.

    python examples/k400_video_classification.py --data ROOT [--model swin3d_t] [--loader pipeline]
    python examples/k400_video_classification.py --data ROOT --evaluate --checkpoint FILE.ckpt
    python examples/k400_video_classification.py --smoke
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.utils.data
from _k400 import Listing, Video, list_videos, write_videos
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import get_model, get_model_weights

import spdl_torch
from spdl_torch.autotune import Limits
from spdl_torch.data.sources import ListSource
from spdl_torch.errors import DecodeError
from spdl_torch.io import VideoInfo, load_clip
from spdl_torch.lightning import PipelineStatsMonitor
from spdl_torch.pipeline import PipelineBuilder

TINY = "tiny"
_logger = logging.getLogger("k400")


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="ROOT", help="the folder of the videos")
    add("--annotations", type=Path, nargs="+", default=[], metavar="CSV", help="lists of videos")
    add("--smoke", action="store_true", help="tiny model, small clips; made-up videos if no --data")
    add("--model", default="r3d_18", help="torchvision's, or tiny")
    add("--weights", help="torchvision's, such as DEFAULT or KINETICS400_V1 (downloads them)")
    add("--checkpoint", help="a .ckpt of an earlier run: go on from it, or --evaluate it")
    add("--evaluate", action="store_true", help="validate only")
    add("--loader", choices=("threads", "pipeline"), default="threads")
    add("--num-workers", type=int, help="that decode; default: one per core")
    add("--on-error", choices=("raise", "skip"), default="raise", help="what a bad video does")
    add("--num-frames", type=int, help="of a clip; default: what the model was published with")
    add("--seconds", type=float, default=2.0, help="of a clip")
    add("--clips", type=int, default=4, help="of each video in validation")
    add("--resize", type=int, help="height of the scaled video")
    add("--crop", type=int, help="height and width of a clip")
    add("--epochs", type=int, default=45)
    add("--batch-size", type=int, default=16, help="clips")
    add("--lr", type=float, default=0.01)
    add("--amp", choices=("off", "fp16", "bf16"), help="default: bf16 on a GPU, off on the CPU")
    add("--accelerator", default="auto")
    add("--devices", default="auto")
    add("--seed", type=int, default=0)
    add("--log-dir", help="for metrics.csv and checkpoints")
    add("--progress", action="store_true", help="Lightning's progress bar")
    return parser


class Clips(torch.utils.data.Dataset):
    """Clips of a video, uint8 (clips, frames, height, width, 3), or None if it is skipped, with its
    label. To train, one clip at random; else evenly spread ones.
    """

    thread_safe = True  # nothing is kept between samples

    def __init__(self, videos: Sequence[Video], options: argparse.Namespace, train: bool) -> None:
        self.videos, self.options, self.train = videos, options, train

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int]:
        video, options = self.videos[index], self.options
        try:
            moments = partial(self.moments, video)
            size = {"width": options.width, "height": options.resize}
            frames = load_clip(video.path, moments, **size).frames
        except (DecodeError, OSError) as error:
            if options.on_error == "raise":
                raise
            _logger.warning("skipped: %s", error)
            return None, video.label
        height, width, crop = options.resize, options.width, options.crop
        top, left = (height - crop) // 2, (width - crop) // 2
        if self.train:
            top = int(torch.randint(height - crop + 1, ()))
            left = int(torch.randint(width - crop + 1, ()))
        clips = frames[:, top : top + crop, left : left + crop]
        if self.train and torch.rand(()) < 0.5:
            clips = clips.flip(2)
        return clips.unflatten(0, (-1, options.num_frames)), video.label

    def moments(self, video: Video, info: VideoInfo) -> list[float]:
        """Return the times of the frames, one clip after the other."""
        options, end = self.options, info.start_seconds + info.duration_seconds
        if video.window is None:
            start = info.start_seconds
        else:
            start, end = video.window[0], min(video.window[1], end)
        span = min(options.seconds, end - start)
        if self.train:
            places = torch.rand(1)
        else:
            places = torch.linspace(0, 1, options.clips) if options.clips > 1 else [0.5]
        begins = [start + float(place) * (end - start - span) for place in places]
        steps = [(k + 0.5) * span / options.num_frames for k in range(options.num_frames)]
        return [begin + step for begin in begins for step in steps]


def collate(samples: Sequence[tuple[Tensor | None, int]]) -> dict[str, Any]:
    """Return a batch of the videos that could be loaded, with the number of the others."""
    good = [sample for sample in samples if sample[0] is not None]
    clips, labels = zip(*good, strict=True) if good else ((torch.empty(0),), ())
    return {
        "clips": torch.stack(clips),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "num_skipped": len(samples) - len(good),
    }


class Kinetics(lightning.LightningDataModule):
    """The loaders of both splits, in one of two ways."""

    def __init__(self, listings: dict[str, Listing], options: argparse.Namespace) -> None:
        super().__init__()
        self.listings, self.options = listings, options

    def train_dataloader(self) -> Any:
        """Return the training loader: random clips, shuffled; a last partial batch is left out."""
        return self._loader("train", self.options.batch_size)

    def val_dataloader(self) -> Any:
        """Return the validation loader: as many clips in a batch as in training."""
        return self._loader("val", max(self.options.batch_size // self.options.clips, 1))

    def _loader(self, split: str, batch_size: int) -> Any:
        train, options = split == "train", self.options
        dataset = Clips(self.listings[split].videos, options, train)
        pin_memory = torch.cuda.is_available()
        if options.loader == "pipeline":
            num_videos, num_ranks = len(dataset), self.trainer.world_size
            if train:  # ranks must not differ in their number of batches
                num_videos -= num_videos % num_ranks
            order = ListSource(range(num_videos))
            drop_last = train and num_videos // num_ranks >= batch_size
            builder = (
                PipelineBuilder()
                .add_source(order.shuffle(options.seed) if train else order)
                .pipe(
                    dataset.__getitem__,
                    name="load",
                    concurrency=max(options.num_workers, 1),
                    output_order="input",
                    max_failures=0,
                )
                .aggregate(batch_size, drop_last=drop_last)
                .pipe(collate, max_failures=0)
                .add_sink(2)
            )
            # No workers: the pipeline has its threads.
            pipeline = spdl_torch.PipelineDataset(builder)
            return torch.utils.data.DataLoader(pipeline, batch_size=None, pin_memory=pin_memory)
        return spdl_torch.DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=train,
            drop_last=train and len(dataset) >= batch_size,
            num_workers=options.num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
        )


class Classifier(lightning.LightningModule):
    """Cross-entropy on clips to train, probabilities averaged over clips to validate.

    Logs ``<split>/videos, skipped, loss, top1, top5, videos_per_second`` once an epoch.
    """

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.sums: dict[str, Tensor] = {}
        """Of a split: videos, skipped ones, loss, and hits among the best 1 and 5."""
        self.began: dict[str, float] = {}
        self.figures: dict[str, dict[str, float]] = {}
        shape = 3, 1, 1, 1
        mean, std = torch.tensor(options.mean).view(shape), torch.tensor(options.std).view(shape)
        self.register_buffer("mean", 255 * mean, persistent=False)
        self.register_buffer("std", 255 * std, persistent=False)

    def forward(self, clips: Tensor) -> Tensor:
        """Score uint8 (videos, clips, frames, height, width, 3) as (videos * clips, classes)."""
        channels_first = clips.flatten(0, 1).permute(0, 4, 1, 2, 3)
        return self.model((channels_first - self.mean) / self.std)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD, with its learning rate on half a cosine."""
        optimizer = torch.optim.SGD(
            self.parameters(), self.options.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.options.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss; a batch of nothing but skipped videos teaches nothing."""
        labels = batch["labels"]
        self.sums["train"][1] += batch["num_skipped"]
        if not len(labels):  # not None: other ranks wait for this one's gradients
            return 0.0 * sum(parameter.sum() for parameter in self.parameters())
        scores = self(batch["clips"])
        losses = functional.cross_entropy(scores, labels, reduction="none")
        self.add("train", scores, labels, losses)
        return losses.mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Score whole videos."""
        labels = batch["labels"]
        self.sums["val"][1] += batch["num_skipped"]
        if not len(labels):
            return
        scores = self(batch["clips"]).float()
        chances = scores.softmax(1).unflatten(0, (len(labels), -1)).mean(1)
        losses = functional.nll_loss(chances.clamp_min(1e-12).log(), labels, reduction="none")
        self.add("val", chances, labels, losses)

    def add(self, split: str, scores: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Add a batch of videos to the sums, without waiting for the device."""
        hits = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        self.sums[split][0] += len(labels)
        values = (losses.sum(), hits[:, 0].sum(), hits.any(1).sum())
        self.sums[split][2:] += torch.stack([value.detach().float() for value in values])

    def start(self, split: str) -> None:
        """Start counting."""
        self.sums[split] = torch.zeros(5, device=self.device)
        self.began[split] = time.perf_counter()

    def on_train_epoch_start(self) -> None:
        """Start counting."""
        self.start("train")

    def on_validation_epoch_start(self) -> None:
        """Print the training part of the epoch, which is over, and start counting anew."""
        if "train" in self.sums:
            self.close("train", f"epoch {self.current_epoch} training")
        self.start("val")

    def on_validation_epoch_end(self) -> None:
        """Print and log what the ranks have seen."""
        is_fitting = self.trainer.state.fn == "fit"
        self.close("val", f"epoch {self.current_epoch} validation" if is_fitting else "validation")
        self.log_dict(self.figures["val"])

    def on_train_epoch_end(self) -> None:
        """Log training's metrics: Lightning takes them here, after the validation."""
        self.log_dict(self.figures["train"])

    def close(self, split: str, what: str) -> None:
        """Make figures of the sums over all ranks, and print a line."""
        # Not self.log's means: those are over ranks, whose numbers of videos differ.
        sums = self.trainer.strategy.reduce(self.sums.pop(split), reduce_op="sum").tolist()
        count, skipped = sums[:2]
        figures = {"videos": count, "skipped": skipped}
        line = f"{what}: {count:.0f} videos"
        if count:
            loss, top1, top5 = (value / count for value in sums[2:])
            rate = count / (time.perf_counter() - self.began[split])
            figures |= {"loss": loss, "top1": top1, "top5": top5, "videos_per_second": rate}
            line += f", loss {loss:.3f}, top-1 {top1:.1%}, top-5 {top5:.1%}, {rate:.1f} videos/s"
            left = len(self.trainer.datamodule.listings[split].videos) - int(count + skipped)
            if split == "train" and left > 0:
                line += f", {left} left out, which would not fill a batch"
        self.print(f"{line}, {skipped:.0f} skipped", flush=True)
        self.figures[split] = {f"{split}/{name}": value for name, value in figures.items()}


def make_model(options: argparse.Namespace, num_classes: int) -> nn.Module:
    """Return the network, with a new last layer if the weights have another number of classes; and
    fill in the options that its published weights decide."""
    height, width, crop, num_frames = 36, 48, 32, 4
    options.mean, options.std = [0.45] * 3, [0.225] * 3
    if options.model == TINY:
        pool = nn.AdaptiveAvgPool3d((2, 4, 4))
        model: nn.Module = nn.Sequential(pool, nn.Flatten(), nn.Linear(3 * 2 * 4 * 4, num_classes))
    else:
        preset = get_model_weights(options.model).DEFAULT.transforms()
        options.mean, options.std = preset.mean, preset.std
        height, crop = preset.resize_size[0], preset.crop_size[0]
        width = preset.resize_size[-1] if preset.resize_size[1:] else height * 4 // 3
        num_frames = 32 if options.model.startswith("swin3d") else 16
        model = get_model(options.model, weights=options.weights)
        layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        last = model.get_submodule(layers[-1])
        if last.out_features != num_classes:
            model.set_submodule(layers[-1], nn.Linear(last.in_features, num_classes))
    options.width = width if options.resize is None else options.resize * 4 // 3
    options.resize = options.resize or height
    options.crop = options.crop or min(crop, options.resize)
    options.num_frames = options.num_frames or num_frames
    return model


def make_trainer(options: argparse.Namespace) -> lightning.Trainer:
    """Return a Trainer that logs and checkpoints only where there is a place for it."""
    precisions = {"off": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
    callbacks: list[Callback] = []
    if options.log_dir:
        folder = Path(options.log_dir, "checkpoints")
        save = partial(ModelCheckpoint, folder, enable_version_counter=False)
        callbacks += [save(filename="last"), save(filename="best", monitor="val/top1", mode="max")]
        callbacks.append(PipelineStatsMonitor())  # data/wait_ratio, data/fetch/busy_ratio, ...
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


def run(options: argparse.Namespace) -> None:
    """List, train, validate."""
    listings = list_videos(options.data, options.annotations)
    lightning.seed_everything(options.seed, verbose=False)
    model = make_model(options, len(listings["train"].classes))
    module, data = Classifier(model, options), Kinetics(listings, options)
    trainer = make_trainer(options)
    if trainer.is_global_zero:
        for split, listing in listings.items():
            print(f"{split}: {listing}", flush=True)
    if options.evaluate:
        if options.checkpoint:
            saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
            module.load_state_dict(saved["state_dict"])
        trainer.validate(module, data, verbose=False)
    else:
        trainer.fit(module, data, ckpt_path=options.checkpoint)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, and run."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.data is None and not options.smoke:
        parser.error("--data ROOT is needed, or --smoke")
    if options.smoke:
        options.model, options.epochs, options.batch_size, options.clips = TINY, 2, 4, 2
        options.accelerator, options.devices = "cpu", "1"
    if options.num_workers is None:
        cores = max(1, int(Limits.of_this_machine().num_cores))
        options.num_workers = 2 if options.smoke else cores
    if options.amp is None:
        on_gpu = torch.cuda.is_available() and options.accelerator != "cpu"
        options.amp = "bf16" if on_gpu else "off"
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers",  # a pipeline has its threads, whatever num_workers is
        "Your `IterableDataset` has `__len__` defined",  # true of each rank's part
        ".*LeafSpec",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            options.data = Path(made)
            write_videos(options.data, num_classes=2, per_class=6)
        run(options)


if __name__ == "__main__":
    main()
