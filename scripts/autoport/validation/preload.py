"""Imported once by the server that ranks are forked from: everything that is slow to import."""

import os
import sys

from autoport.resources import simulator_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(simulator_dir()))

import torch
import transformers.models.auto
import vllm.v1.executor
import vllm_neuron.simulator.harness

torch.set_num_threads(1)

__all__ = ["torch", "transformers", "vllm", "vllm_neuron"]
