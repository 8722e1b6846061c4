#!/usr/bin/env python3
"""Show which tensor-parallel sizes a model can have; the same as `autoport compute-tp`."""

from entry_point import run

if __name__ == "__main__":
    run("compute-tp")
