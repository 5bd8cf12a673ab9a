"""Train and validate an image classifier on ImageNet with Lightning, fed by threads.

The model, recipe and options of ``imagenet_classification.py``, as a LightningModule and a
LightningDataModule: Lightning runs the loop, precision, devices, checkpoints and loggers, and
``spdl_torch.DataLoader`` and ``spdl_torch.ImageFolder`` feed it like any other loader.

    python examples/imagenet_lightning.py --data DIR [--model resnet50] [--amp] [--devices 8]
    python examples/imagenet_lightning.py --data DIR --eval-only --pretrained
    python examples/imagenet_lightning.py --smoke [--data DIR] [--strategy ddp --devices 2]

Prints Lightning's progress, and after each epoch the validation, in which every image counts once,
and the loader's report. ``--output`` gets ``last.ckpt``, ``best.ckpt`` and ``metrics.csv``, in
which ``PipelineStatsMonitor`` writes what loading did: ``data/wait_ratio``,
``data/fetch/busy_ratio``...
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from imagenet_classification import (
    Meter,
    Pixels,
    build_model,
    make_loader,
    make_mixing,
    make_optimizer,
    make_parser,
    make_schedule,
    open_folders,
    parse_args,
    share_buffers,
    to_input,
    train_transform,
    validation_share,
)
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from spdl_torch.lightning import PipelineStatsMonitor

PRECISION = {None: "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class ImageNet(lightning.LightningDataModule):
    """The two loaders, each with the images of this rank."""

    def __init__(
        self, options: argparse.Namespace, train: Subset[Any], held_out: Subset[Any], pixels: Pixels
    ) -> None:
        super().__init__()
        train.dataset.transform = train_transform(options, pixels)
        self.options, self.train, self.held_out, self.pixels = options, train, held_out, pixels

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, shuffled anew every epoch."""
        trainer = self.trainer
        ranks = trainer.world_size, trainer.global_rank
        sampler = DistributedSampler(self.train, *ranks, seed=self.options.seed)
        # Lightning asks for the first batches before it calls set_epoch for the first time.
        sampler.set_epoch(trainer.current_epoch)
        return make_loader(self.options, self.train, trainer.strategy.root_device, sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation loader, with each image on exactly one rank."""
        trainer = self.trainer
        ranks = trainer.global_rank, trainer.world_size
        share = validation_share(self.held_out, self.pixels, *ranks)
        return make_loader(self.options, share, trainer.strategy.root_device)


class Classifier(lightning.LightningModule):
    """Any classifier; batches of bytes in, loss out."""

    def __init__(
        self, options: argparse.Namespace, model: nn.Module, pixels: Pixels, num_classes: int
    ) -> None:
        super().__init__()
        self.options = options
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.model = model.to(memory_format=layout)
        if options.compile:
            self.model.compile()
        self.to_input = to_input(pixels, options.channels_last)
        self.mix = make_mixing(options, num_classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)

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
        loss = self.criterion(self.model(images), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Make every rank validate the same model."""
        share_buffers(self.model)
        self.meter = Meter(self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up; `on_validation_epoch_end` logs."""
        images, targets = batch
        logits = self.model(images).float()
        self.meter.add(logits, targets, nn.functional.cross_entropy(logits, targets))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss``, and ``val/acc1`` and ``val/acc5`` in percent, over all ranks."""
        loss, acc1, acc5, count = self.meter.means()  # not self.log's: ranks' shares differ
        self.log_dict({"val/loss": loss, "val/acc1": acc1, "val/acc5": acc5}, sync_dist=True)
        self.print(
            f"\nvalidation: loss {loss:.4f}  acc1 {acc1:.2f}  acc5 {acc5:.2f} on {count} images"
        )

    def on_train_epoch_end(self) -> None:
        """Print what the loader did."""
        if self.options.loader == "ours":
            self.print(self.trainer.train_dataloader.report())


def make_trainer(options: argparse.Namespace) -> lightning.Trainer:
    """Return an ordinary Trainer, except that loaders keep their own samplers."""
    callbacks: list[Callback] = [
        PipelineStatsMonitor(),
        ModelCheckpoint(
            dirpath=options.output,
            filename="best",
            save_last=True,
            monitor="val/acc1",
            mode="max",
            enable_version_counter=False,
        ),
    ]
    if options.ema_decay is not None:
        callbacks.append(EMAWeightAveraging(decay=options.ema_decay))
    one_gpu = options.device.type == "cuda" and options.devices == 1
    return lightning.Trainer(
        accelerator=options.device.type,
        devices=[options.device.index or 0] if one_gpu else options.devices,
        strategy=options.strategy,
        precision=PRECISION[options.amp],
        max_epochs=options.epochs,
        gradient_clip_val=options.clip_grad_norm,
        sync_batchnorm=options.sync_bn,
        benchmark=True,
        logger=CSVLogger(options.output, name="logs"),
        callbacks=callbacks,
        log_every_n_steps=options.print_freq,
        use_distributed_sampler=False,  # the data module gives every rank its own images
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )


def fit(options: argparse.Namespace) -> None:
    """Train, or validate, as the options say."""
    lightning.seed_everything(options.seed, verbose=False)
    train, held_out = open_folders(options)
    num_classes = len(train.dataset.classes)
    model, pixels = build_model(options, num_classes)
    data = ImageNet(options, train, held_out, pixels)
    module, trainer = Classifier(options, model, pixels, num_classes), make_trainer(options)
    if options.eval_only:
        trainer.validate(module, data, verbose=False)
        return
    last = options.output / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if options.resume and last.exists() else None)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, and run."""
    parser = make_parser(__doc__, "runs/imagenet_lightning")
    add = parser.add_argument
    add("--devices", type=int, default=1, help="ranks on this machine (default: 1)")
    add("--strategy", default="auto", help="as of Trainer; auto is ddp for several devices")
    with tempfile.TemporaryDirectory() as made:
        fit(parse_args(parser, "last.ckpt", made, argv))


if __name__ == "__main__":
    main()
