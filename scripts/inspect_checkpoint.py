#!/usr/bin/env python3
"""Show what a checkpoint holds; the same as `autoport inspect`."""

from entry_point import run

if __name__ == "__main__":
    run("inspect")
