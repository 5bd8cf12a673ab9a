"""Train and validate an image classifier on ImageNet with Lightning, fed by threads.

The same model, recipe and options as ``imagenet_classification.py``, as a LightningModule and a
LightningDataModule: Lightning runs the loop, precision, devices, checkpoints and loggers, and
``spdl_torch.DataLoader`` and ``spdl_torch.ImageFolder`` feed it like any other loader.

    python examples/imagenet_lightning.py --data DIR [--model resnet50] [--amp] [--devices 8]
    python examples/imagenet_lightning.py --data DIR --eval-only --pretrained
    python examples/imagenet_lightning.py --smoke [--data DIR] [--strategy ddp --devices 2]

DIR has ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, or is one folder of class folders, of
which a tenth is held out, the same files every time.

It prints the lines of ``imagenet_classification.py``: every ``--print-freq`` steps images a second
over all ranks, loss, accuracy in percent so far in the epoch, and the share of time in which
training waited for data; after each epoch what the loader's threads did, and the validation, in
which every image counts once. ``--output`` gets ``last.ckpt``, ``best.ckpt`` and the logger's
files (``metrics.csv``, or TensorBoard's with ``--logger tensorboard``), in which
``PipelineStatsMonitor`` writes what loading did: ``data/wait_ratio``, ``data/fetch/busy_ratio``...

Exit codes: 0; 1 a file cannot be decoded, or the loss is not finite; 2 an option or a folder
cannot work; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from _imagenet import argument_parser, find_checkpoint, parse, run_program, smoke_folders


def options_parser() -> argparse.ArgumentParser:
    """Return a parser of the command line."""
    parser = argument_parser(__doc__, output="runs/imagenet_lightning")
    add = parser.add_argument_group("Lightning").add_argument
    add("--devices", type=int, default=1, help="ranks on this machine (default: 1)")
    add("--nodes", type=int, default=1)
    add("--strategy", default="auto", help="as of Trainer; auto is ddp for several devices")
    add("--logger", choices=("csv", "tensorboard"), default="csv")
    return parser


if __name__ == "__main__":
    # --help and a wrong option are answered before the imports that take seconds.
    options_parser().parse_args()

import lightning
import torch
from _imagenet_data import make_loader, open_folders, relabel, train_dataset, validation_dataset
from _imagenet_figures import Clock, Meter, Progress as Lines, describe_loading
from _imagenet_model import (
    Built,
    build_model,
    make_mixing,
    make_optimizer,
    make_schedule,
    share_buffers,
    to_input,
)
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from spdl_torch.lightning import PipelineStatsMonitor

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from _imagenet_data import Folders
    from torch.utils.data import DataLoader

LAST, BEST = "last", "best"
LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
PRECISION = {None: "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or validate, as the options say."""
    options = parse(options_parser(), argv)
    with smoke_folders(options):
        resumed = find_checkpoint(options, f"{LAST}.ckpt")
        lightning.seed_everything(options.seed, verbose=False)
        folders = open_folders(options)
        built = build_model(options, folders.classes)
        relabel(folders.validation, built.classes)
        data = ImageNet(options, folders, built)
        model = Classifier(options, built)
        trainer = make_trainer(options)
        try:
            if options.eval_only:
                trainer.validate(model, data, ckpt_path=resumed, verbose=False)
            else:
                trainer.fit(model, data, ckpt_path=resumed)
        except SystemExit as error:
            # Lightning's own way to end after Ctrl-C.
            raise KeyboardInterrupt if trainer.interrupted else error from None


def make_trainer(options: argparse.Namespace) -> lightning.Trainer:
    """Return an ordinary Trainer, except that loaders keep their own samplers."""
    callbacks: list[Callback] = [
        Progress(options.print_freq, options.warm_up_batches),
        PipelineStatsMonitor(),
        ModelCheckpoint(
            dirpath=options.output,
            filename=BEST,
            save_last=True,
            monitor="val/acc1",
            mode="max",
            enable_version_counter=False,
        ),
    ]
    if options.ema_decay is not None:
        callbacks.append(EMAWeightAveraging(decay=options.ema_decay))
    return lightning.Trainer(
        accelerator=options.device.type,
        devices=_devices(options),
        num_nodes=options.nodes,
        strategy=options.strategy,
        precision=PRECISION[options.amp],
        max_epochs=options.epochs,
        gradient_clip_val=options.clip_grad_norm,
        sync_batchnorm=options.sync_bn,
        benchmark=True,
        logger=LOGGERS[options.logger](options.output, name="logs"),
        callbacks=callbacks,
        log_every_n_steps=options.print_freq,
        # The data module gives every rank its own images: see `validation_dataset`.
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _devices(options: argparse.Namespace) -> int | list[int]:
    if options.device.type == "cuda" and options.devices == 1:
        return [options.device.index]
    return options.devices


class ImageNet(lightning.LightningDataModule):
    """The two loaders, each with the images of this rank."""

    def __init__(self, options: argparse.Namespace, folders: Folders, built: Built) -> None:
        super().__init__()
        self.options, self.folders, self.pixels = options, folders, built.pixels

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, shuffled anew every epoch."""
        trainer = self.trainer
        dataset = train_dataset(self.options, self.folders, self.pixels)
        sampler = DistributedSampler(
            dataset,
            num_replicas=trainer.world_size,
            rank=trainer.global_rank,
            seed=self.options.seed,
        )
        # Lightning asks for the first batches before it calls set_epoch for the first time.
        sampler.set_epoch(trainer.current_epoch)
        device = trainer.strategy.root_device
        return make_loader(self.options, dataset, device=device, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation loader, with each image on exactly one rank."""
        trainer = self.trainer
        dataset = validation_dataset(
            self.folders, self.pixels, rank=trainer.global_rank, num_ranks=trainer.world_size
        )
        return make_loader(self.options, dataset, device=trainer.strategy.root_device)


class Classifier(lightning.LightningModule):
    """Any classifier; batches of bytes in, loss out."""

    def __init__(self, options: argparse.Namespace, built: Built) -> None:
        super().__init__()
        self.options = options
        self.model = built.model
        if options.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        if options.compile:
            self.model.compile()
        self.to_input = to_input(built.pixels, channels_last=options.channels_last)
        self.mix = make_mixing(options, len(built.classes))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.meter = Meter(options.device)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and a schedule that advances after every step."""
        optimizer = make_optimizer(self.options, self.model)
        steps = self.trainer.estimated_stepping_batches // self.options.epochs
        schedule = make_schedule(self.options, optimizer, int(steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_fit_start(self) -> None:
        """Give each rank random numbers of its own, now that all have begun with equal weights."""
        torch.manual_seed(hash((self.options.seed, self.trainer.global_rank)))

    def on_after_batch_transfer(
        self, batch: Sequence[Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Turn bytes into floats, on the device."""
        images, targets = batch
        images = self.to_input(images)
        if self.trainer.training and self.mix is not None:
            images, targets = self.mix(images, targets)
        return images, targets

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        images, targets = batch
        logits = self.model(images)
        loss = self.criterion(logits, targets)
        self.meter.add(logits, targets, loss)
        self.log("train/loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Make every rank validate the same model."""
        share_buffers(self.model)
        self.validation_meter = Meter(self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up; `on_validation_epoch_end` logs."""
        images, targets = batch
        logits = self.model(images).float()
        self.validation_meter.add(logits, targets, nn.functional.cross_entropy(logits, targets))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss``, and ``val/acc1`` and ``val/acc5`` in percent, over all ranks."""
        figures = self.validation_figures = self.validation_meter.figures(self.total)
        values = {"loss": figures.loss, "acc1": figures.acc1, "acc5": figures.acc5}
        self.log_dict({f"val/{name}": value for name, value in values.items()}, sync_dist=True)

    def total(self, sums: Tensor) -> Tensor:
        """Add up sums over the ranks."""
        return self.trainer.strategy.reduce(sums, reduce_op="sum")


class Progress(Callback):
    """Prints the lines that ``imagenet_classification.py`` prints."""

    def __init__(self, print_freq: int, warm_up_batches: int) -> None:
        self._print_freq, self._warm_up_batches = print_freq, warm_up_batches

    def on_train_epoch_start(self, trainer: lightning.Trainer, model: Classifier) -> None:
        """Start counting."""
        model.meter = Meter(model.device)
        self._lines = Lines(
            f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}",
            model.meter,
            num_steps=trainer.num_training_batches,
            images_per_step=model.options.batch_size * trainer.world_size,
        )

    def on_train_batch_end(self, trainer: lightning.Trainer, model: Classifier, *_: object) -> None:
        """Print a line every ``--print-freq`` steps."""
        step = trainer.fit_loop.batch_idx + 1
        if step % self._print_freq and step != trainer.num_training_batches:
            return
        loader = trainer.train_dataloader
        waiting = loader.snapshot().consumer_wait_ratio if hasattr(loader, "snapshot") else None
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._say(trainer, self._lines.line(step, rate, waiting, model.total))

    def on_validation_start(self, trainer: lightning.Trainer, model: Classifier) -> None:
        """Start counting."""
        num_batches = sum(trainer.num_val_batches)
        self._clock = Clock(model.device, min(self._warm_up_batches, num_batches // 2))

    def on_validation_batch_end(
        self,
        trainer: lightning.Trainer,
        model: Classifier,
        outputs: object,
        batch: tuple[Tensor, Tensor],
        *_: object,
    ) -> None:
        """Count the batch."""
        self._clock.step(len(batch[1]))

    def on_validation_end(self, trainer: lightning.Trainer, model: Classifier) -> None:
        """Print loss and accuracy; for validation alone, also images a second."""
        figures = model.validation_figures
        self._say(trainer, f"validation: {figures} on {figures.num_images} images")
        if trainer.state.fn == "validate":
            rate = model.total(torch.tensor(self._clock.rate(), device=model.device)).item()
            line = f"{rate:.0f} images/s after {self._clock.skip} warm-up batches"
            self._say(trainer, line + describe_loading(trainer.val_dataloaders))

    def on_train_epoch_end(self, trainer: lightning.Trainer, model: Classifier) -> None:
        """Print the statistics of the loader."""
        self._say(trainer, "loading:" + describe_loading(trainer.train_dataloader))

    def _say(self, trainer: lightning.Trainer, line: str) -> None:
        if trainer.is_global_zero:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
