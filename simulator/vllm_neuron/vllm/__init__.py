"""Plug-ins of the vLLM engine."""
