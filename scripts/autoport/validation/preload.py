"""Imported once by the server that ranks are forked from: imports everything that is slow to import."""

import importlib
import logging
import os
import signal
import sys

from autoport.resources import simulator_dir

# Ctrl-C ends the server at once and without a traceback; until here it was blocked (see `ranks.warm_up`).
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)
sys.path.insert(0, str(simulator_dir()))

for module in ("torch", "transformers.models.auto", "vllm.v1.executor", "vllm_neuron.simulator.harness"):
    importlib.import_module(module)
