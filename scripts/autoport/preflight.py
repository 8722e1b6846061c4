"""What would stop a later step, found before the step that would waste the work."""

from autoport.errors import Problem, Refusal
from autoport.port_state import Port
from autoport.step import Options


def check(port: Port, options: Options, step: str) -> None:
    """Check what can be known before `step`: names first, the registry after Step 1, TP sizes after Step 2.

    Raises:
        Refusal: PORT-FOREIGN, PROOF-TP, and what adding the row to registry.py would be refused for.
    """
    if step == "research":
        problems = [*_foreign_folder(port, options), *_sizes_of_no_twin(options)]
        if problems:
            raise Refusal(*problems)
    elif step == "analyze":
        _registry(port, options)
    elif step == "generate" and options.tp_sizes:
        _sizes_of_the_plan(port, options)


def _foreign_folder(port: Port, options: Options) -> list[Problem]:
    folder = port.workspace.model_dir(port.name)
    relative = str(folder.relative_to(port.workspace.root))
    if options.force or not port.files_by_hand():
        return []
    return [
        Problem(
            "PORT-FOREIGN",
            f"{relative}/ has a model that is not a port of this name ({what_stands(port)})",
            str(folder),
            "use another NAME; --force overwrites its files, and is right only where that model is to go. A model "
            f"written by hand goes on with: {port.command('review')}; the proof needs 'autoport research' and "
            "'autoport analyze' first, and so do 'autoport register' and 'autoport document' for Steps 5 and 6",
        )
    ]


def what_stands(port: Port) -> str:
    """Which parts of a model of this name the workspace has, and which it lacks, by the step that makes them."""
    name, root = port.name, port.workspace.root
    model = str(port.workspace.model_dir(name).relative_to(root))
    registry = port.workspace.registry_path
    row = registry.is_file() and f"from .{name} import" in registry.read_text(
        encoding="utf-8", errors="replace"
    )
    parts = [
        *(("3", f"{model}/{file}") for file in ("config.py", "factory.py", "__init__.py")),
        ("4", f"{model}/model.py"),
        ("6", f"{model}/README.md"),
        ("6", port.workspace.run_script(name)),
        ("6", port.workspace.logit_test(name)),
    ]
    there = {f"Step {step}: {path.rpartition('/')[2]}": (root / path).is_file() for step, path in parts}
    there["Step 5: a row in registry.py"] = row
    present = ", ".join(sorted(text for text, found in there.items() if found)) or "nothing"
    absent = ", ".join(sorted(text for text, found in there.items() if not found)) or "nothing"
    return f"it has {present}; it lacks {absent}"


def _sizes_of_no_twin(options: Options) -> list[Problem]:
    from autoport.validation.shrink import TP_SIZES

    known = ", ".join(map(str, TP_SIZES))
    return [
        Problem("PROOF-TP", f"TP {size}: the twin is made for {known}", "option --tp", f"choose from {known}")
        for size in options.tp_sizes
        if size not in TP_SIZES
    ]


def _registry(port: Port, options: Options) -> None:
    from autoport.codegen import out_of_tree, register
    from autoport.package_workspace import PackageWorkspace
    from autoport.schema.facts import Facts

    facts = port.read_state("facts.json", Facts, "research")
    architecture = str(facts.architecture.value)
    if isinstance(port.workspace, PackageWorkspace):
        out_of_tree.check_free(port.workspace, architecture)
    elif not register.stays_out(port, options):
        register.edited(port, architecture, options.replace_row)


def _sizes_of_the_plan(port: Port, options: Options) -> None:
    from autoport.schema.plan import Plan
    from autoport.validation.tp_sizes import choose_tp_sizes

    choose_tp_sizes(port.read_state("plan.json", Plan, "analyze").tp, options.tp_sizes)
