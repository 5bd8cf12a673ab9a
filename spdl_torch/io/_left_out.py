"""The parts of ``spdl.io`` that this package leaves out on purpose, and what to use instead."""

from __future__ import annotations

_AUDIO = (
    "Sound comes as a tensor, by load_audio alone; its packets, frames and filters are left out."
)
_ENCODING = "Writing is left out: save images with Pillow, and videos with PyAV."
_NVDEC = (
    "NVDEC is left out as a class: load_video and load_clip decode on the GPU with "
    "decoder='torchcodec' and device_config=; without decoder= on the CPU, and send the frames."
)
_NVJPEG = "Use load_image_batch_nvjpeg."
_NV12 = "NVDEC is left out, and so are its colours: ask a filter for pix_fmt='rgb24'."
_STREAM = "Decoding in pieces is left out: take windows, demux_video(src, timestamp=(start, end))."
_GRAPH = "Filters run inside of decode_packets: pass filter_desc=."

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("AudioCodec", "AudioDecoder", "AudioFrames", "AudioPackets"), _AUDIO),
    **dict.fromkeys(("demux_audio", "get_abuffer_desc", "get_audio_filter_desc"), _AUDIO),
    **dict.fromkeys(("WAVHeader", "load_wav", "parse_wav"), _AUDIO),
    **dict.fromkeys(("AudioEncodeConfig", "AudioEncoder", "Muxer", "VideoEncodeConfig"), _ENCODING),
    **dict.fromkeys(("VideoEncoder", "audio_encode_config", "video_encode_config"), _ENCODING),
    **dict.fromkeys(("create_reference_audio_frame", "create_reference_video_frame"), _ENCODING),
    **dict.fromkeys(("encode_image", "save_image"), _ENCODING),
    **dict.fromkeys(("NvDecDecoder", "decode_packets_nvdec", "nvdec_decoder"), _NVDEC),
    "streaming_load_video_nvdec": _NVDEC,
    "decode_image_nvjpeg": _NVJPEG,
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
"""The last sentence of the AttributeError for each name."""
