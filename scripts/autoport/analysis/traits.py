"""What a family's expressions say of one model: each trait's value with its source."""

from typing import Any

from autoport.errors import Problem
from autoport.families.family import Family
from autoport.research.aliases import ALIASES
from autoport.research.fields import describe
from autoport.research.readings import reading
from autoport.research.values import ConfigValues, UnknownAttribute
from autoport.schema.facts import Fact, Facts


class Traits:
    """Evaluates a family's expressions on a model's config, and collects what is wrong.

    Attributes:
        problems: Attributes that are missing, and values that cannot be computed.
    """

    def __init__(self, family: Family, facts: Facts):
        self.family = family
        self.facts = facts
        self.values = ConfigValues(facts.config, facts.model_type.value)
        self.problems: list[Problem] = []

    def fact(self, expression: str) -> Fact:
        """Value of an expression; None with a problem when it has none."""
        try:
            return self.values.compute(expression)
        except UnknownAttribute as error:
            found = f"{error} has no value: neither config.json nor the config class gives it"
            self._problem("CFG-MISSING", found, f"add {error} to config.json")
        except ValueError as error:
            self._problem("CFG-TYPE", str(error), "correct it in config.json")
        return Fact(None, f"derived: {expression}")

    def value(self, expression: str) -> Any:
        """Value of an expression; None for an empty one."""
        return self.fact(expression).value if expression else None

    def number(self, expression: str, neutral: float | None = None) -> float | None:
        """Value of an expression as a float; None for no value and for the neutral one."""
        value = self.value(expression)
        if value is None or value is False or value == neutral:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._problem(
                "CFG-TYPE", f"{expression} is {describe(value)}, not a number", "correct config.json"
            )
            return None
        return float(value)

    def per_layer(self, expression: str) -> list[Any]:
        """A list with an entry for each layer, or an empty one when the expression is empty."""
        if not expression:
            return []
        fact = self.fact(expression)
        count = self.facts.fields["num_layers"].value
        if not isinstance(fact.value, list) or len(fact.value) != count:
            if fact.value is not None:
                found = f"{describe(fact.value)} is no list of {count} layers ({fact.source})"
                self._problem("CFG-LAYERS", found, "correct it in config.json")
            return []
        return fact.value

    def attribute(self, field: str) -> str:
        """Expression by which the port reads a field of `Facts` from the Hugging Face config."""
        computed = reading(self.facts.model_type.value, field)
        if computed is not None:
            return computed
        aliases = ALIASES[field]
        declared = [name for name in aliases if name in self.values.defaults]
        given = [name for name in aliases if name in self.facts.config]
        return (declared or given or list(aliases))[0]

    def _problem(self, rule: str, found: str, next_step: str) -> None:
        self.problems.append(Problem(rule, found, self.facts.config_file, next_step))
