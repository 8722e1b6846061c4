"""What a check is given and what it returns."""

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from autoport.analysis.draft import DraftPlan
from autoport.review.names import Mappings, weight_mappings
from autoport.review.parameters import Parameter, model_parameters
from autoport.review.source import Class, Function, PortSource, SourceFile
from autoport.review.syntax import names_in
from autoport.schema.facts import Checkpoint, Facts
from autoport.schema.plan import Plan
from autoport.workspace import Workspace

Status = Literal["pass", "fail", "judge"]


NO_CONFIG = "the config is not known: no facts.json (autoport research {name} SOURCE writes it)"


class Finding(msgspec.Struct, frozen=True):
    """What a check found at one place; `judge` where only a reader can decide.

    Attributes:
        where: ``path:line`` below the workspace's root.
    """

    status: Status
    where: str
    text: str


class NotApplicable(Exception):
    """The rule is about something that this port does not have; the message says what."""


class NotChecked(Exception):
    """The check needs something that is not there; the message says what."""


class Subject:
    """A port under review.

    Attributes:
        folder: The port's model folder.
        registry: The plugin's registry.py, None when it cannot be parsed.
        plan, facts, checkpoint: What earlier steps wrote, None for a port that was written by hand.
        unregistered: The user left the architecture's row to another model.
        draft: The plan of a draft model of speculative decoding, None for any other model.
    """

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        source: PortSource,
        registry: SourceFile | None,
        plan: Plan | None = None,
        facts: Facts | None = None,
        checkpoint: Checkpoint | None = None,
        unregistered: bool = False,
        draft: DraftPlan | None = None,
    ):
        self.workspace = workspace
        self.name = name
        self.folder = workspace.model_dir(name)
        self.source = source
        self.registry = registry
        self.plan = plan
        self.facts = facts
        self.checkpoint = checkpoint
        self.unregistered = unregistered
        self.draft = draft

    @property
    def architecture(self) -> str:
        """The exact string of config.json's `architectures`.

        Raises:
            NotChecked: Neither plan.json nor facts.json is there.
        """
        if self.facts:
            return str(self.facts.architecture.value)
        if plan := self.plan or self.draft:
            return plan.architecture.hf_name
        raise NotChecked(NO_CONFIG.format(name=self.name))

    @functools.cached_property
    def mappings(self) -> Mappings:
        return weight_mappings(self.source)

    @functools.cached_property
    def parameters(self) -> list[tuple[Class, list[Parameter], list[str]]]:
        """Per head: its parameters, and submodules whose class is not known."""
        return [(head, *model_parameters(self.source, head)) for head in self.source.heads]

    def functional_op(self, function: Function, call: ast.Call) -> str:
        """Name of the operator of `functional` that a call runs, ``""`` for any other call."""
        return functional_op(function.file, call, self.workspace.package)

    def functional_calls(self, *operators: str) -> Iterator[tuple[Function, ast.Call]]:
        """Calls of these operators of `functional` in the forward path."""
        for function, call in self.source.forward_calls:
            if self.functional_op(function, call) in operators:
                yield function, call

    @functools.cached_property
    def expert_parallel(self) -> bool:
        """Whether the implementation has code for expert parallelism (a factory may only refuse it)."""
        names = {
            "enable_expert_parallel",
            "ep_degree",
            "ep_rank",
            "get_neuron_ep_degree",
            "get_neuron_ep_group",
        }
        paths = (self.source.constructor_path, self.source.forward_path, self.source.load_path)
        return any(names & names_in(function.node) for path in paths for function in path)


def functional_op(file: SourceFile, call: ast.Call, package: str) -> str:
    target = call.func
    functional = f"{package}.functional"
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        return target.attr if file.imports.get(target.value.id) == functional else ""
    if isinstance(target, ast.Name) and file.imports.get(target.id, "").startswith(f"{functional}."):
        return file.imports[target.id].rpartition(".")[2]
    return ""


Check = Callable[..., list[Finding]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its own name, for use in checklists."""
    CHECKS[function.__name__] = function
    return function


def passed(where: str, text: str) -> Finding:
    return Finding("pass", where, text)


def failed(where: str, text: str) -> Finding:
    return Finding("fail", where, text)


def judge(where: str, text: str) -> Finding:
    return Finding("judge", where, text)
