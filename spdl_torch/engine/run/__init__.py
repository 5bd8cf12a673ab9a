"""One run of a pipeline: creates its queues and stages, starts and stops their threads."""
