"""Photographs through the peers that have a decoder or a format of their own."""

from __future__ import annotations

import functools
import io
import itertools
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .images import PIXELS
from .loaders import spdl_batches, spdl_subprocess
from .peers import imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .loaders import Batches, Work


def spdl_decoding(
    work: Work, *, crop: bool, default: bool = False, subprocess: bool = False
) -> Batches:
    """SPDL's own decoder in its pipeline, one batch per task.

    Resizing: ``load_image_batch``, bilinear and not padded, or with its ``default`` filter
    (bicubic, padded). Cropping: a filter for each picture, since a batch has only one filter.
    """
    load = functools.partial(
        _spdl_load, work.dataset.paths, crop=crop, default=default, to_tensor=not subprocess
    )
    if subprocess:  # arrays travel between processes; tensors would need torch's own queues
        torch = imported("torch")
        begin = spdl_subprocess(work, load)
        return lambda: map(torch.from_numpy, begin())
    return spdl_batches(work, load)


def _spdl_load(
    paths: Sequence[str], indices: Sequence[int], *, crop: bool, default: bool, to_tensor: bool
) -> Any:
    io_of_spdl = imported("spdl.io")
    group = [paths[index] for index in indices]
    if crop:
        frames = [_spdl_crop(path) for path in group]
        buffer = io_of_spdl.convert_frames(frames)
    else:
        options: dict[str, Any] = {"width": PIXELS, "height": PIXELS}
        if not default:
            options["filter_desc"] = io_of_spdl.get_video_filter_desc(
                scale_width=PIXELS,
                scale_height=PIXELS,
                scale_algo="bilinear",
                scale_mode=None,
                pix_fmt="rgb24",
            )
        buffer = io_of_spdl.load_image_batch(group, **options)
    return io_of_spdl.to_torch(buffer) if to_tensor else io_of_spdl.to_numpy(buffer)


def _spdl_crop(path: str) -> Any:
    from spdl_torch.io import random_resized_crop

    io_of_spdl = imported("spdl.io")
    packets = io_of_spdl.demux_image(path)
    top, left, height, width, flip = random_resized_crop(packets.height, packets.width)
    description = (
        f"crop={width}:{height}:{left}:{top},scale={PIXELS}:{PIXELS}:flags=bilinear,"
        f"{'hflip,' if flip else ''}format=rgb24"
    )
    return io_of_spdl.decode_packets(packets, filter_desc=description)


def write_shards(paths: Sequence[str], folder: Path, num_shards: int) -> list[str]:
    """Write the photographs as tar files in WebDataset's layout; at least as many shards as
    workers."""
    shards = []
    for number in range(num_shards):
        shard = folder / f"{number:05}.tar"
        with tarfile.open(shard, "w") as archive:
            for index in range(number, len(paths), num_shards):
                content = Path(paths[index]).read_bytes()
                member = tarfile.TarInfo(f"{index:06}.jpg")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        shards.append(str(shard))
    return shards


def webdataset(work: Work, *, shards: Sequence[str], crop: bool) -> Batches:
    """WebDataset in its own loader, decoding with Pillow in forked workers."""
    wds = imported("webdataset")
    per_worker = work.num_samples // work.num_workers
    if per_worker % work.batch_size:
        raise ValueError(
            f"webdataset: the samples must be whole batches for each worker, got "
            f"{work.num_samples} for {work.num_workers} workers."
        )

    def begin() -> Iterator[Any]:
        # A pass may be longer than what the shards hold: repeat them, cut to its length.
        dataset = wds.WebDataset(
            list(shards) * (1 + per_worker), shardshuffle=False, empty_check=False
        )
        decoded = dataset.to_tuple("jpg").map(functools.partial(_from_bytes, crop=crop))
        batched = decoded.batched(work.batch_size, collation_fn=_stacked)
        loader = wds.WebLoader(
            batched.with_epoch(per_worker // work.batch_size),
            batch_size=None,
            num_workers=work.num_workers,
            multiprocessing_context="fork",
        )
        return iter(loader)

    return begin


def _from_bytes(sample: tuple[bytes], *, crop: bool) -> Any:
    from .images import load_pillow

    return load_pillow(io.BytesIO(sample[0]), crop)


def _stacked(samples: Sequence[Any]) -> Any:
    import torch

    return torch.stack(list(samples))


def dali(work: Work, *, crop: bool) -> Batches:
    """DALI's pipeline on the CPU; the crop is fused into its decoder."""
    nvidia_dali, fn = imported("nvidia.dali"), imported("nvidia.dali.fn")
    rgb = imported("nvidia.dali.types").RGB
    generic_iterator = imported("nvidia.dali.plugin.pytorch").DALIGenericIterator
    partial_batch = imported("nvidia.dali.plugin.base_iterator").LastBatchPolicy.PARTIAL

    def graph() -> Any:
        encoded, _ = fn.readers.file(
            files=list(work.dataset.paths), name="reader", dont_use_mmap=False
        )
        if crop:
            images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=rgb)
            images = fn.resize(images, size=(PIXELS, PIXELS), antialias=True)
            return fn.flip(images, horizontal=fn.random.coin_flip())
        images = fn.decoders.image(encoded, device="cpu", output_type=rgb)
        return fn.resize(images, size=(PIXELS, PIXELS), antialias=True)

    def begin() -> Iterator[Any]:
        define = nvidia_dali.pipeline_def(
            batch_size=work.batch_size, num_threads=work.num_workers, device_id=None
        )
        pipeline = define(graph)()
        pipeline.build()
        batches = generic_iterator(
            [pipeline], ["images"], reader_name="reader", last_batch_policy=partial_batch
        )
        return (batch[0]["images"] for batch in itertools.chain(batches))

    return begin
