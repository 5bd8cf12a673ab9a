"""The parts that the ImageNet programs share: their options, checkpoints, and how they end.

``imagenet_classification.py`` and ``imagenet_lightning.py`` differ in who runs the loop and in
nothing else: what a run computes is decided in ``_imagenet_data.py`` (images and loaders) and
``_imagenet_model.py`` (model and recipe), what it prints in ``_imagenet_figures.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdl_torch import DecodeError
from spdl_torch.autotune import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

SMOKE = {
    "model": "resnet18",
    "image_size": 64,
    "limit": 48,
    "epochs": 2,
    "batch_size": 8,
    "workers": 2,
    "lr": 0.01,
    "lr_warmup_epochs": 1,
    "print_freq": 2,
    "warm_up_batches": 1,
}
"""The options that ``--smoke`` changes; options given explicitly take precedence."""
SMOKE_PHOTOGRAPHS = 60


class SetupError(Exception):
    """The caller's fault: an option or a folder that cannot work; printed without a traceback."""


def run_program(main: Callable[[], None]) -> int:
    """Run the program; return the exit code: 0, 1 for bad data, 2 for bad options, 130 for
    Ctrl-C."""
    name = Path(sys.argv[0]).name
    try:
        main()
    except SetupError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except (DecodeError, FloatingPointError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"{name}: {error}{notes}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{name}: interrupted; --resume goes on after the last epoch", file=sys.stderr)
        return 130
    return 0


def argument_parser(description: str, output: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have, named as in torchvision's or timm's
    script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, metavar="DIR", help="train/ and val/, or one folder of class folders")
    add("--val-fraction", type=float, default=0.1, help="held out of one folder (default: 0.1)")
    add("--limit", type=int, metavar="N", help="use N images of each part, evenly spread")
    add("--class-map", type=Path, metavar="FILE", help="names of the model's outputs, one a line")
    add(
        "--loader",
        choices=("ours", "torch", "torchvision"),
        default="ours",
        help="default: ours; see the documentation",
    )
    add("--workers", type=int, help="threads or processes a rank (default: the cores)")
    add("--prefetch-factor", type=int, default=2, help="batches under way a worker (default: 2)")
    add = parser.add_argument_group("model").add_argument
    add("--model", default="resnet50", metavar="NAME", help="of torchvision, or timm:NAME")
    add("--pretrained", action="store_true", help="begin with the published weights")
    add("--weights", metavar="W", help="begin with a checkpoint or torchvision's weights named W")
    add("--image-size", type=int, help="pixels (default: the weights', or 224)")
    add("--val-resize", type=int, help="shorter edge before the central crop (default: 8/7 of it)")
    add("--channels-last", action="store_true")
    add("--compile", action="store_true", help="torch.compile")
    add("--sync-bn", action="store_true", help="batch norm over all ranks")
    add("--ema-decay", type=float, metavar="D", help="keep an average of the weights, e.g. 0.9999")
    add = parser.add_argument_group("training").add_argument
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
    add = parser.add_argument_group("augmentation").add_argument
    add("--auto-augment", choices=("ra", "ta_wide", "augmix", "imagenet"))
    add("--random-erase", type=float, default=0.0, metavar="P")
    add("--mixup", type=float, default=0.0, metavar="ALPHA")
    add("--cutmix", type=float, default=0.0, metavar="ALPHA")
    add = parser.add_argument_group("run").add_argument
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--eval-only", action="store_true", help="validate, print accuracy and images/s, end")
    add("--warm-up-batches", type=int, default=20, help="that --eval-only does not time")
    add("--output", type=Path, help=f"folder of the checkpoints (default: {output})")
    parser.set_defaults(default_output=output)
    add("--resume", nargs="?", const="", metavar="FILE", help="go on from it, or from --output's")
    add("--seed", type=int, default=0)
    add("--print-freq", type=int, default=100, help="steps between lines (default: 100)")
    add("--smoke", action="store_true", help="a short run; without --data on made photographs")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked as far as they can be without the data."""
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args(argv)
    if options.workers is None:
        limits = Limits.of_this_machine()
        ranks = max(limits.local_world_size, getattr(options, "devices", 1))
        options.workers = min(max(int(limits.num_cores / ranks), 1), 16)
    for name in ("epochs", "batch_size", "print_freq"):
        if getattr(options, name) < 1:
            raise SetupError(f"--{name.replace('_', '-')} must be >= 1")
    if not options.smoke and options.data is None:
        raise SetupError(
            "--data DIR is missing: a folder with train/<class>/*.JPEG and val/<class>/*.JPEG, or "
            "one folder of class folders. --smoke runs without."
        )
    options.device = _device(options.device)
    if options.amp == "fp16" and options.device.type == "cpu":
        raise SetupError("--amp fp16 needs CUDA; the CPU computes in --amp bf16.")
    if options.sync_bn and options.device.type == "cpu":
        raise SetupError("--sync-bn needs CUDA; leave it out.")
    if options.smoke and options.device.type == "cpu":
        import torch

        torch.set_num_threads(1)  # a team of threads on busy cores waits for its slowest member
    return options


def _device(name: str) -> torch.device:
    """Return the device of this rank: under torchrun and with no number given, the one that
    ``LOCAL_RANK`` names."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SetupError(f"--device {name}: {error}") from error
    if device.type == "cuda":
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", rank if device.index is None else device.index)
        if device.index >= (count := torch.cuda.device_count()):
            raise SetupError(
                f"--device {name}: this process needs device {device}, and torch sees {count} CUDA "
                "device(s). Start fewer ranks, or use --device cpu."
            )
    return device


@contextlib.contextmanager
def smoke_folders(options: argparse.Namespace) -> Iterator[None]:
    """Make photographs and a place for checkpoints for --smoke, where no others were named."""
    if not options.smoke:
        options.output = options.output or Path(options.default_output)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        options.output = options.output or Path(folder, "output")
        if options.data is None:
            from spdl_torch.measuring.photographs import write_photographs

            options.data = Path(folder, "photographs")
            write_photographs(options.data, SMOKE_PHOTOGRAPHS)
        yield


def find_checkpoint(options: argparse.Namespace, name: str) -> Path | None:
    """Return the file to resume from; None: start from scratch."""
    own = options.output / name
    if options.resume is None:
        if own.exists() and not options.eval_only:
            raise SetupError(
                f"{own} is the checkpoint of an earlier run. Pass --resume to go on with it, or "
                "another --output."
            )
        return None
    if not options.resume:
        return own if own.exists() else None
    path = Path(options.resume)
    path = path / name if path.is_dir() else path
    if not path.is_file():
        raise SetupError(f"--resume: there is no file {path}.")
    return path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what was saved, on the CPU; nothing but tensors and plain values is unpickled."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise SetupError(f"{path} is not a readable checkpoint: {error}") from error


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that ``path`` is the whole old file or the whole new one at any
    moment."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(checkpoint, unfinished)
    unfinished.replace(path)
