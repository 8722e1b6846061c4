"""What a workspace already offers for a word: operators, modules, loaders, other models, installed kernels.

Source is read as text, nothing is imported. The order of the places is the order in which to look before
writing something new.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autoport.api_generation import exported_names
from autoport.errors import refuse
from autoport.workspace import Workspace

# Words for the same thing. A query word finds every word of its row.
SYNONYMS = (
    ("norm", "rmsnorm", "layernorm", "normalization", "normalisation"),
    ("mlp", "swiglu", "geglu", "glu", "ffn", "feedforward", "gated", "gate", "silu", "gelu"),
    ("window", "sliding", "swa", "local"),
    ("rope", "rotary", "cos", "yarn", "mrope"),
    ("attention", "attn", "flash", "sdpa", "mha", "gqa"),
    ("decode", "tkg", "generation"),
    ("prefill", "cte", "segmented", "chunked"),
    ("moe", "expert", "experts", "router", "routing", "topk"),
    ("mla", "latent"),
    ("embedding", "embed", "vocab"),
    ("sample", "sampler", "sampling", "argmax"),
    ("loader", "load", "loading", "shard", "sharding", "checkpoint"),
    ("collective", "gather", "scatter", "reduce", "all2all"),
    ("cache", "kv", "paged"),
    ("quant", "quantization", "quantize", "fp8", "mxfp4", "mxfp8"),
    ("bias", "biases"),
    ("linear", "projection", "proj", "qkv"),
    ("speculative", "spec", "eagle", "eagle3", "draft", "rejection"),
    ("mask", "masking"),
    ("sink", "sinks"),
)

KERNEL_PACKAGES = ("neuronxcc", "nkilib", "nkilib_src")
# Word in a name: a run of capitals, a capitalised or lower-case word, or a number with its letters.
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+[a-z]*")


class Offer(msgspec.Struct):
    """Something that a place offers.

    Attributes:
        place: ``functional``, ``nn``, ``utils``, ``model`` or ``kernels``, in this order of priority.
        signature: Parameters with defaults, as in the source.
        summary: First line of the docstring.
        where: ``path:line``, below the workspace's root where it is in it.
        use: How to refer to it in a port.
    """

    place: str
    name: str
    signature: str
    summary: str
    where: str
    use: str


def search(workspace: Workspace, words: list[str], kernel_folders: list[Path] | None = None) -> list[Offer]:
    """Everything that matches all words: in its name first, then with its docstring, then its parameters.

    Args:
        kernel_folders: Folders of kernel packages; by default those that are installed.

    Raises:
        Refusal: OPS-WORD when a word has no letters or digits.
    """
    groups = [meanings(word) for word in words]
    faulty = [word for word, group in zip(words, groups, strict=True) if not group]
    if faulty or not words:
        found = f"no letters in {', '.join(map(repr, faulty))}" if faulty else "no word"
        raise refuse("OPS-WORD", found, "argument WORD", "name what is needed, e.g. rmsnorm")
    kernels = installed_kernels() if kernel_folders is None else kernel_folders
    matching = []
    for offers in _places(workspace, kernels):
        ranked = [(rank, offer) for offer in offers if (rank := _rank(offer, groups)) is not None]
        matching += [offer for _, offer in sorted(ranked, key=lambda item: item[0])]
    return matching


def meanings(word: str) -> set[str]:
    """The word and its synonyms, in lower case; of ``sliding_window`` one part has to match."""
    parts = {part.lower() for part in WORDS.findall(word)} | {re.sub(r"[^a-z0-9]", "", word.lower())}
    parts.discard("")
    return parts.union(*(row for row in SYNONYMS if parts.intersection(row)))


def _rank(offer: Offer, groups: list[set[str]]) -> tuple[int, str] | None:
    """Sort key of a match: in the name, with the docstring's first line, with the parameters."""
    name = {part.lower() for part in WORDS.findall(offer.name)} | {offer.name.lower()}
    text = name | {part.lower() for part in WORDS.findall(offer.summary)}
    if all(group & name for group in groups):
        return 0, offer.name
    if all(group & text for group in groups):
        return 1, offer.name
    text |= {part.lower() for part in WORDS.findall(offer.signature)}
    return (2, offer.name) if all(group & text for group in groups) else None


# --- Places -----------------------------------------------------------------------------------------


def _places(workspace: Workspace, kernels: list[Path]) -> Iterator[list[Offer]]:
    """What each place offers, in order of priority."""
    root, package = workspace.root, workspace.plugin_root / workspace.package
    exported = set(exported_names(package / "functional" / "__init__.py"))
    for place in ("functional", "nn", "utils", "model"):
        offers: list[Offer] = []
        for path in sorted((package / place).rglob("*.py")):
            private = path.name.startswith("_") and path.name != "__init__.py"
            if private or path.name == "registry.py" or path.name.startswith("test_"):
                continue
            module = _module(path, workspace.plugin_root)
            for offer in read_offers(path, root, place):
                in_functional = place == "functional" and offer.name in exported
                offer.use = f"NF.{offer.name}" if in_functional else f"from {module} import {offer.name}"
                offers.append(offer)
        yield offers
    offers = []
    for folder in kernels:
        for path in sorted(folder.rglob("*.py")):
            module = _module(path, folder.parent)
            for offer in read_offers(path, root, "kernels"):
                offer.use = f"from {module} import {offer.name}"
                offers.append(offer)
    yield offers


def _module(path: Path, top: Path) -> str:
    """Dotted name of a file's module; `top` is the folder that holds its outermost package."""
    return ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")


def installed_kernels() -> list[Path]:
    """Folders of the kernel packages that are installed; found without importing them."""
    folders = []
    for name in KERNEL_PACKAGES:
        spec = importlib.util.find_spec(name)
        folders += [Path(path) for path in (spec.submodule_search_locations or [] if spec else [])]
    return folders


def read_offers(path: Path, root: Path, place: str) -> list[Offer]:
    """Public functions and classes at the top level of a file; none when it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    offers = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        doc = (ast.get_docstring(node) or "").partition("\n")[0]
        offers.append(Offer(place, node.name, _signature(node), doc, f"{shown}:{node.lineno}", ""))
    return offers


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Parameters of a function, or of a class's constructor; fields of a dataclass."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = ast.unparse(item.args)
            return f"({arguments.removeprefix('self').removeprefix(', ')})"
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    return f"({', '.join(fields)})"
