"""How many lines a user of each trainer writes."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_written(job: str, trainer: str) -> int:
    script = count_lines((ROOT / "benchmarks" / "trainers" / f"{job}_{trainer}.py").read_text())
    recipe = (ROOT / "examples" / job / "recipe.py").read_text()
    return script + count_lines(recipe, without_network_and_data=True) if trainer == "ours" else script


def count_lines(source: str, without_network_and_data: bool = False) -> int:
    """Number of lines with code.

    In a recipe's module, its functions, its other classes and the method data count as network and data.
    """
    tree = ast.parse(source)
    left_out = list(_docstrings(tree))
    if without_network_and_data:
        recipe = next(node for node in tree.body if isinstance(node, ast.ClassDef) and _is_recipe(node))
        left_out += [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node != recipe]
        left_out += [node for node in recipe.body if isinstance(node, ast.FunctionDef) and node.name == "data"]
    excluded = {line for node in left_out for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in excluded for number, line in lines)


def _is_recipe(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ("Recipe", "Classifier") for base in node.bases)


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            yield node.body[0]
