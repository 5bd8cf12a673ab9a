"""Parquet files as a source and as a map-style dataset: every row once, in any place, as pyarrow
reads it and as torch collates it."""

import datetime
import io
import math
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, strategies as st
from PIL import Image
from support.inside import placement_of
from torch.utils.data import DataLoader as TorchLoader, default_collate

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import cached, mix, pack
from spdl_torch.data.sources import ListSource, Parquet
from spdl_torch.errors import DecodeError
from spdl_torch.io import decode_image
from spdl_torch.loader.differences import path_of_difference
from spdl_torch.pipeline import PipelineBuilder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(folder, sizes, group_rows=3, **columns):
    """Files of so many rows, with the rows' numbers as ``n``."""
    first = 0
    for number, size in enumerate(sizes):
        numbers = np.arange(first, first + size)
        made = {name: make(numbers) for name, make in columns.items()}
        table = pa.table({"n": pa.array(numbers, pa.int64()), **made})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group_rows)
        first += size
    return folder


def numbers_in(items):
    return [int(n) for each in items for n in np.atleast_1d(np.asarray(each["n"]))]


SIZES = (7, 0, 3, 12, 1)
ALL = list(range(sum(SIZES)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five files of 7, 0, 3, 12 and 1 rows in row groups of 3."""
    return write(tmp_path_factory.mktemp("rows"), SIZES, x=lambda n: pa.array(n / 3, pa.float32()))


@pytest.mark.parametrize("shuffle", [None, (3, 4)])
@given(batch_size=st.integers(1, 7), index=st.integers(0, 2))
def test_batches_of_a_part_are_its_rows_and_begin_anywhere(folder, batch_size, index, shuffle):
    """Over files, row groups and windows; of parts, ``test_sources`` knows the rest."""
    rows, batches = (
        (whole if shuffle is None else whole.shuffle(*shuffle)).shard(index, 3)
        for whole in (Parquet(folder), Parquet(folder, batch_size=batch_size))
    )
    expected, items = numbers_in(rows), list(batches)
    assert numbers_in(items) == expected
    assert len(items) == len(batches) == math.ceil(len(expected) / batch_size)
    assert [len(item["n"]) for item in items[:-1]] == [batch_size] * (len(items) - 1)
    for start in range(len(items) + 2):
        assert numbers_in(batches.iterate(start)) == expected[start * batch_size :]


def test_no_row_group_before_the_start_is_read(tmp_path):
    """They may even be damaged; shuffled, too, and from the state of a pipeline."""
    path = write(tmp_path, [12]) / "0.parquet"

    def shuffled():
        return pickle.loads(pickle.dumps(Parquet(path))).shuffle(1, buffer_size=3)

    def pipeline():
        return PipelineDataset(PipelineBuilder().add_source(shuffled()).add_sink(1))

    expected, stopped = numbers_in(shuffled()), pipeline()
    items = iter(stopped)
    assert numbers_in(islice(items, 4)) == expected[:4]
    state = stopped.state_dict()
    items.close()
    group = expected[0] // 3
    place = pq.ParquetFile(path).metadata.row_group(group).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    assert numbers_in(shuffled().iterate(4)) == expected[4:]
    resumed = pipeline()
    resumed.load_state_dict(state)
    assert numbers_in(resumed) == expected[4:]
    first, source = 3 * (group + 1), Parquet(path)
    assert numbers_in(source.iterate(first)) == ALL[first:12]
    assert numbers_in([source[place] for place in ALL[first:12]]) == ALL[first:12]
    for read in (list, lambda it: it[first - 1], lambda it: list(it.shuffle(1, 3))):
        with pytest.raises(DecodeError, match=rf"0\.parquet: row group {group} cannot be read"):
            read(source)


def test_a_batch_reads_each_row_group_once_and_a_bounded_number_of_them_is_kept(
    monkeypatch, memory
):
    """Of those that were asked for last; one for all threads that ask for it at once."""
    content, opened, really = io.BytesIO(), [], MemoryFileSystem._open
    size = 4000  # rows in a group: 32 kB
    kept = 8 * 8 * size + size  # of eight, and of no ninth
    monkeypatch.setattr("spdl_torch.data.sources._arrow._KEPT_BYTES", kept)
    pq.write_table(pa.table({"n": np.repeat(np.arange(10), size)}), content, row_group_size=size)
    memory.pipe("/large.parquet", content.getvalue())
    source = Parquet("memory://large.parquet")

    def counting(self, *args, **options):
        opened.append(args)
        return really(self, *args, **options)

    def read(*groups):
        rows = [place for each in groups for place in (size * (each + 1) - 1, size * each)]
        assert numbers_in(source.__getitems__(rows)) == [each for each in groups for _ in "ab"]

    monkeypatch.setattr(MemoryFileSystem, "_open", counting)
    for groups, num_reads in (
        ((3, 1, 3, 2, 1), 3),
        ((2, 3, 1), 0),
        ((0,), 1),
        (range(4, 8), 4),
        (range(8), 0),
        ((8,), 1),
        (range(1, 9), 0),
        ((0,), 1),
    ):
        opened.clear()
        read(*groups)
        assert len(opened) == num_reads
    opened.clear()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, [9] * 4))
    assert len(opened) == 1


KINDS = {
    **{
        name: (lambda n, name=name: pa.array(n % 100, getattr(pa, name)()))
        for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64")
    },
    "float16": lambda n: pa.array(n.astype(np.float16)),
    "bool_": lambda n: pa.array(n % 2 == 0),
    "string": lambda n: pa.array([f"é{each}" for each in n], pa.string()),
    "binary": lambda n: pa.array([bytes([each]) * 3 for each in n], pa.binary()),
    "text view": lambda n: pa.array([f"é{each}" * each for each in n], pa.string_view()),
    "bytes view": lambda n: pa.array([bytes([each]) * each for each in n], pa.binary_view()),
    "fixed": lambda n: pa.array([[each, each + 1] for each in n], pa.list_(pa.float32(), 2)),
    "matrix": lambda n: pa.array(
        [[[each, 1], [2, 3], [4, each]] for each in n], pa.list_(pa.list_(pa.int16(), 2), 3)
    ),
    "tokens": lambda n: pa.array([[each, 5] for each in n], pa.list_(pa.int32())),
    "classes": lambda n: pa.array([str(each % 3) for each in n]).dictionary_encode(),
    "coded": lambda n: pa.array(n % 3, pa.int64()).dictionary_encode(),
    "words": lambda n: pa.array([["a", str(each)] for each in n], pa.list_(pa.string())),
    "image": lambda n: pa.array(  # as Hugging Face stores them
        [{"bytes": bytes([each]), "path": f"{each}.png"} for each in n],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    ),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kinds"), (10, 4), 4, **KINDS)


def same(one, other):
    """Whether two items are equal to the bit, with their types and dtypes."""
    return path_of_difference(one, other) is None


def test_rows_and_batches_are_what_pyarrow_reads(kinds):
    """By value, in any order, also what Arrow cannot take rows of; a batch is what torch makes of
    its rows, where it makes anything."""
    expected = pa.concat_tables(map(pq.read_table, sorted(kinds.iterdir()))).to_pylist()
    source = Parquet(kinds)
    rows = list(source)
    plain = [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()} for row in rows]
    assert plain == expected
    assert all(same(source[place], row) for place, row in enumerate(rows))
    assert all(same(source[place - len(rows)], row) for place, row in enumerate(rows))
    assert all(map(same, source.__getitems__([13, 0, 7]), [rows[13], rows[0], rows[7]]))
    shuffled = sorted(source.shuffle(1), key=lambda row: row["n"])
    assert all(map(same, shuffled, rows))
    assert rows[0]["float32"].dtype == np.float32
    changed, batch = (next(iter(Parquet(kinds, batch_size=100))) for _ in range(2))
    changed["float32"].zero_()  # each owns its memory
    for name, column in batch.items():
        made = default_collate([row[name] for row in rows])
        if isinstance(made, torch.Tensor) and isinstance(column, list):
            column = torch.stack(column)
        if isinstance(column, torch.Tensor):
            assert same(column, made), name
        else:
            assert column == [row[name] for row in rows], name


def test_lists_of_several_lengths_are_a_tensor_each(tmp_path):
    """Tokens, say; empty ones, and those inside others, too. Tensors of a fixed shape are one."""
    tokens = [[1, 2, 3], [], [4]]
    deep = [[[1], [2, 3]], [], [[4]]]
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    fixed = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    made = {"tokens": pa.array(tokens, pa.list_(pa.int32())), "deep": deep, "fixed": fixed}
    pq.write_table(pa.table(made), tmp_path / "a.parquet")
    rows = list(Parquet(tmp_path))
    assert all(row["tokens"].dtype == torch.int32 for row in rows)
    assert [row["tokens"].tolist() for row in rows] == tokens
    assert [[each.tolist() for each in row["deep"]] for row in rows] == deep
    assert [row["fixed"].tolist() for row in rows] == values.tolist()
    first, _ = Parquet(tmp_path, batch_size=2)
    assert same(first["tokens"], [row["tokens"] for row in rows[:2]])
    assert first["fixed"].tolist() == values[:2].tolist()


def test_nulls_are_none_and_change_nothing_beside_them(tmp_path):
    """A column of numbers has Python's then."""
    values = [1, None, 3]
    table = pa.table(
        {
            "n": pa.array(values, pa.int16()),
            "flag": pa.array([True, None, False]),
            "list": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int16())),
            "when": pa.array([datetime.date(2026, 1, 1), None, None]),
            "fixed": pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.int16(), (2, 1)),
                pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = list(Parquet(tmp_path))
    assert [row["n"] for row in rows] == values
    assert [type(row["n"]) for row in rows] == [int, type(None), int]
    assert [row["flag"] for row in rows] == [True, None, False]
    assert same(rows[0]["list"], torch.tensor([1, 2], dtype=torch.int16))
    assert [rows[1]["list"], rows[2]["list"]] == [None, [3, None]]
    assert [row["when"] for row in rows] == [datetime.date(2026, 1, 1), None, None]
    fixed = [row["fixed"] if row["fixed"] is None else row["fixed"].tolist() for row in rows]
    assert fixed == [[[1], [2]], None, [[3], [4]]]
    (batch,) = Parquet(tmp_path, batch_size=3)
    assert same(batch["n"], [row["n"] for row in rows])
    loader = DataLoader(Parquet(tmp_path, ["n"]), batch_size=3)
    with pytest.raises(RuntimeError, match="NoneType") as caught:
        list(loader)
    assert "sample 1 of it is unlike most: sample['n'] is NoneType" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_what_torchs_gives_for_the_rows(kinds, num_workers):
    """In another order, too, and with a collate function of the user's; also from processes."""
    names = [name for name in ("n", *KINDS) if name not in ("words", "image")]
    options = {"batch_size": 4, "num_workers": num_workers}
    options |= {"isolation": "process"} if num_workers else {}
    source = Parquet(kinds, names)
    rows = list(source)
    for function in (None, list):
        ours = list(DataLoader(source, collate_fn=function, **options))
        theirs = list(TorchLoader(rows, batch_size=4, collate_fn=function))
        assert len(ours) == len(theirs)
        assert all(map(same, ours, theirs))
    assert sorted(numbers_in(DataLoader(source, shuffle=True, **options))) == ALL[:14]
    assert all(map(same, TorchLoader(source, batch_size=4), TorchLoader(rows, batch_size=4)))


def test_it_is_mixed_packed_cached_and_ordered_by_position(folder, kinds):
    """As any other source and map-style dataset; and loaded on threads, as it says that it may."""
    tokens = Parquet(kinds, ["tokens"])
    source = Parquet(folder, ["n"])
    assert placement_of(DataLoader(source, num_workers=1)).num_processes == 0
    both = mix({"a": source, "b": source}, stop="all")
    assert sorted({*numbers_in(both.iterate())}) == ALL
    kept = cached(source, version="1")
    assert numbers_in(kept[place] for place in range(len(kept))) == ALL
    order = ListSource(source).shuffle(3)
    assert sorted(numbers_in(order)) == ALL
    packs = pack(tokens, 10, size_of=lambda row: len(row["tokens"]), shuffle=False)
    assert sum(len(each["tokens"]) for each in packs) == 2 * 14


def test_files_are_found_by_folder_glob_name_and_url(folder, tmp_path, memory):
    """In the order given; those of a folder and a glob by name."""
    for path in folder.iterdir():
        memory.pipe(f"/rows/{path.name}", path.read_bytes())
    (tmp_path / "b.pq").write_bytes((folder / "2.parquet").read_bytes())
    (tmp_path / "README.md").write_text("not one")
    for files in (folder, folder / "*.parquet", "memory://rows", "memory://rows/*.parquet"):
        assert numbers_in(Parquet(files)) == ALL
    source = Parquet("memory://rows/3.parquet")
    assert numbers_in(source) == ALL[10:22]
    assert source[5]["n"] == 15
    assert numbers_in(Parquet([folder / "3.parquet", tmp_path])) == [*ALL[10:22], *ALL[7:10]]


def test_errors_say_what_to_do(folder, tmp_path):
    """Where a file, a column or a position is not there, or several types are one column."""
    other, damaged, rows = tmp_path / "1.parquet", tmp_path / "2.parquet", Parquet(folder)
    pq.write_table(pa.table({"n": pa.array(["a"])}), other)
    damaged.write_bytes(b"PAR1 this is none PAR1")
    (tmp_path / "empty").mkdir()
    for call, error, message in (
        (lambda: Parquet(tmp_path / "empty"), FileNotFoundError, "Parquet: no file"),
        (lambda: Parquet(tmp_path / "none.parquet"), FileNotFoundError, r"none\.parquet"),
        (lambda: Parquet(folder, ["y"]), ValueError, r"0\.parquet has no column 'y', it has 'n', "),
        (lambda: Parquet(folder, batch_size=0), ValueError, "batch_size must be >= 1 or None"),
        (lambda: rows[23], IndexError, "below 23, got 23"),
        (lambda: rows.shuffle()[0], TypeError, r"before shuffle\(\)"),
        (lambda: Parquet([folder, other], ["n"]), ValueError, "'n' is string in .* and int64 in"),
        (lambda: Parquet(damaged), DecodeError, r"2\.parquet: its footer cannot be read"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_damage_is_an_error_that_names_the_file(tmp_path):
    """Where pyarrow itself reads a file with changed bytes, the values are pyarrow's."""
    path, draw = tmp_path / "a.parquet", random.Random(3)
    pq.write_table(pa.table({"n": range(10), "é": range(10)}), path, row_group_size=3)
    whole, num_found = path.read_bytes(), 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        rows, told = None, "a.parquet"
        try:
            rows = numbers_in(Parquet(path, ["n"]))
        except (DecodeError, ValueError) as error:
            told, num_found = str(error), num_found + 1
        assert "a.parquet" in told
        assert rows is None or rows == pq.read_table(path, columns=["n"])["n"].to_pylist()
    assert num_found > 25
    # Though text is decoded after it was read.
    pq.write_table(pa.table({"s": ["abc", "def"]}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"def", b"\xffef"))
    for read in (list, lambda source: source[1]):
        with pytest.raises(DecodeError, match=r"a\.parquet: row group 0 cannot be read"):
            read(Parquet(path))


def test_pictures_of_hugging_face_are_decoded_as_they_are(tmp_path):
    """From their bytes or, where only that is stored, from their path."""
    path, picture = tmp_path / "a.png", torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
    stored = [{"bytes": path.read_bytes(), "path": "a"}, {"bytes": None, "path": str(path)}]
    pq.write_table(pa.table({"image": stored}), tmp_path / "a.parquet")
    for row in Parquet(tmp_path / "a.parquet"):
        assert torch.equal(decode_image(row["image"]), picture)
    with pytest.raises(TypeError, match="neither bytes nor a path"):
        decode_image({"bytes": None, "path": None})
