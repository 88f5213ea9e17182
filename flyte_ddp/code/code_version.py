"""Versions of code, which change with what decides a result, and with nothing else.

A module and all first-party modules that it imports decide a result. They are found in their source, because importing
them would import torch. Comments, docstrings and formatting of users' code don't count. This library's code is hashed
as it is, because each process that knows a task hashes all of it, and only a release changes it.
"""

import ast
import hashlib
import inspect
import os
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import flyte_ddp
from flyte_ddp.errors import InputError, ReportedError

LIBRARY = "flyte_ddp"
HERE = str(Path(flyte_ddp.__path__[0]).parent)
# Modules that no result depends on: they start ranks, listen to them, and show and store what the ranks found
AROUND = ("launch.", "report.", "attempt.", "flyte1.", "flyte2.", "lightning.task", "sweep.page")
AROUND_RANKS = tuple(f"{LIBRARY}.{name}" for name in AROUND)
# The names that users import from flyte_ddp, with their modules: flyte_ddp/__init__.py only looks them up
FACE = {f"{LIBRARY}.{name}": module for name, module in flyte_ddp.MODULES.items()}
OTHER_CODE = "leave out --copy none, so that the code is sent, or rebuild the image"
# Each process that knows a task reads the library's imports. Parsing these files would take it 0.3 s, and this 0.01 s.
OF_LIBRARY = re.compile(rf"^ *from ({LIBRARY}[\w.]*) import (\([^)]*\)|[^#\n]*)", re.MULTILINE)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """A module's source.

    Attributes:
        file: the path of the module's file.
        hash: the hash of the module's code.
        imports: full names that the module imports, which may be modules or what is in them.
    """

    file: str
    hash: str
    imports: tuple[str, ...]


def code_version(*modules: str) -> str:
    """Return a hash, 16 hex digits, of the code of these modules and of all first-party modules that they import.

    Raises:
        ReportedError: One of these modules is missing, as in a pod that was sent no code.
        InputError: A file has a syntax error.
    """
    sources = find_sources(modules)
    for name in modules:
        if name not in sources:
            raise ReportedError(f"{name} is missing here: {OTHER_CODE}")
    return hash_parts({name: source.hash for name, source in sources.items()})


def with_installed(code: str, distributions: Sequence[str] = ("torch",)) -> str:
    """Return a hash, 16 hex digits, of a code version and of the installed versions of some distributions.

    Args:
        code: the code version.
        distributions: names of installed packages, as for pip. One that is not installed is left out.
    """
    # The code version does not contain them: it must be equal on all hosts, whose installed versions may differ
    versions = {"": code}
    for name in distributions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return hash_parts(versions)


def hash_parts(parts: Mapping[str, str]) -> str:
    """Return 16 hex digits, hashed from the hashes or versions of parts by name, in whatever order these come."""
    lines = sorted(f"{name}\0{part}\n" for name, part in parts.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def find_sources(modules: Sequence[str], root: str = HERE) -> dict[str, Source]:
    """Find the sources of these modules, their parent packages and all first-party modules that they import, in turn.

    No module is imported. A module that is not found is left out. First-party modules are those of this library, and
    those of the user's project: the modules below `root` that are not installed. A module of this library that no
    result depends on counts only if `modules` names it.

    Args:
        modules: the full names of the modules.
        root: the project's folder, which comes first on the ranks' sys.path. If it is itself installed, only the
            top-level packages in `modules` belong to the project.

    Returns:
        The source of each module, by its full name.

    Raises:
        InputError: A file has a syntax error.
    """
    own = {name.partition(".")[0] for name in modules}
    sources: dict[str, Source] = {}
    others: set[str] = set()
    seen = set(modules)
    todo = list(modules)
    while todo:
        name = todo.pop()
        name = FACE.get(name, name)
        parts = name.split(".")
        if parts[0] in others:
            continue
        specs = find_parts(name, [root, *sys.path])  # root is the first on the ranks' sys.path, too
        if not specs or (specs[0].origin and not is_first_party(name, specs[0].origin, root, own)):
            others.add(parts[0])
            continue
        for count, spec in enumerate(specs, start=1):  # parents first: importing a.b runs a/__init__.py
            one = ".".join(parts[:count])
            file = source_file(spec)
            counts = one in modules or not (one == LIBRARY or one.startswith(AROUND_RANKS))
            if counts and file and one not in sources and is_first_party(one, file, root, own):
                package = one if spec.submodule_search_locations is not None else ".".join(parts[: count - 1])
                sources[one] = _read_source(file, package, Path(file).read_bytes())
                new = set(sources[one].imports) - seen
                seen |= new
                todo += new
    return sources


# --- finding ---


def find_parts(module: str, path: Sequence[str]) -> list[ModuleSpec]:
    """Find the package a, its subpackage a.b and so on down to a module a.b.c, without importing any of them.

    This library's modules are searched for where the library itself is, others in the folders of `path`. Returns the
    specs of a, a.b and a.b.c, up to the first one that is not found.
    """
    specs: list[ModuleSpec] = []  # importlib.util.find_spec would import the parents
    path = [HERE] if module.partition(".")[0] == LIBRARY else path
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            break
        specs.append(spec)
        path = list(spec.submodule_search_locations or ())
    return specs


def source_file(spec: ModuleSpec) -> str | None:
    """Return a module's file; None for a compiled module and for a folder without __init__.py (a namespace package)."""
    return os.path.abspath(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def is_first_party(module: str, file: str, root: str, own: Collection[str] = ()) -> bool:
    """Return whether a module belongs to this library, or to the user's project.

    Args:
        module: the module's full name.
        file: the path of its file.
        root: the project's folder. What is installed below it does not belong to the project.
        own: if root itself is installed, the names of the top-level packages that belong to the project.
    """
    top = module.partition(".")[0]
    if top == LIBRARY:
        return True
    if not Path(file).is_relative_to(root) or not file.endswith(".py") or is_installed(file) != is_installed(root):
        return False
    return top in own or not is_installed(root)


def is_installed(path: str) -> bool:
    """Return whether a path is in the standard library, or below a folder named site-packages or dist-packages.

    Links are not followed, and the path need not exist.
    """
    # sys.prefix tells nothing: it may be /usr, while /usr/src/app is a user's code
    standard_library = os.path.dirname(os.__file__)
    installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return bool(installed) or Path(path).is_relative_to(standard_library)


# --- reading ---


@contextmanager
def faults_named(file: str) -> Iterator[None]:
    """Turn a syntax error in the block, which parses the file, into an InputError with file and line."""
    try:
        yield
    except (SyntaxError, ValueError) as error:  # ValueError: the source has null bytes
        line = getattr(error, "lineno", None) or 1
        raise InputError(f"{file}, line {line}: {error.args[0]} (read by Python {sys.version.split()[0]})") from None


def read_script(file: str) -> Source:
    """Return the source of a file that is run instead of imported. Raises InputError for a syntax error."""
    return _read_source(file, "", Path(file).read_bytes())


@cache
def _read_source(file: str, package: str, content: bytes) -> Source:
    """Hash a module's source, and list the full names that it imports, which may be modules or what is in them.

    A file of this library is hashed by its bytes, with Unix line ends. Any other file is hashed by its code, without
    comments and docstrings. The result is cached by all arguments.

    Args:
        file: the path of the file.
        package: the full name of the package that the module's relative imports start from. It also tells whether the
            file belongs to this library.
        content: the bytes of the file.

    Raises:
        InputError: A file of the user has a syntax error.
    """
    if package.partition(".")[0] == LIBRARY:
        text = content.replace(b"\r\n", b"\n")  # git may check files out with these ends of lines
        return Source(file, hashlib.sha256(text).hexdigest(), tuple(_imports_of_library(text.decode())))
    with faults_named(file):
        tree = ast.parse(content, file)
    digest, nodes = hash_of_code(tree)
    return Source(file, digest, tuple(_imports(nodes, package)))


def hash_of_file(file: str) -> str:
    """Return the hash of a user's file: of its code if the file is Python, else of its bytes."""
    content = Path(file).read_bytes()
    with suppress(SyntaxError, ValueError):  # a data file may be named so, or the user may be editing the file
        if file.endswith(".py"):
            return hash_of_code(ast.parse(content, file))[0]
    return hashlib.sha256(content).hexdigest()


def hash_of_body(function: Callable[..., Any]) -> str:
    """Return the hash, 64 hex digits, of the body of a task's function.

    Decorators, signature, docstring and comments do not count, nor does what the body calls. Returns "" if the
    function's source cannot be read.
    """
    try:
        source = inspect.getsource(function)
        # A multi-line string in an indented function may keep textwrap.dedent from finding the indent
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = next((node for node in ast.walk(tree) if isinstance(node, functions)), None)
    return hash_of_code(ast.Module(found.body, []))[0] if found else ""


def hash_of_code(tree: ast.Module) -> tuple[str, list[ast.AST]]:
    """Return a hash of a module's code, 64 hex digits, and the nodes of its syntax tree, without docstrings.

    The hash does not depend on comments, formatting and docstrings, nor on the version of Python from 3.10 to 3.13. The
    docstrings are removed from `tree` itself.
    """
    # ast.dump and ast.unparse differ between these versions. So each node is hashed with its fields, level by level.
    # Empty fields are left out, because newer versions have more of them.
    texts: list[str] = []
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        texts.append(type(node).__name__)
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        for name, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else (value,)
            if isinstance(node, ast.JoinedStr):  # Python 3.12.1 ends f"{x:{width}}" with an empty string
                values = [one for one in values if getattr(one, "value", None) != ""]
            if value is None or not values or name == "ctx":  # ctx, load or store, follows from the place
                continue
            texts.append(name)
            for one in values:
                if isinstance(one, ast.AST):
                    texts.append(type(one).__name__)
                    nodes.append(one)
                else:
                    texts.append(ascii(one))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest(), nodes


def _imports_of_library(text: str) -> Iterator[str]:
    """Yield the full names that a file of the library imports.

    Such a file imports from the library by full names alone.
    """
    for origin, names in OF_LIBRARY.findall(text):
        yield from (f"{origin}.{name.split()[0]}" for name in names.strip("()").split(",") if name.strip())


def _imports(nodes: Sequence[ast.AST], package: str) -> Iterator[str]:
    """Yield the full names of the modules that code may import.

    Import statements count, and calls of import_module() or __import__() with a literal name. "from module import name"
    yields "module.name", whose last part may be an attribute and no module. User code that imports flyte_ddp itself, or
    * from it, also yields "flyte_ddp.NAME" for each public name of flyte_ddp.

    Args:
        nodes: the nodes of the code's syntax tree.
        package: the full name of the package that relative imports start from.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from names
            if LIBRARY in names and package.partition(".")[0] != LIBRARY:
                yield from FACE  # the code may use any of the library's names as an attribute
        elif isinstance(node, ast.ImportFrom):
            # A relative import beyond the top-level package fails in the rank, with Python's own message
            with suppress(ImportError):
                origin = resolve_name("." * node.level + (node.module or ""), package)
                yield from (origin if alias.name == "*" else f"{origin}.{alias.name}" for alias in node.names)
                if origin == LIBRARY and node.names[0].name == "*":
                    yield from FACE
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            literal = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(literal, str):
                with suppress(ImportError):
                    yield resolve_name(literal, package)
