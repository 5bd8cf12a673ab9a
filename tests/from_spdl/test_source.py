"""spdl_torch.spdl.source: what ranks get, in which order, and that the order is SPDL's."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spdl_torch import PipelineDataset
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.spdl.source import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    IterableWithShuffle,
    SizedIterable,
    SizedIterableWithShuffle,
)
from spdl_torch.spdl.source.imagenet import ImageNet, get_mappings, parse_wnid
from spdl_torch.spdl.source.local_directory import LocalDirectory
from spdl_torch.spdl.source.utils import MergeIterator, embed_shuffle, repeat_source


def spdl(name):
    """A module of SPDL's."""
    return pytest.importorskip(name)


pytestmark = pytest.mark.filterwarnings("ignore:.*never visited:UserWarning")

drops = st.booleans()
seeds = st.integers(0, 2**40)


@st.composite
def shares(draw):
    """How many indices, and among how many ranks."""
    world_size = draw(st.integers(1, 9))
    return draw(st.integers(world_size, 200)), world_size


@pytest.mark.parametrize("kind", [DistributedDeterministicSampler, DistributedRandomSampler])
@given(share=shares(), drop=drops, seed=seeds)
def test_ranks_have_nothing_in_common_and_together_everything(kind, share, drop, seed):
    """Or, without the last round, all but less than a round; lengths are as said."""
    n, world_size = share
    samplers = [
        kind(n, rank=rank, world_size=world_size, ddp_drop_last_distributed_round=drop)
        for rank in range(world_size)
    ]
    if kind is DistributedRandomSampler:
        for sampler in samplers:
            sampler.shuffle(seed)
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    drawn = list(itertools.chain(*parts))
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(range(n))
    lengths = {len(part) for part in parts}
    assert len(drawn) == (n - n % world_size if drop else n)
    assert len(lengths) == 1 if drop else max(lengths) - min(lengths) <= 1
    assert all(type(index) is int for index in drawn)
    assert parts == [list(sampler) for sampler in samplers], "the same in every pass"


def random_states():
    """Of everyone's generators."""
    numpys = np.random.get_state()[1].tolist()
    return random.getstate(), numpys, torch.get_rng_state().tolist()


@given(share=shares(), seed=seeds, history=st.lists(seeds, max_size=3), draws=st.integers(0, 5))
def test_shuffle_depends_on_its_seed_alone(share, seed, history, draws):
    """Neither on what was before, nor on anyone's random state, which it leaves alone."""
    n, world_size = share
    fresh = DistributedRandomSampler(n, rank=0, world_size=world_size, seed=seed)
    used = DistributedRandomSampler(n, rank=0, world_size=world_size)
    for before in history:
        used.shuffle(before)
        list(itertools.islice(used, draws))
    used.shuffle(seed=seed)
    random.seed(draws), np.random.seed(draws), torch.manual_seed(draws)
    state = random_states()
    first = list(fresh)
    assert state == random_states()
    random.random(), np.random.rand(), torch.rand(1)
    assert list(used) == first == list(pickle.loads(pickle.dumps(fresh)))


@st.composite
def arguments(draw):
    """Of a random sampler, weighted or not, for one of several ranks."""
    n, world_size = draw(shares())
    weights = draw(
        st.none() | st.lists(st.floats(0, 9) | st.just(0.0), min_size=n, max_size=n).filter(any)
    )
    most = 3 * n if weights else n
    options = {
        "num_draws": draw(st.none() | st.integers(world_size, most)),
        "weights": weights,
        "seed": draw(seeds),
        "ddp_drop_last_distributed_round": draw(drops),
    }
    return n, {"rank": draw(st.integers(0, world_size - 1)), "world_size": world_size, **options}


@given(arguments=arguments(), seed=seeds)
def test_order_is_spdl_s(arguments, seed):
    """A run that was begun with SPDL goes on with the same samples."""
    n, options = arguments
    ours = DistributedRandomSampler(n, **options)
    theirs = spdl("spdl.source").DistributedRandomSampler(n, **options)
    assert (len(ours), list(ours)) == (len(theirs), list(theirs))
    ours.shuffle(seed), theirs.shuffle(seed)
    assert list(ours) == list(theirs)
    if options["weights"] is not None:
        assert all(options["weights"][index] > 0 for index in ours)
        return
    for name in ("num_draws", "weights", "seed"):
        del options[name]
    ours = DistributedDeterministicSampler(n, **options)
    theirs = spdl("spdl.source").DistributedDeterministicSampler(n, **options)
    assert (len(ours), list(ours)) == (len(theirs), list(theirs))


SHARE = {"rank": 0, "world_size": 2}
BOTH = DistributedDeterministicSampler, DistributedRandomSampler
ONE = (DistributedRandomSampler,)


@pytest.mark.parametrize(
    ("kinds", "n", "options", "complaint"),
    [
        (BOTH, 0, {}, "n must be >= 1, got 0"),
        (BOTH, 2.5, {}, "n must be an int"),
        (BOTH, 9, {"rank": 2}, "rank must be between 0 and 1, got 2"),
        (BOTH, 1, {}, "Pass ddp_drop_last_distributed_round=False"),
        (ONE, 3, {"num_draws": 4}, r"num_draws must be <= n without weights.*num_draws=4, n=3"),
        (ONE, 3, {"weights": [1, 2]}, r"must be 3 numbers, one for each index, got shape \(2,\)"),
        (ONE, 3, {"weights": [1, -1, 1]}, "weights must be finite and >= 0"),
        (ONE, 3, {"weights": [1e308] * 3}, "weights must add up to a finite number > 0, got inf"),
        ((MergeIterator,), None, {"iterables": []}, "iterables must hold at least one"),
        ((MergeIterator,), None, {"stop_after": -2}, "stop_after must be >= -1, got -2"),
        ((MergeIterator,), None, {"weights": [1]}, "must be 2 numbers, one for each iterable, got"),
    ],
)
def test_argument_is_refused_when_it_cannot_be_meant(kinds, n, options, complaint):
    """With the argument's name and what was given."""
    first, given = ((), {"iterables": [[1], [2]]}) if n is None else ((n,), SHARE)
    for kind in kinds:
        with pytest.raises(TypeError if n == 2.5 else ValueError, match=complaint):
            kind(*first, **{**given, **options})


@pytest.mark.filterwarnings("error")
def test_indices_that_are_never_visited_give_a_warning():
    """As by SPDL; at the caller's line."""
    with pytest.warns(UserWarning, match="the last 3 of 11 indices are never visited") as warned:
        DistributedDeterministicSampler(11, rank=0, world_size=4)
    assert warned[0].filename == __file__
    DistributedDeterministicSampler(11, rank=0, world_size=4, ddp_drop_last_distributed_round=False)


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, embed_shuffle])
def test_dataset_does_not_divide_a_sampler_again(wrap):
    """The rank's part is there already: all of it is the rank's."""
    sampler = wrap(DistributedRandomSampler(12, rank=1, world_size=3))
    builder = PipelineBuilder().add_source(sampler).pipe(str).add_sink()
    dataset = PipelineDataset(builder, num_replicas=3, rank=1)
    assert len(dataset) == 4
    own = [str(i) for i in DistributedRandomSampler(12, rank=1, world_size=3, seed=0)]
    assert list(dataset) == own


class Recording:
    """A source that keeps the seeds that it was given."""

    def __init__(self, num_items=3, seeds=()):
        self.num_items, self.seeds = num_items, list(seeds)

    def shuffle(self, seed):
        self.seeds.append(seed)

    def __iter__(self):
        yield from ((tuple(self.seeds), number) for number in range(self.num_items))


def test_embed_shuffle_shuffles_once_a_pass():
    """With the epoch's number, before the pass or after it; one that was left counts."""
    source = embed_shuffle(Recording(), epoch=5)
    assert [[seeds for seeds, _ in source] for _ in range(2)] == [[(5,)] * 3, [(5, 6)] * 3]
    source = embed_shuffle(Recording(), shuffle_last=True, epoch=5)
    assert next(iter(source)) == ((), 0)
    assert next(iter(source)) == ((5,), 0)


@given(share=shares(), epoch=st.integers(0, 99), last=st.booleans())
def test_embed_shuffle_and_repeat_source_are_spdl_s(share, epoch, last):
    """Over the same sampler, for several passes."""
    theirs = spdl("spdl.source.utils")
    n, world_size = share

    def sampler():
        return DistributedRandomSampler(n, rank=world_size - 1, world_size=world_size)

    ours, peer = (
        make(sampler(), shuffle_last=last, epoch=epoch)
        for make in (embed_shuffle, theirs.embed_shuffle)
    )
    assert len(ours) == len(peer)
    assert [list(ours) for _ in range(3)] == [list(peer) for _ in range(3)]
    many = 3 * len(ours) + 1
    ours, peer = repeat_source(sampler(), epoch), theirs.repeat_source(sampler(), epoch)
    assert list(itertools.islice(ours, many)) == list(itertools.islice(peer, many))


def test_embed_shuffle_has_a_length_where_the_source_has_one():
    """And none otherwise; it takes what can be shuffled alone."""
    assert isinstance(Recording(), IterableWithShuffle)
    assert not isinstance(Recording(), SizedIterableWithShuffle)
    sampler = DistributedRandomSampler(9, rank=0, world_size=2)
    assert isinstance(sampler, SizedIterableWithShuffle)
    assert isinstance(embed_shuffle(sampler), SizedIterable)
    assert len(embed_shuffle(sampler)) == 4
    with pytest.raises(TypeError, match="a Recording has no len"):
        len(embed_shuffle(Recording()))
    with pytest.raises(TypeError, match=r"have shuffle\(seed\), got list"):
        embed_shuffle([1, 2])


def test_repeat_source_goes_round_what_cannot_be_shuffled():
    """In its own order; a source that has ended for good is an error, not a wait."""
    assert list(itertools.islice(repeat_source([1, 2]), 5)) == [1, 2, 1, 2, 1]
    copy = pickle.loads(pickle.dumps(begun := repeat_source([1, 2])))
    assert [next(copy), next(begun), next(begun)] == [1, 1, 2]
    with pytest.raises(ValueError, match="it was begun, and cannot be pickled"):
        pickle.dumps(begun)
    once = repeat_source(iter([1, 2]))
    assert [next(once), next(once)] == [1, 2]
    with pytest.raises(RuntimeError, match="epoch 1 of the list_iterator is empty"):
        next(once)


lists = st.lists(st.lists(st.integers(), max_size=6), min_size=1, max_size=4)


@given(lists=lists, stop=st.integers(-1, 12), seed=seeds, weigh=st.booleans(), data=st.data())
def test_merging_is_spdl_s(lists, stop, seed, weigh, data):
    """In turn and by weights, wherever it stops, and in every pass."""
    # Weights more than 2^250 apart are drawn as exactly, by other random bits than SPDL's.
    weight = st.just(0.0) | st.floats(2**-40, 5) | st.integers(0, 5)
    numbers = st.lists(weight, min_size=len(lists), max_size=len(lists)).filter(any)
    options = {"stop_after": stop, "seed": seed, "weights": data.draw(numbers) if weigh else None}
    ours = MergeIterator(lists, **options)
    theirs = spdl("spdl.source.utils").MergeIterator(lists, **options)
    assert list(ours) == list(theirs) == list(ours)


@given(lists=lists, weights=st.lists(st.integers(1, 9), min_size=4, max_size=4), seed=seeds)
def test_merging_loses_and_doubles_nothing(lists, weights, seed):
    """Every item once, those of an iterable in its order."""
    numbered = [[(place, item) for item in items] for place, items in enumerate(lists)]
    for chosen in (None, weights[: len(lists)]):
        merged = list(MergeIterator(numbered, weights=chosen, seed=seed))
        for place, items in enumerate(numbered):
            assert [each for each in merged if each[0] == place] == items


@given(seed=seeds, history=st.lists(seeds, max_size=3))
def test_folder_has_an_order_for_every_seed(tmp_path_factory, seed, history):
    """Which does not depend on the shuffles before, and at first is SPDL's."""
    root = tmp_path_factory.mktemp("folder")
    for number in range(9):
        (root / f"{number}.txt").touch()
    source = LocalDirectory(str(root), "*.txt")
    assert list(source) == sorted(root.iterdir())
    assert len(source) == 9
    for before in history:
        source.shuffle(before)
    source.shuffle(seed)
    peer = spdl("spdl.source.local_directory").LocalDirectory(root, "*.txt")
    peer.shuffle(seed)
    assert list(source) == list(peer)
    assert sorted(source) == sorted(root.iterdir())


def test_folder_is_refused_when_it_is_empty(tmp_path):
    """Rather than training on nothing."""
    with pytest.raises(FileNotFoundError, match=r"nothing in .*nowhere matches '\*\.jpg'"):
        LocalDirectory(tmp_path / "nowhere", "*.jpg")


def test_imagenet_gives_paths_with_their_labels(tmp_path):
    """By the name of the file's own folder."""
    folder = tmp_path / "n00000000"
    for wnid, num_files in (("n01440764", 3), ("n15075141", 2)):
        (folder / "val" / wnid).mkdir(parents=True)
        for name in ["list.txt", *(f"{number}.JPEG" for number in range(num_files))]:
            (folder / "val" / wnid / name).touch()
    source = ImageNet(folder)
    found = [(path.parent.name, label) for path, label in source]
    assert found == [("n01440764", 0)] * 3 + [("n15075141", 999)] * 2
    assert len(source) == 5
    source.shuffle(1)
    shuffled = list(source)
    assert shuffled != sorted(shuffled)
    assert sorted(shuffled) == sorted(ImageNet(folder, "val"))
    with pytest.raises(ValueError, match="split must be one of train, val, got 'test'"):
        ImageNet(folder, "test")
    with pytest.raises(FileNotFoundError, match="matches 'train/"):
        ImageNet(folder, "train")
    (folder / "val" / "n99999999").mkdir()
    (folder / "val" / "n99999999" / "x.JPEG").touch()
    with pytest.raises(ValueError, match="n99999999 is none of the 1000 classes"):
        list(ImageNet(folder))


def test_labels_are_everyone_s():
    """SPDL's, and those of the folders' names in order."""
    labels = get_mappings()
    assert labels == spdl("spdl.source.imagenet").get_mappings()
    assert list(labels) == sorted(labels)
    assert list(labels.values()) == list(range(1000))
    assert parse_wnid("a/n01440764_x/n02.JPEG") == "n01440764"
    with pytest.raises(ValueError, match="no WordNet number"):
        parse_wnid("n123")
