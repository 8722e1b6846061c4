"""What the simulator has beyond the plugin: set-up, model overlay, device rules, and a harness."""

from vllm_neuron.simulator.process import activate_engine, environment

__all__ = ["activate_engine", "environment"]
