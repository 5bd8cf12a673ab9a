"""The job of a child process and its answers: plain data, sent as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..named_tuples import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

POOL = 2000
"""Different images that are read unless ``--epochs`` asks for the whole folder; they are read
once beforehand, so that every row finds them in the page cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the comparison: which classes the training script imports."""

    heading: tuple[str, str]
    """The two lines above its column."""
    subject: str
    """The words for it in a sentence that compares it with torch's."""
    loader: str
    folder: str

    @property
    def name(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading)


VARIANTS = {
    "torch": Variant(
        heading=("torch", "DataLoader"),
        subject="torch's DataLoader",
        loader="torch.utils.data:DataLoader",
        folder="torchvision.datasets:ImageFolder",
    ),
    "loader": Variant(
        heading=("spdl_torch", "DataLoader"),
        subject="our DataLoader",
        loader="spdl_torch:DataLoader",
        folder="torchvision.datasets:ImageFolder",
    ),
    "both": Variant(
        heading=("spdl_torch", "+ImageFolder"),
        subject="our DataLoader and our ImageFolder",
        loader="spdl_torch:DataLoader",
        folder="spdl_torch:ImageFolder",
    ),
}
"""The variants in the order of the columns: the user's program today, then one import changed, then
two."""


PICTURES = "pictures"
PHOTOGRAPHS = "photographs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A dataset and the variants that load it."""

    title: str
    about: str
    """A description of a sample and of how it is made."""
    why_level: str
    """The reason why our DataLoader alone changes little, and what gains more."""
    variants: tuple[str, ...]


WORKLOADS = {
    PICTURES: Workload(
        title="Pictures",
        about="32 x 32 pixels in memory, through Pillow and torchvision's transforms",
        why_level="This dataset stays in worker processes, as with torch's loader, because its "
        "many short calls hold the GIL: our DataLoader alone saves only what surrounds the "
        "samples. For more, give the dataset __getitems__, which makes a batch's samples in one "
        "call.",
        variants=("torch", "loader"),
    ),
    PHOTOGRAPHS: Workload(
        title="Photographs",
        about="JPEG files, cropped at random and resized",
        why_level="torchvision's ImageFolder stays in worker processes, as with torch's loader, "
        "and decodes there as before: our DataLoader alone saves only what surrounds the samples. "
        "For more, import ImageFolder from spdl_torch, too.",
        variants=("torch", "loader", "both"),
    ),
}
"""The workloads in the order in which they are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadPlan:
    """The amount of work that every variant does with a workload; the same for all of them."""

    crop_pixels: int
    """Width and height of what the light network sees."""
    batch_size: int
    loading_images: int
    """Images of the pass without a model."""
    light_images: int
    """Images of an epoch of the light network."""
    resnet_crop_pixels: int
    resnet_batch_size: int
    resnet_images: int
    """Images of an epoch of resnet18."""
    epochs: int
    """Of both networks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Write the photographs, or read the user's, and find out what the machine is."""

    folder: str
    num_photographs: int
    """0: ``folder`` is the user's and stays as it is."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    seed: int = 0
    is_smoke: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The answer to :class:`Prepare`."""

    python: str
    torch: str
    torchvision: str
    device: str
    """``cpu`` or ``cuda``."""
    device_name: str
    num_cores: int
    """Cores that the measuring processes may use."""
    num_images: int
    num_classes: int
    mean_bytes: float
    """Mean size of the files that were read."""
    codec: str
    """The library that decodes crops for our ImageFolder."""
    image_seconds: Mapping[str, float]
    """CPU seconds that a dataset of torchvision takes for one image, by measured workload."""
    resnet_seconds: Mapping[str, float]
    """Seconds that resnet18 trains on one image, alone, by measured workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Load, then train both networks, with one of ``VARIANTS`` of one of ``WORKLOADS``."""

    workload: str
    variant: str
    folder: str
    num_workers: int
    device: str
    plan: WorkloadPlan
    reports: bool = False
    """Whether the light network trains on, until its loader's report has enough to say."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Prepare, then measure every variant, round after round."""

    prepare: Prepare
    num_workers: int
    num_rounds: int
    epochs: int | None = None

    def measures(self, environment: Environment) -> list[Measure]:
        """Return the measurements that follow the preparation.

        The loaders take turns, the other way round in every second round: a disturbance then hits
        all of them, and none is always the first.
        """
        plans = make_plans(
            environment, self.num_workers, smoke=self.prepare.is_smoke, epochs=self.epochs
        )
        turns = [
            Measure(
                workload=workload,
                variant=variant,
                folder=self.prepare.folder,
                num_workers=self.num_workers,
                device=environment.device,
                plan=plan,
            )
            for number in range(self.num_rounds)
            for workload, plan in plans.items()
            for variant in WORKLOADS[workload].variants[:: -1 if number % 2 else 1]
        ]
        # The last turn of the last column: its table is the last that is shown.
        *_, last = (
            number
            for number, turn in enumerate(turns)
            if turn.variant == WORKLOADS[turn.workload].variants[-1]
        )
        turns[last] = replace(turns[last], reports=not self.prepare.is_smoke)
        return turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A network's epochs, from the end of as many steps on as there are workers: the first one sets
    up kernels, and all of them wait for the workers to start."""

    images_per_second: float
    epochs: tuple[float, ...]
    """The same of each epoch."""
    wait_ratio: float
    """Share of the time spent waiting for batches."""
    cpu_seconds: float
    """Per image, of the process and its workers, their start included."""
    loss: float
    """The loss of the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The answer to :class:`Measure`; CPU seconds are those of the process and its workers."""

    loading_images_per_second: float
    """The rate from when as many batches are in hand as there are workers."""
    first_batch_seconds: float
    """The time from ``iter()`` to the first batch in hand, in a fresh process."""
    loading_cpu_seconds: float
    """Per image, without a model."""
    light: Training
    resnet: Training
    other_cores: float | None
    """Cores that other programs kept busy meanwhile, on average; None if unknown."""
    report: Mapping[str, Any] | None = None
    """What our loader's report has of the time when it fed the light network, by its ``as_dict``,
    where that was asked for; None for torch's."""
    peak_bytes: float | None = None
    """The peak of the process tree; filled in by the parent, which watches it."""


def make_plans(
    environment: Environment, num_workers: int, *, smoke: bool = False, epochs: int | None = None
) -> dict[str, WorkloadPlan]:
    """Return the plan of every workload that is measured; ``epochs`` is that of photographs."""
    return {
        workload: make_plan(
            workload,
            environment,
            num_workers,
            smoke=smoke,
            epochs=epochs if workload == PHOTOGRAPHS else None,
        )
        for workload in environment.image_seconds
    }


def make_plan(
    workload: str,
    environment: Environment,
    num_workers: int,
    *,
    smoke: bool = False,
    epochs: int | None = None,
) -> WorkloadPlan:
    """Choose amounts with which five rounds end within 90 seconds on 2 cores, one within 15 with
    ``smoke``.

    They follow from what one image costs on this machine. With ``epochs`` both networks train on
    every photograph that many times, however long that takes.
    """
    light, resnet = (
        _LIGHT[workload, environment.device, smoke],
        resnet_amount(workload, environment.device, smoke=smoke),
    )
    cost = _loading_seconds(workload, environment, num_workers)
    step = _step_seconds(workload, environment, num_workers)

    def images_in(seconds: float, each: float, amount: Amount) -> int:
        size, fewest = amount.batch_size, amount.fewest_batches
        return size * (fewest if smoke else max(fewest, round(seconds / each / size)))

    whole = environment.num_images
    return WorkloadPlan(
        crop_pixels=light.pixels,
        batch_size=light.batch_size,
        loading_images=images_in(_LOADING_SECONDS, cost, light),
        light_images=whole if epochs else images_in(_LIGHT_SECONDS, cost, light),
        resnet_crop_pixels=resnet.pixels,
        resnet_batch_size=resnet.batch_size,
        resnet_images=whole if epochs else images_in(_RESNET_SECONDS, step, resnet),
        epochs=epochs or 1,
    )


_LOADING_SECONDS, _LIGHT_SECONDS, _RESNET_SECONDS = 0.4, 0.6, 0.8


class Amount(NamedTuple):
    """What a network gets."""

    pixels: int
    batch_size: int
    fewest_batches: int


_LIGHT: dict[tuple[str, str, bool], Amount] = {
    (PICTURES, "cpu", False): Amount(32, 64, 8),
    (PICTURES, "cpu", True): Amount(32, 32, 4),
    (PICTURES, "cuda", False): Amount(32, 128, 8),
    (PICTURES, "cuda", True): Amount(32, 32, 6),
    (PHOTOGRAPHS, "cpu", False): Amount(128, 16, 8),
    (PHOTOGRAPHS, "cpu", True): Amount(64, 16, 3),
    (PHOTOGRAPHS, "cuda", False): Amount(224, 64, 8),
    (PHOTOGRAPHS, "cuda", True): Amount(224, 32, 4),
}
"""By workload, device and ``smoke``."""

_RESNET_ON_CPU: dict[str, Amount] = {PICTURES: Amount(32, 16, 6), PHOTOGRAPHS: Amount(64, 8, 6)}
"""A CPU trains resnet18 on 10 to 15 images of 224 pixels a second, whatever the loader does: small
batches of small crops are several steps, which decoding costs the same."""


def resnet_amount(workload: str, device: str, *, smoke: bool) -> Amount:
    """Return what resnet18 gets: on a GPU what the light network does."""
    if device == "cpu" and not smoke:
        return _RESNET_ON_CPU[workload]
    return _LIGHT[workload, device, smoke]


# The part of the workers' cores that goes into samples; the rest collates them and hands them over.
_PART_OF_SAMPLES = {PICTURES: 0.55, PHOTOGRAPHS: 0.85}


def _loading_seconds(workload: str, environment: Environment, num_workers: int) -> float:
    """Return about how long torch's loader takes per image, all its workers together."""
    num_cores = max(1, min(num_workers, environment.num_cores)) * _PART_OF_SAMPLES[workload]
    return environment.image_seconds[workload] / num_cores


def expected_seconds(
    workload: str, plan: WorkloadPlan, environment: Environment, num_workers: int
) -> float:
    """Return about how long one turn takes if nothing else keeps the cores busy."""
    load = _loading_seconds(workload, environment, num_workers)
    step = _step_seconds(workload, environment, num_workers)
    image = environment.image_seconds[workload]
    first = _START_SECONDS + plan.batch_size * image
    loading = first + plan.loading_images * load
    light = first + plan.light_images * load
    resnet = _START_SECONDS + plan.resnet_batch_size * image + plan.resnet_images * step
    return _TURN_SECONDS + loading + plan.epochs * (light + resnet)


REPORT_TIMES = 8
"""For the report, so many times the light network's images: ours loads them in half the time."""


_TURN_SECONDS = 0.4  # of a fork, of what it imports, and of its end
_START_SECONDS = 0.15  # of an epoch's workers, and of their end


def _step_seconds(workload: str, environment: Environment, num_workers: int) -> float:
    """Return about how long resnet18 takes per image while a loader feeds it."""
    load = _loading_seconds(workload, environment, num_workers)
    resnet = environment.resnet_seconds[workload]
    # On a CPU the network and the loader share the cores.
    return resnet + load if environment.device == "cpu" else max(resnet, load)


def spread(total: int, count: int) -> list[int]:
    """Return the indices of ``count`` images out of ``total``: spread evenly over the folder, or
    repeating it.

    ``total=10 count=3 -> 0 3 6``; ``total=2 count=5 -> 0 1 0 1 0``.
    """
    if count <= total:
        return [index * total // count for index in range(count)]
    return [index % total for index in range(count)]


def encode(data: Comparison | Environment | Measurement) -> dict[str, Any]:
    """Return plain JSON types, with the name of the class."""
    return {"type": type(data).__name__, **dataclasses.asdict(data)}


def decode_job(text: str) -> Comparison:
    """Return the job in ``text``, as :func:`encode` wrote it."""
    fields = json.loads(text)
    del fields["type"]
    prepare = fields["prepare"]
    prepare = Prepare(**{**prepare, "workloads": tuple(prepare["workloads"])})
    return Comparison(**{**fields, "prepare": prepare})


def decode_answer(fields: dict[str, Any]) -> Environment | Measurement:
    """Return the answer in ``fields``, as :func:`encode` made them."""
    fields = dict(fields)
    if fields.pop("type") == "Environment":
        return Environment(**fields)
    networks = {
        name: Training(**{**fields[name], "epochs": tuple(fields[name]["epochs"])})
        for name in ("light", "resnet")
    }
    return Measurement(**{**fields, **networks})
