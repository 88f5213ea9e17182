"""Which layer may import which: see docs/architecture.md."""

import ast
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "flyte_ddp"
# From the ground up: a layer imports from itself and from those before it
LAYERS = (
    "ground",
    "launch",
    "data",
    "recipe",
    "engine",
    "recipes",
    "report",
    "training",
    "attempt",
    "flyte1",
    "lightning",
)
GROUND = (
    "code",
    "errors",
    "events",
    "fields",
    "lock",
    "manifest",
    "model_files",
    "random_numbers",
    "reading",
    "schedules",
    "settings",
    "whole_files",
    "text",
)
FEATURES = (
    "__main__",
    "export",
    "flyte2",
    "inference",
    "new",
    "promote",
    "run",
    "script",
    "sweep",
    "watch",
)

# Their folders are rooms, and so is each module beside these
WITH_ROOMS = ("data", "engine")


@cache
def _modules() -> dict[str, Path]:
    """By name within the library: engine.loop, recipe."""
    return {
        ".".join(path.relative_to(LIBRARY).with_suffix("").parts): path
        for path in LIBRARY.rglob("*.py")
        if path.name != "__init__.py" and "template" not in path.parts
    }


def _layer(module: str) -> str:
    layer = module.partition(".")[0]
    return "ground" if layer in GROUND else "recipe" if layer in ("batch_share",) else layer


@cache
def _imported_names(path: Path) -> set[str]:
    """Full names of what a file imports, modules or what is in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@cache
def _imports(path: Path) -> set[str]:
    """The modules of this library that a file imports; "" stands for its face, which is for users: no layer."""
    modules = _modules()
    parts = {name.removeprefix("flyte_ddp.") for name in _imported_names(path) if name.startswith("flyte_ddp.")}
    return {name if name in modules else name.rpartition(".")[0] for name in parts}


def test_every_module_has_its_layer():
    assert {_layer(module) for module in _modules()} == {*LAYERS, *FEATURES}


def test_no_layer_imports_from_one_above():
    wrong = {}
    for module, path in _modules().items():
        layer = _layer(module)
        if layer == "flyte2":  # beside flyte1: the other platform
            allowed = (*LAYERS[: LAYERS.index("flyte1")], layer)
        else:
            allowed = (*LAYERS, "flyte2", layer) if layer in FEATURES else LAYERS[: LAYERS.index(layer) + 1]
        upwards = {name for name in _imports(path) if _layer(name) not in allowed}
        if upwards:
            wrong[module] = upwards
    assert not wrong


def test_what_every_platform_shares_imports_none():
    """flyte_ddp.attempt and all below it import neither flytekit nor flyte, not even inside a function."""
    below = [path for module, path in _modules().items() if _layer(module) in LAYERS[: LAYERS.index("flyte1")]]
    assert below
    for path in below:
        found = {name.split(".")[0] for name in _imported_names(path)}
        assert not found & {"flyte", "flytekit", "flyteidl", "flytekitplugins"}, path


def test_neither_platform_imports_the_other():
    for layer, others in {"flyte1": {"flyte"}, "flyte2": {"flytekit", "flytekitplugins", "flyteidl"}}.items():
        for path in (path for module, path in _modules().items() if _layer(module) == layer):
            assert not {name.split(".")[0] for name in _imported_names(path)} & others, path


# --- rooms ---


def _room(module: str) -> str:
    """The folder of a module, or, of one beside rooms, the module itself: others may be below a room, others above."""
    depth = 2 if module.partition(".")[0] in WITH_ROOMS else 1
    return module.rpartition(".")[0] if module.count(".") >= depth else module


def _circle(imports: dict[str, set[str]]) -> list[str]:
    """Names that import one another, in their order; empty if there are none."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next(filter(None, (visit(other, (*path, name)) for other in sorted(imports.get(name, ())))), [])
        done.add(name)
        return found

    return next(filter(None, (visit(name, ()) for name in sorted(imports))), [])


def test_a_circle_is_found():
    assert _circle({"a": {"b", "c"}, "b": set(), "c": {"b", "d"}, "d": {"c"}}) == ["c", "d", "c"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_modules_and_no_rooms_import_one_another():
    """Neither at the top of a file nor within a function."""
    modules = {module: _imports(path) & {*_modules()} for module, path in _modules().items()}
    assert not _circle(modules)
    rooms: dict[str, set[str]] = {}
    for module, imported in modules.items():
        rooms.setdefault(_room(module), set()).update({_room(one) for one in imported} - {_room(module)})
    assert {"engine.batches", "engine.state", "data.blocks", "attempt", "recipe"} <= {*rooms}
    assert not _circle(rooms)


def test_no_module_imports_names_that_another_keeps_for_itself():
    for path in _modules().values():
        names = {name for name in _imported_names(path) if name.startswith("flyte_ddp.")}
        assert not {name for name in names if any(part.startswith("_") for part in name.split("."))}, path


def test_every_package_says_what_lives_in_it():
    packages = [path for path in LIBRARY.rglob("__init__.py") if "template" not in path.parts]
    for path in packages:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert path.parent == LIBRARY or 2 <= len(text.splitlines()) <= 5, path


# --- words ---

# A docstring that begins with one of these begins in the middle of a thought
FIRST_WORDS = {
    "also", "and", "as", "by", "for", "from", "how", "if", "in", "not", "of", "once", "one", "see", "that", "this",
    "those", "to", "what", "where", "which", "whoever", "whose", "with",
}  # fmt: skip


def test_docstrings_begin_with_what_something_is_or_does():
    """Ruff holds the rest of PEP 257; where pyproject.toml still ignores its rules, so does this test."""
    ignored = re.findall(r'^"(flyte_ddp/.*)" = \["D"\]$', (LIBRARY.parent / "pyproject.toml").read_text(), re.MULTILINE)
    found = []
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY.parent).as_posix()
        if any(fnmatch(name, pattern) for pattern in ignored):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or "Nothing"
                if text.startswith("The same") or text.split()[0].strip(".,:;").lower() in FIRST_WORDS:
                    found.append(f"{name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)
