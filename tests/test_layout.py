"""The house's own rules of who may import whom: see docs/architecture.md."""

import ast
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "flyte_ddp"
# From the ground up: a room imports from itself and from those before it. "" is the library's own folder.
ROOMS = ("ground", "launch", "data", "recipe", "engine", "recipes", "report", "train", "tasks")
GROUND = (
    "code_version",
    "errors",
    "events",
    "model_metadata",
    "reading",
    "schedules",
    "settings",
    "storage",
    "user_code",
)
FEATURES = (
    "__main__",
    "autoencoder",
    "export",
    "hardware",
    "inference",
    "keras",
    "loading",
    "new",
    "promote",
    "sweep",
    "timing",
    "watch",
)


def _modules() -> dict[str, Path]:
    """By name within the library: engine.loop, recipe."""
    return {
        ".".join(path.relative_to(LIBRARY).with_suffix("").parts): path
        for path in LIBRARY.rglob("*.py")
        if path.name != "__init__.py"
    }


def _room(module: str) -> str:
    room = module.partition(".")[0]
    return "ground" if room in GROUND else "recipe" if room in ("share", "weights") else room


def _imports(path: Path) -> set[str]:
    """Modules of this library, and whatever else starts with its name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    modules = _modules()
    parts = {name.removeprefix("flyte_ddp.") for name in found if name.startswith("flyte_ddp.")}
    return {name if name in modules else name.rpartition(".")[0] for name in parts}


def test_every_module_has_its_room():
    assert {_room(module) for module in _modules()} == {*ROOMS, *FEATURES}


def test_no_arrow_leads_up():
    wrong = {}
    for module, path in _modules().items():
        room = _room(module)
        allowed = (*ROOMS, room) if room in FEATURES else ROOMS[: ROOMS.index(room) + 1]
        upwards = {name for name in _imports(path) if _room(name) not in allowed}
        if upwards:
            wrong[module] = upwards
    assert not wrong
