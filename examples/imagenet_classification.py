"""Train and validate an image classifier on ImageNet: a plain loop, fed by threads.

The options are those of torchvision's and timm's training scripts. What differs is two imports:
``spdl_torch.DataLoader`` and ``spdl_torch.ImageFolder`` read, decode, crop and flip a batch in two
calls that do not hold the GIL, on threads of the training process. Batches are bytes until they are
on the device, where they become floats.

    python examples/imagenet_classification.py --data DIR [--model resnet50] [--amp] [...]
    torchrun --nproc-per-node 8 examples/imagenet_classification.py --data DIR [...]
    python examples/imagenet_classification.py --data DIR --eval-only --pretrained [--compile]
    python examples/imagenet_classification.py --smoke [--data DIR]

DIR has ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, or is one folder of class folders, of
which a tenth is held out, the same files every time.

It prints, every ``--print-freq`` steps, images a second over all ranks, loss, top-1 and top-5
accuracy in percent so far in the epoch, the learning rate, and the share of time in which
training waited for data; after each epoch what the loader's threads did, and the validation, in
which every image counts once however many ranks there are. ``--output`` gets ``last.pt`` after
each epoch and ``best.pt``; ``--resume`` goes on exactly where ``last.pt`` stopped. ``--loader
torch`` runs the same with torch's DataLoader, ``--loader torchvision`` with torchvision's
ImageFolder too.

``--eval-only`` prints accuracy and, after ``--warm-up-batches``, images a second.

Exit codes: 0; 1 a file cannot be decoded, or the loss is not finite; 2 an option or a folder
cannot work; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _imagenet import (
    SetupError,
    argument_parser,
    find_checkpoint,
    parse,
    read_checkpoint,
    run_program,
    save_checkpoint,
    smoke_folders,
)

OUTPUT = "runs/imagenet"

if __name__ == "__main__":
    # --help and a wrong option are answered before the imports that take seconds.
    argument_parser(__doc__, output=OUTPUT).parse_args()

import torch
import torch.distributed as dist
from _imagenet_data import make_loader, open_folders, relabel, train_dataset, validation_dataset
from _imagenet_figures import Clock, Figures, Meter, Progress, Waiting, describe_loading
from _imagenet_model import (
    Built,
    build_model,
    make_mixing,
    make_optimizer,
    make_schedule,
    share_buffers,
    to_input,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from _imagenet_data import Folders

LAST, BEST = "last.pt", "best.pt"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or validate, as the options say."""
    options = parse(argument_parser(__doc__, output=OUTPUT), argv)
    with smoke_folders(options), ranks(options.device) as group:
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(options.seed)
        resumed = find_checkpoint(options, LAST)
        if options.eval_only and resumed is not None:
            options.weights = str(resumed)
        folders = open_folders(options)
        built = build_model(options, folders.classes)
        relabel(folders.validation, built.classes)
        group.say(
            f"{options.model} on {options.device}, {group.num_ranks} rank(s); "
            f"{len(folders.train_indices)} training and {len(folders.validation_indices)} "
            f"validation images of {len(folders.classes)} classes; {options.loader} loader, "
            f"{options.workers} worker(s) a rank"
        )
        run = Run(options, group, built, folders)
        if options.eval_only:
            run.validate_and_time()
            return
        training = Training(run)
        if resumed is not None:
            training.load(read_checkpoint(resumed))
            group.say(f"resumed from {resumed}, after epoch {training.num_epochs}")
        training.fit()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes that train together, as torchrun started them, or this one alone."""

    rank: int = 0
    num_ranks: int = 1

    def say(self, line: str) -> None:
        """Print it once."""
        if self.rank == 0:
            print(line, flush=True)

    def total(self, values: Tensor) -> Tensor:
        """Add up values over the ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(values)
        return values


@contextlib.contextmanager
def ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the process group, if torchrun started this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield Ranks(rank=dist.get_rank(), num_ranks=dist.get_world_size())
    # Not after an error: other ranks may wait in a collective call that this one will not join.
    dist.destroy_process_group()


class Run:
    """The model on its device, and its validation."""

    def __init__(
        self, options: argparse.Namespace, group: Ranks, built: Built, folders: Folders
    ) -> None:
        self.options, self.group, self.built, self.folders = options, group, built, folders
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.model = built.model.to(options.device, memory_format=layout)
        if options.sync_bn and group.num_ranks > 1:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        if options.compile:
            self.model.compile()  # in place: names in checkpoints stay as they are
        self.to_input = to_input(built.pixels, channels_last=options.channels_last)
        self.to_input.to(options.device)
        self.validation_loader = make_loader(
            options,
            validation_dataset(folders, built.pixels, rank=group.rank, num_ranks=group.num_ranks),
            device=options.device,
        )

    def on_device(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Move a batch: bytes and targets of the loader -> input and targets on the device."""
        images, targets = (part.to(self.options.device, non_blocking=True) for part in batch)
        return self.to_input(images), targets

    def autocast(self) -> torch.autocast:
        """Return the context for mixed precision, as ``--amp`` says."""
        dtype = torch.float16 if self.options.amp == "fp16" else torch.bfloat16
        return torch.autocast(self.options.device.type, dtype, enabled=self.options.amp is not None)

    def validate(self, model: nn.Module, clock: Clock | None = None) -> Figures:
        """Validate: every image once, over all ranks."""
        share_buffers(model)
        model.eval()
        meter = Meter(self.options.device)
        with torch.inference_mode():
            for batch in self.validation_loader:
                images, targets = self.on_device(batch)
                with self.autocast():
                    logits = model(images)
                logits = logits.float()
                meter.add(logits, targets, nn.functional.cross_entropy(logits, targets))
                if clock is not None:
                    clock.step(len(targets))
        return meter.figures(self.group.total)

    def validate_and_time(self) -> None:
        """Validate and print the rate: the work of ``--eval-only``."""
        num_batches = len(self.validation_loader)
        clock = Clock(self.options.device, min(self.options.warm_up_batches, num_batches // 2))
        figures = self.validate(self.model, clock)
        rate = torch.tensor([clock.rate()], dtype=torch.float64, device=self.options.device)
        self.group.say(f"validation: {figures} on {figures.num_images} images")
        self.group.say(
            f"{self.group.total(rate).item():.0f} images/s after {clock.skip} warm-up batches"
            + describe_loading(self.validation_loader)
        )


class Training:
    """The state that training changes: weights, their average, the optimizer, and the progress."""

    def __init__(self, run: Run) -> None:
        options, group, built = run.options, run.group, run.built
        self.run, self.options, self.group = run, options, group
        dataset = train_dataset(options, run.folders, built.pixels)
        # Also for one rank: the order of an epoch follows from seed and epoch alone.
        self.sampler = DistributedSampler(
            dataset, num_replicas=group.num_ranks, rank=group.rank, seed=options.seed
        )
        self.loader = make_loader(options, dataset, device=options.device, sampler=self.sampler)
        self.forward: nn.Module = run.model
        if group.num_ranks > 1:
            self.forward = nn.parallel.DistributedDataParallel(run.model)
        self.ema = None
        if options.ema_decay is not None:
            average = get_ema_multi_avg_fn(options.ema_decay)
            self.ema = AveragedModel(run.model, multi_avg_fn=average, use_buffers=True)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.mix = make_mixing(options, len(built.classes))
        self.optimizer = make_optimizer(options, run.model)
        self.schedule = make_schedule(options, self.optimizer, len(self.loader))
        self.scaler = torch.amp.GradScaler(options.device.type, enabled=options.amp == "fp16")
        self.num_epochs = 0
        self.best_acc1 = 0.0

    def fit(self) -> None:
        """Train for the remaining epochs; after each, validate and write a checkpoint."""
        while self.num_epochs < self.options.epochs:
            begin = time.perf_counter()
            self.train_epoch()
            trained = time.perf_counter()
            self.num_epochs += 1
            where = f"epoch {self.num_epochs}/{self.options.epochs}"
            figures = self.run.validate(self.run.model)
            if self.ema is not None:
                self.group.say(f"{where}  validation without averaging: {figures}")
                figures = self.run.validate(self.ema.module)
            self.group.say(
                f"{where}  validation: {figures} on {figures.num_images} images; trained "
                f"{trained - begin:.1f} s, validated {time.perf_counter() - trained:.1f} s"
                + describe_loading(self.loader)
            )
            best = figures.acc1 > self.best_acc1
            self.best_acc1 = max(figures.acc1, self.best_acc1)
            if self.group.rank == 0:
                checkpoint = self.checkpoint()
                for name in (LAST, BEST) if best else (LAST,):
                    save_checkpoint(checkpoint, self.options.output / name)
        self.group.say(f"best acc1 {self.best_acc1:.2f}; checkpoints in {self.options.output}")

    def train_epoch(self) -> None:
        """Train for one pass over the training images."""
        # All that is random in an epoch follows from this, so that it can be repeated.
        torch.manual_seed(hash((self.options.seed, self.num_epochs, self.group.rank)))
        self.sampler.set_epoch(self.num_epochs)
        self.run.model.train()
        meter = Meter(self.options.device)
        waiting = Waiting(self.loader)
        progress = Progress(
            f"epoch {self.num_epochs + 1}/{self.options.epochs}",
            meter,
            num_steps=len(self.loader),
            images_per_step=self.options.batch_size * self.group.num_ranks,
        )
        for step, batch in enumerate(waiting, 1):
            images, targets = self.run.on_device(batch)
            if self.mix is not None:
                images, targets = self.mix(images, targets)
            meter.add(*self.step(images, targets))
            if step % self.options.print_freq == 0 or step == len(self.loader):
                rate = self.schedule.get_last_lr()[0]
                self.group.say(progress.line(step, rate, waiting.ratio(), self.group.total))

    def step(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do one step. Returns: the logits, the targets and the loss."""
        with self.run.autocast():
            logits = self.forward(images)
            loss = self.criterion(logits, targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.options.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.run.model.parameters(), self.options.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.run.model)
        return logits, targets, loss

    def checkpoint(self) -> dict[str, Any]:
        """Return all that ``load`` needs, and what ``--weights`` looks at."""
        return {
            "model": self.run.model.state_dict(),
            "model_name": self.options.model,
            "classes": list(self.run.built.classes),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "num_epochs": self.num_epochs,
            "best_acc1": self.best_acc1,
        }

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        own = {"model_name": self.options.model, "classes": list(self.run.built.classes)}
        for name, value in own.items():
            if checkpoint.get(name) != value:
                raise SetupError(
                    f"--resume: the checkpoint has another {name} than this run. To begin with its "
                    "weights, pass it to --weights."
                )
        self.run.model.load_state_dict(checkpoint["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(checkpoint["ema"] or checkpoint["model"])
            self.ema.n_averaged.fill_(1)  # from now on it averages instead of copying
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.schedule.load_state_dict(checkpoint["schedule"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        self.num_epochs = checkpoint["num_epochs"]
        self.best_acc1 = checkpoint["best_acc1"]


if __name__ == "__main__":
    sys.exit(run_program(main))
