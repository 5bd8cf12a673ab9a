"""The engine: stages of worker threads joined by bounded queues. It knows nothing of torch.

What users define is a ``definition``; ``run`` is one run of it: it creates source and stages
(``stage``), and owns their ``threads``. They wait for each other at a ``channel`` and nowhere else.
``stats``, ``hooks`` and the ``recorder`` show what they do. A loader uses threads, channels and
statistics without a pipeline.

From the ground up: ``definition``, ``failures``, ``threads``, ``stats``, ``channel``, ``recorder``,
``hooks``, ``stage``, ``run``; each uses only those before it.
"""
