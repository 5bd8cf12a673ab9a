"""Random numbers while loading: a stream for each sample; the trainer's generators are untouched.

keys: the seed of an epoch and a position. streams: the generators of one thread, seeded anew at the
first draw of each sample; batch_seeds: their seeds; default_generator: whether they draw from
torch's own instead. dispatch, patches: redirect user code that draws from the process's
generators to those. owned: generators that a dataset or a transform keeps itself.
"""
