"""Several ranks, as real processes: every sample once, no hang, and on after a rank was killed."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
from contextlib import ExitStack
from subprocess import STDOUT

import pytest
import torch.utils.data as torch_data
from support import torchrun, warm
from support.folders import TESTS
from support.ranks import GLOBAL_BATCH, NUM_EPOCHS, NUM_SAMPLES, NUM_STEPS, SHARED

from spdl_torch import DataLoader
from spdl_torch.loader.sampling.distributed_sampler import DistributedSampler

PROGRAM = TESTS / "support" / "ranks.py"
PATIENCE_SECONDS = 100  # how long a hang takes to fail; the machine may be busy

pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS + 20)


def run(*command, ranks=({},)):
    """Run a program once in each of these environments; end all its processes if one hangs."""

    def end_all_of(program):
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)

    options = {"stderr": STDOUT, "start_new_session": True}
    with ExitStack() as stack:
        programs = []
        for rank in ranks:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **rank}
            program = stack.enter_context(warm.start(command, env=environment, **options))
            programs.append(program)
            stack.callback(end_all_of, program)
        printed = [program.communicate(timeout=PATIENCE_SECONDS)[0] for program in programs]
    for program, text in zip(programs, printed, strict=True):
        assert program.returncode == 0, text


def run_ranks(world, *command):
    """Run ranks that find what torchrun gives them, without it: it has a test of its own."""
    with torchrun.environments(world) as ranks:
        run(*command, ranks=ranks)


def seen_by_ranks(folder, world):
    """What each rank wrote."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def indices_of(batches):
    """Of all batches of a rank."""
    return [*itertools.chain(*batches)]


def together(ranks, key):
    """The indices that all ranks had, sorted."""
    return sorted(itertools.chain(*(indices_of(seen[key]) for seen in ranks)))


def order_of(length, epoch=0):
    """The one that the ranks share."""
    sampler = DistributedSampler(length, 1, 0, seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_ranks_of_a_process_group_share_what_there_is(tmp_path):
    """With a sampler that was made before the group, which torchrun's environment tells its rank,
    and in a pipeline. An evaluation in equal steps is exact: padded samples are known. Their report
    is one."""
    world, data = 3, range(NUM_SAMPLES + 1)
    run_ranks(world, PROGRAM, "shares", tmp_path)
    ranks = seen_by_ranks(tmp_path, world)
    assert [seen["rank"] for seen in ranks] == [[rank, world] * 2 for rank in range(world)]
    turns = itertools.zip_longest(*(indices_of(seen["loader"]) for seen in ranks))
    assert [each for turn in turns for each in turn if each is not None] == order_of(len(data))
    assert together(ranks, "pipeline") == [*data]
    sizes = [len(indices_of(seen["pipeline"])) for seen in ranks]
    assert max(sizes) - min(sizes) == 1
    assert [seen["evaluated"] for seen in ranks] == [[sum(data), len(data)]] * world
    (told,) = {seen["report"] for seen in ranks}
    assert [line.split()[0] for line in told.splitlines()[: world + 1]] == ["rank", "0", "1", "2"]
    assert told.count("VERDICT") == 1


def test_training_goes_on_when_a_rank_was_killed(tmp_path):
    """4 ranks stop after 2 steps."""
    run_ranks(4, PROGRAM, "train", tmp_path, 2, -1)
    # Restarted ranks of torch 2.15 may meet the addresses of those before them in a store that
    # torchrun shares with them, and then fail or wait for ever.
    run(PROGRAM, "torchrun", tmp_path, ranks=[{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}])
    assert seen_by_ranks(tmp_path, 2) == ["done", "done"]
    assert {path.stem for path in tmp_path.glob("*.log")} == {
        *(f"4-0-{rank}" for rank in range(4)),
        *(f"2-{attempt}-{rank}" for attempt in (0, 1) for rank in (0, 1)),
    }
    steps = {}
    for path in sorted(tmp_path.glob("*.log")):
        for line in path.read_text().splitlines():
            step, batch = json.loads(line)
            steps.setdefault(step, []).append(batch)
    assert [len(batches) for _, batches in sorted(steps.items())] == [4, 4] + [2] * 10
    turns = [turn for _, batches in sorted(steps.items()) for turn in zip(*batches, strict=True)]
    trained = indices_of(turns)  # each a stretch of the order of which the ranks have a batch each
    length = NUM_STEPS * GLOBAL_BATCH + 3
    whole = [order_of(length, epoch)[: NUM_STEPS * GLOBAL_BATCH] for epoch in range(NUM_EPOCHS)]
    assert trained == whole[0] + whole[1]


TRAINERS = {  # what the ranks import, and how many samples they have
    "lightning": ("lightning", NUM_SAMPLES),  # which starts the second rank itself
    "accelerate": ("accelerate", NUM_SAMPLES + 2),
    "ray": ("ray.train", NUM_SAMPLES),
}


@pytest.fixture(scope="module")
def seen_under(tmp_path_factory):
    """What the two ranks of a trainer saw; each has run once for all tests."""

    @functools.cache
    def seen(trainer):
        library, _ = TRAINERS[trainer]
        pytest.importorskip(library)
        folder = tmp_path_factory.mktemp(trainer)
        if trainer in ("lightning", "ray"):
            run(PROGRAM, trainer, folder, ranks=[{"RAY_USAGE_STATS_ENABLED": "0"}])
        else:
            run_ranks(2, PROGRAM, trainer, folder)
        return seen_by_ranks(folder, 2)

    return seen


@pytest.mark.parametrize(
    ("trainer", "loader"), [(trainer, each) for trainer, made in SHARED.items() for each in made]
)
def test_trainer_shares_out_once(seen_under, trainer, loader):
    """By its own rules what nobody has shared out yet, and nothing else, in each epoch in another
    order. The loader stays ours, on threads too, unless Ray itself prepares one without a sampler
    of ranks."""
    ranks, (_, length) = seen_under(trainer), TRAINERS[trainer]
    for epoch in range(NUM_EPOCHS):
        assert together(ranks, f"{loader} {epoch}") == [*range(length)]
    for rank, seen in enumerate(ranks):
        is_torchs = loader == "by Ray itself"
        theirs = "torch.utils.data.dataloader" if is_torchs else "spdl_torch.loader.dataloader"
        if "bare" not in loader:
            assert seen[f"{loader} class"] == theirs
        if "pipeline" not in loader and loader != "stream":
            assert seen[f"{loader} 0"] != seen[f"{loader} 1"], "no other order in epoch 1"
        if is_torchs:
            assert seen[f"{loader} 0"] == seen["plain 0"], "another order than ours"
        if trainer == "lightning":
            assert {len(seen[f"{loader} {epoch}"]) for epoch in range(NUM_EPOCHS)} == {4}
            if "our" in loader:
                for epoch in range(NUM_EPOCHS):
                    part = order_of(NUM_SAMPLES, epoch)[rank::2]
                    assert indices_of(seen[f"{loader} {epoch}"]) == part


def test_lightning_ranks_share_one_cache_in_memory(seen_under):
    """Made before Lightning starts the second rank, and made later."""
    first, second = (seen["caches"] for seen in seen_under("lightning"))
    assert first == second
    assert len(set(first)) == 2


def test_each_sample_is_evaluated_once(seen_under):
    """By our sampler, in prediction by Lightning's own; Accelerate knows what it padded."""
    ranks = seen_under("lightning")
    assert together(ranks, "validation 0") == [*range(NUM_SAMPLES)]
    for number in (0, 1):
        assert together(ranks, f"prediction {number}") == [*range(NUM_SAMPLES - 1)]
    for seen in seen_under("accelerate"):
        assert indices_of(seen["evaluated"]) == [*range(NUM_SAMPLES + 1)]


def test_accelerate_goes_on_with_the_samplers_state(seen_under):
    """In an epoch that is not the first, without a batch twice. Without our function the samples of
    a loader are right, too; only the threads and our options are lost."""
    ranks = seen_under("accelerate")
    for seen in ranks:
        assert seen["resumed"] == seen["our sampler 1"]
        assert seen["figures"] > 0
    assert together(ranks, "by Accelerate itself") == [*range(NUM_SAMPLES + 2)]


def test_loader_that_is_prepared_is_refused():
    """Twice is a mistake; torch's loaders need no help."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from spdl_torch.accelerate import prepare_data_loader

    accelerator = Accelerator(cpu=True)
    loader = prepare_data_loader(accelerator, DataLoader(range(4)))
    assert accelerator.prepare(loader) is loader
    for given in (loader, torch_data.DataLoader(range(4))):
        with pytest.raises(TypeError, match=r"must be a spdl_torch\.DataLoader that was not"):
            prepare_data_loader(accelerator, given)
