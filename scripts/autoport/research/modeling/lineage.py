"""The classes of a file, and the bases that they have in it."""

import ast
from collections.abc import Mapping


def class_definitions(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def lineage(classes: Mapping[str, ast.ClassDef], owner: ast.ClassDef, most: int) -> list[ast.ClassDef]:
    """A class and its bases in the file, bases first, each once (a file may name them in a circle).

    Args:
        most: Look for no more classes than these.
    """
    found: list[ast.ClassDef] = []
    seen: set[str] = set()

    def visit(node: ast.ClassDef) -> None:
        seen.add(node.name)
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes and base.id not in seen and len(seen) < most:
                visit(classes[base.id])
        found.append(node)

    visit(owner)
    return found
