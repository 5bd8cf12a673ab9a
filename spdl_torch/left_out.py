"""Names that do not exist, and what to use instead: of SPDL's, and of ours that went."""

from __future__ import annotations

_AUDIO = (
    "Sound comes as a tensor, by load_audio alone; its packets, frames and filters are left out."
)
_ENCODING = "Writing is left out: save images with Pillow, and videos with PyAV."
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
_GRAPH = "Filters run inside of decode_packets: pass filter_desc=."

_IO = {
    **dict.fromkeys(("AudioCodec", "AudioDecoder", "AudioFrames", "AudioPackets"), _AUDIO),
    **dict.fromkeys(("demux_audio", "get_abuffer_desc", "get_audio_filter_desc"), _AUDIO),
    **dict.fromkeys(("WAVHeader", "load_wav", "parse_wav"), _AUDIO),
    **dict.fromkeys(("AudioEncodeConfig", "AudioEncoder", "Muxer", "VideoEncodeConfig"), _ENCODING),
    **dict.fromkeys(("VideoEncoder", "audio_encode_config", "video_encode_config"), _ENCODING),
    **dict.fromkeys(("create_reference_audio_frame", "create_reference_video_frame"), _ENCODING),
    **dict.fromkeys(("encode_image", "save_image"), _ENCODING),
    **dict.fromkeys(("NvDecDecoder", "decode_packets_nvdec", "nvdec_decoder"), _NVDEC),
    "streaming_load_video_nvdec": _NVDEC,
    **dict.fromkeys(("decode_image_nvjpeg", "load_image_batch_nvjpeg"), _NVJPEG),
    **dict.fromkeys(("nv12_to_bgr", "nv12_to_rgb"), _NV12),
    **dict.fromkeys(("Decoder", "Demuxer", "VideoDecoder"), _STREAM),
    **dict.fromkeys(("FilterGraph", "get_buffer_desc"), _GRAPH),
    **dict.fromkeys(("BSF", "apply_bsf"), "Bitstream filters run in demux_video: pass bsf=."),
    "convert_array": "Use torch.from_numpy(array).",
    "to_jax": "Use jax.numpy.asarray(tensor.numpy()).",
    "to_numba": "Use numba.cuda.as_cuda_array(tensor).",
    "transfer_buffer_cpu": "Use tensor.cpu().",
    "transfer_tensor_d2h": "Use tensor.cpu(), or tensor.to('cpu', non_blocking=True) and an event.",
}

_PRIORITY = "Every stage has threads of its own, which need no priorities."
_REGION = "Use run_pipeline_in_subprocess, or executor= of one stage."
_INTERPRETER = (
    "torch cannot be imported in a subinterpreter: use run_pipeline_in_subprocess or "
    "iterate_in_subprocess."
)
_SHARED_MEMORY = "Tensors and arrays always come from a child process through shared memory."
_BACKGROUND = "Start a thread or an event loop of your own."
_PROBES = "Use the probes of report()."
_PROFILE = "Use report(), which judges the real run; PerfParams.auto() finds the concurrency."

_LINE = "A pipeline is a line of stages: let an op choose by itself."
_SOURCES = "Let a generator op iterate over them: add_source([a, b]).pipe(items_of, concurrency=2)."
_GRAPHS = {"PathVariants": _LINE, "Merge": _SOURCES}
_MARKS = dict.fromkeys(("is_eof", "is_epoch_end"), _SOURCES)

_PROFILING = dict.fromkeys(("ProfileHook", "ProfileResult", "profile_pipeline"), _PROFILE)

_PIPELINE = {
    "AsyncQueue": "Use StatsQueue, or build(stats=False).",
    **dict.fromkeys(("BackgroundTask", "BackgroundTaskFactory"), _BACKGROUND),
    **dict.fromkeys(("PriorityExecutorEntrypoint", "PriorityInterpreterPoolExecutor"), _PRIORITY),
    **dict.fromkeys(("PriorityProcessPoolExecutor", "PriorityThreadPoolExecutor"), _PRIORITY),
    **dict.fromkeys(("ProcessGroupResourceUsage", "ProcessGroupStatsMonitor"), _PROBES),
    **dict.fromkeys(("SharedMemoryRingBuffer", "SharedMemorySegmentPool"), _SHARED_MEMORY),
    "create_task": "Use asyncio.create_task.",
    **_PROFILING,
    **_MARKS,
    "iterate_in_subinterpreter": _INTERPRETER,
    "run_pipeline_in_subinterpreter": _INTERPRETER,
    "config": "Pass the classes to build(), and set the level of the logger spdl_torch.pipeline.",
}

_KIND = "Every stage is a PipeConfig, whose kind and name say what it does."

_LOADER = "Use spdl_torch.DataLoader, which takes what torch's DataLoader takes."

# What went, by room, each with what a user who had it does now. The changelog's "Removed" says the
# same of options and behaviour, which have no name to ask for.
_WENT: dict[str, dict[str, str]] = {
    "spdl_torch.data": {
        "MixedIterable": "Use PipelineDataset(PipelineBuilder().add_source(mix(...)).add_sink()).",
    },
    "spdl_torch.io": {
        "Codec": "Leave codec= out: what is there decodes, with the same pixels.",
        "load_image_batch_nvjpeg": _NVJPEG,
    },
    "spdl_torch.observe": {
        **dict.fromkeys(
            ("TraceSummary", "check_trace"), "Perfetto says itself what of a trace it drops."
        ),
        "showing": "Use display(loader.report(), display_id=True), and its update().",
    },
    "spdl_torch.pipeline": {**_PROFILING, **_GRAPHS, **_MARKS},
}

LEFT_OUT: dict[str, dict[str, str]] = {
    **_WENT,
    "spdl_torch.spdl.io": _IO,
    "spdl_torch.spdl.pipeline": _PIPELINE,
    "spdl_torch.spdl.pipeline.defs": {
        **dict.fromkeys(("ExecutorConfig", "MAIN_PROCESS", "PlacementConfig"), _REGION),
        **dict.fromkeys(("InterpreterPoolExecutorConfig", "ProcessPoolExecutorConfig"), _REGION),
        **dict.fromkeys(("AggregateConfig", "DisaggregateConfig"), _KIND),
        **_GRAPHS,
        "PathVariantsConfig": _LINE,
        "MergeConfig": _SOURCES,
    },
    "spdl_torch.spdl.dataloader": {"PyTorchDataLoader": _LOADER, "get_pytorch_dataloader": _LOADER},
}
"""By module and name, the last sentence of the error."""

METHODS = {"path_variants": _LINE, "to": _REGION}
"""The same, of methods of SPDL's ``PipelineBuilder``."""
