"""What holds for every test."""

import signal

# A shell that starts the tests in the background, as some build servers do, lets them ignore
# Ctrl-C, and so do the processes that tests start in order to interrupt them. A handler, unlike
# being ignored, is not inherited by a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
