"""Private parts of other libraries are used in files named *_compat.py, and nowhere else."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"_(?!_)\w+|__\w+(?<!__)")
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
DOCUMENTED = {"os._exit", "sys._getframe"}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
OURS = ("flyte_ddp", "flyte2", "workflows", "examples")


def _touched(tree: ast.Module) -> Iterator[str]:
    """Private names of other objects. `self` counts as ours only within a class."""
    inside = {
        node for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in ast.walk(owner)
    }  # nodes are compared by identity
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in NAMED_TUPLES:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node in inside
            if not own and ast.unparse(node) not in DOCUMENTED:
                yield ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(PRIVATE.fullmatch(part) for part in name.split(".")))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and PRIVATE.fullmatch(str(name.value)):
                yield ast.unparse(node)


def _shared(module: str, tree: ast.Module) -> Iterator[str]:
    """Private names of our classes that are also those of a base class from another library."""
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            bases = [
                base
                for base in getattr(importlib.import_module(module), owner.name).__mro__
                if not base.__module__.startswith(OURS)
            ]
            yield from (f"{owner.name}.{name}" for name in _named(owner) & {x for b in bases for x in _names_of(b)})


def _named(owner: ast.ClassDef) -> set[str]:
    names = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(owner) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if PRIVATE.fullmatch(name)} - NAMED_TUPLES


@functools.cache  # to find a class in its file takes a second for some
def _names_of(base: type) -> set[str]:
    names = {*vars(base)}
    with suppress(OSError, TypeError):  # it may have no source
        names |= {*re.findall(r"\b(?:self|cls)\.(_\w+)", inspect.getsource(base))}
    return names


@pytest.mark.slow
def test_no_other_file_touches_a_private_part(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # from where the examples are run
    found = {}
    for file in sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py")):
        if not file.name.endswith("_compat.py") and ".venv" not in file.parts:
            name, tree = file.relative_to(ROOT).with_suffix(""), ast.parse(file.read_text())
            is_class = any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body)
            is_class = is_class and not {"template", "mirrored"} & {*file.parts}  # cannot be imported from here
            touched = {*_touched(tree), *(_shared(".".join(name.parts), tree) if is_class else ())}
            if touched:
                found[str(name)] = touched
    assert not found, "move it to a file whose name ends in _compat, and test it beside this"
