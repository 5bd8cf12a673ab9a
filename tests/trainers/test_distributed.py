"""Several ranks, as real processes: every sample once, no hang, and on after a rank was killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
from contextlib import ExitStack
from subprocess import STDOUT

import _torchrun
import _warm
import pytest
import torch.utils.data as torch_data
from _folders import HELPERS
from _ranks import BATCH_SIZE, GLOBAL_BATCH, NUM_EPOCHS, NUM_SAMPLES, NUM_STEPS, TAILS

from spdl_torch import DataLoader
from spdl_torch.loader.sampling.distributed_sampler import DistributedSampler

PROGRAM = HELPERS / "_ranks.py"
PATIENCE_SECONDS = 100  # how long a hang takes to fail; the machine may be busy

pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS + 20)


def run(*command, preload=(), **environment):
    """Run a program with all the processes that it starts; end all of them if it hangs."""
    (printed,) = run_together([(command, environment)], preload)
    return printed


def run_together(commands, preload=()):
    """Run several; what each of them printed."""
    with ExitStack() as stack:
        programs = []
        for command, environment in commands:
            program = _warm.start(
                command,
                stderr=STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
                preload=preload,
            )
            programs.append(stack.enter_context(program))
            stack.callback(end_all_of, program)
        printed = [program.communicate(timeout=PATIENCE_SECONDS)[0] for program in programs]
    for program, text in zip(programs, printed, strict=True):
        assert program.returncode == 0, text
    return printed


def end_all_of(program):
    """The processes that a program has started, if it hangs."""
    if program.returncode is None:
        os.killpg(program.pid, signal.SIGKILL)


def run_ranks(world, *command, preload=()):
    """Run ranks that find what torchrun gives them, without it: it has a test of its own."""
    with _torchrun.environments(world) as each:
        run_together([(command, environment) for environment in each], preload)


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


# -- torchrun --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank of 3 saw."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(3, PROGRAM, "shares", folder)
    return seen_by_ranks(folder, 3)


@pytest.mark.parametrize("loader", ["torch", "ours"])
@pytest.mark.parametrize("tail", TAILS)
def test_every_sample_is_on_one_rank(ranks, loader, tail):
    """With both loaders, in two epochs of different orders, each tail as it says."""
    length, world = NUM_SAMPLES + 1, len(ranks)
    for epoch in range(NUM_EPOCHS):
        order = order_of(length, epoch)
        expected = {
            "drop": order[: length - length % world],
            "pad": order + order[: -length % world],
            "uneven": order,
        }[tail]
        assert together(ranks, f"{tail} {loader} {epoch}") == sorted(expected)
        steps = {len(seen[f"{tail} {loader} {epoch}"]) for seen in ranks}
        assert len(steps) == 1 or tail == "uneven"
    assert order_of(length, 0) != order_of(length, 1)


@pytest.mark.parametrize("tail", TAILS)
def test_pipeline_is_shared_out(ranks, tail):
    """The process group's ranks, each with its part of the source."""
    length, world = NUM_SAMPLES + 1, len(ranks)
    whole, rest = divmod(length, world)
    had = together(ranks, f"{tail} pipeline")
    if tail == "drop":
        assert had == [*range(whole * world)]
    else:
        repeated = range(-length % world if tail == "pad" else 0)
        assert had == sorted([*range(length), *repeated])
    sizes = [len(indices_of(seen[f"{tail} pipeline"])) for seen in ranks]
    if tail == "uneven":
        assert sizes == [whole + 1] * rest + [whole] * (world - rest)
    else:
        assert len(set(sizes)) == 1


def test_rank_is_known_to_a_sampler_made_before_the_group(ranks):
    """Asked for when it is needed."""
    assert [seen["rank"] for seen in ranks] == [[rank, len(ranks)] for rank in range(len(ranks))]


def test_evaluation_is_exact_when_ranks_must_make_equal_steps(ranks):
    """Padded samples are known and left out: sum and number are those of one process."""
    data = range(NUM_SAMPLES + 1)
    assert [seen["evaluated"] for seen in ranks] == [[sum(data), len(data)]] * len(ranks)


# -- restarts --------------------------------------------------------------------------------------


def test_training_goes_on_when_a_rank_was_killed(tmp_path):
    """4 ranks stop after 2 steps."""
    run_ranks(4, PROGRAM, "train", tmp_path, 2, -1)
    # Restarted ranks of torch 2.15 may meet the addresses of those before them in a store that
    # torchrun shares with them, and then fail or wait for ever.
    run(PROGRAM, "torchrun", tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
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
    trained = [index for _, batches in sorted(steps.items()) for index in in_turns(batches)]
    length = NUM_STEPS * GLOBAL_BATCH + 3
    whole = [order_of(length, epoch)[: NUM_STEPS * GLOBAL_BATCH] for epoch in range(NUM_EPOCHS)]
    assert trained == whole[0] + whole[1]


def in_turns(batches):
    """The stretch of the order of which the ranks have a batch each."""
    return [*itertools.chain(*zip(*batches, strict=True))]


# -- Lightning -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning_ranks(tmp_path_factory):
    """What two ranks of strategy="ddp" saw; Lightning starts the second one itself."""
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    run(PROGRAM, "lightning", folder, preload=["lightning"])
    return seen_by_ranks(folder, 2)


@pytest.mark.parametrize(
    "loader", ["injected", "torch's sampler", "our sampler", "pipeline", "pipeline in a loader"]
)
def test_lightning_shares_out_once(lightning_ranks, loader):
    """Its own sampler where there is none, and nothing where each rank has its part already."""
    epochs = [f"{loader} {epoch}" for epoch in range(NUM_EPOCHS)]
    for key in epochs:
        assert together(lightning_ranks, key) == [*range(NUM_SAMPLES)]
        assert {len(seen[key]) for seen in lightning_ranks} == {-(-NUM_SAMPLES // 2 // BATCH_SIZE)}
    if "pipeline" not in loader:
        assert lightning_ranks[0][epochs[0]] != lightning_ranks[0][epochs[1]], "no set_epoch"
    if "our" in loader:
        for epoch, key in enumerate(epochs):
            for rank, seen in enumerate(lightning_ranks):
                assert indices_of(seen[key]) == order_of(NUM_SAMPLES, epoch)[rank::2]


def test_lightning_ranks_share_one_cache_in_memory(lightning_ranks):
    """Made before Lightning starts the second rank, and made later."""
    first, second = (seen["caches"] for seen in lightning_ranks)
    assert first == second
    assert len(set(first)) == 2


def test_lightning_keeps_our_loader(lightning_ranks):
    """The copy that it makes to put its sampler in loads on threads too."""
    assert lightning_ranks[0]["classes"] == ["spdl_torch.loader.dataloader"]


@pytest.mark.parametrize(
    ("key", "length"),
    [
        ("validation 0", NUM_SAMPLES),
        ("prediction 0", NUM_SAMPLES - 1),
        ("prediction 1", NUM_SAMPLES - 1),
    ],
)
def test_lightning_evaluates_each_sample_once(lightning_ranks, key, length):
    """Our sampler in validation and prediction, and Lightning's own in prediction."""
    assert together(lightning_ranks, key) == [*range(length)]


# -- Accelerate and Ray Train ----------------------------------------------------------------------


def test_fabric_shares_out_once(tmp_path):
    """Its own sampler where there is none, and nothing where each rank has its part already."""
    pytest.importorskip("lightning")
    run_ranks(2, PROGRAM, "fabric", tmp_path, preload=["lightning"])
    ranks = seen_by_ranks(tmp_path, 2)
    for loader in ("plain", "our sampler", "pipeline"):
        for epoch in range(NUM_EPOCHS):
            assert together(ranks, f"{loader} {epoch}") == [*range(NUM_SAMPLES)]
        for seen in ranks:
            assert seen[f"{loader} class"] == "spdl_torch.loader.dataloader"
            if loader != "pipeline":
                assert seen[f"{loader} 0"] != seen[f"{loader} 1"], "no other order in epoch 1"


@pytest.fixture(scope="module")
def accelerate_ranks(tmp_path_factory):
    """What two ranks of Accelerate saw."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("accelerate")
    run_ranks(2, PROGRAM, "accelerate", folder, preload=["accelerate"])
    return seen_by_ranks(folder, 2)


@pytest.mark.parametrize(
    "loader", ["plain", "torch's sampler", "our sampler", "pipeline", "stream"]
)
def test_accelerate_shares_out_once(accelerate_ranks, loader):
    """By its own rules what nobody has shared out yet, and nothing else; on our threads."""
    for epoch in range(NUM_EPOCHS):
        assert together(accelerate_ranks, f"{loader} {epoch}") == [*range(NUM_SAMPLES + 2)]
    for seen in accelerate_ranks:
        assert seen[f"{loader} class"] == "spdl_torch.loader.dataloader"
        if loader in ("plain", "torch's sampler", "our sampler"):
            assert seen[f"{loader} 0"] != seen[f"{loader} 1"], "no other order in epoch 1"
    assert accelerate_ranks[0][f"{loader} stages"] > 0, "no figures"


def test_accelerate_shares_out_what_it_prepares_itself(accelerate_ranks):
    """Without our function the samples are right; only the threads and our options are lost."""
    assert together(accelerate_ranks, "by Accelerate itself") == [*range(NUM_SAMPLES + 2)]


def test_gather_for_metrics_is_exact_when_accelerate_shares_out(accelerate_ranks):
    """It knows what it padded."""
    for seen in accelerate_ranks:
        assert indices_of(seen["evaluated"]) == [*range(NUM_SAMPLES + 1)]


def test_accelerate_goes_on_with_the_samplers_state(accelerate_ranks):
    """In an epoch that is not the first, without a batch twice."""
    for seen in accelerate_ranks:
        assert seen["resumed"] == seen["our sampler 1"]


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


@pytest.fixture(scope="module")
def ray_ranks(tmp_path_factory):
    """What two workers of a TorchTrainer saw."""
    pytest.importorskip("ray.train")
    folder = tmp_path_factory.mktemp("ray")
    run(PROGRAM, "ray", folder, RAY_USAGE_STATS_ENABLED="0")
    return seen_by_ranks(folder, 2)


@pytest.mark.parametrize("loader", ["our sampler", "prepared", "pipeline"])
def test_ray_shares_out_once(ray_ranks, loader):
    """Workers know their rank from the process group; ``prepare_data_loader`` adds no sampler."""
    for epoch in range(NUM_EPOCHS):
        assert together(ray_ranks, f"{loader} {epoch}") == [*range(NUM_SAMPLES)]
    if loader != "pipeline":
        assert ray_ranks[0][f"{loader} 0"] != ray_ranks[0][f"{loader} 1"]
        assert ray_ranks[0]["prepared class"] == "spdl_torch.loader.dataloader"


def test_ray_shares_out_what_it_prepares_itself(ray_ranks):
    """A loader without a sampler of ranks becomes torch's with Ray's own function, and stays ours
    with ours; the samples are the same."""
    assert together(ray_ranks, "by Ray itself") == [*range(NUM_SAMPLES)]
    assert ray_ranks[0]["by Ray itself class"] == "torch.utils.data.dataloader"
    for epoch in range(NUM_EPOCHS):
        assert together(ray_ranks, f"kept {epoch}") == [*range(NUM_SAMPLES)]
    assert ray_ranks[0]["kept 0"] == ray_ranks[0]["by Ray itself"] != ray_ranks[0]["kept 1"]
    assert ray_ranks[0]["kept class"] == "spdl_torch.loader.dataloader"
