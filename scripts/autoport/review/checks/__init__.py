"""The checks that decide the rules; importing this package registers all of them."""

from autoport.review.checks import (
    biases,
    collectives,
    configuration,
    construction,
    experts,
    forward,
    interface,
    naming,
    norms,
    places,
    registry,
    shared,
    weights,
)

__all__ = [
    "biases",
    "collectives",
    "configuration",
    "construction",
    "experts",
    "forward",
    "interface",
    "naming",
    "norms",
    "places",
    "registry",
    "shared",
    "weights",
]
