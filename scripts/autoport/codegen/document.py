"""Step 6: the example script, the results file, the model's README and the logit test."""

import math
import posixpath
from collections.abc import Mapping
from pathlib import Path

from autoport.codegen.features import (
    FEATURES,
    STATE_FILE,
    FeatureResult,
    FeatureResults,
    current_results,
    feature_rows,
    model_hash,
    tp_sizes,
)
from autoport.codegen.gaps import unwritten
from autoport.codegen.out_of_tree import against_simulator, distribution
from autoport.codegen.render import render, render_python
from autoport.codegen.results import Measured, current_sections, keep_section
from autoport.port_state import Port
from autoport.schema.plan import Plan
from autoport.step import Options, Outcome

EXAMPLE_MODEL_LEN = 1024  # tokens; enough for the example's prompts
EXAMPLE_SEQS = 4  # one for each of the example's prompts
LOGIT_TEST_MODEL_LEN = 256  # tokens; the length of the plugin's own logit tests
KERNEL_MULTIPLE = 128  # the decode kernel takes contexts that are a multiple of this


def run(port: Port, options: Options) -> Outcome:
    """Write the files; for edited ones see `Port.write_files`."""
    plan = port.read_state("plan.json", Plan, "analyze")
    files = {**documents(port, plan), **readme(port, plan)}
    written = port.write_files("document", files, options.force, options.keep_edited)
    return Outcome("done", f"{len(files)} files{written}", files=written.changed + written.beside)


def documents(port: Port, plan: Plan) -> dict[str, str]:
    """Everything but the README: text by path below the workspace."""
    script, logit_test = port.workspace.run_script(port.name), port.workspace.logit_test(port.name)
    context = _context(port, plan) | {"sections": current_sections(port)}
    return {
        script: render_python("docs/run.py.j2", **context),
        f"{posixpath.dirname(script)}/results/results.md": render("docs/results.md.j2", **context),
        logit_test: render_python("tests/test_logits.py.j2", **context),
    }


def readme(port: Port, plan: Plan) -> dict[str, str]:
    """The README's text by its path below the workspace."""
    path = port.workspace.readme(port.name)
    context = _context(port, plan) | {
        "arch": plan.architecture,
        "rope": _rope_text(plan),
        "reference": plan.reference_model,
        "against_simulator": against_simulator(port.workspace),
        "differences": [section for section in plan.sections if section.change not in ("", "none")],
        "overrides": plan.overrides,
        "gaps": plan.gaps,
        "unwritten": unwritten(port),
        "pitfalls": plan.pitfalls,
        "features": feature_rows(port, plan),
        "tp_sizes": tp_sizes(plan),
    }
    return {path: render("docs/README.md.j2", **context)}


def record_results(port: Port, results: Mapping[str, FeatureResult]) -> list[str]:
    """Record what was run, and bring the README's table up to date.

    A README that a person wrote, edited or removed stays as it is; the record is kept all the same.

    Args:
        results: By row of `FEATURES`; other rows keep what was recorded for the same files.

    Returns:
        Workspace paths that changed.

    Raises:
        ValueError: A name that is no row of `FEATURES`.
    """
    unknown = results.keys() - FEATURES.keys()
    if unknown:
        raise ValueError(f"no such feature: {', '.join(sorted(unknown))}")
    merged = {**current_results(port), **results}
    port.write_state(STATE_FILE, FeatureResults(model_hash(port), merged))
    return _bring_up_to_date(port, readme(port, port.read_state("plan.json", Plan, "analyze")))


def record_section(port: Port, name: str, measured: Measured) -> list[str]:
    """Record what was measured, and bring results.md up to date.

    A results.md that a person edited stays as it is; the record is kept all the same.

    Args:
        name: `autoport.codegen.results.OFFLINE` or ``ONLINE``.

    Returns:
        Workspace paths that changed.
    """
    keep_section(port, name, measured)
    files = documents(port, port.read_state("plan.json", Plan, "analyze"))
    return _bring_up_to_date(
        port, {path: text for path, text in files.items() if path.endswith("results.md")}
    )


def _bring_up_to_date(port: Port, files: dict[str, str]) -> list[str]:
    if any(port.file_status(path) != "ours" for path in files):
        return []
    return port.write_files("document", files).changed


def _context(port: Port, plan: Plan) -> dict[str, object]:
    tp_size = default_tp_size(plan)
    longest = plan.architecture.max_position_embeddings
    return {
        "name": port.name,
        "prefix": plan.class_prefix,
        # A folder of this machine is no default for the readers of these files.
        "source": Path(plan.source).name if is_folder(plan.source) else plan.source,
        "is_folder": is_folder(plan.source),
        "hf_name": plan.architecture.hf_name,
        "tp_size": tp_size,
        "max_model_len": model_len(min(EXAMPLE_MODEL_LEN, plan.tp.context_length), longest, tp_size),
        "max_num_seqs": EXAMPLE_SEQS,
        "planned": f"{plan.tp.batch_size} x {plan.tp.context_length} tokens of KV cache",
        "run_script": port.workspace.run_script(port.name),
        "logit_test": port.workspace.logit_test(port.name),
        "distribution": distribution(port.workspace),
        "logit_test_model_len": model_len(LOGIT_TEST_MODEL_LEN, longest, tp_size),
    }


def is_folder(source: str) -> bool:
    """Whether a port's source is a folder (kept as an absolute path) instead of a hub id."""
    return Path(source).is_absolute()


def model_len(wanted: int, longest: int, tp_size: int) -> int:
    """A length in tokens near `wanted`, at most `longest`, that the kernels take and that divides by TP."""
    multiple = math.lcm(KERNEL_MULTIPLE, tp_size)
    return -(-min(wanted, longest // multiple * multiple) // multiple) * multiple or longest


def default_tp_size(plan: Plan) -> int:
    """The recommended size; without one the smallest that the rules allow; without that, 1."""
    valid = [candidate.tp_size for candidate in plan.tp.candidates if candidate.valid]
    return plan.tp.recommended or min(valid, default=1)


def _rope_text(plan: Plan) -> str:
    rope = plan.architecture.rope
    if rope is None:
        return "none"
    numbers = {"theta": rope.theta} | rope.parameters
    listing = [f"{name} {number:g}" for name, number in numbers.items() if isinstance(number, (int, float))]
    return f"{rope.kind} ({', '.join(listing)})"
