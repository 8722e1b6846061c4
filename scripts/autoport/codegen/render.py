"""Rendering: Jinja templates in, checked and formatted text out.

Text from a config or a checkpoint is data. A template can put a value into its output only through one of the
filters here, each of which quotes the value or checks it; printing anything else stops the run.
"""

import ast
import contextlib
import functools
import json
import keyword
import math
import re
import shlex
import subprocess
from typing import Any, TypeVar

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from autoport import expressions
from autoport.errors import Refusal, refuse
from autoport.modules import run_module
from autoport.resources import templates_dir

LINE_LENGTH = 110


class Checked(str):
    """Text that went through a filter and may be printed by a template."""


def py(value: Any) -> Checked:
    """A Python literal for a str, int, float, bool, None, or a list, tuple or dict of them.

    Raises:
        Refusal: GEN-LITERAL for any other type, or a number that is not finite.
    """
    _check_literal(value)
    return Checked(repr(value))


def _check_literal(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_literal(key)
            _check_literal(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_literal(item)
    elif not (value is None or type(value) in (str, int, bool, float, Checked)):
        raise refuse(
            "GEN-LITERAL", f"{value!r} has no Python literal", "plan.json", "correct the source's config"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise refuse(
            "GEN-LITERAL", f"{value!r} is not a finite number", "plan.json", "correct the source's config"
        )


def identifier(value: Any) -> Checked:
    """A Python identifier.

    Raises:
        Refusal: GEN-IDENTIFIER when `value` is not an ASCII identifier, or is a keyword.
    """
    if not (
        isinstance(value, str) and value.isascii() and value.isidentifier() and not keyword.iskeyword(value)
    ):
        raise refuse(
            "GEN-IDENTIFIER",
            f"{value!r} is not a Python identifier",
            "plan.json",
            "correct the name in the source's config, or choose another NAME",
        )
    return Checked(value)


def weight_name(value: Any) -> Checked:
    """A string literal of a weight's name; an f-string when ``{i}`` stands in it for the layer index.

    The generated loop over the layers has the prefix ``model.layers.{i}`` in a variable, `layer`; one over the
    experts has the expert in a variable `e`.

    Raises:
        Refusal: GEN-KEY when the name has anything but letters, digits, ``_``, ``-``, ``.``, ``{i}``, ``{e}``.
    """
    plain = value.replace("{i}", "0").replace("{e}", "0") if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", plain):
        raise refuse(
            "GEN-KEY",
            f"{value!r} is not a weight name that can be written into code",
            "plan.json",
            "rename the tensor in the checkpoint",
        )
    text = value.replace("model.layers.{i}", "{layer}")
    return Checked(f'f"{text}"' if "{" in text else f'"{text}"')


def weight_keys(keys: list[str]) -> Checked:
    """One name as a string literal, several as a list of them; see `weight_name`.

    Names with ``{e}`` become lists over the experts, joined.
    """
    names = [weight_name(key) for key in keys]
    if all("{e}" in key for key in keys):
        lists = [f"[{name} for e in range(self.config.num_experts)]" for name in names]
        return Checked(" + ".join(lists))
    return names[0] if len(names) == 1 else Checked("[" + ", ".join(names) + "]")


def reading(value: Any) -> Checked:
    """A small expression over the Hugging Face config, which the generated code has as `hf_config`.

    Raises:
        Refusal: GEN-READING for anything but such an expression (see `autoport.expressions`).
    """
    try:
        return Checked(expressions.qualify(str(value), "hf_config"))
    except ValueError as error:
        raise refuse("GEN-READING", str(error), "plan.json", "run 'autoport analyze' again") from error


def size(value: Any) -> Checked:
    """A product of whole numbers and fields of `config`, e.g. ``2 * config.head_dim``.

    Raises:
        Refusal: GEN-SIZE for anything else.
    """
    if not re.fullmatch(r"(\d+|config\.[a-z_]+)( \* (\d+|config\.[a-z_]+))*", str(value)):
        raise refuse("GEN-SIZE", f"{value!r} is no size", "plan.json", "run 'autoport analyze' again")
    return Checked(value)


def pattern(value: Any) -> Checked:
    """A raw string literal of a regular expression over checkpoint keys.

    Raises:
        Refusal: GEN-PATTERN for what is none, or has characters that no key and no operator needs.
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.\\|()*+?-]*", value):
        with contextlib.suppress(re.error):
            re.compile(value)
            return Checked(f'r"{value}"')
    raise refuse(
        "GEN-PATTERN",
        f"{value!r} is no pattern of checkpoint keys",
        "plan.json",
        "run 'autoport analyze' again",
    )


def markdown(value: Any) -> Checked:
    """One line of Markdown text in which nothing is markup and no table cell ends early."""
    line = " ".join(str(value).split())
    printable = "".join(char for char in line if char.isprintable())
    return Checked(re.sub(r"[\\`*{}\[\]<>#|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", printable))


def code_span(value: Any) -> Checked:
    """A Markdown code span; back-ticks, pipes and line breaks, which would end it, are taken out."""
    line = " ".join(str(value).split())
    return Checked("`" + "".join(char for char in line if char.isprintable() and char not in "`|") + "`")


def shell(value: Any) -> Checked:
    """One word of a POSIX shell command."""
    return Checked(shlex.quote("".join(char for char in str(value) if char.isprintable())))


def toml(value: Any) -> Checked:
    """A TOML string; what is not printable is left out."""
    printable = "".join(char for char in str(value) if char.isprintable())
    return Checked(json.dumps(printable, ensure_ascii=False))


def comment(value: Any) -> Checked:
    """Words for a comment or docstring: quotes, backslashes and line breaks become spaces."""
    line = " ".join(re.sub(r"[\"'\\]", " ", str(value)).split())
    return Checked("".join(char for char in line if char.isprintable()))


FILTERS = (
    py,
    identifier,
    weight_name,
    weight_keys,
    reading,
    size,
    pattern,
    markdown,
    code_span,
    shell,
    toml,
    comment,
)


def _only_checked(value: Any) -> Any:
    if not isinstance(value, (Checked, jinja2.Undefined)):
        raise TypeError(f"a template prints {value!r} without a filter")
    return value


@functools.cache
def environment() -> SandboxedEnvironment:
    return make_environment(SandboxedEnvironment)


Kind = TypeVar("Kind", bound=SandboxedEnvironment)


def make_environment(kind: type[Kind]) -> Kind:
    """An environment with the filters and rules of generated code."""
    env = kind(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_only_checked,
    )
    for name_filter in FILTERS:
        env.filters[name_filter.__name__] = name_filter
    return env


def render(template: str, **context: Any) -> str:
    """Render a template (path below ``templates/``).

    Raises:
        Refusal: GEN-TEMPLATE when a section has no template for what the plan asks; what the filters refuse.
    """
    try:
        return environment().get_template(template).render(context)
    except jinja2.TemplateNotFound as error:
        raise refuse(
            "GEN-TEMPLATE",
            f"there is no template {error.name}",
            templates_dir(),
            "write this section by hand",
        ) from error


def render_python(template: str, **context: Any) -> str:
    """Render a template to Python: imports sorted, unused ones removed, formatted, no name undefined.

    Raises:
        Refusal: GEN-SYNTAX when the text is not Python or pyflakes objects to it, and what `render` refuses.
    """
    return finish_python(render(template, **context), template)


def finish_python(text: str, template: str) -> str:
    """What `render_python` does after rendering."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise _not_python(str(error), template) from error
    arguments = ("--fix", "--select", "I,F", "--quiet", "--output-format=concise")
    checked = _run_ruff("check", *arguments, text=text)
    if checked.returncode != 0:
        raise _not_python(checked.stderr.strip(), template)
    return format_python(checked.stdout)


def _not_python(what: str, template: str) -> Refusal:
    return refuse(
        "GEN-SYNTAX",
        f"{template} rendered text that is not Python: {what}",
        templates_dir() / template,
        "nothing was written; correct the template",
    )


def format_python(text: str) -> str:
    """`text` as ruff formats it; it must be Python."""
    result = _run_ruff("format", "--quiet", text=text)
    if result.returncode != 0:
        raise RuntimeError(f"ruff format failed: {result.stderr.strip()}")
    return result.stdout


def _run_ruff(command: str, *arguments: str, text: str) -> "subprocess.CompletedProcess[str]":
    settings = (
        "--isolated",
        "--no-cache",
        f"--config=line-length={LINE_LENGTH}",
        "--config=format.skip-magic-trailing-comma=true",
        "--config=lint.isort.split-on-trailing-comma=false",
        "--config=lint.isort.known-first-party=['vllm_neuron', 'private_vllm_neuron']",
        "--stdin-filename=generated.py",
        "-",
    )
    return run_module("ruff", command, *arguments, *settings, text=text)
