"""``isolation="process"``: the workers of a loader as threads of one child process.

Trainer                                        child
    pool.ProcessPool ── jobs, slabs set free ──▶ child: main thread ─▶ WorkerPool, N threads
    (WorkerPool's surface)                                                 │ packing into a slab
    line: receiver ◀── where a batch lies ────── child: sender ◀───────────┘
        │ unpacking: tensors that view the slab
        ▼
    results ─▶ trainer, or the device stage as ever

messages: what passes. parcel: the loader's way there. portable: exceptions. start: by which method.
process: a child from its start to its end. signals: whose business they are.
"""
