"""Names of SPDL that do not exist, and what to use instead."""

from __future__ import annotations


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    """Return what is said by name, from the names of which each is said."""
    return {name: said for said, names in names_of.items() for name in names.split()}


_AUDIO = (
    "Sound comes as a tensor, by load_audio alone; its packets, frames and filters are left out."
)
_NVDEC = (
    "NVDEC is left out: torchcodec.decoders.VideoDecoder(path, device='cuda') decodes there; "
    "load_video and load_clip decode on the CPU and send the frames with device_config=."
)
_NVJPEG = (
    "Use torchcodec.decoders.decode_jpeg(list of bytes as tensors, device='cuda'), or "
    "load_image_batch(device_config=), which decodes on the CPU."
)
_NV12 = "NVDEC is left out, and so are its colours: ask a filter for pix_fmt='rgb24'."
_STREAM = "Decoding in pieces is left out: take windows, demux_video(src, timestamp=(start, end))."
_DEMUX = "A file's content tells its format: open a rarer one yourself, and pass the file object."
_D2H = "Use tensor.cpu(), or tensor.to('cpu', non_blocking=True) and an event."

_IO = {
    _AUDIO: "AudioCodec AudioDecoder AudioFrames AudioPackets demux_audio get_abuffer_desc "
    "get_audio_filter_desc WAVHeader load_wav parse_wav",
    "Writing is left out: save images with Pillow, and videos with PyAV.": "AudioEncodeConfig "
    "AudioEncoder Muxer VideoEncodeConfig VideoEncoder audio_encode_config video_encode_config "
    "create_reference_audio_frame create_reference_video_frame encode_image save_image",
    _NVDEC: "NvDecDecoder decode_packets_nvdec nvdec_decoder streaming_load_video_nvdec",
    _NVJPEG: "decode_image_nvjpeg load_image_batch_nvjpeg",
    _NV12: "nv12_to_bgr nv12_to_rgb",
    _STREAM: "Decoder Demuxer VideoDecoder",
    "Filters run inside of decode_packets: pass filter_desc=.": "FilterGraph get_buffer_desc",
    "Run PyAV's BitStreamFilterContext over the packets.": "BSF apply_bsf",
    _DEMUX: "DemuxConfig demux_config",
    "Use torch.from_numpy(array).": "convert_array",
    "Use jax.numpy.asarray(tensor.numpy()).": "to_jax",
    "Use numba.cuda.as_cuda_array(tensor).": "to_numba",
    "Use tensor.cpu().": "transfer_buffer_cpu",
    _D2H: "transfer_tensor_d2h",
}

_REGION = "Use run_pipeline_in_subprocess, or executor= of one stage."
_INTERPRETER = (
    "torch cannot be imported in a subinterpreter: use run_pipeline_in_subprocess or "
    "iterate_in_subprocess."
)
_SHARED_MEMORY = "Tensors and arrays always come from a child process through shared memory."
_PROFILE = "Use report(), which judges the real run; PerfParams.auto() finds the concurrency."
_CONFIG = "Pass the classes to build(), and set the level of the logger spdl_torch.pipeline."
_LINE = "A pipeline is a line of stages: let an op choose by itself."
_SOURCES = "Let a generator op iterate over them: add_source([a, b]).pipe(items_of, concurrency=2)."
_PROFILING = "ProfileHook ProfileResult profile_pipeline"

_PIPELINE = {
    "Use StatsQueue, or build(stats=False).": "AsyncQueue",
    "Start a thread or an event loop of your own.": "BackgroundTask BackgroundTaskFactory",
    "Every stage has threads of its own, which need no priorities.": "PriorityExecutorEntrypoint "
    "PriorityInterpreterPoolExecutor PriorityProcessPoolExecutor PriorityThreadPoolExecutor",
    "Use the probes of report().": "ProcessGroupResourceUsage ProcessGroupStatsMonitor",
    _SHARED_MEMORY: "SharedMemoryRingBuffer SharedMemorySegmentPool",
    "Use asyncio.create_task.": "create_task",
    _PROFILE: _PROFILING,
    _SOURCES: "is_eof is_epoch_end",
    _INTERPRETER: "iterate_in_subinterpreter run_pipeline_in_subinterpreter",
    _CONFIG: "config",
}

_KIND = "Every stage is a PipeConfig, whose kind and name say what it does."
_LOADER = "Use spdl_torch.DataLoader, which takes what torch's DataLoader takes."

# By room: what SPDL has there and is left out, each with what a user who had it does now.
_ROOMS = {
    "spdl_torch.io": {_DEMUX: "DemuxConfig demux_config", _NVJPEG: "load_image_batch_nvjpeg"},
    "spdl_torch.spdl.io": _IO,
    "spdl_torch.spdl.pipeline": _PIPELINE,
    "spdl_torch.spdl.pipeline.defs": {
        _REGION: "ExecutorConfig MAIN_PROCESS PlacementConfig InterpreterPoolExecutorConfig "
        "ProcessPoolExecutorConfig",
        _KIND: "AggregateConfig DisaggregateConfig",
        _LINE: "PathVariants PathVariantsConfig",
        _SOURCES: "Merge MergeConfig",
    },
    "spdl_torch.spdl.dataloader": {_LOADER: "PyTorchDataLoader get_pytorch_dataloader"},
}
LEFT_OUT = {room: _by_name(names_of) for room, names_of in _ROOMS.items()}
"""By module and name, the last sentence of the error."""
METHODS = {"path_variants": _LINE, "to": _REGION}
"""The same, of methods of SPDL's ``PipelineBuilder``."""
