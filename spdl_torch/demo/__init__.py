"""``python -m spdl_torch demo``: load and train with torch's DataLoader and with ours, compare.

::

    command ─▶ child ─▶ photographs, or a run: load, train both networks
       ▲         └─ progress and result (JSON lines), memory of the process tree
       └─ outcome ─▶ text (table, verdict)

Every run has a process of its own, so that its memory, its CPU time and its first batch are its
own. The parent needs no torch, so these modules do not import it at the top: ``__main__``,
``command``, ``jobs``, ``outcome``, ``table``, ``text``, ``verdict``.
"""
