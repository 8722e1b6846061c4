"""Settings of the whole test session."""

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests that interrupt a child need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
