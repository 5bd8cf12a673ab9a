"""One run of a pipeline: makes the queues and stages, owns their threads, starts and stops them."""
