"""The user's code behind a recipe's name, which is found, versioned and checked without importing it.

The parent of a training run knows a recipe only by its name, "package.module:Name", because importing the recipe would
import torch. Caching and shipping need facts about its code, which are read from the source.
"""

import ast
import hashlib
import os
import symtable
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from types import ModuleType

from flyte_ddp.code.code_version import (
    LIBRARY,
    Source,
    faults_named,
    find_parts,
    find_sources,
    hash_parts,
    is_first_party,
    is_installed,
    read_script,
    source_file,
)
from flyte_ddp.errors import InputError

EXAMPLE = '"package.module:Name"'
ENGINE = ("flyte_ddp.engine.worker", "flyte_ddp.engine.predict")  # the modules that train, and predict with, a recipe


@dataclass(frozen=True)
class UserCode:
    """The code behind a recipe's name.

    First party is what is below root, not installed (site-packages) and not part of this library. For a recipe that is
    itself installed, first party is only the recipe's top-level package.

    Attributes:
        name: "package.module:Name".
        root: the folder that must be on sys.path to import package.module.
        files: sorted paths of the data files, and of the recipe's module and the modules it imports if they are first
            party.
        version: 16 hex digits, hashed from these files, and from what they and the engine import of this library.
    """

    name: str
    root: str
    files: tuple[str, ...]
    version: str


def find_code(name: str, data_files: Sequence[str] = (), ranks: Sequence[str] = ENGINE) -> UserCode:
    """Find the source of a recipe or an observer, and compute its version, without importing anything.

    Modules are searched for on sys.path. Import statements count anywhere in a file, and so does import_module("a.b")
    with a literal name. Other imports are not found, but make checked_imports() raise an error when they happen. The
    version does not change with comments, docstrings or formatting of the user's code, nor between Python 3.10 and
    3.13.

    Args:
        name: "package.module:Name".
        data_files: files that the code reads, relative to the folder of the module.
        ranks: modules of this library that the ranks run. The version covers their code, too.

    Returns:
        The code's name, root folder, files and version.

    Raises:
        InputError: The name is malformed, the code or a data file is not found, a data file lies outside the root
            folder, `data_files` is a single text, or a file has a syntax error.
    """
    if not isinstance(name, str):
        raise InputError(f"give a name such as {EXAMPLE}, got {name!r}: what ranks import is found by its name")
    module, colon, attribute = name.partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InputError(
            f"give a name such as {EXAMPLE}, got {name!r}: name the module with dots and without .py, then a colon and "
            "what is defined there"
        )
    specs = find_parts(module, sys.path)
    if len(specs) <= module.count("."):
        raise _not_found(name, specs)
    file = source_file(specs[-1])
    if not file:
        where = specs[-1].origin or ", ".join(specs[-1].submodule_search_locations or ())
        raise InputError(f"{name}: {module} is {where}, which has no Python source: name a module that has")
    is_package = specs[-1].submodule_search_locations is not None
    root = str(Path(file).parents[module.count(".") + is_package])
    _check_defined(name, file)
    return _make_code(name, os.path.dirname(file), root, find_sources([module, *ranks], root), data_files)


def _make_code(name: str, folder: str, root: str, sources: Mapping[str, Source], data_files: Sequence[str]) -> UserCode:
    """Return the code of a recipe or script, whose version is a hash of its sources and of its data files' bytes.

    Args:
        name: the name of the recipe or script.
        folder: the folder that data files are relative to.
        root: the project's folder.
        sources: the source of each module, by the module's name.
        data_files: files that the code reads.

    Raises:
        InputError: A data file is not found, or lies outside of root, or `data_files` is a single text.
    """
    versions = {one: source.hash for one, source in sources.items()}
    files = {source.file for one, source in sources.items() if one.partition(".")[0] != LIBRARY}
    for one in _check_list("data_files", data_files):
        path = os.path.abspath(os.path.join(folder, one))
        if not os.path.isfile(path):
            raise InputError(f"{name}: data file {one!r} is not a file; it is looked for as {path}")
        if not Path(path).is_relative_to(root):
            raise InputError(f"{name}: data file {one!r} must lie below {root}, to be shipped with the code")
        if path not in files:
            files.add(path)
            key = f"data file {Path(path).relative_to(root).as_posix()}"  # no module can have this name
            versions[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return UserCode(name, root, tuple(sorted(files)), hash_parts(versions))


def find_script(script: str | Path, data_files: Sequence[str] = (), ranks: Sequence[str] = ()) -> UserCode:
    """Find a script and the first-party modules that it imports, without running anything, and compute its version.

    A relative path is looked for in the current folder, and then in the folders of sys.path, as modules are.

    Args:
        script: the path of a Python file.
        data_files: files that the script reads, relative to its own folder.
        ranks: modules of this library that the ranks run. The version covers their code, too.

    Returns:
        The code. Its root is the folder in which the path was found, and its name the path from there. For an absolute
        path or one that begins with "..", the root is the script's own folder.

    Raises:
        InputError: The script is no file NAME.py, the script or a data file is not found, a data file lies outside the
            root, `data_files` is a single text, or a file has a syntax error.
    """
    given = Path(script)
    if not given.name.endswith(".py"):
        raise InputError(f"script must be a Python file, got {str(script)!r}: give the path of a file NAME.py")
    folders = [str(given.parent)] if given.is_absolute() else [os.getcwd(), *map(os.path.abspath, sys.path)]
    name = given.name if given.is_absolute() else os.path.normpath(given)
    root = next((folder for folder in folders if os.path.isfile(os.path.join(folder, name))), None)
    if root is None:
        searched = [one for one in dict.fromkeys(folders) if os.path.isdir(one) and not is_installed(one)]
        remedy = f"is not in {', '.join(searched)}: give its path from one of these folders, or its absolute path"
        if given.is_absolute():
            remedy = "is no file: correct its path"
        raise InputError(f"script must be a Python file that is there, got {str(script)!r}, which {remedy}")
    file = os.path.normpath(os.path.join(root, name))
    if name.startswith(os.pardir):
        root, name = os.path.split(file)
    folder = os.path.dirname(file)
    script_source = read_script(file)
    sys.path.insert(0, folder)  # where the script's own imports look first
    try:
        sources = find_sources([*ranks, *script_source.imports], root)
    finally:
        sys.path.remove(folder)
    return _make_code(name, folder, root, {**sources, name: script_source}, data_files)


def find_observers(names: Sequence[str]) -> list[UserCode]:
    """Find the code of each observer by its name, "package.module:Name". Raises InputError as find_code does."""
    return [find_code(one) for one in _check_list("observers", names)]


def _check_list(what: str, names: Sequence[str]) -> Sequence[str]:
    """Return the names. Raises InputError for a single text, which is a sequence of letters, too."""
    if isinstance(names, str):
        raise InputError(f"{what} must be a list, got {names!r}: write [{names!r}]")
    return names


def join_codes(codes: Sequence[UserCode]) -> UserCode:
    """Combine the code of several names that are used together: the name and root of the first, the files of all."""
    files = {*chain.from_iterable(code.files for code in codes)}
    version = hash_parts({code.name: code.version for code in codes})
    return UserCode(codes[0].name, codes[0].root, tuple(sorted(files)), version)


@contextmanager
def checked_imports(root: str, files: Collection[str]) -> Iterator[None]:
    """Raise InputError at the end of the block if the block imported the user's code by a computed name.

    A context manager. find_code() finds only modules that are imported by literal names; the version, and the pods,
    would lack any other. Modules that were imported before the block are not checked. If the block raises, nothing is
    checked.

    Args:
        root: the project's folder, below which modules are checked; "" checks nothing.
        files: the absolute paths of the files that find_code has found.
    """
    before = {"__main__", *sys.modules}
    yield
    loaded = loaded_files(before) if root else {}
    others = {name: file for name, file in loaded.items() if file not in files and name.partition(".")[0] != LIBRARY}
    missed = {name: file for name, file in others.items() if is_first_party(name, file, root)}
    if missed:
        shown = ", ".join(f"{name} ({os.path.relpath(file, root)})" for name, file in sorted(missed.items()))
        raise InputError(
            f"imported by a computed name: {shown}. The cache would not notice that they were edited, and pods would "
            "lack them: import them by a plain import statement, or name their files as data files of the recipe"
        )


def loaded_files(others: Collection[str] = ()) -> dict[str, str]:
    """Return the absolute path of each imported module's file, by module name.

    Modules without a file are left out. So are modules whose type is a subclass of ModuleType: some of these are lazy,
    and reading their __file__ would import them.

    Args:
        others: names of modules to leave out; their submodules are not left out.
    """
    modules = {n: m for n, m in list(sys.modules.items()) if n not in others and type(m) is ModuleType}
    files = {name: vars(module).get("__file__") for name, module in modules.items()}
    return {name: os.path.abspath(file) for name, file in files.items() if isinstance(file, str)}


# --- mistakes ---


def _not_found(name: str, specs: Sequence[ModuleSpec]) -> InputError:
    """Return (not raise) the error for a module that is not found.

    The message names the folders that were searched, or the parent that is a module and no package.

    Args:
        name: "package.module:Name".
        specs: the specs of the module's parents that were found, from the outermost.
    """
    parts = name.partition(":")[0].split(".")
    parent = ".".join(parts[: len(specs)])
    missing = parts[len(specs)]
    paths = (specs[-1].submodule_search_locations or ()) if specs else sys.path
    folders = [folder for folder in dict.fromkeys(map(os.path.abspath, paths)) if os.path.isdir(folder)]
    scripts = os.path.realpath(sysconfig.get_path("scripts"))  # the folder of pyflyte is the first on its sys.path
    folders = [one for one in folders if specs or not (is_installed(one) or os.path.realpath(one) == scripts)]
    if parent and not folders:
        return InputError(f"{name}: {parent} is a module, {specs[-1].origin}, and has no module {missing} in it")
    return InputError(
        f"{name}: no module {missing} in {', '.join(folders)}: start in the folder from which the module can be "
        "imported, or put that folder on PYTHONPATH"
    )


def _check_defined(name: str, file: str) -> None:
    """Raise InputError if a module's source does not define a name at its top level, or has a syntax error.

    An assignment, a definition or an import of the name counts. A module with a star import, with __getattr__, or with
    a function that declares the name as global passes, because each may provide the name. The module is not imported.

    Args:
        name: "package.module:Name".
        file: the module's file.
    """
    attribute = name.partition(":")[2]
    content = Path(file).read_bytes()
    with faults_named(file):
        tree = ast.parse(content, file)
        table = symtable.symtable(content, file, "exec")  # type: ignore[arg-type] # bytes: its coding
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    stars = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
    global_names = chain.from_iterable(node.names for node in ast.walk(tree) if isinstance(node, ast.Global))
    # The rank finds out about names that come from a star import, from __getattr__ or from a function
    if not {attribute, "__getattr__"} & {*names, *global_names} and not any(stars):
        raise InputError(f"{name}: {file} defines no {attribute} at its top level")
