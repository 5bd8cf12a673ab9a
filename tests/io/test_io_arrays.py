"""Arrays and archives of them: what numpy wrote is read, without a copy where that can be."""

import gc
import io
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from support.arrays import SMOOTH, both_codecs, codec, saved
from support.gates import switching

from spdl_torch.io import NpzFile, load_npy, load_npz

__all__ = ["codec"]

PIXELS = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
NPY = saved(np.save, PIXELS)
STORED = saved(np.savez, pixels=PIXELS, smooth=SMOOTH)
DEFLATED = saved(np.savez_compressed, pixels=PIXELS, smooth=SMOOTH)

# numpy warns when a name of a field makes it choose one.
newer_versions = pytest.mark.filterwarnings("ignore:Stored array in format")


def scalar_dtypes():
    """Dtypes without fields, of either byte order."""
    kinds = (
        *(hnp.integer_dtypes, hnp.unsigned_integer_dtypes, hnp.floating_dtypes),
        *(hnp.complex_number_dtypes, hnp.datetime64_dtypes, hnp.timedelta64_dtypes),
        hnp.unicode_string_dtypes,
    )
    both = [kind(endianness=order) for kind in kinds for order in "<>"]
    return st.one_of(*both, hnp.boolean_dtypes(), hnp.byte_string_dtypes(), st.just(np.dtype("V3")))


def arrays():
    """Every dtype that the format has without a pickle, 0 to 4 dimensions, both orders."""
    dtypes = scalar_dtypes() | hnp.array_dtypes(scalar_dtypes(), max_size=3, allow_subarrays=True)
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    return st.builds(filled, dtypes, shapes, st.sampled_from("CF"), st.integers(0, 9))


def filled(dtype, shape, order, seed):
    array = np.empty(shape, dtype, order)
    if array.nbytes:
        content = np.random.default_rng(seed).bytes(array.nbytes)
        array = np.ndarray(shape, dtype, content, order=order)
    return array


def assert_same(array, expected):
    """The same in all that numpy keeps."""
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.flags.f_contiguous == expected.flags.f_contiguous
    assert array.tobytes() == expected.tobytes()


@newer_versions
@given(arrays())
def test_load_npy_equals_numpy(array):
    """Any dtype, shape and order comes back as numpy.load gives it, from odd addresses, too."""
    content = saved(np.save, array)
    expected = np.load(io.BytesIO(content), allow_pickle=False)
    assert_same(load_npy(content), expected)
    assert_same(load_npy(memoryview(bytearray(content))), expected)
    assert_same(load_npy(content + b"as numpy allows"), expected)
    assert_same(load_npy(memoryview(b"x" + content)[1:]), expected)


@newer_versions
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_load_npy_when_the_header_is_anothers(version):
    """All three versions of the format are read, names that need UTF-8 too; and a header without
    numpy's padding, as other programs write it, is read right twice."""
    name = "größe" if version == (3, 0) else "size"
    array = np.zeros(4, [(name, "<f4"), ("n", ">i2")])
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version)
    assert_same(load_npy(buffer.getvalue()), array)
    text = b"{'shape':(2,),'descr':'<i2','fortran_order':False}"
    for values in ([1, 2], [3, 4]):
        data = np.array(values, "<i2").tobytes()
        content = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + data
        assert load_npy(content).tolist() == values


@newer_versions
@both_codecs
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # one codec for all inputs
@given(st.dictionaries(st.from_regex(r"\w[\w./ ]{0,8}", fullmatch=True), arrays(), max_size=4))
def test_load_npz_equals_numpy(named):
    """Archives, stored and deflated, hold what numpy.load finds in them, under the same names."""
    named = {name: array for name, array in named.items() if ".." not in name and name != "file"}
    for save in (np.savez, np.savez_compressed):
        content = saved(save, **named)
        archive, expected = load_npz(content, verify=True), np.load(io.BytesIO(content))
        assert archive.files == expected.files
        unaligned = load_npz(memoryview(b"x" + content)[1:])
        for name in expected.files:
            assert_same(archive[name], expected[name])
            assert_same(unaligned[name], expected[name])


def test_load_npz_is_a_mapping():
    """Names work with and without suffix, in the archive's order, and ``with`` as numpy's does."""
    with load_npz(STORED) as archive:
        assert isinstance(archive, NpzFile)
        assert list(archive) == archive.files == list(archive.keys()) == ["pixels", "smooth"]
        assert len(archive) == 2
        assert [each in archive for each in ("pixels", "pixels.npy", "other", 3)] == [1, 1, 0, 0]
        assert archive.get(3) is None
        assert np.array_equal(archive["pixels.npy"], PIXELS)
        assert [array.shape for _, array in archive.items()] == [PIXELS.shape, SMOOTH.shape]
        with pytest.raises(KeyError, match=r"'other' is not in <bytes>, only \['pixels', 'smooth'"):
            archive["other"]
    assert dict(load_npz(saved(np.savez))) == {}


@pytest.mark.parametrize("load", [load_npy, lambda m: load_npz(m)["pixels"]])
def test_load_is_a_view_when_it_can_be(load, tmp_path):
    """Arrays share the source's memory and whether it may be written, and keep it alive: it can be
    neither resized nor closed under them."""
    content = NPY if load is load_npy else STORED
    writable = bytearray(content)
    view = load(writable)
    view[0, 0, 0] = 77
    assert writable != content
    assert load(writable)[0, 0, 0] == 77
    with pytest.raises(BufferError, match="cannot be re-sized"):
        writable.extend(bytes(100_000))
    del writable
    view[0, 0, 0] = PIXELS[0, 0, 0]
    assert np.array_equal(view, PIXELS)

    read_only = load(content)
    assert not read_only.flags.writeable
    assert np.shares_memory(read_only, np.frombuffer(content, np.uint8))

    (path := tmp_path / "array").write_bytes(content)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = load(mapped)
    assert not view.flags.writeable
    with pytest.raises(BufferError, match="cannot close exported pointers"):
        mapped.close()
    del mapped
    assert np.array_equal(view, PIXELS)


def test_load_from_files_and_urls(tmp_path, pool):
    """Paths, open files and URLs do as well as memory; arrays of a path are writable. A pipe, which
    does not report its size, is read to its end."""
    for content, load in ((NPY, load_npy), (STORED, lambda source: load_npz(source)["pixels"])):
        (path := tmp_path / "a.bin").write_bytes(content)
        with open(path, "rb") as file:
            from_file = load(file)
        for array in (load(path), load(str(path)), load(path.as_uri()), from_file):
            assert np.array_equal(array, PIXELS)
        assert load(path).flags.writeable
        assert np.array_equal(load(io.BytesIO(content)), PIXELS)
    if hasattr(os, "mkfifo"):
        os.mkfifo(pipe := tmp_path / "pipe")
        written = pool.submit(pipe.write_bytes, NPY)
        assert np.array_equal(load_npy(pipe), PIXELS)
        assert written.result() == len(NPY)


@both_codecs
def test_deflated_arrays_are_their_readers_own():
    """Several threads may use one archive at once, and torch takes an array without a warning."""
    archive = load_npz(DEFLATED)
    with ThreadPoolExecutor(4) as executor:
        for array in executor.map(archive.__getitem__, ["smooth"] * 50):
            assert np.array_equal(array, SMOOTH)
            torch.from_numpy(array).zero_()
            assert not array.any()


def test_headers_are_read_whatever_other_threads_parse():
    """Some Pythons count the depth of all threads' parsing together, and fail where they differ."""
    arrays = [np.zeros((number + 1, *[1] * 20), np.uint8) for number in range(500)]
    files, threshold = [saved(np.save, array) for array in arrays], gc.get_threshold()
    # Python code that runs in each of many collections: another thread may take over there.
    gc.callbacks.append(run := lambda phase, info: sum(range(50)))
    gc.set_threshold(1)
    try:
        with switching(1e-6), ThreadPoolExecutor(4) as threads:
            shapes = [array.shape for array in threads.map(load_npy, files)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(run)
    assert shapes == [array.shape for array in arrays]
