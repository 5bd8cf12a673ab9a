"""Datasets of other libraries, written for worker processes, each beside torch's loader.

They are not dependencies: ``tox -e libraries`` installs them, and runs these tests.
"""

import io
import multiprocessing
import tarfile
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from _idioms import samples_of
from _loader_helpers import library
from PIL import Image

import spdl_torch

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(),
        reason="compared with forked workers",
    ),
    pytest.mark.filterwarnings("ignore"),  # of the libraries, in this and in later versions
]

N = 96


def imported(name):
    """Import a library, or skip; it may warn as it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library(name)


def epochs_of(loader_type, dataset, **options):
    """Return two epochs' batches, as plain numbers."""
    loader = loader_type(dataset, batch_size=4, num_workers=4, **options)
    epochs = []
    for number in range(2):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(number)
        epochs.append([samples_of(batch) for batch in loader])
    return epochs


def assert_as_torchs(make, expected):
    """Two epochs have the batches of torch's loader, and all samples."""
    theirs = epochs_of(torch.utils.data.DataLoader, make())
    ours = epochs_of(spdl_torch.DataLoader, make())
    for epoch in theirs:
        assert sorted(sample for batch in epoch for sample in batch) == expected
    assert ours == theirs


def number_in(image):
    return int(np.asarray(image).flat[0])


def test_timms_image_dataset_on_a_tar(tmp_path):
    """Its reader keeps one tar file open, and seeks in it."""
    timm = imported("timm.data")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for number in range(N):
            content = io.BytesIO()
            Image.new("RGB", (2, 2), (number,) * 3).save(content, "png")
            member = tarfile.TarInfo(f"{'ab'[number % 2]}/{number:03}.png")
            member.size = content.tell()
            content.seek(0)
            tar.addfile(member, content)

    def make():
        return timm.ImageDataset(str(tmp_path / "images.tar"), transform=number_in)

    assert_as_torchs(make, [(number, number % 2) for number in range(N)])


def rows_of(shards):
    """Yield the rows of some of eight shards."""
    for shard in shards:
        yield from ({"number": number} for number in range(shard, N, 8))


def with_square(row):
    return {"square": row["number"] ** 2}


def test_hugging_faces_streaming_dataset(tmp_path, monkeypatch):
    """Shards that workers divide, a buffer that shuffles, and a function of the user's."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = imported("datasets")

    def make():
        shards = {"shards": list(range(8))}
        streamed = datasets.IterableDataset.from_generator(rows_of, gen_kwargs=shards)
        return streamed.map(with_square).shuffle(seed=3, buffer_size=10)

    def pairs(loader_type):
        class AsPairs(loader_type):
            def __iter__(self):
                for batch in super().__iter__():
                    yield [batch["number"], batch["square"]]

        return AsPairs

    def epochs(loader_type):
        return epochs_of(pairs(loader_type), make())

    theirs, ours = epochs(torch.utils.data.DataLoader), epochs(spdl_torch.DataLoader)
    for epoch in theirs:
        expected = [(number, number**2) for number in range(N)]
        assert sorted(sample for batch in epoch for sample in batch) == expected
    assert theirs[0] != theirs[1]
    assert ours == theirs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_faces_stream_of_a_node_goes_on_from_its_state(tmp_path, monkeypatch, num_workers):
    """By their own function for nodes; workers divide the share again. In a later epoch, too."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    datasets = imported("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"number": list(range(N))})

    def loader(node):
        share = split_dataset_by_node(rows.to_iterable_dataset(num_shards=8), node, 2)
        share.set_epoch(1)
        return spdl_torch.DataLoader(share.map(with_square), batch_size=4, num_workers=num_workers)

    def squares(batches):
        return [int(square) for batch in batches for square in batch["square"]]

    found = []
    for node in range(2):
        stopped, resumed = loader(node), loader(node)
        stopped.state_dict()
        batches = iter(stopped)
        found += squares(islice(batches, 5))
        resumed.load_state_dict(stopped.state_dict())
        rest = squares(batches)
        assert squares(resumed) == rest
        found += rest
    assert sorted(found) == [number**2 for number in range(N)]


def doubled(rows):
    return {"number": [2 * number for number in rows["number"]]}


@pytest.mark.parametrize(
    ("formatted", "reason"),
    [
        (lambda dataset: dataset, ""),
        (lambda dataset: dataset.with_format("torch", dtype=torch.float32), ""),
        (lambda dataset: dataset.with_format("numpy", columns=["x"]).shuffle(seed=1), ""),
        (lambda dataset: dataset.with_transform(doubled), "transform=doubled is not known"),
    ],
    ids=["plain", "torch", "numpy", "a function of the user's"],
)
def test_hugging_faces_dataset(tmp_path, monkeypatch, formatted, reason):
    """On threads unless a function of the user's makes its rows; as torch's loader in bits."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    datasets = imported("datasets")
    rows = {"number": list(range(N)), "x": [[number / 7, 1.0] for number in range(N)]}
    dataset = formatted(datasets.Dataset.from_dict(rows))
    options = {"batch_size": 8, "shuffle": True, "num_workers": 2}
    loaders = spdl_torch.DataLoader, torch.utils.data.DataLoader
    ours, theirs = (
        kind(dataset, generator=torch.Generator().manual_seed(1), **options) for kind in loaders
    )
    came, expected = (
        [{name: [row.tolist() for row in rows] for name, rows in batch.items()} for batch in loader]
        for loader in (ours, theirs)
    )
    assert came == expected
    assert len(came) == N // 8
    placement = ours.report().placement
    assert (placement.num_processes, reason in placement.reason) == (2 if reason else 0, True)


def test_litdatas_streaming_dataset(tmp_path, monkeypatch):
    """Chunks that each worker fetches and keeps for itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    imported("litdata")
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder = tmp_path / "chunks"
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=8)
    for number in range(N):
        writer[number] = {"number": number}
    writer.done()
    writer.merge()

    def make():
        return Numbers(str(folder), shuffle=True, seed=3)

    class Numbers(StreamingDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)["number"]

    assert_as_torchs(make, list(range(N)))
