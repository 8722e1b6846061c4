"""Which generation of the plugin's API a workspace has, told by the names in its files."""

import ast
import re
from pathlib import Path

import msgspec

from autoport.errors import Refusal
from autoport.resources import simulator_dir

# What generated models call. A workspace without one of them is older than the generator.
NEEDED_OPERATORS = (
    "attention_decode", "flash_attention", "gen_attention_decode_mask", "mlp", "o_proj", "qkv_proj",
    "segmented_attention",
)  # fmt: skip
NEEDED_DECODE_PARAMETERS = ("update_cache", "kv_cache_update_idx", "bias_qkv", "bias_out", "attention_mask")
NEEDED_NEURON_CONFIG = ("on_device_sampling_config", "max_logprobs", "debug_logits_dir", "quantization")

# Fields that every copy of the 0.24 line has; others are a checkout's own.
LAYER_SPEC_FIELDS = {"name", "num_kv_heads", "head_size", "dtype", "sliding_window_size", "chunk_size"}
NEURON_CONFIG_FIELDS = {
    "ep_degree", "attention_dp_size", "embedding_dp_size", "lm_head_dp_size", "mlp_dp_size",
    "on_device_sampling_config", "max_logprobs", "tensor_capture", "tensor_replacement", "kv_segment_size_buckets",
    "debug_logits_dir", "quantization", "all2all_backend", "modules_to_not_convert", "num_batched_tokens_buckets",
    "num_seqs_buckets", "decode_context_length_buckets", "enable_structured_outputs", "fp8_packed_kv",
}  # fmt: skip


class ApiGeneration(msgspec.Struct):
    """What the plugin in a workspace offers.

    Attributes:
        version: Of the plugin's pyproject.toml, empty when there is none.
        simulator: Whether it is the CPU simulator.
        bundled: Whether it is that of this bundle itself, which stands for the plugin of a package out of tree.
        operators: Names that `functional` exports.
        models: Folders of `model/` with an implementation, registered or not.
        rows: Architectures in the registry; None when it cannot be read.
        missing: Names that generated models use and the plugin does not have.
        extensions: Names that the checkout adds to the common API.
    """

    version: str
    simulator: bool
    bundled: bool
    operators: list[str]
    models: list[str]
    rows: list[str] | None
    missing: list[str]
    extensions: list[str]

    def __str__(self) -> str:
        kind = f"plugin {self.version}".strip()
        if self.bundled:
            kind = "the bundled simulator, in the plugin's place"
        elif self.simulator:
            kind = "simulator (a practice workspace, not the plugin's checkout)"
        text = f"{kind}: {len(self.operators)} operators, {len(self.models)} models"
        if self.rows is not None:
            text += (
                f", {len(self.rows)} registered architectures{' of its own models' if self.bundled else ''}"
            )
        if self.missing:
            text += f"; older than the generator, lacks {', '.join(self.missing)}"
        if self.extensions:
            text += f"; adds {', '.join(self.extensions)}"
        return text


def read_api(root: Path, package: str) -> ApiGeneration:
    """Read the API of the plugin in a checkout.

    Args:
        root: The checkout.
        package: ``vllm_neuron`` or ``private_vllm_neuron``.
    """
    folder = root / package
    operators = exported_names(folder / "functional" / "__init__.py")
    parameters = _parameters(folder / "functional", "attention_decode")
    missing = [name for name in NEEDED_OPERATORS if name not in operators]
    if parameters:
        missing += [
            f"attention_decode({name}=)" for name in NEEDED_DECODE_PARAMETERS if name not in parameters
        ]
    layer_spec = _class_fields(folder / "model" / "kv_cache.py", "LayerSpec")
    neuron_config = neuron_config_fields(root, package)
    missing += [f"NeuronConfig.{name}" for name in NEEDED_NEURON_CONFIG if name not in neuron_config]
    return ApiGeneration(
        version=_version(root),
        simulator=_is_simulator(folder / "__init__.py"),
        bundled=root == simulator_dir(),
        operators=operators,
        models=sorted(
            {path.parent.name for path in (folder / "model").glob("*/*.py") if path.name != "__init__.py"}
        ),
        rows=_registered(folder / "model" / "registry.py"),
        missing=missing,
        extensions=[f"LayerSpec.{name}" for name in layer_spec if name not in LAYER_SPEC_FIELDS]
        + [f"NeuronConfig.{name}" for name in neuron_config if name not in NEURON_CONFIG_FIELDS],
    )


def neuron_config_fields(root: Path, package: str) -> list[str]:
    """Fields that the plugin's `NeuronConfig` declares; empty where its file cannot be read.

    Args:
        root, package: As `read_api` takes them.
    """
    return _class_fields(root / package / "model" / "neuron_config.py", "NeuronConfig")


def _registered(registry: Path) -> list[str] | None:
    try:
        from autoport.registry import row_origins

        return sorted(row_origins(registry.read_text(encoding="utf-8")))
    except (ImportError, OSError, UnicodeDecodeError, Refusal):  # libcst may be what the doctor misses
        return None


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file; empty when it is missing or cannot be parsed."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def exported_names(init: Path) -> list[str]:
    """Names in a package's `__all__`, or what it imports when it has none."""
    tree = parse(init)
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            names = [item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
            return sorted(str(name) for name in names)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return sorted({alias.asname or alias.name for node in imports for alias in node.names})


def _parameters(folder: Path, function: str) -> list[str]:
    for path in sorted(folder.rglob("*.py")):
        for node in parse(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return []


def _class_fields(path: Path, name: str) -> list[str]:
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
    return []


def _is_simulator(init: Path) -> bool:
    return any(
        isinstance(node, (ast.Assign, ast.AnnAssign)) and "__simulator__" in ast.unparse(node)
        for node in parse(init).body
    )


def _version(root: Path) -> str:
    """Version in the checkout's pyproject.toml (read as text: Python 3.10 has no toml parser)."""
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    found = re.search(r'^version\s*=\s*"([^"]+)"', text, re.MULTILINE)
    return found.group(1) if found else ""
