"""Values of config attributes as the config class would have them, for expressions over them."""

from collections.abc import Mapping
from typing import Any

from autoport import expressions
from autoport.research.config_class import class_attributes
from autoport.research.config_defaults import config_defaults
from autoport.schema.facts import Fact


class UnknownAttribute(LookupError):
    """Neither config.json nor the config class has the attribute."""


class ConfigValues:
    """Looks attributes up: as the config class computes them, else in config.json, else its default."""

    def __init__(self, config: Mapping[str, Any], model_type: str):
        self.config = config
        self.model_type = model_type
        self.defaults = config_defaults(model_type)
        self.attributes = class_attributes(model_type, config).facts
        renamed = self.defaults.get("attribute_map")
        self.renamed: Mapping[str, str] = renamed.value if renamed else {}

    def attribute(self, name: str) -> Fact:
        """The attribute's value with its source.

        Raises:
            UnknownAttribute: There is no such attribute.
        """
        name = self.renamed.get(name, name)
        if name in self.attributes:
            return self.attributes[name]
        if name in self.config:
            return Fact(self.config[name], f"config.json: {name}")
        if name in self.defaults:
            return self.defaults[name]
        raise UnknownAttribute(name)

    def compute(self, expression: str) -> Fact:
        """An expression's value; the source of a single attribute is that of the attribute.

        Raises:
            UnknownAttribute: It reads an attribute that does not exist.
            ValueError: It cannot be computed.
        """
        facts = {name: self.attribute(name) for name in expressions.names(expression)}
        value = expressions.evaluate(expression, {name: fact.value for name, fact in facts.items()})
        if expression in facts:
            return facts[expression]
        read = "; ".join(f"{name}: {fact.source}" for name, fact in facts.items())
        return Fact(
            value, f"derived: {expression} ({read or f'a constant in the code of {self.model_type}'})"
        )
