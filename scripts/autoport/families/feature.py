"""A feature that keeps a class from being ported: what it is, where it stands, what to write by hand."""

from typing import Literal

import msgspec

Section = Literal[
    "config", "norm", "rope", "attention", "mlp", "moe", "decoder", "backbone", "head", "weights"
]  # of a generated port: config.py, and the sections of model.py


class Feature(msgspec.Struct, frozen=True):
    """One feature of a Hugging Face class.

    Attributes:
        what: In a few words.
        owner: Class of the modeling file that has it.
        text: What to look for in that class; empty for the class itself.
        sections: What is written by hand.
        by_hand: How: the nearest operators and reference models, what needs care under TP.
        when: Expression over config attributes; whether a config switches it on.
        nearest: Reference model to start from, where another than llama3 is nearer.
    """

    what: str
    owner: str
    text: str
    sections: tuple[Section, ...]
    by_hand: str
    when: str = "True"
    nearest: str = ""
