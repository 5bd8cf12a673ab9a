"""A loader that is gone keeps nothing alive, without the garbage collector's help."""

import gc
import weakref

import pytest
from _datasets import BulkData, GatedData, MapData, StreamData
from _gates import is_gone, until
from _inside import state_of
from _loader_helpers import ThreadLoader as DataLoader, torch_loader


class Stateful(StreamData):
    """Keeps a state of its own, which fails."""

    def state_dict(self):
        raise LookupError("no state")

    def load_state_dict(self, state):
        raise LookupError("no state")


def train(loader, how):
    """Two epochs, each ended in that way."""
    for _ in range(2):
        try:
            for number, _batch in enumerate(loader):
                if how in ("break", "state") and number == 1:
                    break
        except (ValueError, LookupError):
            pass
        if how == "state" or (how == "end, state" and loader.persistent_workers):
            with pytest.raises(LookupError, match="no state"):
                loader.state_dict()


@pytest.fixture
def without_collector():
    """What is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPTIONS = {
    "0": {},
    "0, no figures": {"stats": False},
    "2": {"num_workers": 2},
    "2, skipping": {"num_workers": 2, "on_error": "skip", "error_budget": 99},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "persistent, no figures": {"num_workers": 2, "persistent_workers": True, "stats": False},
    "auto": {"num_workers": "auto"},
    "process": {"num_workers": 1, "isolation": "process"},
}
WAYS = ["end", "break", "error", "state", "end, state"]


@pytest.mark.parametrize("options", OPTIONS)
def test_dataset_goes_with_its_loader(options, without_collector):
    """However its epochs ended; as with torch's loader."""
    kept = []
    is_process = options == "process"
    for kind in (MapData, BulkData, StreamData, Stateful):
        for how in ("break", "error", "state") if is_process else WAYS:
            if ("state" in how) != (kind is Stateful):
                continue
            data = kind(12, {5: ValueError} if how == "error" else {})
            found = weakref.ref(data)
            # torch's too, but in the trainer's process: elsewhere its dataset is another.
            loaders = [torch_loader(data, 2), DataLoader(data, 2, **OPTIONS[options])]
            for loader in loaders if kind is not Stateful else loaders[1:]:
                if kind is Stateful:
                    state_of(loader).position.want()
                train(loader, how)
            del data, loader, loaders
            kept.append((kind.__name__, how, found))
    until(lambda: not [(kind, how) for kind, how, found in kept if not is_gone(found)])


def test_dataset_goes_with_its_loader_while_a_worker_is_stuck(without_collector):
    """It goes when the worker does."""
    data = GatedData(12)
    gate, entered, found = data.gate, data.entered, weakref.ref(data)
    batches = iter(DataLoader(data, 2, num_workers=2))
    assert entered.wait(60)
    del batches, data
    assert found() is not None
    gate.set()
    until(lambda: is_gone(found))
