"""The engine: stages of worker threads joined by bounded queues. It knows nothing of torch.

A pipeline is a line: what users define is a ``definition``, and ``run`` is one run of it: a
``source``, stages (``stage``, ``grouping``, ``async_stage``), which differ in how they are
``passing`` results on, their ``threads`` and, for all that is asynchronous, one ``loop``. They wait
for each other at a ``channel`` and nowhere else. ``counters``, ``statistics``, ``hooks``,
``stage_hooks`` and the ``recorder`` show what they do. A loader uses threads, channels and
statistics without a pipeline.
"""
