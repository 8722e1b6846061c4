"""Imported once by the server that ranks are forked from: everything that is slow to import."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import transformers
import vllm.config
import vllm.distributed.parallel_state

torch.set_num_threads(1)

__all__ = ["torch", "transformers", "vllm"]
