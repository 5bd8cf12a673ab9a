"""Random numbers while loading: a stream for each sample; the trainer's generators are untouched.

keys: the seed of an epoch and a position, and those of a batch. streams: the generators of one
thread, seeded anew at the first draw of each sample; thread_generators: these, and whether torch's
own stands in for one. dispatch, patches: redirect user code that draws from the process's
generators to those. owned: generators that a dataset or a transform keeps itself.
"""
