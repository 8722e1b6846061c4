"""The names of the Neuron kernel library that ports import; no kernel is here."""
