"""The way to the GPU: pinned slabs, a stream of their own, and the hand-over."""
