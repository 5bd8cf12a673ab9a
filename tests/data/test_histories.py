"""Training that is stopped anywhere and goes on with other ranks and workers leaves no trace."""

from __future__ import annotations

import itertools
import json
import random
from typing import NamedTuple

import pytest
import torch
import torch.utils.data as torch_data
from test_packing import some_sizes
from test_sampling import in_turns

from spdl_torch import DataLoader, DistributedSampler, PipelineDataset
from spdl_torch.data import mix, pack
from spdl_torch.data.sources import ListSource, Parquet
from spdl_torch.pipeline import PipelineBuilder

GLOBAL_BATCH = 12
PLACES = [(0, "auto"), (1, "thread"), (2, "thread"), (2, "process")]


class Texts:
    """Documents of given sizes, with a random number in each, as augmentation draws them."""

    thread_safe = True

    def __init__(self, first, sizes):
        self.first, self.sizes = first, sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        tokens = torch.full((self.sizes[index],), self.first + index)
        return {"tokens": tokens, "noise": torch.randint(1 << 40, ()).expand(len(tokens))}


class Documents(torch_data.IterableDataset):
    """A stream, which each rank reads whole."""

    thread_safe = True

    def __iter__(self):
        return (torch.full((1 + 7 * number % 40,), number) for number in range(230))


def loader_of(dataset, world, sampler, place, batch_size=None):
    batch_size, options = batch_size and batch_size // world, {"sampler": sampler, "seed": 5}
    return DataLoader(dataset, batch_size, num_workers=place[0], isolation=place[1], **options)


def mixture(world, rank, place, _):
    sources = {"a": Texts(0, [1] * 50), "b": Texts(100, [1] * 17), "c": Texts(200, [1] * 31)}
    shares = {0: {"a": 1, "b": 1, "c": 1}, 90: {"a": 6, "b": 0.5, "c": 1}}
    mixed = mix(sources, shares, seed=4, stop="never", num_samples=96)
    return loader_of(mixed, world, mixed.sampler(world, rank), place, GLOBAL_BATCH)


def packs_of_a_mixture(world, rank, place, _):
    sources = {"a": Texts(0, some_sizes(40, 64)), "b": Texts(1000, some_sizes(110, 64))}
    mixed = mix(sources, {"a": 1, "b": 2}, seed=2, stop="never", num_samples=150)

    def size_at(position):
        name, index = mixed.locate(position)
        return sources[name].sizes[index]

    packed = pack(mixed, 64, size_of=size_at, seed=9)
    return loader_of(packed, world, packed.sampler(world, rank), place)


def packs_of_a_stream(world, rank, place, _):
    ranks = {"num_replicas": world, "rank": rank}
    packed = pack(Documents(), 64, size_of=len, look_ahead=50, seed=6, **ranks)
    return loader_of(packed, world, None, place)


def shared_out_by_torch(world, rank, place, _):
    sampler = torch_data.DistributedSampler(range(96), world, rank, seed=2)
    return loader_of(Texts(0, [1] * 96), world, sampler, place, GLOBAL_BATCH)


def batches_shared_out_by_ours(world, rank, place, _):
    sampler = DistributedSampler(range(96), world, rank, seed=2)
    batches = torch_data.BatchSampler(sampler, GLOBAL_BATCH // world, drop_last=False)
    options = {"num_workers": place[0], "isolation": place[1], "seed": 5}
    loader = DataLoader(Texts(0, [1] * 96), batch_sampler=batches, **options)
    loader.set_epoch = sampler.set_epoch
    return loader


def pipeline_of(source, world, rank, **options):
    builder = PipelineBuilder().add_source(source).pipe(abs, output_order="input")
    builder.aggregate(GLOBAL_BATCH // world).add_sink()
    return PipelineDataset(builder, num_replicas=world, rank=rank, **options)


def pipeline_of_a_mixture(world, rank, *_):
    shuffled = ListSource([*range(100, 120)]).shuffle(3)
    source = mix({"a": range(40), "b": shuffled, "c": [*range(200, 230)]}, seed=1, stop="all")
    return pipeline_of(source, world, rank, tail="uneven")


def pipeline_of_a_list(world, rank, *_):
    return pipeline_of(range(48), world, rank)


def parquet(world, rank, place, folder):
    """With copies of two of four files on the machine's disk."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(4):
        path = folder / f"{number}.parquet"
        if not path.exists():
            table = pa.table({"n": range(20 * number, 20 * number + 20)})
            pq.write_table(table, path, row_group_size=3)
    limit = 2 * path.stat().st_size
    rows = Parquet(folder, cache=folder / "kept", max_bytes=limit, ahead=world % 3)
    sampler = DistributedSampler(rows, world, rank, tail="uneven")
    return loader_of(rows, world, sampler, place, GLOBAL_BATCH)


class Kind(NamedTuple):
    """What is trained on."""

    make: object
    places: list = PLACES
    in_batches: bool = False
    num_epochs: int = 2


KINDS = [
    Kind(shared_out_by_torch, PLACES[:3], in_batches=True),
    Kind(batches_shared_out_by_ours, PLACES[:3], in_batches=True),
    Kind(mixture, in_batches=True),
    Kind(packs_of_a_mixture),
    Kind(packs_of_a_stream, PLACES[:2], num_epochs=1),
    Kind(pipeline_of_a_mixture, PLACES[:1], in_batches=True),
    Kind(pipeline_of_a_list, PLACES[:1], in_batches=True),
    Kind(parquet, PLACES[:3], in_batches=True),
]


def plain(came):
    if isinstance(came, dict):
        return {name: plain(each) for name, each in came.items()}
    return torch.as_tensor(came).tolist()


def samples_of(came, in_batches):
    """What one rank gets in a step: a batch's samples, or one pack."""
    came = plain(came)
    if isinstance(came, dict) and in_batches:
        return [dict(zip(came, row, strict=True)) for row in zip(*came.values(), strict=True)]
    return came if in_batches else [came]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.make.__name__)
def test_history_of_a_training_leaves_no_trace(kind, tmp_path):
    """Wherever it stops and with whatever ranks and workers it goes on: the same bits, epoch after
    epoch, from any rank's state."""

    def loaders_of(world, place, epoch, state=None):
        loaders = [kind.make(world, rank, place, tmp_path) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            if kind.num_epochs > 1:
                set_epoch = getattr(loader, "set_epoch", None) or loader.sampler.set_epoch
                set_epoch(epoch)
            loader.state_dict()  # from now on, a stream's own state is asked for
        return loaders

    epochs = []
    for epoch in range(kind.num_epochs):
        (whole,) = loaders_of(1, PLACES[0], epoch)
        epochs.append([each for came in whole for each in samples_of(came, kind.in_batches)])
    assert all(epochs)
    assert kind.make is pipeline_of_a_list or epochs[:1] != epochs[1:]
    for number in range(3):
        draw, state, history = random.Random(number), None, []
        for epoch, expected in enumerate(epochs):
            seen = []
            while len(seen) < len(expected):
                world, place = draw.randint(1, 4), draw.choice(kind.places)
                steps = draw.randrange(1, 4 if kind.in_batches else 12)
                history.append((epoch, world, place, steps))
                loaders = loaders_of(world, place, epoch, state)
                parts = [[*itertools.islice(loader, steps)] for loader in loaders]
                for step in itertools.zip_longest(*parts, fillvalue=()):
                    seen += in_turns([samples_of(each, kind.in_batches) for each in step])
                state = json.dumps(draw.choice(loaders).state_dict())
                if len(parts[0]) < steps:
                    break
            # Ranks that have nothing in the last round leave it out.
            assert seen == expected[: len(seen)], history
            assert len(expected) - len(seen) < 4, history
