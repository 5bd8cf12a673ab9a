"""Random numbers while loading: a stream for each sample; the trainer's generators are untouched.

keys: the seed of an epoch and a position, those of a batch, and the generators of one thread.
streams: these, seeded anew at the first draw of each sample, and whether torch's own stands in.
dispatch, patches: redirect user code that draws from the process's generators to those. owned:
generators that a dataset or a transform keeps itself.
"""
