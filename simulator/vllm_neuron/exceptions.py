"""Exceptions of the plugin."""


class CPUCompilationComplete(Exception):
    """Compilation on a CPU host is done; there is nothing to execute."""
