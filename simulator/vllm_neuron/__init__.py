"""The vLLM Neuron plugin's Python API on a CPU, with the rules of Trainium enforced."""

__simulator__ = True


def register() -> str:
    """Entry point of the group ``vllm.platform_plugins``: the platform class, as a dotted path."""
    return "vllm_neuron.vllm.platform.NeuronPlatform"
