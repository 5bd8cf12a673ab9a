"""What the commands that measure share: child processes, memory, photographs, videos, quantiles.

::

    command ─▶ child_process ─▶ the measuring process, which ends with the command
       ▲            └─ answers and progress, as JSON lines from its reporter
       └─ memory (of a process tree)

Importing it does not import torch, and it does not know which command it serves.
"""
