"""What a child process is asked to do and what it answers: plain data, sent as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

__all__ = [
    "POOL",
    "VARIANTS",
    "Environment",
    "Measure",
    "Measurement",
    "Plan",
    "Prepare",
    "Smoke",
    "StageRow",
    "Variant",
    "decode_answer",
    "decode_job",
    "encode",
    "expected_seconds",
    "make_plan",
    "spread",
]

POOL = 2000
"""Different images that are read unless ``--epochs`` asks for the whole folder; they are read
once beforehand, so that every row finds them in the page cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the comparison: which classes the training script imports."""

    heading: tuple[str, str]
    """Two lines above its column."""
    loader: str
    folder: str


VARIANTS = {
    "torch": Variant(
        heading=("torch", "DataLoader"),
        loader="torch.utils.data:DataLoader",
        folder="torchvision.datasets:ImageFolder",
    ),
    "loader": Variant(
        heading=("spdl_torch", "DataLoader"),
        loader="spdl_torch:DataLoader",
        folder="torchvision.datasets:ImageFolder",
    ),
    "both": Variant(
        heading=("spdl_torch", "+ ImageFolder"),
        loader="spdl_torch:DataLoader",
        folder="spdl_torch:ImageFolder",
    ),
}
"""In the order of the columns: the user's program today, then one import changed, then two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much every row does; the same for all of them."""

    crop_pixels: int
    """Width and height of what the model sees."""
    batch_size: int
    loading_images: int
    """Images of the pass without a model."""
    epoch_images: int
    epochs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Write the photographs, or read those of the user, and tell what the machine is."""

    folder: str
    num_photographs: int
    """0: ``folder`` is the user's and stays as it is."""
    seed: int = 0
    num_threads: int | None = None
    """Intra-op threads of what follows in the same process; None = torch's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The answer to :class:`Prepare`."""

    python: str
    torch: str
    torchvision: str
    device: str
    """``cpu`` or ``cuda``."""
    device_name: str
    num_threads: int
    """Intra-op threads of the trainer."""
    num_images: int
    num_classes: int
    mean_bytes: float
    """Mean size of the files that were read."""
    codec: str
    """What decodes crops for our ImageFolder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Load, then train, with one of ``VARIANTS``."""

    variant: str
    folder: str
    num_workers: int
    device: str
    plan: Plan
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoke:
    """Prepare, then measure every variant once, all in one process: most of a short run's time
    would be torch's import in each."""

    prepare: Prepare
    num_workers: int
    epochs: int | None = None

    def measures(self, environment: Environment) -> list[Measure]:
        """What follows on the preparation."""
        device = environment.device
        plan = make_plan(device, environment.num_images, smoke=True, epochs=self.epochs)
        return [
            Measure(
                variant=variant,
                folder=self.prepare.folder,
                num_workers=self.num_workers,
                device=device,
                plan=plan,
            )
            for variant in VARIANTS
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One stage of the loader over one training run. Ratios are of the threads' time, 0 to 1."""

    name: str
    concurrency: int
    num_calls: int
    """One a batch if the dataset has ``__getitems__``, else one a sample."""
    busy_ratio: float
    cpu_ratio: float
    """CPU time over wall time inside the stage's function."""
    wait_in_ratio: float
    wait_out_ratio: float
    mean_seconds: float
    p99_seconds: float
    calls_per_second: float
    capacity_per_second: float
    """Calls a second if the stage never waited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The answer to :class:`Measure`; CPU seconds are those of the process and its workers."""

    loading_images_per_second: float
    """From the first batch in hand to the last one."""
    first_batch_seconds: float
    """From ``iter()`` to the first batch in hand, in a fresh process."""
    loading_cpu_seconds: float
    """Per image, no model."""
    training_images_per_second: float
    wait_ratio: float
    """Share of the training time spent waiting for batches."""
    training_cpu_seconds: float
    """Per image, the model's own included."""
    loss: float
    """Of the last training step."""
    other_cores: float | None
    """Cores that other programs kept busy meanwhile, on average; None if unknown."""
    stages: tuple[StageRow, ...] = ()
    peak_bytes: float | None = None
    """Of the process tree; filled in by the parent, which watches it."""


def make_plan(
    device: str, num_images: int, *, smoke: bool = False, epochs: int | None = None
) -> Plan:
    """Choose sizes that end within 3 minutes on 2 cores, 15 seconds with ``smoke``.

    With ``epochs`` the model trains on every image that many times, however long that takes.
    """
    crop, batch, loading, training = _AMOUNTS[device, smoke]
    return Plan(
        crop_pixels=crop,
        batch_size=batch,
        loading_images=loading,
        epoch_images=training if epochs is None else num_images,
        epochs=epochs or 1,
    )


# A CPU trains resnet18 on 10 to 15 images of 224 pixels a second, whatever the loader does;
# at 128 pixels it takes 60, and decoding, which is what a loader is for, costs the same.
_AMOUNTS = {
    ("cpu", False): (128, 32, 1600, 480),
    ("cpu", True): (64, 16, 96, 32),
    ("cuda", False): (224, 64, 6400, 12800),
    ("cuda", True): (224, 64, 640, 640),
}


def expected_seconds(plan: Plan, device: str, num_cores: int) -> float:
    """About how long one run takes in a process of its own, from torch's import on.

    By the rates of a machine whose cores have nothing else to do: loading 250 images a second on a
    core, training 30 on one that has no GPU, 1000 on a GPU if the cores can load as many.
    """
    load = 250.0 * num_cores
    train = 30.0 * num_cores if device == "cpu" else min(1000.0, load)
    return 5.0 + plan.loading_images / load + plan.epoch_images * plan.epochs / train


def spread(total: int, count: int) -> list[int]:
    """Indices of ``count`` images out of ``total``: evenly over the folder, or round and round.

    ``total=10 count=3 -> 0 3 6``; ``total=2 count=5 -> 0 1 0 1 0``.
    """
    if count <= total:
        return [index * total // count for index in range(count)]
    return [index % total for index in range(count)]


def encode(data: Prepare | Measure | Smoke | Environment | Measurement) -> dict[str, Any]:
    """Plain JSON types, with the name of the class."""
    return {"type": type(data).__name__, **dataclasses.asdict(data)}


def decode_job(text: str) -> Prepare | Measure | Smoke:
    """The job in ``text``, as :func:`encode` wrote it."""
    fields = json.loads(text)
    kind = fields.pop("type")
    if kind == "Prepare":
        return Prepare(**fields)
    if kind == "Smoke":
        return Smoke(**{**fields, "prepare": Prepare(**fields["prepare"])})
    return Measure(**{**fields, "plan": Plan(**fields["plan"])})


def decode_answer(fields: dict[str, Any]) -> Environment | Measurement:
    """The answer in ``fields``, as :func:`encode` made them."""
    fields = dict(fields)
    if fields.pop("type") == "Environment":
        return Environment(**fields)
    return Measurement(**{**fields, "stages": tuple(StageRow(**s) for s in fields["stages"])})
