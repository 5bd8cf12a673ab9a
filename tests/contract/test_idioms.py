"""Datasets written for torch's worker processes, each beside torch's own loader."""

import decimal
import multiprocessing

import pytest
from _datasets import Drawing
from _idioms import IDIOMS, samples_of
from _inside import placement_of
from _loader_helpers import as_list, torch_loader

from spdl_torch import DataLoader
from spdl_torch.objects.generator_states import generators_kept
from spdl_torch.testing._process_state import changed_settings, settings_kept

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="idioms of forked workers"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def load(loader_type, name, folder, **options):
    """The samples of two epochs, by batch; and what of a worker's settings reached this process."""
    folder.mkdir()
    idiom = IDIOMS[name](folder)
    options = {"batch_size": 8, "num_workers": 2, **options, **idiom.options}
    with generators_kept(), settings_kept() as settings:
        loader = loader_type(idiom.dataset, **options)
        epochs = [[samples_of(batch) for batch in loader] for _ in range(2)]
        return epochs, changed_settings(settings)


@pytest.mark.parametrize("name", sorted(IDIOMS))
def test_idiom_is_right_where_torchs_is(name, tmp_path):
    """With one import changed, and nothing else: in processes, as none of them is known to be safe
    on threads; and nothing that a worker does to its own reaches the trainer's."""
    ours = load(DataLoader, name, tmp_path / "ours")
    assert ours == load(torch_loader, name, tmp_path / "torch")
    assert not ours[1]
    placement = placement_of(DataLoader(IDIOMS[name](tmp_path).dataset, num_workers=2))
    assert placement.num_processes == 2


def test_threads_take_over_what_the_program_set_for_its_own():
    """Context variables, which new threads do not have by themselves."""
    data = Drawing(lambda: decimal.getcontext().prec, 8)
    with decimal.localcontext() as context:
        context.prec = 40
        loader = DataLoader(data, num_workers=2, isolation="thread", collate_fn=as_list)
        assert list(loader) == [[40]] * 8


def test_signals_need_a_process_of_their_own(tmp_path):
    """Its handlers are set by its main thread alone."""
    with pytest.raises(ValueError, match="signal only works in main thread"):
        load(DataLoader, "TimeLimit", tmp_path / "x", isolation="thread")
