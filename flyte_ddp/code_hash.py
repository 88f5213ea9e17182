"""A hash of Python source by what it does, not by how it is written."""

import ast
import hashlib


def hash_of_code(tree: ast.Module) -> str:
    """A hash of a module, the same whatever its comments, formatting and docstrings, and on Python 3.10 to 3.13.

    ast.dump and ast.unparse differ between these versions. So each node is hashed with its fields, in the order of
    ast.walk, which goes level by level; empty fields are left out, because newer versions have more of them.
    """
    digest = hashlib.sha256()
    _normalise(tree)
    for node in ast.walk(tree):
        fields = [(key, _outline(value)) for key, value in ast.iter_fields(node) if value is not None and value != []]
        digest.update(ascii((type(node).__name__, fields)).encode())
    return digest.hexdigest()


def _normalise(tree: ast.Module) -> None:
    """Removes docstrings, and nodes that not every Python version has."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        elif isinstance(node, ast.JoinedStr):  # Python 3.12.1 ends f"{x:{width}}" with an empty string
            node.values = [value for value in node.values if getattr(value, "value", None) != ""]


def _outline(value: object) -> object:
    """A field's value, in which nodes, which are hashed later, stand as the names of their types."""
    if isinstance(value, list):
        return [_outline(one) for one in value]
    return type(value).__name__ if isinstance(value, ast.AST) else value
