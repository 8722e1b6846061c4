"""Steps 3 and 4: the model's package (`__init__.py`, `config.py`, `factory.py`, `model.py`) from the plan."""

from collections.abc import Sequence
from typing import Any

from autoport.analysis.weight_map import possibly_unused, unused_pattern
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import run as add_variant
from autoport.codegen.context import architecture_context, own_loaders
from autoport.codegen.factory import selection_context
from autoport.codegen.gaps import gap_context, unwritten
from autoport.codegen.out_of_tree import own_files
from autoport.codegen.render import render_python
from autoport.codegen.support import check_plan
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.schema.weights import WeightEntry
from autoport.step import Options, Outcome
from autoport.variants import BASE, Variant, read_variants

TEMPLATES = {
    "__init__.py": "boilerplate/init.py.j2",
    "config.py": "boilerplate/config.py.j2",
    "factory.py": "boilerplate/factory.py.j2",
    "model.py": "model/model.py.j2",
}
WEIGHT_LOADERS = "weight_loaders.py"  # only for a model that needs loaders of its own


def run(port: Port, options: Options) -> Outcome:
    """Write the model's package; for edited files see `Port.write_files`."""
    plan = port.read_state("plan.json", Plan, "analyze")
    workspace, variants = port.workspace, read_variants(port.workspace, port.name)
    texts = render_package(plan, workspace.package, variants)
    if isinstance(workspace, PackageWorkspace):
        del texts["__init__.py"]
        texts |= own_files(workspace, plan, texts)
    folder = workspace.model_dir(port.name).relative_to(workspace.root).as_posix()
    files = {f"{folder}/{name}": text for name, text in texts.items()}
    written = port.write_files("generate", files, options.force, options.keep_edited)
    port.manifest.incomplete = unwritten(port)
    added = _variant_of_checkpoint(port, plan)
    missing = f"; to be written by hand: {', '.join(port.manifest.incomplete)}" if plan.gaps else ""
    lines = texts["model.py"].count("\n")
    return Outcome(
        "done",
        f"{len(files)} files, model.py: {lines} lines{written}{missing}"
        + (f"; {plan.stored_as}: model_{plan.stored_as}.py" if plan.stored_as else ""),
        files=written.changed + written.beside + added,
    )


def _variant_of_checkpoint(port: Port, plan: Plan) -> list[str]:
    """Add the implementation that loads a quantised checkpoint, unless it is there; returns what changed."""
    variant = declare(plan.stored_as)
    if not plan.stored_as or (port.workspace.model_dir(port.name) / f"{variant.module}.py").exists():
        return []
    return add_variant(port, variant).files


def render_package(plan: Plan, package: str, variants: Sequence[Variant] = (BASE,)) -> dict[str, str]:
    """Render the model's package.

    Args:
        package: The plugin's package, ``vllm_neuron`` or ``private_vllm_neuron``.
        variants: What the factory chooses from; their own files are not part of the result.

    Returns:
        Text by file name.

    Raises:
        Refusal: What the templates cannot express, or a weight map that does not fit the model.
    """
    context = render_context(plan, package, variants)
    templates = dict(TEMPLATES)
    if own_loaders(plan.architecture):
        templates[WEIGHT_LOADERS] = f"boilerplate/{WEIGHT_LOADERS}.j2"
    return {name: render_python(template, **context) for name, template in templates.items()}


def render_context(plan: Plan, package: str, variants: Sequence[Variant] = (BASE,)) -> dict[str, Any]:
    """What the templates of the model's package see.

    Raises:
        Refusal: GEN-WEIGHTS when the weight map does not fit the model.
    """
    check_plan(plan)
    layered: dict[str, list[WeightEntry]] = {"all": [], "moe": [], "dense": []}
    for entry in plan.weights.entries:
        if "{i}" in entry.parameter:
            layered[entry.layers if plan.architecture.layers.moe else "all"].append(entry)
    return (
        {
            "name": plan.name,
            "prefix": plan.class_prefix,
            "class_name": f"{plan.class_prefix}ForCausalLM",
            "hf_name": plan.architecture.hf_name,
            "package": package,
            "exports": sorted(
                [plan.architecture.hf_name, f"{plan.class_prefix}Config", "UnsupportedConfigError"]
            ),
            "arch": plan.architecture,
            "needs_even_heads": not plan.architecture.attention.composed
            and not any(broken.rule == "R2" for size in plan.tp.candidates for broken in size.relaxed),
            "weights": {
                "single": [entry for entry in plan.weights.entries if "{i}" not in entry.parameter],
                "layered": layered["all"],
                "moe": layered["moe"],
                "dense": layered["dense"],
            },
            "unused_keys": unused_pattern(possibly_unused(plan.architecture, plan.weights)),
            "per_head_keys": any(
                len(entry.keys) > 1 for entry in plan.weights.entries if entry.transform == "q_heads"
            ),
        }
        | architecture_context(plan.architecture)
        | selection_context(variants)
        | gap_context(plan.gaps)
    )
