"""``python examples/bench TABLE``: loaders side by side, one table at a time.

::

    command ─▶ rounds ─▶ child process ─▶ a table's ``measure`` ─▶ one contender
       ▲           └─ progress and results (JSON lines), memory of the process tree
       └─ report: table, JSON, picture

Every measurement has a process of its own, which ``child_process`` starts and watches.
Modules that the parent needs import neither torch nor a peer at the top level; ``tables`` lists the
tables, one module each, and ``loaders`` holds the peers' loaders over one dataset.
"""
