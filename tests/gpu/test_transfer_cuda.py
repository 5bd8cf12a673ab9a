"""Transfers on a real GPU, besides what ``check-gpu`` checks there (test_check_gpu.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _loader_helpers import ThreadLoader as DataLoader, as_list
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchLoader, Dataset
from torchvision import tv_tensors

from spdl_torch.io import (
    Transfer,
    cuda_config,
    load_image_batch,
    transfer_tensor,
)
from spdl_torch.io._transfer import cuda
from spdl_torch.pipeline import PipelineBuilder

pytestmark = pytest.mark.cuda

MEBI = 1 << 20
LATE = 20_000_000
"""GPU clock cycles, some 10 ms: how late kernels run behind their launch."""


def keep_busy(num_cycles):
    """Launch a kernel that takes so many cycles."""
    torch.cuda._sleep(num_cycles)


@dataclass
class Sample:
    image: Any
    key: str


class Constant(Dataset):
    """Sample ``k`` is a large tensor of ``k``."""

    def __init__(self, length, size=MEBI):
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), float(index))


def test_batch_equals_itself_on_the_device():
    """Containers, sparse tensors and those that are pinned already."""
    image = torch.rand(2, 3, 32, 48)
    batch = {
        "nested": [Sample(torch.arange(100_000), "key"), (torch.ones(2, dtype=torch.bfloat16),)],
        "sparse": torch.eye(3).to_sparse(),
        "pinned": image.pin_memory(),
        "pinned holes": image.pin_memory()[..., ::2],
        "name": "n",
    }
    for _ in range(5):
        received = Transfer("cuda").stage(batch).receive()
        for key in batch.keys() - {"nested", "name"}:
            expected = batch[key].to("cuda")
            assert received[key].device == expected.device, key
            assert torch.equal(received[key].to_dense(), expected.to_dense()), key
            if key != "sparse":
                assert received[key].stride() == expected.stride(), key
        assert received["nested"][0].key == "key"
        assert torch.equal(received["nested"][0].image.cpu(), torch.arange(100_000))
        assert received["nested"][1][0].is_cuda
        assert received["name"] == "n"


def test_copy_is_waited_for_on_a_busy_link():
    """A copy that takes long (1 GiB) is complete for the kernel that reads its end."""
    transfer = Transfer("cuda")
    big = torch.zeros(1 << 28)
    for k in range(1, 5):
        big[-1] = k
        assert transfer.stage(big).receive()[-1].item() == k


def test_slab_is_not_packed_while_its_copy_is_under_way():
    """Batches are staged as fast as can be; each arrives with its own bytes."""
    transfer = Transfer("cuda", num_slabs=2)
    staged = [transfer.stage(torch.full((8 * MEBI,), float(k))) for k in range(20)]
    for k, one in enumerate(staged):
        batch = one.receive()
        assert (batch.min().item(), batch.max().item()) == (k, k)


def test_no_memory_is_pinned_after_the_first_batches(monkeypatch):
    """Slabs are used over and over: pinning takes longer than copying."""
    pinned, made = cuda.CudaBackend.pinned, []

    def noted(backend, num_bytes):
        made.append(pinned(backend, num_bytes))
        return made[-1]

    monkeypatch.setattr(cuda.CudaBackend, "pinned", noted)
    transfer = Transfer("cuda")
    for _ in range(50):
        transfer.stage(torch.zeros(MEBI + 1)).receive()
    assert [memory.numel() for memory in made] == [4 * MEBI + 512] * 2
    assert all(memory.is_pinned() for memory in made)


def test_reserved_memory_is_flat_over_epochs():
    """What one epoch's copies used is found again by the next: they share a stream."""
    loader = DataLoader(Constant(8), batch_size=None, num_workers=1, device="cuda")

    def reserved_after_an_epoch():
        for batch in loader:
            batch.sum()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    first = max(reserved_after_an_epoch() for _ in range(3))
    assert max(reserved_after_an_epoch() for _ in range(40)) <= first + 8 * 4 * MEBI


@pytest.mark.parametrize("seed", [0, 1])
def test_resnet_trains_the_same_on_transferred_batches(seed):
    """The same losses as with batches that the loop moved itself, to the last bit."""
    from torchvision.models import resnet18

    class Images(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(seed * 100 + index)
            return torch.rand(3, 64, 64, generator=generator), index % 10

    def losses(loader):
        torch.manual_seed(seed)
        model = resnet18(num_classes=10).cuda().eval()
        found = []
        with torch.no_grad():
            for images, labels in loader:
                images, labels = images.to("cuda"), labels.to("cuda")
                found.append(torch.nn.functional.cross_entropy(model(images), labels))
        return torch.stack(found).tolist()

    moved = losses(TorchLoader(Images(), batch_size=4))
    assert losses(DataLoader(Images(), batch_size=4, num_workers=2, device="cuda")) == moved


def test_transfer_tensor_is_a_pipeline_stage():
    """On the stage's thread, for a trainer on another one."""
    pipeline = (
        PipelineBuilder()
        .add_source(range(50))
        .pipe(lambda k: {"x": torch.full((MEBI,), float(k)), "k": k})
        .pipe(transfer_tensor)
        .add_sink()
        .build()
    )
    sums = []
    with pipeline.auto_stop():
        for batch in pipeline:
            keep_busy(LATE // 10)
            sums.append(batch["x"].sum())
            del batch
    assert torch.stack(sums).tolist() == [k * MEBI for k in range(50)]


def test_copy_stream_may_be_the_users_own():
    """As SPDL's ``cuda_config(stream=)``."""
    stream = torch.cuda.Stream()
    config = cuda_config(device_index=0, stream=stream.cuda_stream)
    for k in range(20):
        assert transfer_tensor(torch.full((MEBI,), float(k)), config).sum().item() == k * MEBI


@pytest.fixture
def jpegs(tmp_path):
    """Pictures of several sizes, one of them progressive, one gray."""
    for number in range(6):
        image = Image.radial_gradient("L").resize((200 + 20 * number, 150 + 10 * number))
        mode = image if number == 5 else Image.merge("RGB", [image, image.rotate(90), image])
        mode.save(tmp_path / f"{number}.jpg", quality=95, progressive=number == 4)
    return sorted(tmp_path.glob("*.jpg"))


def test_load_image_batch_arrives_on_the_device(jpegs):
    """Equal to the batch that stays."""
    batch = load_image_batch(jpegs, width=96, height=64, device_config=cuda_config(0))
    assert batch.device == torch.device("cuda", 0)
    assert torch.equal(batch.cpu(), load_image_batch(jpegs, width=96, height=64))


def test_unordered_and_unsized_batches_reach_the_device():
    """``batch_size=None`` and ``in_order=False`` pass through the owner, too."""
    loader = DataLoader(range(20), num_workers=3, in_order=False, device="cuda")
    assert sorted(int(batch) for batch in loader) == list(range(20))
    loader = DataLoader(range(5), batch_size=2, num_workers=1, device=0, collate_fn=as_list)
    assert list(loader) == [[0, 1], [2, 3], [4]]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_thread_that_trains_never_waits_for_the_device(num_workers):
    """With tensors, subclasses, packed sequences and objects that move themselves."""
    data = [
        [
            torch.full((MEBI,), float(k)),
            tv_tensors.Image(torch.full((3, 64, 64), k, dtype=torch.uint8)),
            pack_sequence([torch.full((3,), float(k))]),
            torch.eye(3).mul(k).to_sparse(),
            Pinnable(torch.full((MEBI,), float(k))),
        ]
        for k in range(50)
    ]
    sums = []
    batches = iter(DataLoader(data, batch_size=None, num_workers=num_workers, device="cuda"))
    for _ in range(50):
        # Staging waits for copies, which is the owner's business if there is one.
        torch.cuda.set_sync_debug_mode("error" if num_workers else "default")
        try:
            batch = next(batches)
            keep_busy(LATE // 4)
            plain, image, packed, sparse, own = batch
            sums += [plain.sum(), image.double().sum(), packed.data.sum(), own.tensor.sum()]
            sums.append(sparse.values().sum())
            assert isinstance(image, tv_tensors.Image)
            del batch, plain, image, packed, sparse, own
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = [value for k in range(50) for value in (k * MEBI, k * 12288, 3 * k, k * MEBI, 3 * k)]
    assert [float(each) for each in sums] == expected


class Pinnable:
    """Moves itself, and can be pinned before."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return Pinnable(self.tensor.pin_memory())

    def to(self, device, non_blocking=False):
        return Pinnable(self.tensor.to(device, non_blocking=non_blocking))


def test_graph_is_captured_beside_a_loader():
    """In the default mode, which other threads' pinning and allocating would spoil."""

    class Growing(Constant):
        def __getitem__(self, index):
            return torch.full(((index + 1) * 10_000,), float(index))

    place, result = torch.zeros(1000, device="cuda"), None
    for number, batch in enumerate(
        DataLoader(Growing(100), batch_size=None, num_workers=2, device="cuda")
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = place + 1
        place.fill_(number)
        graph.replay()
        assert result.sum().item() == 1000 * (number + 1)
        assert bool((batch == number).all())


def test_copy_stream_is_none_of_torchs():
    """However many of them a program takes."""
    own = cuda.CudaBackend(torch.device("cuda", 0)).own_stream
    assert own.cuda_stream not in {torch.cuda.Stream().cuda_stream for _ in range(64)}
