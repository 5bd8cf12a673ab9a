"""What test_distributed.py runs as several ranks: ``python ranks.py PROGRAM FOLDER [OPTION...]``.

Each rank writes what it saw to a file of its own in FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data as torch_data

import spdl_torch
from spdl_torch.data import cached
from spdl_torch.loader.sampling.distributed_sampler import DistributedSampler
from spdl_torch.pipeline import PipelineBuilder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.inside import kept_by

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 22, 3, 2
GLOBAL_BATCH, NUM_STEPS = 8, 6


def sampler_of(data, **options):
    """A sampler that asks for its rank."""
    return DistributedSampler(data, seed=3, **options)


def loader(data, **options):
    """Ours, with a worker."""
    return spdl_torch.DataLoader(data, batch_size=BATCH_SIZE, num_workers=1, **options)


def numbers_of(batches):
    """What a loader gave, as plain numbers."""
    return [batch.tolist() for batch in batches]


def pipeline_of(length, **options):
    """A pipeline of batches of numbers."""
    builder = PipelineBuilder().add_source(range(length)).aggregate(BATCH_SIZE)
    return spdl_torch.PipelineDataset(
        builder.pipe(torch.tensor, output_order="input").add_sink(), **options
    )


class LateSampler(torch_data.DistributedSampler):
    """torch's, made before the process group as users of Lightning have to."""

    def __init__(self, data):
        super().__init__(data, 2, int(os.environ.get("LOCAL_RANK", 0)), seed=3)


class RanklessStream(torch_data.IterableDataset):
    """Knows nothing of ranks."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


KINDS = {
    "plain": lambda data: loader(data, shuffle=True),
    "torch's sampler": lambda data: loader(data, sampler=LateSampler(data)),
    "our sampler": lambda data: loader(data, sampler=sampler_of(data)),
    "bare pipeline": lambda data: pipeline_of(len(data)),
    "pipeline": lambda data: spdl_torch.DataLoader(pipeline_of(len(data)), batch_size=None),
    "stream": lambda data: loader(RanklessStream(len(data))),
}
SHARED = {
    "lightning": ("plain", "torch's sampler", "our sampler", "bare pipeline", "pipeline"),
    "accelerate": ("plain", "torch's sampler", "our sampler", "pipeline", "stream"),
    "ray": ("plain", "our sampler", "prepared", "bare pipeline", "by Ray itself"),
}
"""What each trainer shares out."""


def loaders_for(trainer, data):
    """A loader of each kind."""
    return {kind: KINDS[kind](data) for kind in SHARED[trainer]}


def epochs_of(loaders, prepare, inner=lambda prepared: prepared):
    """What each loader gives in each epoch once it is prepared, and whose class it then is; inner:
    where that is found."""
    seen = {}
    for name, given in loaders.items():
        prepared = prepare(given)
        for epoch in range(NUM_EPOCHS):
            seen[f"{name} {epoch}"] = numbers_of(prepared)
        seen[f"{name} class"] = type(inner(prepared)).__module__
    return seen


def write(folder, rank, value):
    """For the test to read."""
    (Path(folder) / f"{rank}.json").write_text(json.dumps(value))


def join_group():
    """A group of processes that does not wait for ever."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    dist.barrier()  # gloo fails where another one is gone before all are connected
    return dist.get_rank(), dist.get_world_size()


def shares(folder):
    """A loader's batches and a pipeline's; and an evaluation that counts each sample once."""
    torch.set_num_threads(1)
    data = range(NUM_SAMPLES + 1)  # divides by neither 2 nor 4
    sampler = sampler_of(data, tail="uneven")
    made_before = [sampler.rank, sampler.num_replicas]
    rank, _ = join_group()
    seen = {"rank": [*made_before, sampler.rank, sampler.num_replicas]}
    loading = loader(data, sampler=sampler)
    seen["loader"] = numbers_of(loading)
    seen["report"] = loading.report().across_ranks()
    seen["pipeline"] = numbers_of(pipeline_of(len(data), tail="uneven"))
    seen["evaluated"] = evaluate(data)
    write(folder, rank, seen)
    dist.destroy_process_group()


def evaluate(data):
    """The sum and number of all samples, in steps that all ranks make together."""
    sampler = sampler_of(data, shuffle=False, tail="pad")
    totals = torch.zeros(2)
    for number, batch in enumerate(loader(data, sampler=sampler)):
        dist.barrier()  # as a model that is spread over the ranks would
        valid = batch[: sampler.num_valid(number, BATCH_SIZE)]
        totals += torch.tensor([valid.sum(), len(valid)])
    dist.all_reduce(totals)
    return totals.tolist()


def train(folder, stop_after, kill_at):
    """Steps in common, a checkpoint after each; ends after some, or loses a rank to kill -9."""
    torch.set_num_threads(1)
    folder = Path(folder)
    rank, world = join_group()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    data = range(NUM_STEPS * GLOBAL_BATCH + 3)
    sampler = sampler_of(data)
    loader = spdl_torch.DataLoader(
        data, batch_size=GLOBAL_BATCH // world, sampler=sampler, num_workers=1, drop_last=True
    )
    checkpoint = folder / "checkpoint.pt"
    first_epoch, step = 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        loader.load_state_dict(saved["loader"])
        first_epoch, step = saved["epoch"], saved["step"]
    for epoch in range(first_epoch, NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            if int(kill_at) == step and attempt == 0 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))  # what the gradients do
            step += 1
            with open(folder / f"{world}-{attempt}-{rank}.log", "a") as log:
                log.write(json.dumps([step, batch.tolist()]) + "\n")
            dist.barrier()
            if rank == 0:
                saved = {"loader": loader.state_dict(), "epoch": epoch, "step": step}
                torch.save(saved, folder / "new.pt")
                os.replace(folder / "new.pt", checkpoint)
            dist.barrier()
            if step == int(stop_after):
                dist.destroy_process_group()
                return
    write(folder, rank, "done")
    dist.destroy_process_group()


def torchrun(folder):
    """Train on 2 ranks, of which one is lost, as ``torchrun --nproc-per-node 2 --max-restarts 1``
    does, but that its ranks are forks: they need not import torch."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", run_id="ranks", **where)
    elastic_launch(config, train)(folder, -1, 4)


def lightning(folder):
    """Loaders of every kind in one fit, then validation and prediction, with strategy="ddp"."""
    import lightning as pl

    data = range(NUM_SAMPLES)

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = {}

        def note(self, kind, batch):
            self.seen.setdefault(kind, []).append(batch.tolist())

        def training_step(self, batch, batch_idx):
            for name, part in batch.items():
                self.note(f"{name} {self.current_epoch}", part)
            return self.layer(torch.ones(1, 1)).sum()

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.note(f"validation {dataloader_idx}", batch)

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            self.note(f"prediction {dataloader_idx}", batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    caches = [cached(data)]  # before Lightning has started the second rank
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": NUM_EPOCHS, "num_sanity_val_steps": 0, **dict.fromkeys(names, False)}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **options)
    model = Model()
    training = loaders_for("lightning", data)
    trainer.fit(model, training)
    caches.append(cached(data))  # with a process group
    model.seen["caches"] = [kept_by(kept).folder for kept in caches]
    for name, used in trainer.fit_loop._combined_loader.iterables.items():
        model.seen[f"{name} class"] = type(used).__module__
    trainer.validate(model, loader(data, sampler=sampler_of(data, shuffle=False)), verbose=False)
    odd = range(NUM_SAMPLES - 1)
    both = loader(odd), loader(odd, sampler=sampler_of(odd, tail="uneven"))
    trainer.predict(model, both, return_predictions=False)
    write(folder, trainer.global_rank, model.seen)


def accelerate(folder):
    """Loaders that Accelerate shares out, those that are shared out already, and an evaluation."""
    from accelerate import Accelerator as TheirAccelerator

    from spdl_torch.accelerate import Accelerator, prepare_data_loader

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = range(NUM_SAMPLES + 2)
    torch.manual_seed(accelerator.process_index)  # Accelerate has to agree on an order
    loaders = loaders_for("accelerate", data)
    seen = epochs_of(loaders, accelerator.prepare, lambda prepared: prepared.base_dataloader)
    report = accelerator.prepare(loaders["plain"]).report
    seen["figures"] = len(report().stats.stages) if list(report.__self__) else 0
    accelerator = TheirAccelerator(cpu=True)
    seen["by Accelerate itself"] = numbers_of(accelerator.prepare(loader(data, shuffle=True)))
    odd = prepare_data_loader(accelerator, loader(range(NUM_SAMPLES + 1)))
    seen["evaluated"] = [accelerator.gather_for_metrics(batch).tolist() for batch in odd]
    seen["resumed"] = resume_with(accelerator, prepare_data_loader, data)
    write(folder, accelerator.process_index, seen)
    accelerator.end_training()


def resume_with(accelerator, prepare_data_loader, data):
    """Epoch 1, one batch, a new process's loader, the rest."""
    first, again = (
        prepare_data_loader(accelerator, loader(data, sampler=sampler_of(data))) for _ in range(2)
    )
    first.set_epoch(1)
    batches = [next(iter(first.base_dataloader)).tolist()]
    again.base_dataloader.load_state_dict(first.base_dataloader.state_dict())
    again.set_epoch(1)
    return batches + numbers_of(again)


def ray(folder):
    """A TorchTrainer of Ray Train with two workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    quiet = {"include_dashboard": False, "configure_logging": False}
    ray.init(num_cpus=2, **quiet, runtime_env={"env_vars": environment})
    TorchTrainer(
        ray_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()


def ray_worker(config):
    """What each of Ray's workers runs."""
    import ray.train
    import ray.train.torch

    import spdl_torch.ray

    data = range(NUM_SAMPLES)
    theirs, ours = ray.train.torch.prepare_data_loader, spdl_torch.ray.prepare_data_loader
    plain = loader(data, shuffle=True)
    loaders = {
        "our sampler": (loader(data, sampler=sampler_of(data)), lambda own: own),
        "prepared": (loader(data, sampler=sampler_of(data)), theirs),
        "bare pipeline": (pipeline_of(NUM_SAMPLES), lambda own: own),
        "plain": (plain, ours),
        "by Ray itself": (plain, theirs),
    }
    seen = {}
    for name, (given, prepare) in loaders.items():
        prepared = prepare(given)
        for epoch in range(NUM_EPOCHS):
            if "bare" not in name:
                prepared.sampler.set_epoch(epoch)
            seen[f"{name} {epoch}"] = numbers_of(prepared)
        seen[f"{name} class"] = type(getattr(prepared, "_dataloader", prepared)).__module__
    write(config["folder"], ray.train.get_context().get_world_rank(), seen)


PROGRAMS = (shares, train, torchrun, lightning, accelerate, ray)

if __name__ == "__main__":
    # These are ranks of a very small machine.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    {program.__name__: program for program in PROGRAMS}[sys.argv[1]](*sys.argv[2:])
