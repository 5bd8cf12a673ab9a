"""The parts that ``demo`` and ``bench`` share: child processes, the machine, memory, photographs.

::

    demo, bench ─▶ child_process ─▶ the measuring process, which ends by its lifeline
         ▲              └─ answers and progress, as JSON lines from its reporter
         └─ progress_bar, machine (cores, other programs), memory (of a process tree)

Nothing here imports torch, nor knows which command it serves.
"""
