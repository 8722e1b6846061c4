"""Reads of config attributes in a modeling file."""

import ast


def config_attribute(node: ast.AST) -> str:
    """Name of the config attribute that a node reads (``config.x``, ``getattr(config, "x", ...)``), or nothing."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        return node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) >= 2:
        owner, name = node.args[0], node.args[1]
        if _is_config(owner) and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    return ""


def _is_config(node: ast.expr) -> bool:
    return ast.unparse(node) in ("config", "self.config", "text_config", "config.text_config")
