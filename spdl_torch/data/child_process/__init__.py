"""Workers in child processes: what torch's workers own, a memory and a GIL, with our order and
streams.

Trainer                                         child, one of P
    ProcessPool ── jobs, freed shared memory ──▶ one worker: the main thread reads its jobs and
    (a Pool, as WorkerPool is)                   │ sends its batches (lone_worker); a second thread
    a receiver for each child                    │ answers questions
        │                                        │ several: main thread ─▶ WorkerPool, T threads
        │ ◀────── where a batch lies ────────────┘ ─▶ sender (child)
        │ unpacks: tensors that view the shared memory
        ▼
    results, put in order ─▶ trainer, or the device stage as ever

worker_process: one child and its jobs, on the trainer's side. uplink: a child's way to the trainer.
batch_packing: batches in shared_memory, collated there. messages: everything that passes.
dataset_pickle, error_pickle: loaders and exceptions on their way; shared_blocks: large arrays of
the dataset. start_methods, process, connection: a child from its start to its end. signals: which
process they are for.
"""
