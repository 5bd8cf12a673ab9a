"""Train and validate an image classifier on ImageNet: a plain loop, fed by threads.

Two imports differ from torch's own example: ``spdl_torch.DataLoader`` and
``spdl_torch.ImageFolder`` read, decode, crop and flip a batch in two calls that do not hold the
GIL. Batches are bytes until they are on the device, where they become floats.

    python examples/imagenet_classification.py --data DIR [--model resnet50] [--amp] [...]
    torchrun --nproc-per-node 8 examples/imagenet_classification.py --data DIR [...]
    python examples/imagenet_classification.py --data DIR --eval-only --pretrained
    python examples/imagenet_classification.py --smoke [--data DIR]

DIR has ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, or is one folder of class folders, of
which a tenth is held out, the same files every time.

Prints, every ``--print-freq`` steps, images a second over all ranks, loss, top-1 and top-5 accuracy
in percent so far in the epoch, the learning rate, and the share of time in which training waited
for data; after each epoch the loader's report, and the validation, in which every image counts
once. ``--output`` gets ``last.pt`` after each epoch, and ``best.pt``; ``--resume`` goes on exactly
where ``last.pt`` stopped. ``imagenet_lightning.py`` is the same with Lightning.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.transforms import v2

import spdl_torch
from spdl_torch.autotune import Limits
from spdl_torch.demo.photographs import write_photographs
from spdl_torch.nn import ToFloat

LOADERS = {
    "ours": (spdl_torch.DataLoader, spdl_torch.ImageFolder),
    "torch": (DataLoader, spdl_torch.ImageFolder),
    "torchvision": (DataLoader, torchvision.datasets.ImageFolder),
}
AUTO_AUGMENT = {
    "ra": v2.RandAugment,
    "ta_wide": v2.TrivialAugmentWide,
    "augmix": v2.AugMix,
    "imagenet": v2.AutoAugment,
}


def make_parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """Return a parser of the options, which are named as in torchvision's or timm's script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="train/ and val/, or one folder of class folders")
    add("--val-fraction", type=float, default=0.1, help="held out of one folder (default: 0.1)")
    add("--limit", type=int, metavar="N", help="use N images of each part, evenly spread")
    add("--loader", choices=LOADERS, default="ours", help="torch's, or torchvision's folder, too")
    add("--workers", type=int, help="threads or processes a rank (default: the cores, at most 16)")
    add("--model", default="resnet50", metavar="NAME", help="of torchvision, or timm:NAME")
    add("--pretrained", action="store_true", help="begin with the published weights")
    add("--weights", metavar="W", help="begin with a checkpoint or torchvision's weights named W")
    add("--image-size", type=int, help="pixels (default: the weights', or 224)")
    add("--channels-last", action="store_true")
    add("--compile", action="store_true", help="torch.compile")
    add("--sync-bn", action="store_true", help="batch norm over all ranks")
    add("--ema-decay", type=float, metavar="D", help="keep an average of the weights, e.g. 0.9999")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=64, help="images a rank and step (default: 64)")
    add("--opt", choices=("sgd", "adamw"), default="sgd")
    add("--lr", type=float, default=0.1)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--norm-weight-decay", type=float, help="of biases and norms (default: as the others)")
    add("--lr-warmup-epochs", type=float, default=5)
    add("--clip-grad-norm", type=float)
    add("--label-smoothing", type=float, default=0.0)
    add("--amp", choices=("bf16", "fp16"), nargs="?", const="bf16", help="default: float32")
    add("--auto-augment", choices=AUTO_AUGMENT)
    add("--random-erase", type=float, default=0.0, metavar="P")
    add("--mixup", type=float, default=0.0, metavar="ALPHA")
    add("--cutmix", type=float, default=0.0, metavar="ALPHA")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--eval-only", action="store_true", help="validate, and end")
    add("--output", type=Path, default=output, help=f"of the checkpoints (default: {output})")
    add("--resume", action="store_true", help="go on from --output's last checkpoint, if any")
    add("--seed", type=int, default=0)
    add("--print-freq", type=int, default=100, help="steps between lines (default: 100)")
    add("--smoke", action="store_true", help="a short run; without --data on made photographs")
    return parser


def parse_args(
    parser: argparse.ArgumentParser, last: str, made: str, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options.

    last: the name of the last checkpoint in ``--output``. made: a folder for ``--smoke``.
    """
    if parser.parse_args(argv).smoke:
        parser.set_defaults(output=Path(made, "output"), model="resnet18", image_size=64, limit=48)
        parser.set_defaults(epochs=2, batch_size=8, workers=2, lr=0.01, lr_warmup_epochs=1)
        parser.set_defaults(print_freq=2)
        torch.set_num_threads(1)
    options = parser.parse_args(argv)
    if options.smoke and options.data is None:
        options.data = Path(made, "photographs")
        write_photographs(options.data, 60)
    if options.data is None or not options.data.is_dir():
        parser.error(f"--data {options.data}: there is no such folder; --smoke runs without.")
    if (options.output / last).exists() and not (options.resume or options.eval_only):
        parser.error(
            f"{options.output / last} is the checkpoint of an earlier run. Pass --resume to go on "
            "with it, or another --output."
        )
    if options.workers is None:
        limits = Limits.of_this_machine()
        options.workers = min(max(int(limits.num_cores / limits.local_world_size), 1), 16)
    if options.device is None:
        rank = os.environ.get("LOCAL_RANK", "0")
        options.device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    options.device = torch.device(options.device)
    return options


# -- images ----------------------------------------------------------------------------------------


class Pixels(NamedTuple):
    """The size, resampling and normalisation that a model was trained with."""

    size: int = 224
    resize: int = 256
    """Pixels of the shorter edge, from whose middle the square is cut for validation."""
    interpolation: v2.InterpolationMode = v2.InterpolationMode.BILINEAR
    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)


def open_folders(options: argparse.Namespace) -> tuple[Subset[Any], Subset[Any]]:
    """Return the images to train with and to validate with, before any transform."""
    folder_class = LOADERS[options.loader][1]
    if (options.data / "train").is_dir():
        train = folder_class(options.data / "train")
        validation = folder_class(options.data / "val")
        # val/ may lack a class: its images get the numbers that the classes have in train/.
        names, numbers = validation.classes, train.class_to_idx
        validation.samples = [(path, numbers[names[k]]) for path, k in validation.samples]
        indices, held_out = list(range(len(train))), list(range(len(validation)))
    else:
        train = folder_class(options.data)
        validation = copy.copy(train)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
        count = max(1, round(len(train) * options.val_fraction))
        indices, held_out = sorted(order[count:]), sorted(order[:count])
    chosen, kept = spread(indices, options.limit), spread(held_out, options.limit)
    return Subset(train, chosen), Subset(validation, kept)


def spread(indices: list[int], limit: int | None) -> list[int]:
    """Return at most ``limit`` of them, evenly spread."""
    count = min(len(indices), limit or len(indices))
    return [indices[k * len(indices) // count] for k in range(count)]


def train_transform(options: argparse.Namespace, pixels: Pixels) -> v2.Compose:
    """Return random crops, flips and whatever else was asked for: uint8 (3, size, size)."""
    steps = [
        v2.RandomResizedCrop(pixels.size, interpolation=pixels.interpolation, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if options.auto_augment:
        steps.append(AUTO_AUGMENT[options.auto_augment](interpolation=pixels.interpolation))
    steps.append(v2.PILToTensor())  # bytes; normalised on the device
    if options.random_erase:
        grey = tuple(round(255 * value) for value in pixels.mean)  # 0, once it is normalised
        steps.append(v2.RandomErasing(options.random_erase, value=grey))
    return v2.Compose(steps)


def validation_share(images: Subset[Any], pixels: Pixels, rank: int, num_ranks: int) -> Subset[Any]:
    """Return the central crops: uint8 (3, size, size); each image belongs to exactly one rank,
    where torch's DistributedSampler would repeat some to give every rank equally many.
    """
    resize = v2.Resize(pixels.resize, interpolation=pixels.interpolation, antialias=True)
    images.dataset.transform = v2.Compose([resize, v2.CenterCrop(pixels.size), v2.PILToTensor()])
    return Subset(images.dataset, images.indices[rank::num_ranks])


def make_loader(
    options: argparse.Namespace,
    dataset: Dataset[Any],
    device: torch.device,
    sampler: DistributedSampler[Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader; with a sampler, one for training."""
    is_ours = options.loader == "ours"
    on_cuda = device.type == "cuda"
    return LOADERS[options.loader][0](
        dataset,
        batch_size=options.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        persistent_workers=options.workers > 0 and not is_ours,  # processes are slow to start
        # Batch norm needs more than one image: a last batch that is not full is left out.
        drop_last=sampler is not None and len(sampler) >= options.batch_size,
        **({"device": device} if on_cuda and is_ours else {"pin_memory": on_cuda}),
    )


# -- model and recipe ------------------------------------------------------------------------------


def build_model(options: argparse.Namespace, num_classes: int) -> tuple[nn.Module, Pixels]:
    """Return the model that ``--model`` names, with the weights that were asked for."""
    is_file = options.weights is not None and Path(options.weights).is_file()
    if options.model.startswith("timm:"):
        import timm

        name = options.model.removeprefix("timm:")
        model = timm.create_model(name, options.pretrained, num_classes=num_classes)
        config = timm.data.resolve_data_config({}, model=model)
        size = config["input_size"][-1]
        interpolation = v2.InterpolationMode(config["interpolation"])
        resize = math.floor(size / config["crop_pct"])
        pixels = Pixels(size, resize, interpolation, config["mean"], config["std"])
    else:
        model = torchvision.models.get_model(options.model, num_classes=num_classes)
        pixels = Pixels()
        name = "DEFAULT" if options.pretrained else options.weights
        if name is not None and not is_file:
            weights = torchvision.models.get_model_weights(options.model)[name]
            load_weights(model, weights.get_state_dict(check_hash=True))
            at = weights.transforms()
            sizes = at.crop_size[0], at.resize_size[0]
            pixels = Pixels(*sizes, at.interpolation, at.mean, at.std)
    if is_file:
        saved = torch.load(options.weights, map_location="cpu", weights_only=True)
        state = saved.get("ema") or saved.get("model", saved)
        load_weights(model, {name.removeprefix("module."): v for name, v in state.items()})
    if options.image_size:
        resize = round(options.image_size * pixels.resize / pixels.size)
        pixels = pixels._replace(size=options.image_size, resize=resize)
    return model, pixels


def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the weights of the same shape: all but the last layer, if classes are others."""
    own = model.state_dict()
    same = {name: v for name, v in state.items() if name in own and own[name].shape == v.shape}
    if others := sorted(own.keys() - same.keys()):
        print(f"begin at random: {', '.join(others)}", file=sys.stderr)
    model.load_state_dict(same, strict=False)


def to_input(pixels: Pixels, channels_last: bool) -> nn.Module:
    """Return the module that turns batches of bytes from the loader into the model's input."""
    if channels_last:
        return ToFloat(pixels.mean, pixels.std, dtype=torch.float32)
    normalize = v2.Normalize(list(pixels.mean), list(pixels.std))
    return nn.Sequential(v2.ToDtype(torch.float32, scale=True), normalize)


def make_mixing(options: argparse.Namespace, num_classes: int) -> Callable[..., Any] | None:
    """Return Mixup and CutMix for a batch on its device; targets become (N, num_classes)."""
    kinds = [(v2.MixUp, options.mixup), (v2.CutMix, options.cutmix)]
    mixing = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    return v2.RandomChoice(mixing) if mixing else None


def make_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, or AdamW; norms and biases decay as asked for."""
    decay, of_norms = options.weight_decay, options.norm_weight_decay
    of_norms = decay if of_norms is None else of_norms
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": of_norms},
    ]
    if options.opt == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)


def make_schedule(
    options: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule to advance after every step: linear up to ``--lr``, then half a cosine down
    to 0."""
    total = max(options.epochs * steps_per_epoch, 1)
    warmup = min(round(options.lr_warmup_epochs * steps_per_epoch), total - 1)

    def factor(step: int) -> float:
        if step < warmup:
            return 0.01 + 0.99 * step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def share_buffers(model: nn.Module) -> None:
    """Give every rank the batch norm statistics of rank 0, whose model is saved."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


class Meter:
    """Adds up loss and hits on the device, so that no step has to wait for its result."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch: (N, classes), (N,) or (N, classes), and the mean loss."""
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        hits = logits.detach().topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
        count = len(labels)
        self.sums[:3] += torch.stack([loss.detach() * count, hits[:, 0].sum(), hits.sum()])
        self.sums[3] += count

    def means(self) -> tuple[float, float, float, int]:
        """Return loss, top-1 and top-5 accuracy in percent, and the images, of all ranks so far."""
        sums = self.sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, top1, top5, count = sums.tolist()
        images = max(count, 1)
        return loss / images, 100 * top1 / images, 100 * top5 / images, int(count)


# -- the run ---------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line, once for all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def train_epoch(options: argparse.Namespace, run: SimpleNamespace, loader: Any, epoch: int) -> None:
    """Train for one pass over the training images."""
    # All that is random in an epoch follows from this, so that it can be repeated.
    torch.manual_seed(hash((options.seed, epoch, loader.sampler.rank)))
    loader.sampler.set_epoch(epoch)
    run.model.train()
    criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    meter, waited, num_images = Meter(options.device), 0.0, 0
    begin = asked = time.perf_counter()
    for step, (images, targets) in enumerate(loader, 1):
        waited += time.perf_counter() - asked
        images = run.to_input(images.to(options.device, non_blocking=True))
        targets = targets.to(options.device, non_blocking=True)
        if run.mix is not None:
            images, targets = run.mix(images, targets)
        with autocast(options):
            logits = run.forward(images)
            loss = criterion(logits, targets)
        run.optimizer.zero_grad()
        run.scaler.scale(loss).backward()
        if options.clip_grad_norm is not None:
            run.scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), options.clip_grad_norm)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.schedule.step()
        if run.ema is not None:
            run.ema.update_parameters(run.model)
        meter.add(logits, targets, loss)
        num_images += len(images) * loader.sampler.num_replicas
        if step % options.print_freq == 0 or step == len(loader):
            mean, acc1, acc5, _ = meter.means()
            if not math.isfinite(mean):
                sys.exit(
                    f"the loss is {mean} in epoch {epoch + 1}. Lower --lr, or leave out --amp."
                )
            seconds = time.perf_counter() - begin
            say(
                f"epoch {epoch + 1}/{options.epochs}  step {step}/{len(loader)}  "
                f"{num_images / seconds:.0f} images/s  loss {mean:.4f}  acc1 {acc1:.2f}  "
                f"acc5 {acc5:.2f}  lr {run.schedule.get_last_lr()[0]:.4f}  "
                f"waiting for data {waited / seconds:.0%}"
            )
        asked = time.perf_counter()


def validate(
    options: argparse.Namespace, model: nn.Module, prepare: nn.Module, loader: Any, what: str
) -> float:
    """Validate: every image once, over all ranks. Return the top-1 accuracy."""
    share_buffers(model)
    model.eval()
    meter, begin = Meter(options.device), time.perf_counter()
    with torch.inference_mode():
        for images, targets in loader:
            images = prepare(images.to(options.device, non_blocking=True))
            targets = targets.to(options.device, non_blocking=True)
            with autocast(options):
                logits = model(images)
            logits = logits.float()
            meter.add(logits, targets, nn.functional.cross_entropy(logits, targets))
    mean, acc1, acc5, count = meter.means()
    say(
        f"{what}: loss {mean:.4f}  acc1 {acc1:.2f}  acc5 {acc5:.2f} on {count} images, "
        f"{count / (time.perf_counter() - begin):.0f} images/s"
    )
    return acc1


def autocast(options: argparse.Namespace) -> torch.autocast:
    """Return the context for mixed precision, as ``--amp`` says."""
    dtype = torch.float16 if options.amp == "fp16" else torch.bfloat16
    return torch.autocast(options.device.type, dtype, enabled=options.amp is not None)


SAVED = ("model", "ema", "optimizer", "schedule", "scaler")


def save(path: Path, run: SimpleNamespace, epoch: int, best: float) -> None:
    """Write a checkpoint: ``path`` is the whole old file or the whole new one at any moment."""
    states = {name: getattr(run, name).state_dict() for name in SAVED if getattr(run, name)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**states, "epoch": epoch, "best": best}, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or validate, as the options say."""
    with tempfile.TemporaryDirectory() as made:
        fit(parse_args(make_parser(__doc__, "runs/imagenet"), "last.pt", made, argv))


def fit(options: argparse.Namespace) -> None:
    """Train the remaining epochs; after each, validate and write a checkpoint."""
    rank, num_ranks = 0, int(os.environ.get("WORLD_SIZE", "1"))
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        torch.backends.cudnn.benchmark = True
    if num_ranks > 1:
        dist.init_process_group("nccl" if options.device.type == "cuda" else "gloo")
        rank = dist.get_rank()
    torch.manual_seed(options.seed)

    train, held_out = open_folders(options)
    num_classes = len(train.dataset.classes)
    model, pixels = build_model(options, num_classes)
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model.to(options.device, memory_format=layout)
    if options.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if options.compile:
        model.compile()  # in place: names in checkpoints stay as they are
    prepare = to_input(pixels, options.channels_last).to(options.device)
    say(
        f"{options.model} on {options.device}, {num_ranks} rank(s); {len(train)} "
        f"training and {len(held_out)} validation images of {num_classes} classes; "
        f"{options.loader} loader, {options.workers} worker(s) a rank"
    )
    share = validation_share(held_out, pixels, rank, num_ranks)
    validation = make_loader(options, share, options.device)
    if options.eval_only:
        validate(options, model, prepare, validation, "validation")
        return

    train.dataset.transform = train_transform(options, pixels)
    # Also for one rank: the order of an epoch follows from seed and epoch alone.
    sampler = DistributedSampler(train, num_ranks, rank, seed=options.seed)
    loader = make_loader(options, train, options.device, sampler)
    ema = None
    if options.ema_decay is not None:
        average = get_ema_multi_avg_fn(options.ema_decay)
        ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    optimizer = make_optimizer(options, model)
    run = SimpleNamespace(
        model=model,
        forward=nn.parallel.DistributedDataParallel(model) if num_ranks > 1 else model,
        to_input=prepare,
        mix=make_mixing(options, num_classes),
        ema=ema,
        optimizer=optimizer,
        schedule=make_schedule(options, optimizer, len(loader)),
        scaler=torch.amp.GradScaler(options.device.type, enabled=options.amp == "fp16"),
    )
    begin, best, last = 0, 0.0, options.output / "last.pt"
    if options.resume and last.exists():
        saved = torch.load(last, map_location="cpu", weights_only=True)
        for name in SAVED:
            if getattr(run, name):
                getattr(run, name).load_state_dict(saved[name])
        begin, best = saved["epoch"], saved["best"]
        say(f"resumed from {last}, after epoch {begin}")
    for epoch in range(begin, options.epochs):
        train_epoch(options, run, loader, epoch)
        what = f"epoch {epoch + 1}/{options.epochs}  validation"
        acc1 = validate(options, model, prepare, validation, what)
        if ema is not None:
            acc1 = validate(options, ema.module, prepare, validation, f"{what} of the average")
        if options.loader == "ours":
            say(str(loader.report()))
        if rank == 0:
            save(last, run, epoch + 1, max(acc1, best))
            if acc1 > best:
                save(options.output / "best.pt", run, epoch + 1, acc1)
        best = max(acc1, best)
    say(f"best acc1 {best:.2f}; checkpoints in {options.output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; --resume goes on after the last epoch", file=sys.stderr)
        sys.exit(130)
