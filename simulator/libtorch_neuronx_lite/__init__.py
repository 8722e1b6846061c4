"""The parts of the Neuron runtime library that the plugin asks about the platform."""
