"""The package of a draft model, its README and example, and its row in the plugin's registry."""

from pathlib import Path

from autoport.analysis.draft import HF_NAME, NOT_PORTED, DraftPlan
from autoport.analysis.weight_map import INV_FREQ, unused_pattern
from autoport.codegen.context import architecture_context
from autoport.codegen.document import EXAMPLE_MODEL_LEN, is_folder, model_len
from autoport.codegen.gaps import gap_context
from autoport.codegen.register import edited
from autoport.codegen.render import Checked, render, render_python
from autoport.errors import refuse
from autoport.files import write_atomic
from autoport.naming import class_prefix
from autoport.port_state import Port
from autoport.research.draft import EAGLE3_HIDDEN_STATES

TEMPLATES = {
    "__init__.py": "boilerplate/init.py.j2",
    "config.py": "draft/config.py.j2",
    "factory.py": "draft/factory.py.j2",
    "model.py": "draft/model.py.j2",
}
STEP = "draft"
NUM_DRAFTS = 3  # of the example


def write_draft(port: Port, plan: DraftPlan, force: bool = False, replace_row: bool = False) -> list[str]:
    """Write the package and the registry's row; returns the files that changed.

    Raises:
        Refusal: What `Port.write_files` and `edited` refuse; REG-CHANGED when the registry changes meanwhile.
    """
    path = port.workspace.registry_path
    folder = port.workspace.model_dir(port.name).relative_to(port.workspace.root).as_posix()
    texts = render_draft(port.name, port.workspace.package, plan)
    with port.workspace.lock("registry"):
        aliases = [plan.served_as] if plan.served_as != HF_NAME else []
        before, after = edited(port, HF_NAME, replace_row, aliases)
        files = {f"{folder}/{name}": text for name, text in texts.items()} | documents(port, plan)
        written = port.write_files(STEP, files, force)
        if path.read_bytes() != before:
            raise refuse("REG-CHANGED", "changed while it was being edited", path, "run the command again")
        if after == before:
            return written.changed
        write_atomic(path, after, staging=port.state_dir / "staging")
    return [*written.changed, path.relative_to(port.workspace.root).as_posix()]


def render_draft(name: str, package: str, plan: DraftPlan) -> dict[str, str]:
    """Text of each file of the package.

    Args:
        package: The plugin's package, ``vllm_neuron`` or ``private_vllm_neuron``.
    """
    prefix = class_prefix(name)
    context = architecture_context(plan.architecture) | {
        "name": name,
        "prefix": prefix,
        "class_name": f"{prefix}ForCausalLM",
        "hf_name": HF_NAME,
        "package": package,
        "exports": sorted([HF_NAME, f"{prefix}Config", "UnsupportedConfigError"]),
        "arch": plan.architecture,
        "weights": {"single": plan.weights.entries, "layered": [], "moe": [], "dense": []},
        "needs_even_heads": True,
        "unused_keys": unused_pattern((INV_FREQ, *plan.weights.ignored)),
        "attention_input": Checked("2 * self.hidden_size"),
        "norm_before_residual": plan.norm_before_residual,
        "own_embedding": plan.own_embedding,
        "norms": plan.norms,
        "not_ported": NOT_PORTED,
        "maps_vocabulary": plan.maps_vocabulary,
    }
    context |= gap_context([])
    return {file: render_python(template, **context) for file, template in TEMPLATES.items()}


def documents(port: Port, plan: DraftPlan) -> dict[str, str]:
    """The README, and an example that serves a target with the draft: text by path below the workspace."""
    tp_size = 1
    context = {
        "name": port.name,
        "prefix": class_prefix(port.name),
        "hf_name": HF_NAME,
        "source": Path(plan.source).name if is_folder(plan.source) else plan.source,
        "is_folder": is_folder(plan.source),
        "run_script": port.workspace.run_script(port.name),
        "num_drafts": NUM_DRAFTS,
        "tp_size": tp_size,
        "max_model_len": model_len(EXAMPLE_MODEL_LEN, plan.architecture.max_position_embeddings, tp_size),
        "arch": plan.architecture,
        "draft_vocab_size": plan.draft_vocab_size,
        "own_embedding": plan.own_embedding,
        "norm_before_residual": plan.norm_before_residual,
        "layer_ids": plan.aux_layer_ids,
        "num_states": EAGLE3_HIDDEN_STATES,
    }
    return {
        port.workspace.readme(port.name): render("draft/README.md.j2", **context),
        port.workspace.run_script(port.name): render_python("draft/run.py.j2", **context),
    }


def example_command(port: Port, plan: DraftPlan) -> str:
    """What to type, in the workspace's folder, to generate text with a target and the draft."""
    draft = f" --draft-checkpoint {plan.source}" if is_folder(plan.source) else ""
    return f"python {port.workspace.run_script(port.name)} --model-checkpoint TARGET{draft}"
