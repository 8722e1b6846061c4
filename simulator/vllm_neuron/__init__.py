"""The vLLM Neuron plugin's Python API on a CPU, with the rules of Trainium enforced."""

import os

__simulator__ = True


def register() -> str:
    """Entry point of the group ``vllm.platform_plugins``: the platform class, as a dotted path."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return "vllm_neuron.vllm.platform.NeuronPlatform"
