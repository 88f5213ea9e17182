"""Finds, hashes and checks the user's own code behind a recipe's name, without importing it.

The parent of a training run knows a recipe only by its name, "package.module:Name", because importing it would import
torch. What caching and shipping need to know about its code is read from the source.
"""

import ast
import difflib
import hashlib
import os
import symtable
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Collection, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from flyte_ddp.code_hash import hash_of_code
from flyte_ddp.errors import InputError

LIBRARY = "flyte_ddp"  # its code is hashed and shipped separately from the user's
EXAMPLE = '"package.module:Name", as in "recipes.flowers:Flowers"'


@dataclass(frozen=True)
class UserCode:
    """The first-party code behind a recipe's name.

    First party is what is below root, not installed (site-packages) and not part of this library. For a recipe that is
    itself installed, or part of this library, it is only its own top-level package.
    """

    name: str  # "package.module:Name"
    root: str  # the folder that must be on sys.path to import package.module
    files: Tuple[str, ...]  # its module, those that it imports, and the data files: absolute paths, sorted
    packages: Tuple[str, ...]  # top-level names of its other imports, except the standard library and this one
    version: str  # 16 hex digits: a hash of the files, not of the packages, which differ between hosts


def find_code(name: str, data_files: Sequence[str] = ()) -> UserCode:
    """Finds the code that a recipe consists of, from its source; imports nothing, not even a parent package.

    Modules are searched for on sys.path. Import statements are found anywhere, and so is import_module("a.b") with a
    literal name; check_imports reports other imports. data_files are relative to the folder of the recipe's module. The
    version does not change when comments, docstrings or formatting are edited, nor between Python 3.10 and 3.13. Raises
    InputError.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InputError(f"a recipe is named {EXAMPLE}, got {name!r}: name the module with dots, without .py")
    found = _find_parts(module, sys.path)
    if len(found) <= module.count("."):
        raise _not_found(name, found)
    file = _source(found[-1])
    if not file:
        where = found[-1].origin or ", ".join(found[-1].submodule_search_locations or ())
        raise InputError(f"recipe {name}: {module} is {where}, which has no Python source: name a module that has")
    is_package = found[-1].submodule_search_locations is not None
    root = str(Path(file).parents[module.count(".") + is_package])
    modules, packages = _imported(module, root)
    _check_defined(name, file, modules[file])
    versions = {one: hash_of_code(tree) for one, tree in modules.items()}
    for one in data_files:
        path = os.path.abspath(os.path.join(os.path.dirname(file), one))
        if not os.path.isfile(path):
            raise InputError(f"recipe {name}: data file {one!r} is not a file; it is looked for as {path}")
        if not _is_below(path, root):
            raise InputError(f"recipe {name}: data file {one!r} must lie below {root}, to be shipped with the code")
        if path not in versions:
            versions[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    files = sorted(versions)
    lines = [f"{Path(one).relative_to(root).as_posix()}\0{versions[one]}\n" for one in files]
    version = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]
    return UserCode(name, root, tuple(files), packages, version)


def check_imports(root: str, files: Collection[str], before: Collection[str] = ()) -> None:
    """Raises InputError if a rank has imported first-party modules that find_code has not found.

    before: names of modules that were imported before the recipe, by others (torchrun's script, Flyte's entry point).
    """
    known = {"__main__", *before}
    missed = {
        name: file
        for name, file in loaded_files().items()
        if name not in known and file not in files and _is_first_party(name, file, root)
    }
    if missed:
        shown = ", ".join(f"{name} ({os.path.relpath(file, root)})" for name, file in sorted(missed.items()))
        raise InputError(
            f"imported by a computed name: {shown}. The cache would not notice that they were edited, and pods would "
            "lack them: import them by a plain import statement, or name their files as data files of the recipe"
        )


def loaded_files() -> Dict[str, str]:
    """Absolute paths of the imported modules' files, by module name."""
    # not modules of other types: reading __file__ would make lazily imported ones import themselves
    modules = {name: module for name, module in list(sys.modules.items()) if type(module) is ModuleType}
    files = {name: vars(module).get("__file__") for name, module in modules.items()}
    return {name: os.path.abspath(file) for name, file in files.items() if isinstance(file, str)}


def is_installed(path: str) -> bool:
    """Whether it is in the standard library or installed by pip. sys.prefix can't tell: /usr/src/app is below /usr."""
    standard_library = os.path.dirname(os.__file__)
    return bool({"site-packages", "dist-packages"} & {*Path(path).parts}) or _is_below(path, standard_library)


def _is_below(path: str, folder: str) -> bool:
    """Whether the path is below the folder, or the folder itself."""
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


def _is_first_party(module: str, file: str, root: str, recipe: str = "") -> bool:
    top = module.partition(".")[0]
    if not _is_below(file, root) or not file.endswith(".py") or is_installed(file) != is_installed(root):
        return False
    return top == recipe.partition(".")[0] or not (top == LIBRARY or is_installed(root))


# --- finding ---


def _find_parts(module: str, path: Sequence[str]) -> List[ModuleSpec]:
    """The specs of a dotted name's parts, as far as found; importlib.util.find_spec would import the parents."""
    found: List[ModuleSpec] = []
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            break
        found.append(spec)
        path = list(spec.submodule_search_locations or ())
    return found


def _source(spec: ModuleSpec) -> Optional[str]:
    """None for a folder without __init__.py (a namespace package) and for a compiled module."""
    return os.path.abspath(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _not_found(name: str, found: Sequence[ModuleSpec]) -> InputError:
    parts = name.partition(":")[0].split(".")
    parent, missing = ".".join(parts[: len(found)]), parts[len(found)]
    places = (found[-1].submodule_search_locations or ()) if found else sys.path
    folders = [folder for folder in map(os.path.abspath, places) if os.path.isdir(folder)]
    folders = [folder for folder in folders if found or not is_installed(folder)]
    if parent and not folders:
        return InputError(f"recipe {name}: {parent} is a module, {found[-1].origin}, and has no module {missing} in it")
    entries = [entry for folder in folders for entry in os.scandir(folder)]
    names = {entry.name.removesuffix(".py") for entry in entries if entry.name.endswith(".py") or entry.is_dir()}
    return InputError(
        f"recipe {name}: no module {missing}{_hint(missing, names)} in {', '.join(folders)}: start pyflyte in the "
        "folder from which the module can be imported, or put that folder on PYTHONPATH"
    )


def _hint(name: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _check_defined(name: str, file: str, tree: ast.Module) -> None:
    attribute = name.partition(":")[2]
    with _faults_named(file):
        table = symtable.symtable(Path(file).read_bytes(), file, "exec")  # type: ignore[arg-type] # bytes: its coding
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    stars = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
    # if names may come from elsewhere too, the rank finds out
    if attribute not in names and "__getattr__" not in names and not any(stars):
        raise InputError(f"recipe {name}: {file} defines no {attribute}{_hint(attribute, names)} at its top level")


# --- reading ---


@contextmanager
def _faults_named(file: str) -> Iterator[None]:
    try:
        yield
    except (SyntaxError, ValueError) as error:  # a ValueError for null bytes
        line = getattr(error, "lineno", None) or 1
        raise InputError(f"{file}, line {line}: {error.args[0]} (read by Python {sys.version.split()[0]})") from None


def _imported(module: str, root: str) -> Tuple[Dict[str, ast.Module], Tuple[str, ...]]:
    """The first-party files that a module imports, including its own, and the top-level names of its other imports."""
    files: Dict[str, ast.Module] = {}
    others: Set[str] = set()
    seen, todo = {module}, [module]
    while todo:
        name = todo.pop()
        parts = name.split(".")
        found = _find_parts(name, [root, *sys.path])  # as in the ranks: the root is first on their sys.path
        if not found or (found[0].origin and not _is_first_party(name, found[0].origin, root, module)):
            others.add(parts[0])
            continue
        for count, spec in enumerate(found, start=1):  # parents first: importing a.b runs a/__init__.py
            one, file = ".".join(parts[:count]), _source(spec)
            if file and file not in files and _is_first_party(one, file, root, module):
                with _faults_named(file):
                    files[file] = ast.parse(Path(file).read_bytes(), file)
                package = one if spec.submodule_search_locations is not None else ".".join(parts[: count - 1])
                new = set(_imports(files[file], package)) - seen
                seen |= new
                todo += new
    return files, tuple(sorted(others - sys.stdlib_module_names - {LIBRARY}))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Full names of possible modules: a name in a from-import may also be an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a relative import beyond the top-level package fails in the rank, with Python's own message
            with suppress(ImportError):
                origin = resolve_name("." * node.level + (node.module or ""), package)
                yield from (origin if alias.name == "*" else f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, literal = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
            if called in ("import_module", "__import__") and isinstance(literal, str):
                with suppress(ImportError):
                    yield resolve_name(literal, package)
