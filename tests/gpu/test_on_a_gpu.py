"""What a GPU gets is whole: as torch's, read late, beside captures, from memory that is bounded.

Each test runs on a GPU (``pytest -m cuda``), and most, with less to load, on the stand-in for one.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from support.gpus import ANYWHERE, KIBI, MEBI, ON_CUDA, PROMPT, STREAMS, Filled, filled, num_wrong
from support.videos import KINDS, write_video
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from torchvision import tv_tensors

from spdl_torch import DataLoader, io
from spdl_torch.demo.photographs import write_photographs
from spdl_torch.io._transfer import cuda

INLINE = {"num_workers": 0}
THREADS = {"num_workers": 2, "isolation": "thread"}
PROCESSES = {"num_workers": 2, "isolation": "process"}


def has_arrived(gpu, expected, found):
    """Whether a tensor is on the device, and has the type and the values of another."""
    is_there = found.nbytes == 0 or gpu.index_of(found) is not None
    return is_there and expected.dtype == found.dtype and torch.equal(expected.cpu(), found.cpu())


@pytest.mark.usefixtures("pins")
@PROMPT
def test_tensors_of_every_kind_are_as_torch_sends_them(gpu):
    """Of every common dtype and layout, in one batch: in dtype, values and strides."""
    image = torch.rand(2, 3, 40, 48)
    given = {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2),
        "holes": image[..., ::3],
        "expanded": image[:1].expand(5, 3, 40, 48),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "conjugate": torch.rand(4, dtype=torch.complex64).conj(),
        "large": torch.arange(1 << 20),
    }
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float64):
        given[str(dtype)] = torch.arange(100).to(dtype)
    transfer = io.Transfer("cuda")  # kept: freeing one waits for its copies
    for name, found in transfer.stage(given).receive().items():
        expected = given[name].to(found.device, copy=True)
        assert has_arrived(gpu, expected, found), name
        assert expected.stride() == found.stride(), name


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("options", [INLINE, {**THREADS, "num_workers": 4}, PROCESSES])
@PROMPT
def test_batches_are_those_of_torchs_loader(gpu, options):
    """In its order; without workers, on threads, in processes."""
    data = TensorDataset(torch.arange(96_000.0).view(96, 1000), torch.arange(96))
    found = DataLoader(data, batch_size=10, device="cuda", **options)
    for batch, other in zip(found, TorchLoader(data, batch_size=10), strict=True):
        assert all(has_arrived(gpu, one, two) for one, two in zip(other, batch, strict=True))


def frames_of(pictures, video, **options):
    """By each function that loads some."""
    sampler = io.uniform_frames(4)
    sized = {**options, "width": 160, "height": 128}
    return [
        io.load_image_batch(pictures, width=32, height=24, **options),
        io.load_clip(video, sampler, **sized).frames,
        io.load_clip_batch([video, video], sampler, **sized).frames,
        io.load_video(video, **options),
    ]


@PROMPT
def test_images_and_clips_are_those_of_the_cpu(gpu, tmp_path):
    """Decoded there, and copied."""
    write_photographs(tmp_path, 3)
    given = sorted(tmp_path.rglob("*.jpg")), write_video(KINDS["b-frames"])
    copied = frames_of(*given, device_config=io.cuda_config(0))
    assert [gpu.index_of(frames) for frames in copied] == [0, 0, 0, 0]
    for expected, found in zip(frames_of(*given), copied, strict=True):
        assert torch.equal(expected, found.cpu())
        assert expected.stride() == found.stride()


def sizes_between(least, most, count):
    """Sizes in bytes, as many between 1 and 2 MB as between 10 and 20; the same each time. Half of
    them repeat the one before: memory is used again where sizes are equal."""
    rng, sizes = random.Random(count), []
    for number in range(count):
        size = int(least * (most / least) ** rng.random())
        sizes.append(sizes[-1] if number % 2 else size)
    return sizes


@pytest.mark.parametrize("num_workers", [0, 4, 16])
@pytest.mark.parametrize("stream", STREAMS)
@ANYWHERE
def test_batches_are_whole_on_every_stream(gpu, stream, num_workers):
    """Packed, and of one sample, which are made in pinned memory that is soon used again."""
    num_batches, most_bytes = gpu.extent(222, 64 * MEBI)
    data = Filled(sizes_between(64 * KIBI, most_bytes, num_batches))
    options = {**THREADS, "num_workers": num_workers}
    for batch_size in (None, 1):
        loader = DataLoader(data, batch_size, device="cuda", **options)
        assert num_wrong(gpu, loader, data.expected(), streams=[stream]) == 0


@pytest.mark.usefixtures("pins")
@ON_CUDA
def test_graphs_are_captured_beside_a_loader(gpu):
    """In the default mode, beside one that needs more memory each time; and replayed."""
    data = Filled([(index + 1) * 64 * KIBI for index in range(50)])
    options = {**THREADS, "num_workers": 16}
    loader = DataLoader(data, batch_size=None, device="cuda", **options)
    place, result, failed, wrong = torch.zeros(1000, device="cuda"), None, 0, 0
    for number, batch in enumerate(loader):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = place + 1
        except RuntimeError:
            failed += 1
            continue
        place.fill_(number)
        graph.replay()
        is_right = float(result.sum()) == 1000 * (number + 1)
        wrong += not (is_right and bool((batch == number % 251).all()))
    assert (failed, wrong) == (0, 0)


SHAPES = 4
"""Different batches, each of which the compiled model meets, and captures, beside the loader."""


@ON_CUDA
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own, which as errors would skip the test
def test_compiled_model_captures_beside_a_loader(gpu):
    """With batches that it has not met before."""
    model = torch.nn.Linear(64, 64, device="cuda").requires_grad_(requires_grad=False)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    try:
        for _ in range(3):
            compiled(torch.zeros(SHAPES + 1, 64, device="cuda"))
    except Exception as error:  # no compiler, no Triton: its own exceptions are many
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    data = [torch.full((index % SHAPES + 1, 64), float(index)) for index in range(40)]
    loader = DataLoader(data, batch_size=None, device="cuda", **THREADS)
    for batch in loader:
        found = compiled(batch).clone()  # its own memory is used again by the next call
        assert torch.allclose(found, model(batch), rtol=1e-3, atol=1e-3)


@pytest.fixture
def locked(gpu, monkeypatch):
    """By address, the number and the size in bytes of what is locked for transfers."""
    backend, found, numbers = cuda.CudaBackend, {}, itertools.count()
    lock_pages, unlock_pages = backend.lock_pages, backend.unlock_pages

    def lock(self, address, num_bytes):
        if is_locked := lock_pages(self, address, num_bytes):
            found[address] = next(numbers), num_bytes
        return is_locked

    def unlock(self, address):
        found.pop(address, None)  # first: then another one may have the address
        unlock_pages(self, address)

    monkeypatch.setattr(backend, "lock_pages", lock)
    monkeypatch.setattr(backend, "unlock_pages", unlock)
    return found


def active_bytes():
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


@ON_CUDA
def test_few_batches_are_in_device_memory(gpu):
    """However much faster than the device the loop launches. It is asked as each batch arrives: the
    peak would have in it what the test's own kernels take for a moment. What is in use then
    includes batches that were dropped under their kernels."""
    data, held = filled(gpu, 500, 4 * MEBI), []
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # now the allocator takes back what others have used
    before = active_bytes()

    def seen(batch):
        held.append(active_bytes())
        return batch

    loader = DataLoader(data, batch_size=None, device="cuda", **THREADS)
    assert num_wrong(gpu, loader, data.expected(), use=seen) == 0
    assert (max(held) - before) / data.sizes[0] <= 12


@ON_CUDA
def test_epoch_begins_with_the_pinned_memory_of_the_one_before_it(gpu, locked, pins):
    """Ours is locked once, and torch's is not asked for any more."""
    data = filled(gpu, 50, MEBI)
    loader = DataLoader(data, batch_size=1, device="cuda", **THREADS)
    epochs, pinned_by_torch = [], []
    for _ in range(3):
        regions = set()

        def look(batch, regions=regions):
            regions.update(number for number, _ in list(locked.values()))
            return batch

        assert num_wrong(gpu, loader, data.expected(), use=look) == 0
        epochs.append(regions)
        pinned_by_torch.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    # The two slabs grow when a batch is first packed into them, and a piece may be made later.
    assert bool(epochs[0]) is not pins
    assert len(epochs[1] - epochs[0]) <= 3
    assert pinned_by_torch[1:] == pinned_by_torch[:1] * 2


@pytest.mark.parametrize(
    ("batch_size", "options", "most"),
    [(None, THREADS, 2), (1, INLINE, 2 + 3), (1, THREADS, 4 + 3), (1, PROCESSES, 4 + 3 + 2)],
)
@ANYWHERE
def test_pinned_memory_is_bounded_by_the_largest_batch(gpu, locked, batch_size, options, most):
    """The bound, in batches of that size plus an eighth and the rounding: two slabs for what is
    packed; for what is made there, three more than may be outstanding, these two included, and one
    for each process."""
    num_batches, most_bytes = gpu.extent(1000, 16 * MEBI)
    data, pinned = Filled(sizes_between(64 * KIBI, most_bytes, num_batches)), []
    largest = max(data.sizes) * 9 / 8 + 64 * KIBI

    def seen(batch):
        pinned.append(sum(size for _, size in list(locked.values())))
        return batch

    loader = DataLoader(data, batch_size=batch_size, device="cuda", **options)
    assert num_wrong(gpu, loader, data.expected(), use=seen) == 0
    assert 0 < max(pinned) / largest <= most


@ON_CUDA
def test_loop_goes_on_when_the_device_had_no_memory_for_a_batch(gpu):
    """The error is torch's, and says where."""
    size = 2 * torch.cuda.get_device_properties(0).total_memory

    def collate(samples):
        # Expanded: it takes no memory on the host.
        return torch.zeros(1).expand(size) if samples == [1] else torch.tensor(samples)

    options = {**THREADS, "num_workers": 1}
    batches = iter(DataLoader(range(3), device="cuda", collate_fn=collate, **options))
    assert next(batches).tolist() == [0]
    with pytest.raises(torch.OutOfMemoryError, match=r"memory|full") as caught:
        next(batches)
    where = f"in the transfer to {io.Transfer('cuda').device}"
    assert any(where in note for note in caught.value.__notes__)
    assert next(batches).tolist() == [2]


@pytest.mark.cuda
def test_copy_is_waited_for_on_a_busy_link():
    """A copy that takes long (1 GiB) is complete for the kernel that reads its end."""
    transfer = io.Transfer("cuda")
    big = torch.zeros(1 << 28)
    for k in range(1, 5):
        big[-1] = k
        assert transfer.stage(big).receive()[-1].item() == k


@pytest.mark.cuda
def test_reserved_memory_is_flat_over_epochs():
    """What one epoch's copies used is found again by the next: they share a stream."""
    data = [torch.full((MEBI,), float(k)) for k in range(8)]
    options = {**THREADS, "num_workers": 1}
    loader = DataLoader(data, batch_size=None, device="cuda", **options)

    def reserved_after_an_epoch():
        for batch in loader:
            batch.sum()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    first = max(reserved_after_an_epoch() for _ in range(3))
    assert max(reserved_after_an_epoch() for _ in range(40)) <= first + 8 * 4 * MEBI


@pytest.mark.cuda
def test_copy_stream_may_be_the_users_own():
    """As SPDL's ``cuda_config(stream=)``."""
    stream = torch.cuda.Stream()
    config = io.cuda_config(device_index=0, stream=stream.cuda_stream)
    for k in range(20):
        assert io.transfer_tensor(torch.full((MEBI,), float(k)), config).sum().item() == k * MEBI


class Pinnable:
    """Moves itself, and can be pinned before."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return Pinnable(self.tensor.pin_memory())

    def to(self, device, non_blocking=False):
        return Pinnable(self.tensor.to(device, non_blocking=non_blocking))


@pytest.mark.cuda
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
    options = {**THREADS, "num_workers": num_workers}
    batches = iter(DataLoader(data, batch_size=None, device="cuda", **options))
    for _ in range(50):
        # Staging waits for copies, which is the owner's business if there is one.
        torch.cuda.set_sync_debug_mode("error" if num_workers else "default")
        try:
            batch = next(batches)
            torch.cuda._sleep(5_000_000)  # cycles: some milliseconds
            plain, image, packed, sparse, own = batch
            sums += [plain.sum(), image.double().sum(), packed.data.sum(), own.tensor.sum()]
            sums.append(sparse.values().sum())
            assert isinstance(image, tv_tensors.Image)
            del batch, plain, image, packed, sparse, own
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = [value for k in range(50) for value in (k * MEBI, k * 12288, 3 * k, k * MEBI, 3 * k)]
    assert [float(each) for each in sums] == expected
