"""Workers in child processes: each has its own memory and GIL, as torch's workers have, with our
order and random streams.

Trainer                                         child, one for each worker
    processes ── jobs, freed shared memory ────▶ the main thread reads its jobs and sends its
        │                                        │ batches (child)
        │ ◀──── what it does and has counted: page, in memory that both have
    hearing ◀──────── where a batch lies ────────┘
        │ unpacks: tensors that view the shared memory
        ▼
    the loop or, with pin_memory= or device=, the stage's thread, which reads then

wire: the socket, on both sides, and everything that is sent. worker_process, process: a child from
its start to its end; hearing: their results in order. shared_memory: where batches are packed, and
collated. pickling, error_pickle: batches, loaders and exceptions in transit. signals: which process
handles them.
"""
