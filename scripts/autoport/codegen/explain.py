"""Which decision of the plan put which lines into model.py, as the render itself did it.

The templates are compiled with a mark at both ends of every block that depends on a decision: the branch of an
``if`` that was taken, a ``for`` loop, and an ``include`` whose file is chosen. The marks say where a block stands in
the text.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from autoport.codegen.generate import TEMPLATES, render_context
from autoport.codegen.render import finish_python, make_environment
from autoport.schema.plan import Plan

BEGIN, END, STOP = "\ue000", "\ue002", "\ue001"
MARK = re.compile(f"([{BEGIN}{END}])([0-9]+){STOP}")
WORD = re.compile(r"\w+")
SECTION = re.compile(r"# ===== Section \d+: (.*?) =+")
VALUE_LENGTH = 60

# Part of the architecture, or name that the templates see -> the section of the plan that says where its values are
# known from.
SECTIONS = {
    "norm": "norm",
    "rope": "rope",
    "ropes": "rope",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
    "block": "decoder",
    "embedding": "backbone",
    "final_norm": "backbone",
    "head": "head",
    "storage": "weights",
    "layers.windows": "attention",
    "layers.ropes": "rope",
    "layers.moe": "moe",
    "norm_class": "norm",
    "rope_kinds": "rope",
    "reorders": "rope",
    "qk_norm_parameters": "attention",
    "has_dense": "mlp",
    "kernel_activations": "mlp",
    "has_experts": "moe",
    "fused_experts": "moe",
    "kernel_activation": "moe",
    "router_order": "moe",
    "norm_names": "decoder",
    "pads_vocabulary": "head",
    "own_loaders": "weights",
    "own_qkv_loader": "weights",
    "own_head_norm_loader": "weights",
    "shared_split": "weights",
    "weights": "weights",
}


class Block(msgspec.Struct, frozen=True):
    """Lines of model.py that a decision brought.

    Attributes:
        first, last: Lines, from 1.
        section: Heading in model.py.
        template: File below ``templates/`` and line of the ``if``, ``for`` or ``include``.
        decisions: Values that it looked at, by name; fields of the architecture by their path.
        sources: Where these are known from.
    """

    first: int
    last: int
    section: str
    template: str
    decisions: dict[str, str]
    sources: list[str]


class _Place(msgspec.Struct, frozen=True):
    template: str
    line: int
    names: list[str]


def explain(plan: Plan, package: str) -> list[Block]:
    """The blocks of model.py that depend on a decision, in their order.

    Raises:
        Refusal: As `generate.render_package`.
    """
    context = render_context(plan, package)
    env = make_environment(_Tracing)
    env.places = []
    marked = env.get_template(TEMPLATES["model.py"]).render(context)
    text, spans = _take_marks(marked)
    final = finish_python(text, TEMPLATES["model.py"])
    lines = _word_lines(text, final)
    headings = [(final[: match.start()].count("\n") + 1, match[1]) for match in SECTION.finditer(final)]
    blocks = []
    for number, start, stop in spans:
        place = env.places[number]
        within = [line for at, line in lines.items() if start <= at < stop and line]
        decisions = dict(_decisions(place.names, context))
        if within and decisions:
            section = next((name for line, name in reversed(headings) if line <= within[0]), "header")
            blocks.append(
                Block(
                    first=min(within),
                    last=max(within),
                    section=section,
                    template=f"{place.template}:{place.line}",
                    decisions=decisions,
                    sources=_sources(decisions, plan),
                )
            )
    return sorted(blocks, key=lambda block: (block.first, -block.last))


class _Tracing(SandboxedEnvironment):
    """The generator's environment, with marks in the templates that it compiles."""

    places: list[_Place]

    def _generate(self, source: nodes.Template, name: str | None, *rest: Any, **options: Any) -> str:
        aliases = {
            node.target.name: path
            for node in source.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and (path := _path(node.node))
        }
        self._mark_list(source.body, name or "", aliases)
        return super()._generate(source, name, *rest, **options)

    def _mark_list(self, body: list[nodes.Node], template: str, aliases: Mapping[str, str]) -> None:
        for node in list(body):
            for field in ("body", "else_"):
                self._mark_list(getattr(node, field, None) or [], template, aliases)
            if isinstance(node, nodes.If):
                tests: list[nodes.Node] = []
                for branch in (node, *node.elif_):
                    if branch is not node:
                        self._mark_list(branch.body, template, aliases)
                    tests.append(branch.test)
                    self._wrap(branch.body, 0, len(branch.body), branch, [branch.test], template, aliases)
                if node.else_:
                    self._wrap(node.else_, 0, len(node.else_), node, tests, template, aliases)
            chosen: nodes.Node | None = None
            if isinstance(node, nodes.For):
                chosen = node.iter
            elif isinstance(node, nodes.Include):
                chosen = node.template
            if chosen is not None and not isinstance(chosen, nodes.Const):
                at = body.index(node)
                self._wrap(body, at, at + 1, node, [chosen], template, aliases)

    def _wrap(
        self,
        body: list[nodes.Node],
        start: int,
        stop: int,
        node: nodes.Node,
        tests: list[nodes.Node],
        template: str,
        aliases: Mapping[str, str],
    ) -> None:
        """Put marks around ``body[start:stop]``."""
        number = len(self.places)
        names = [name for test in tests for name in _names(test, aliases)]
        self.places.append(_Place(template, node.lineno, list(dict.fromkeys(names))))
        begin, end = (
            nodes.Output([nodes.TemplateData(f"{kind}{number}{STOP}")], lineno=node.lineno)
            for kind in (BEGIN, END)
        )
        body[start:stop] = [begin, *body[start:stop], end]


def _path(node: nodes.Node) -> str:
    """``a.b.c`` for such an expression, else nothing."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and (parent := _path(node.node)):
        return f"{parent}.{node.attr}"
    return ""


def _names(node: nodes.Node, aliases: Mapping[str, str]) -> Iterator[str]:
    """The names and dotted paths in an expression, without what is only a part of a longer one."""
    if path := _path(node):
        head, dot, rest = path.partition(".")
        yield aliases.get(head, head) + dot + rest
        return
    for child in node.iter_child_nodes():
        yield from _names(child, aliases)


def _take_marks(marked: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The text without marks, and (number, start, stop) of every block in it."""
    text, spans, open_blocks, last = "", [], list[tuple[int, int]](), 0
    for match in MARK.finditer(marked):
        text += marked[last : match.start()]
        last = match.end()
        if match[1] == BEGIN:
            open_blocks.append((int(match[2]), len(text)))
        else:
            number, start = open_blocks.pop()
            spans.append((number, start, len(text)))
    return text + marked[last:], spans


def _word_lines(text: str, final: str) -> dict[int, int]:
    """Line in the formatted text of each word, by its place in the text before; 0 for words that went away."""
    before = [(match.start(), match[0]) for match in WORD.finditer(text)]
    after = [(final.count("\n", 0, match.start()) + 1, match[0]) for match in WORD.finditer(final)]
    lines = dict.fromkeys((at for at, _ in before), 0)
    # Sorting and dropping imports is all that changes words, so most of the text matches from the end.
    same = 0
    while same < min(len(before), len(after)) and before[-same - 1][1] == after[-same - 1][1]:
        same += 1
        lines[before[-same][0]] = after[-same][0]
    head, rest = before[: len(before) - same], after[: len(after) - same]
    matcher = difflib.SequenceMatcher(None, [w for _, w in head], [w for _, w in rest], autojunk=False)
    for i, j, size in matcher.get_matching_blocks():
        for offset in range(size):
            lines[head[i + offset][0]] = rest[j + offset][0]
    return lines


def _decisions(names: list[str], context: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in names:
        first, *attributes = name.split(".")
        if first not in context:
            continue  # a variable of a loop
        value = context[first]
        for attribute in attributes:
            value = value.get(attribute) if isinstance(value, Mapping) else getattr(value, attribute, None)
        yield name.removeprefix("arch."), _short(value)


def _short(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        text = ", ".join(f"{field} {getattr(value, field)}" for field in value.__struct_fields__)
    elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        text = f"{len(value)} entries"
    elif isinstance(value, (list, tuple, dict)):
        text = "; ".join(map(str, value)) or "none"
    else:
        text = str(value)
    return text if len(text) <= VALUE_LENGTH else f"{text[:VALUE_LENGTH]}..."


def _sources(decisions: Mapping[str, str], plan: Plan) -> list[str]:
    """Overrides, and what the plan's sections say of where they know it from."""
    names = [section for path in decisions if (section := _section(path))]
    taken = [item for item in plan.overrides if item.field.partition(".")[0] in names]
    known = [section.source for section in plan.sections if section.name in names and section.source]
    return list(dict.fromkeys([*(f"{item.field}: {item.who}" for item in taken), *known]))


def _section(path: str) -> str:
    parts = path.split(".")
    return SECTIONS.get(".".join(parts[:2]), SECTIONS.get(parts[0], ""))
