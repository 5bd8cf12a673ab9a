"""Datasets written for torch's worker processes, each beside torch's own loader: idioms of
repositories, and those of other libraries.

The libraries are not dependencies: ``tox -e libraries`` installs them, and runs these tests.
"""

import io
import multiprocessing
import tarfile
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from support.idioms import IDIOMS, made, samples_of
from support.inside import placement_of
from support.loaders import library, torch_loader
from torch.utils.data import ConcatDataset

from spdl_torch import DataLoader
from spdl_torch.objects.generator_states import generators_kept
from spdl_torch.testing._changes import changed_settings, settings_kept

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="compared with forked workers"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of files that idioms leave open
]
of_a_library = pytest.mark.filterwarnings("ignore")  # its own, in this and in later versions


SIMPLE = [name for name, make in IDIOMS.items() if isinstance(make, type)]
"""Idioms that need no options; the loader has them one behind the other."""


def dataset_of(name, folder):
    """An idiom's, or that of all simple ones, and its loader's options."""
    if name != "simple ones":
        return made(name, folder)
    datasets = []
    for each in SIMPLE:
        (folder / each).mkdir(parents=True)
        datasets.append(made(each, folder / each)[0])
    return ConcatDataset(datasets), {}


def load(loader_type, name, folder):
    """The samples of two epochs, by batch; and what of a worker's settings reached this process."""
    folder.mkdir()
    dataset, own = dataset_of(name, folder)
    options = {"batch_size": 8, "num_workers": 2, **own}
    with generators_kept(), settings_kept() as settings:
        loader = loader_type(dataset, **options)
        epochs = [[samples_of(batch) for batch in loader] for _ in range(2)]
        return epochs, changed_settings(settings)


@pytest.mark.parametrize("name", ["simple ones", *(each for each in IDIOMS if each not in SIMPLE)])
def test_idiom_is_right_where_torchs_is(name, tmp_path):
    """With one import changed, and nothing else: in processes, as none of them is known to be safe
    on threads; and nothing that a worker does to its own reaches the trainer's."""
    ours = load(DataLoader, name, tmp_path / "ours")
    assert ours == load(torch_loader, name, tmp_path / "torch")
    assert not ours[1]
    dataset, _ = dataset_of(name, tmp_path)
    for each in getattr(dataset, "datasets", [dataset]):
        assert placement_of(DataLoader(each, num_workers=2)).num_processes == 2


N = 96


def imported(name):
    """Import a library, or skip; it may warn as it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library(name)


def assert_as_torchs(make, expected):
    """Two epochs have the batches of torch's loader, and all samples."""
    found = []
    for loader_type in (torch.utils.data.DataLoader, DataLoader):
        dataset = make()
        loader = loader_type(dataset, batch_size=4, num_workers=4)
        found.append([])
        for number in range(2):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(number)
            batches = [[*b.values()] if isinstance(b, dict) else b for b in loader]
            found[-1].append([samples_of(batch) for batch in batches])
    for epoch in found[0]:
        assert sorted(sample for batch in epoch for sample in batch) == expected
    assert found[0] == found[1]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Hugging Face's, in a folder of this test's."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return imported("datasets")


@of_a_library
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
        number_in = lambda image: int(np.asarray(image).flat[0])  # noqa: E731
        return timm.ImageDataset(str(tmp_path / "images.tar"), transform=number_in)

    assert_as_torchs(make, [(number, number % 2) for number in range(N)])


def rows_of(shards):
    """Yield the rows of some of eight shards."""
    for shard in shards:
        yield from ({"number": number} for number in range(shard, N, 8))


def with_square(row):
    return {"square": row["number"] ** 2}


@of_a_library
def test_hugging_faces_streaming_dataset(datasets):
    """Shards that workers divide, a buffer that shuffles, and a function of the user's."""

    def make():
        shards = {"shards": list(range(8))}
        streamed = datasets.IterableDataset.from_generator(rows_of, gen_kwargs=shards)
        return streamed.map(with_square).shuffle(seed=3, buffer_size=10)

    assert_as_torchs(make, [(number, number**2) for number in range(N)])


@of_a_library
@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_faces_stream_of_a_node_goes_on_from_its_state(datasets, num_workers):
    """By their own function for nodes; workers divide the share again. In a later epoch, too."""
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"number": list(range(N))})

    def loader(node):
        share = split_dataset_by_node(rows.to_iterable_dataset(num_shards=8), node, 2)
        share.set_epoch(1)
        return DataLoader(share.map(with_square), batch_size=4, num_workers=num_workers)

    found = []
    for node in range(2):
        stopped, again = loader(node), loader(node)
        stopped.state_dict()
        batches = iter(stopped)
        found += islice(batches, 5)
        again.load_state_dict(stopped.state_dict())
        rest = list(batches)
        assert str(list(again)) == str(rest)
        found += rest
    squares = [int(square) for batch in found for square in batch["square"]]
    assert sorted(squares) == [number**2 for number in range(N)]


def doubled(rows):
    return {"number": [2 * number for number in rows["number"]]}


@of_a_library
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
def test_hugging_faces_dataset(datasets, formatted, reason):
    """On threads unless a function of the user's makes its rows; as torch's loader in bits."""
    rows = {"number": list(range(N)), "x": [[number / 7, 1.0] for number in range(N)]}
    dataset, found = formatted(datasets.Dataset.from_dict(rows)), []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        generator = torch.Generator().manual_seed(1)
        loader = kind(dataset, 8, shuffle=True, num_workers=2, generator=generator)
        found.append([{n: [row.tolist() for row in b[n]] for n in b} for b in loader])
    assert found[0] == found[1]
    assert len(found[0]) == N // 8
    placement = loader.report().placement
    assert (placement.num_processes, reason in placement.reason) == (2 if reason else 0, True)


@of_a_library
def test_litdatas_streaming_dataset(tmp_path, monkeypatch):
    """Chunks that each worker fetches and keeps for itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    imported("litdata")
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    class Numbers(StreamingDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)["number"]

    folder = tmp_path / "chunks"
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=8)
    for number in range(N):
        writer[number] = {"number": number}
    writer.done()
    writer.merge()
    assert_as_torchs(lambda: Numbers(str(folder), shuffle=True, seed=3), list(range(N)))
