"""The branches and joins of a pipeline: routers, merges, and forwarding between queues."""
