"""The numbers by which a loader decides whether its workers move, and when."""

from __future__ import annotations

LOOK_SECONDS = 0.6
"""The time between two checks of the threads: the probe of the GIL needs half a second."""
LEAST_WAIT = 0.2
"""The share of the time that the loop has to wait; below it, moving could gain little."""
LEAST_BATCHES = 8
"""The number of batches from which the threads' speed is known."""
TRIAL_SECONDS, TRIAL_BATCHES = 0.5, 8
"""The least length of the children's trial."""
TRIAL_EPOCHS, LONG_TRIAL_SECONDS = 2, 2.0
"""The least number of epochs in a trial that begins with one, unless they take long: in the first
one modules are imported and caches filled."""
LONGEST_START_SECONDS = 5.0
"""The time after which forked children that are not ready are probably waiting for a thread or a
lock that does not exist in them."""
GAIN = 1.1
"""The speedup of the loop from which the children keep the work; the noise of such windows is a
few percent."""
