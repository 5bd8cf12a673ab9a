"""The model of the ImageNet programs, and the recipe by which it is trained."""

from __future__ import annotations

import difflib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _imagenet import SetupError, read_checkpoint
from _imagenet_data import Pixels
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms import v2

from spdl_torch.nn import ToFloat

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model, and what it expects."""

    model: nn.Module
    pixels: Pixels
    classes: Sequence[str]
    """The names of its outputs."""


def build_model(options: argparse.Namespace, classes: Sequence[str]) -> Built:
    """Return the model that ``--model`` names, with the weights that were asked for.

    Args:
        classes: names of the folder's classes. The model gets as many outputs, except for
            ``--eval-only``, where it has those of its weights.
    """
    checkpoint = _read_weights(options)
    if options.eval_only and checkpoint is not None and "classes" in checkpoint:
        classes = checkpoint["classes"]
    elif options.eval_only and options.class_map is not None:
        classes = _read_class_map(options.class_map)
    make = _timm_model if options.model.startswith("timm:") else _torchvision_model
    try:
        model, pixels, num_outputs = make(options, len(classes), published=checkpoint is None)
    except (OSError, ImportError) as error:  # no network, no room for the download
        raise SetupError(f"--model {options.model}: {error}") from error
    if num_outputs != len(classes):
        classes = published_classes(num_outputs, classes)
    if checkpoint is not None:
        _load(model, checkpoint, options, len(classes))
    return Built(model=model, pixels=_override(pixels, options), classes=classes)


def _read_weights(options: argparse.Namespace) -> dict[str, Any] | None:
    """Read the file of ``--weights``; None if it is a name, or not there."""
    if options.weights is None or not Path(options.weights).is_file():
        return None
    loaded = read_checkpoint(Path(options.weights))
    return loaded if "model" in loaded else {"model": loaded.get("state_dict", loaded)}


def _read_class_map(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise SetupError(f"--class-map {path}: {error}") from error


def _torchvision_model(
    options: argparse.Namespace, num_classes: int, *, published: bool
) -> tuple[nn.Module, Pixels, int]:
    name, known = options.model, models.list_models(module=models)
    if name not in known:
        close = difflib.get_close_matches(name, known) or ["resnet50", "vit_b_16"]
        raise SetupError(
            f"--model {name}: torchvision has no such model. Near it: {', '.join(close)}; timm's "
            "are called timm:NAME."
        )
    extra: dict[str, Any] = {}
    if name in ("inception_v3", "googlenet"):
        extra |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_") and options.image_size:
        extra["image_size"] = options.image_size
    weights = _torchvision_weights(options) if published else None
    if weights is None:
        size = options.image_size or (299 if name == "inception_v3" else 224)
        pixels = Pixels(size=size, resize=_resize_for(size))
        return models.get_model(name, num_classes=num_classes, **extra), pixels, num_classes
    recipe = weights.transforms()
    pixels = Pixels(
        size=recipe.crop_size[0],
        resize=recipe.resize_size[0],
        interpolation=recipe.interpolation,
        mean=recipe.mean,
        std=recipe.std,
    )
    trained = models.get_model(name, weights=weights)
    num_outputs = len(weights.meta["categories"])
    if options.eval_only or num_outputs == num_classes:
        return trained, pixels, num_outputs
    model = models.get_model(name, num_classes=num_classes, **extra)
    _load_matching(model, trained.state_dict())
    return model, pixels, num_classes


def _torchvision_weights(options: argparse.Namespace) -> Any:
    if options.weights is None:
        return models.get_model_weights(options.model).DEFAULT if options.pretrained else None
    known = models.get_model_weights(options.model)
    if options.weights not in known.__members__:
        raise SetupError(
            f"--weights {options.weights} is neither a file nor weights of {options.model}; "
            f"torchvision has {', '.join(known.__members__)}."
        )
    return known[options.weights]


def _load_matching(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the weights that have the same shape.

    Raises: RuntimeError: more than a last layer or two is different.
    """
    own = model.state_dict()
    same = {name: v for name, v in state.items() if name in own and own[name].shape == v.shape}
    if others := sorted(own.keys() - same.keys()):
        if len(others) > 4:
            raise RuntimeError(f"{len(others)} tensors differ, {others[0]} for one")
        print(f"begin at random: {', '.join(others)}", file=sys.stderr)
    model.load_state_dict(same, strict=False)


def _timm_model(
    options: argparse.Namespace, num_classes: int, *, published: bool
) -> tuple[nn.Module, Pixels, int]:
    try:
        import timm
    except ImportError as error:
        raise SetupError(f"--model {options.model} needs timm: pip install timm.") from error
    name = options.model.removeprefix("timm:")
    pretrained = published and (options.pretrained or options.weights is not None)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models()) or timm.list_models("resnet*")
        raise SetupError(f"--model timm:{name}: timm has no such model. Near it: {close[:3]}.")
    if published and options.weights is not None:
        raise SetupError(f"--weights {options.weights}: no such file; timm's own are --pretrained.")
    outputs = {} if pretrained and options.eval_only else {"num_classes": num_classes}
    try:
        model = timm.create_model(name, pretrained=pretrained, **outputs)
    except RuntimeError as error:  # no published weights of that name
        raise SetupError(f"--model timm:{name}: {error}") from error
    config = timm.data.resolve_data_config({}, model=model)
    size = config["input_size"][-1]
    trained_as = v2.InterpolationMode(config["interpolation"])
    pixels = Pixels(
        size=size,
        resize=math.floor(size / config["crop_pct"]),
        interpolation=trained_as if pretrained else v2.InterpolationMode.BILINEAR,
        mean=config["mean"],
        std=config["std"],
    )
    return model, pixels, model.num_classes


def published_classes(num_outputs: int, classes: Sequence[str]) -> list[str]:
    """Return the names of the outputs of published weights, where the folder has fewer classes."""
    try:
        from timm.data import ImageNetInfo

        names = ImageNetInfo().label_names()  # WordNet's numbers, in the order of the outputs
    except ImportError:
        names = []
    if num_outputs != len(names) or not set(classes) <= set(names):
        raise SetupError(
            f"the weights have {num_outputs} outputs and the folder {len(classes)} classes. Pass "
            "--class-map FILE, with the folder name of each output, one a line"
            + ("." if names else "; with timm installed, ImageNet's are known.")
        )
    return names


def _load(
    model: nn.Module, checkpoint: dict[str, Any], options: argparse.Namespace, num_classes: int
) -> None:
    """Load all weights to validate; to train, the last layer may have other classes."""
    state = checkpoint.get("ema") or checkpoint["model"]
    try:
        if options.eval_only:
            model.load_state_dict(state)
        else:
            _load_matching(model, state)
    except RuntimeError as error:
        raise SetupError(
            f"--weights {options.weights} does not fit --model {options.model} with {num_classes} "
            f"classes: {shorten(str(error), 300)}"
        ) from error


def _resize_for(size: int) -> int:
    return round(size * 256 / 224)


def _override(pixels: Pixels, options: argparse.Namespace) -> Pixels:
    size = options.image_size or pixels.size
    resize = options.val_resize or (pixels.resize if size == pixels.size else _resize_for(size))
    return Pixels(
        size=size,
        resize=resize,
        interpolation=pixels.interpolation,
        mean=pixels.mean,
        std=pixels.std,
    )


def to_input(pixels: Pixels, *, channels_last: bool) -> ToFloat:
    """Return the module that turns batches of bytes from the loader into the model's input."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return ToFloat(pixels.mean, pixels.std, dtype=torch.float32, memory_format=layout)


def make_mixing(options: argparse.Namespace, num_classes: int) -> Callable[..., Any] | None:
    """Return Mixup and CutMix for a batch on its device; targets become (N, num_classes)."""
    kinds = [(v2.MixUp, options.mixup), (v2.CutMix, options.cutmix)]
    mixing = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    return v2.RandomChoice(mixing) if mixing else None


def make_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, or AdamW; norms and biases decay as asked for."""
    of_norms = options.weight_decay
    if options.norm_weight_decay is not None:
        of_norms = options.norm_weight_decay
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": of_norms},
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
