"""Random numbers while loading: a stream for each sample, and the trainer's left alone.

keys: from an epoch and a position follows a seed. streams: the generators of one thread, seeded
anew at the first draw of each sample. dispatch, patches: how user code that draws from the
process's generators reaches them. owned: generators that a dataset or a transform keeps itself.
"""
