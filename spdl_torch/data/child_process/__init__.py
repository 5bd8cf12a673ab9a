"""``isolation="process"``: the workers of a loader as threads of one child process.

Trainer                                        child
    ProcessPool ── jobs, freed shared memory ──▶ child: main thread ─▶ WorkerPool, N threads
    (a Pool, as WorkerPool is)                                    │ packs into shared memory
    connection: receiver ◀── where a batch lies ── child: sender ◀┘
        │ unpacks: tensors that view the shared memory
        ▼
    results ─▶ trainer, or the device stage as ever

messages: everything that passes. dataset_pickle, error_pickle: loaders and exceptions on their way.
start_methods, process: a child from its start to its end. signals: which process they are for.
"""
