"""Port Hugging Face decoder models to the vLLM Neuron backend."""

__version__ = "0.1.0"
