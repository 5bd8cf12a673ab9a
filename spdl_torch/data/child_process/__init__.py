"""Workers in child processes: each has its own memory and GIL, as torch's workers have, with our
order and random streams.

Trainer                                         child, one for each worker
    ProcessSeats ─ jobs, freed shared memory ──▶ the main thread reads its jobs and sends its
    a receiver for each child                    │ batches (job_wire); a second thread answers
        │                                        │ questions
        │ ◀────── where a batch lies ────────────┘
        │ unpacks: tensors that view the shared memory
        ▼
    the epoch's outlet ─▶ trainer, or the device stage as usual

worker_process: one child and its jobs, on the trainer's side. uplink: a child's way to the trainer.
batch_packing: batches in shared_memory, collated there; mappings: the trainer's side of it.
messages: everything that is sent.
dataset_pickle, error_pickle: loaders and exceptions in transit. start_methods, process,
connection, line: a child from its start to its end. signals: which process handles them.
"""
