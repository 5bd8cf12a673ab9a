"""``python examples/bench TABLE``: loaders side by side, one table at a time.

``command`` starts a process for every measurement (``child_process`` starts and watches it), in
which ``child`` has a table's ``measure`` run one contender; ``report`` makes of the values a table
for people and JSON. ``tables`` lists the tables, a module each, whose peers are imported by what
runs them; ``loaders`` holds the peers' loaders over one dataset.
"""
