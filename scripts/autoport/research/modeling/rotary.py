"""Which dimensions of a head rotate together, and in which direction."""

import ast
from collections.abc import Iterator

from autoport.research.modeling.classes import Decoder
from autoport.schema.facts import Finding


def rotary_findings(decoder: Decoder) -> Iterator[Finding]:
    """One finding for each function that rotates: pairing (``half`` or ``interleaved``) and sign."""
    for name, node in decoder.functions.items():
        pairing = _pairing(node)
        if pairing:
            yield Finding("rope", name, {"pairing": pairing, "sign": _sign(node)}, decoder.where(node))
    for owner in decoder.classes.values():
        for item in owner.body:
            if isinstance(item, ast.FunctionDef) and "rotar" in item.name and (pairing := _pairing(item)):
                value = {"pairing": pairing, "sign": _sign(item)}
                yield Finding("rope", f"{owner.name}.{item.name}", value, decoder.where(item))


def _pairing(node: ast.FunctionDef) -> str:
    text = ast.unparse(node)
    if "view_as_complex" in text:
        return "interleaved" if "-1, 2)" in text else ""
    if not any(word in text for word in ("cat(", "stack(", "[..., ")):
        return ""
    slices = [ast.unparse(item) for item in ast.walk(node) if isinstance(item, ast.Slice)]
    if "::2" in slices or "0::2" in slices:
        return "interleaved" if "1::2" in slices else ""
    if any("// 2" in item for item in slices) or ".chunk(2" in text or "torch.chunk(" in text:
        subtracts = any(
            isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub) for item in ast.walk(node)
        )
        return "half" if "(-" in text or "-x" in text or (subtracts and "cat(" in text) else ""
    return ""


def _sign(node: ast.FunctionDef) -> int:
    """-1 where the second half (or the odd elements) is not the negated one."""
    for item in ast.walk(node):
        if isinstance(item, ast.Call) and ast.unparse(item.func) in ("torch.cat", "torch.stack"):
            joined = item.args[0] if item.args else None
            parts = joined.elts if isinstance(joined, (ast.Tuple, ast.List)) else []
            if (
                len(parts) == 2
                and isinstance(parts[1], ast.UnaryOp)
                and not isinstance(parts[0], ast.UnaryOp)
            ):
                return -1
    return 1
