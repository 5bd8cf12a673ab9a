"""What random streams and torch's modes do not reach, and where they do: the trainer's own
generators, other threads, the functions' looks; and the modes of a thread in its workers."""

import decimal
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from random import seed as seed_imported_early

import numpy as np
import pytest
import torch
from support.datasets import Made
from support.loaders import assert_threads_end, run_script
from support.seats import FORKED, NONE, ONE, THREADS, in_seats
from test_random import states
from torch.utils.data import IterableDataset

from spdl_torch import DataLoader

LENGTH = 12
near = in_seats(NONE, THREADS, FORKED)


@pytest.mark.usefixtures("led_by")
@near
def test_seeding_in_a_sample_stays_there(seat):
    """The usual way to treat image and mask alike holds; ``get_rng_state``, ``set_rng_state``,
    ``fork_rng`` and ``initial_seed`` agree with draws; and the trainer is not reseeded."""

    def draws():
        numpys = np.random.rand(), np.random.randn()
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), *numpys]

    def drawn_after(seed, index):
        torch.manual_seed(index)
        seed(index)
        np.random.seed(index)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        found = draws()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        assert draws() == found
        return found

    def pair(index):
        state = torch.get_rng_state()
        first = torch.rand(1)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            assert torch.initial_seed() == index
        assert torch.equal(torch.rand(1), first)
        found = drawn_after(random.seed, index)
        assert drawn_after(seed_imported_early, index) == found
        own, numpys = random.Random(index), np.random.RandomState(index)
        assert found[1:] == [own.random(), own.gauss(0, 1), numpys.rand(), numpys.randn()]
        return index

    before = states()
    assert len(list(seat.loader(Made(pair), 4, generator=torch.Generator()))) == 3
    assert states() == before


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

        NAMES = "self name qualname module doc text_signature".split()
        ASKS = [
            *(operator.attrgetter(f"__{name}__") for name in NAMES), inspect.signature,
            lambda it: isinstance(it, types.MethodType | types.BuiltinMethodType),
            lambda it: copy.copy(it).__name__, lambda it: pickle.loads(pickle.dumps(it)).__name__,
        ]

        def all_looks():
            names = [(module, name) for module in (random, np.random) for name in dir(module)]
            torchs = "manual_seed seed initial_seed get_rng_state set_rng_state".split()
            names += [*((torch, name) for name in torchs), (torch.utils.data, "get_worker_info")]
            functions = [(n, getattr(m, n)) for m, n in names if not n.startswith("_")]
            return [(n, [asked(ask, f) for ask in ASKS]) for n, f in functions if callable(f)]

        def drawn():
            random.seed(4)
            np.random.seed(4)
            found = [torch.manual_seed(4) is torch.default_generator, torch.initial_seed()]
            found += [torch.get_rng_state().sum(), torch.rand(2), type(torch.seed())]
            found += [random.getrandbits(70), random.sample(range(99), 5), random.gauss(0, 1)]
            found += [np.random.randn(3), np.random.permutation(9), np.random.ranf()]
            again = pickle.loads(pickle.dumps((random.random, random.gauss, np.random.rand)))
            found += [sum(random.getstate()[1]), np.random.get_state()[2:]]
            return repr([*found, [draw() for draw in again], random.Random(3).random()])

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


@pytest.mark.parametrize(("seat", "is_there"), [(NONE, True), (ONE, True), (ONE, False)])
def test_other_threads_draw_from_the_process_while_a_batch_is_made(seat, is_there):
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
        loader = seat.loader(Made(lambda _: draw_twice(beside)), 4, seed=1)
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


class CleansUp(IterableDataset):
    """Its generator draws, seeds and restores as it ends."""

    def __iter__(self):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            for index in range(LENGTH):
                yield index, torch.rand(())
        finally:
            torch.rand(()), random.random(), np.random.rand()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])


@near
@pytest.mark.parametrize("num_batches", [0, 2, LENGTH])
def test_a_generator_that_ends_leaves_the_trainers_generators_alone(seat, num_batches):
    """Wherever the loop is left, what an iterable draws as it ends belongs to its own streams."""
    before = states()
    for number, _ in enumerate(seat.loader(CleansUp(), 3, seed=5, generator=torch.Generator()), 1):
        if number >= num_batches:
            break
    assert_threads_end()
    assert states() == before


@pytest.mark.usefixtures("led_by")
def test_draws_on_another_default_device_are_left_alone():
    """Without threads the trainer's default device is in force in the dataset."""
    iterator = iter(DataLoader(Made(lambda _: torch.rand(2)), 3))
    with torch.device("meta"):
        batch = next(iterator)
    assert batch.device.type == "meta"


def look(index):
    """A sample that shows the modes under which it is made."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    is_half = product.dtype is torch.bfloat16
    precision = decimal.getcontext().prec
    return index, torch.zeros(1).item(), is_half, product.requires_grad, precision, product.detach()


MODES = {
    "none": lambda: torch.enable_grad(),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "context variable": lambda: decimal.localcontext(prec=40),
}


@functools.cache
def of_torch(mode):
    """What torch's workers make under a mode."""
    with MODES[mode]():
        return repr(list(FORKED.peer(Made(look, 8), batch_size=2)))


@near
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_thread_that_begins_the_epoch(seat, mode):
    """As in torch's forked workers, and so are context variables, which new threads do not have by
    themselves; what is made under inference mode can be used outside it."""
    loader = seat.loader(Made(look, 8), batch_size=2)
    with MODES[mode]():
        batches = list(loader)
    again = [batch for batch in loader if seat.num_workers]
    assert repr(batches) == of_torch(mode)
    assert again == [] or again[0][1].sum() == 0, "each epoch has its own"
    if not seat.are_processes and seat.num_workers:
        torch.ones(2, 2, requires_grad=True).mul(batches[0][5]).sum().backward()
