"""``python -m spdl_torch demo``: train resnet18 with torch's DataLoader and with ours, compare.

::

    command ─▶ children ─▶ child ─▶ photographs, or training with one of the loaders
       ▲            └─ progress and result (JSON lines), memory of the process tree
       └─ table, verdict

Every run has a process of its own, so that its memory, its CPU time and its first batch are its
own. The parent needs no torch, so these files import none at their top: ``__main__``, ``command``,
``children``, ``jobs``, ``machine``, ``memory``, ``meter``, ``table``, ``verdict``.
"""
