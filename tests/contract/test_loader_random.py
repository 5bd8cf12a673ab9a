"""Random numbers while loading: a stream for each sample, and the trainer's left alone."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from random import seed as seed_imported_early

import _ways_of_draws
import numpy as np
import pytest
import torch
from _covering import by_pairs
from _datasets import Made
from _first_draws import Draws, Stream, collate, states_of_program
from _loader_helpers import DataLoader, run_script, torch_loader
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

ONE = {"num_workers": 1, "isolation": "thread"}
THREADS = {"num_workers": 3, "isolation": "thread"}
PROCESSES = {"num_workers": 2, "isolation": "process"}


@pytest.fixture(params=["key", "unseen, then key"])
def led_by(request, monkeypatch):
    """Draws are led by the dispatch key, or not seen at first."""
    _ways_of_draws.take(request.param, monkeypatch)
    return request.param


def drawn(loader):
    """What the loader's samples drew, of an epoch."""
    return [each for batch in loader for each in as_list(batch)]


def as_list(batch):
    """Rows of a batch as comparable values."""
    return [tuple(row.flatten().tolist()) for row in batch]


def three_draws(_=None):
    """A number from each library, as one tensor."""
    numbers = [torch.rand(()), random.random(), np.random.rand()]
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


@pytest.mark.parametrize("rng", ["sample", "worker"])
@pytest.mark.parametrize("persistent", [False, True])
def test_seed_makes_every_epoch_replayable(persistent, rng):
    """Epoch n has the same streams in a new loader, whatever torch's own seed is; no two samples of
    any epochs have the same, without a seed either. Streams of workers are dealt out anew for every
    epoch, also on threads that live on."""
    options = {"persistent_workers": persistent, "rng": rng, **THREADS}
    loader = DataLoader(Made(three_draws), 4, seed=5, **options)
    epochs = [drawn(loader) for _ in range(3)]
    torch.manual_seed(123)
    again = DataLoader(Made(three_draws), 4, seed=5, rng=rng, **THREADS)
    assert [drawn(again) for _ in range(3)] == epochs
    if rng == "sample":
        assert [drawn(DataLoader(Made(three_draws), 4, seed=5))] == epochs[:1]
    for other in (DataLoader(Made(three_draws), 4, **options, seed=seed) for seed in (6, None)):
        epochs += [drawn(other), drawn(other)]
    assert len({sample for epoch in epochs for sample in epoch}) == 7 * 12, "no two are alike"


def test_epoch_is_the_samplers_where_it_was_set():
    """``set_epoch`` names the streams as it names the order, in a resumed program too."""
    dataset = Made(three_draws)
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    loader = DataLoader(dataset, 4, sampler=sampler, seed=5)
    epochs = []
    for epoch in (0, 1, 2, 1):
        sampler.set_epoch(epoch)
        epochs.append(drawn(loader))
    assert epochs[3] == epochs[1]
    assert len(set(map(tuple, epochs))) == 3
    assert epochs[:3] == [drawn(plain) for plain in [DataLoader(dataset, 4, seed=5)] * 3]


@pytest.mark.usefixtures("led_by")
@pytest.mark.parametrize("workers", [{}, THREADS, PROCESSES], ids=["none", "threads", "processes"])
def test_seeding_in_a_sample_stays_there(workers):
    """The usual way to treat image and mask alike holds; ``get_rng_state``, ``set_rng_state``,
    ``fork_rng`` and ``initial_seed`` agree with draws; and the trainer is not reseeded."""

    def pair(index):
        state = torch.get_rng_state()
        first = torch.rand(1)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            assert torch.initial_seed() == index
        assert torch.equal(torch.rand(1), first)
        rows = []
        for seed in (random.seed, seed_imported_early):
            torch.manual_seed(index)
            seed(index)
            np.random.seed(index)
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            rows.append(some_draws())
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
            assert some_draws() == rows[-1]
        own = random.Random(index), np.random.RandomState(index)
        named = (own[0].random(), own[0].gauss(0, 1), own[1].rand(), own[1].randn())
        rows.append((rows[0][0], *named))
        return torch.tensor(rows, dtype=torch.float64)

    def some_draws():
        numpys = np.random.rand(), np.random.randn()
        return torch.rand(()).item(), random.random(), random.gauss(0, 1), *numpys

    before = states_of_program()
    rows = torch.cat(list(DataLoader(Made(pair), 4, generator=torch.Generator(), **workers)))
    assert torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(rows[:, 0], rows[:, 2])
    assert states_of_program() == before


generator_of_threads = getattr(torch, "thread_safe_generator", lambda: None)
"""torch's function; 2.9 has none, and draws without a generator's name."""


def named_draw(_=None):
    """Two numbers in the way that torch offers to code that may run on threads."""
    return torch.rand(2, generator=generator_of_threads())


class NamedNumbers(IterableDataset):
    """Asks for its generator once, and draws from it and without it for each item; splits itself by
    worker."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        generator = generator_of_threads()
        for _ in range(first, 12, step):
            yield torch.cat([torch.rand(2, generator=generator), three_draws()])


@pytest.mark.parametrize("workers", [{}, THREADS, PROCESSES], ids=["none", "threads", "processes"])
def test_thread_safe_generator_follows_the_samples_stream(workers):
    """The draws are those of code that names no generator, whoever makes a sample; of an iterable's
    item, too, by its position."""
    options = {"seed": 3, **workers}
    expected = drawn(DataLoader(Made(lambda _: torch.rand(2)), 5, seed=3))
    assert drawn(DataLoader(Made(named_draw), 5, **options)) == expected
    items = [tuple(item.tolist()) for item in DataLoader(NamedNumbers(), None, **options)]
    numbers = Made(lambda _: torch.cat([torch.rand(2), three_draws()]), 12)
    assert sorted(items) == sorted(drawn(DataLoader(numbers, 5, seed=3)))


def seed_workers(number):
    """What Lightning's does, in short."""
    seed = torch.initial_seed() + number
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@pytest.mark.usefixtures("led_by")
@by_pairs(
    workers=[{}, THREADS, PROCESSES],
    init_fn=[None, seed_workers],
    dataset=[pytest.param(Draws(22), id="map"), pytest.param(Stream(), id="iterable")],
)
def test_worker_streams_are_torchs_own(dataset, init_fn, workers):
    """rng="worker": the bits that torch's worker processes draw, from all three libraries."""
    options = {
        "num_workers": workers.get("num_workers", 0),
        "collate_fn": collate,
        "worker_init_fn": init_fn,
        "persistent_workers": bool(workers),
    }

    def two_epochs(make, **more):
        torch.manual_seed(11)
        random.seed(12)
        np.random.seed(13)
        loader = make(copy.deepcopy(dataset), 4, **{**options, **more})
        return repr([[batch for _ in range(2) for batch in loader], three_draws()])

    assert two_epochs(DataLoader, rng="worker", **workers) == two_epochs(torch_loader)


def test_functions_that_are_led_elsewhere_look_as_they_did():
    """What programs ask the functions of ``random``, ``numpy.random`` and torch for is the same
    after a loader: their generator, name, text, signature, pickle and copy. And on the trainer's
    thread the numbers and states are what they are without a loader."""
    script = """
        import copy, inspect, operator, pickle, random, types
        import numpy as np
        import torch

        def asked(ask, function):
            try:
                return ask(function)
            except Exception as error:
                return type(error)

        NAMES = ("self", "name", "qualname", "module", "doc", "text_signature")
        ASKS = (
            *(operator.attrgetter(f"__{name}__") for name in NAMES),
            lambda it: isinstance(it, types.MethodType | types.BuiltinMethodType),
            inspect.signature, callable, lambda it: copy.copy(it).__name__,
            lambda it: pickle.loads(pickle.dumps(it)).__name__,
        )

        def all_looks():
            names = [(module, name) for module in (random, np.random) for name in dir(module)]
            torchs = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
            names += [(torch, name) for name in torchs]
            names += [(torch.utils.data, "get_worker_info")]
            functions = [(n, getattr(m, n)) for m, n in names if not n.startswith("_")]
            return [(n, [asked(ask, f) for ask in ASKS]) for n, f in functions if callable(f)]

        def drawn():
            random.seed(4)
            np.random.seed(4)
            found = [torch.manual_seed(4) is torch.default_generator, torch.initial_seed()]
            found += [torch.get_rng_state().sum(), torch.rand(2), type(torch.seed())]
            found += [random.random(), random.getrandbits(70), random.sample(range(99), 5)]
            found += [random.gauss(0, 1), random.gauss(0, 1)]
            found += [np.random.rand(2), np.random.randn(3), np.random.permutation(9)]
            found += [np.random.ranf(), sum(random.getstate()[1]), random.getstate()[2]]
            again = pickle.loads(pickle.dumps((random.random, random.gauss, np.random.rand)))
            found += [np.random.get_state()[2:], [draw() for draw in again]]
            return repr([*found, type(random.Random(3)).__name__, random.Random(3).random()])

        generators = random.shuffle.__self__, np.random.shuffle.__self__
        before, numbers = all_looks(), drawn()
        list(DataLoader([1, 2, 3], num_workers=2))
        list(DataLoader([1, 2, 3]))
        after = all_looks()
        print(drawn() == numbers, len(before) > 60)
        print([look[0] for look, now in zip(before, after, strict=True) if look != now])
        print(generators == (random.random.__self__, np.random.random.__self__))
        # Written as MONAI and others write their defaults.
        print(np.random.random.__self__.uniform(2, 3) > 2)
        for value in (random.random, random.randint, random.random.__self__, np.random.rand):
            assert b"spdl" not in pickle.dumps(value)  # a spawned process may have none of ours
    """
    result = run_script(script)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["True True", "[]", "True", "True"]


@pytest.mark.parametrize(("workers", "is_there"), [({}, True), (ONE, True), (ONE, False)])
def test_other_threads_draw_from_the_process_while_a_batch_is_made(workers, is_there):
    """Those that were there and, on a worker, those that user code starts: the samples keep their
    bits, and no draw of the thread comes twice."""

    def draw_twice(beside=None):
        first = torch.rand(1)
        if beside is not None:
            drawn.append(beside.submit(torch.rand, 1).result())
        return torch.cat([first, torch.rand(1)])

    drawn = []
    expected = list(DataLoader(Made(lambda _: draw_twice()), 4, seed=1))
    with ThreadPoolExecutor(1) as beside:
        if is_there:
            beside.submit(torch.rand, 1).result()  # its thread lives from here on
        loader = DataLoader(Made(lambda _: draw_twice(beside)), 4, seed=1, **workers)
        torch.manual_seed(3)
        batches = list(loader)
    assert all(map(torch.equal, batches, expected))
    generator = torch.Generator().manual_seed(3)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # torch's base seed
    assert torch.equal(torch.cat(drawn), torch.rand(12, generator=generator))


@pytest.mark.usefixtures("led_by")
def test_trainer_draws_between_batches_from_its_own():
    """With 0 workers the streams end where the batch does, and after an error too."""

    def fail_at_5(index):
        if index == 5:
            raise ValueError("bad")
        return torch.rand(1)

    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(3)
    iterator = iter(DataLoader(Made(fail_at_5), 1, generator=torch.Generator()))
    for _ in range(5):
        next(iterator)
        assert torch.equal(torch.rand(2), torch.rand(2, generator=generator))
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=generator))


@pytest.mark.usefixtures("led_by")
def test_draws_on_another_default_device_are_left_alone():
    """Without threads the trainer's default device is in force in the dataset."""
    iterator = iter(DataLoader(Made(lambda _: torch.rand(2)), 3))
    with torch.device("meta"):
        batch = next(iterator)
    assert batch.device.type == "meta"
