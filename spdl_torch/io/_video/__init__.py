"""Video: packets, frames and clips, by PyAV."""
