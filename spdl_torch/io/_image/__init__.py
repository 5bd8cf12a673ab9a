"""Images: from bytes to batches of pixels."""
