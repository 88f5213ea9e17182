"""The page of the Python API: every public name by the rooms of the library, with its docstring.

Docstrings describe arguments in Google's sections, or in their last lines as "name: what it is. other: what that is.",
which become such a section here. Those of settings are the help of their fields, with the defaults.
"""

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import flyte_ddp
from flyte_ddp.fields import Settings

ROOT = Path(__file__).parents[2]
PAGE = "docs/api"
# Headings, and the modules whose names are below them, or what these begin with; what fits none comes last
GROUPS = {
    "A recipe": r"recipe$|recipes\.(?!models)",
    "Settings and options": "settings|fields",
    "Training without Flyte": "training",
    "Tasks and workflows": "flyte1|attempt",
    "A loop of your own": r"engine\.own_loop",
    "LightningModules": "lightning",
    "Scripts": "script",
    "Data in blocks": r"data\.blocks",
    "Trained models": r"model_files|recipes\.models",
    "More": "",
}


def grouped() -> dict[str, list[str]]:
    """The public names by the heading that they stand below."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name, module in flyte_ddp.MODULES.items():
        room = module.removeprefix("flyte_ddp.")
        groups[next(title for title, start in GROUPS.items() if re.match(start, room))].append(name)
    return {title: names for title, names in groups.items() if names}


def add_names(app: Any, page: str, source: list[str]) -> None:
    if page == PAGE:
        blocks = [line for title, names in grouped().items() for line in (f"\n## {title}", *map(_directive, names))]
        source[0] += "\n".join(blocks)


def _directive(name: str) -> str:
    value = getattr(flyte_ddp, name)
    lines = [".. py:currentmodule:: flyte_ddp", ""]
    if hasattr(value, "task_function"):  # a Flyte task is called as its function is
        setattr(flyte_ddp, name, value := value.task_function)
    if inspect.isclass(value):
        members = ", ".join(_members(value))
        lines += [f".. autoclass:: {name}", f"   :members: {members}" if members else ""]
    elif inspect.isroutine(value):
        lines.append(f".. autofunction:: {name}")
    else:  # an alias: its comment and its value
        text = inspect.getsource(import_module(flyte_ddp.MODULES[name]))
        comment, meaning = re.findall(rf"^((?:# .*\n)*){name} = (.*)", text, re.MULTILINE)[0]
        lines += [f".. py:data:: {name}", f"   :value: {meaning}", "", *comment.replace("# ", "   ").splitlines()]
    return f"\n### {name}\n\n```{{eval-rst}}\n" + "\n".join(lines) + "\n```\n"


def _members(value: type) -> list[str]:
    """The methods and properties, inherited ones too, that pages or examples name; those of public bases are there."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.py")]
    text = "".join(file.read_text() for file in files)
    bases = [base for base in value.__mro__ if base is value or base.__name__ not in flyte_ddp.MODULES]
    names = {name: None for base in bases if base.__module__.startswith("flyte_ddp.") for name in vars(base)}
    shown = (name for name in names if inspect.isroutine(one := getattr(value, name)) or isinstance(one, property))
    return [name for name in shown if name[0] != "_" and re.search(rf"\b{name}[(`]", text)]


def as_text() -> str:
    """The same page as plain text, of a docstring for each name and each public method."""
    parts = []
    for name in (name for names in grouped().values() for name in names):
        value = getattr(flyte_ddp, name)
        described = {name: value}
        if inspect.isclass(value):
            described |= {f"{name}.{each}": getattr(value, each) for each in _members(value)}
        parts += [f"\n## {title}\n\n{inspect.getdoc(one)}\n{_fields(one)}\n" for title, one in described.items()]
    return "".join(parts)


def lists_of_arguments(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place: arguments become a section, and what is code in Markdown becomes code here."""
    known = _parameters(value) if kind in ("function", "method", "class") else set()
    blocks = re.split(r"\n\n(?=\S)", "\n".join(lines).strip("\n") + _fields(value))
    new = "\n\n".join(_as_section(block, known) for block in blocks)
    new = re.sub(r"^    (\w+(?:, \w+)+)(: .*(?:\n     .*)*)", _one_by_one, new, flags=re.MULTILINE)
    new = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", new)
    new = re.sub(r"(?<![`\w])(\*+)(?=\w)", r"\\\1", new)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            new = re.sub(rf"^    {field.name}: ", f"    {field.name} ({_kind(field)}): ", new, flags=re.MULTILINE)
    lines[:] = [*new.splitlines(), ""]


def _fields(value: Any) -> str:
    """The section of the fields that a settings class declares itself; empty for other values."""
    if not (inspect.isclass(value) and issubclass(value, Settings) and dataclasses.is_dataclass(value)):
        return ""
    own = [field for field in dataclasses.fields(value) if field.name in value.__annotations__]
    lines = [f"    {field.name}: {field.metadata['help']}" for field in own if field.metadata.get("help")]
    return "\n\nAttributes:\n" + "\n".join(lines) if lines else ""


def _parameters(value: Any) -> set[str]:
    try:
        return {*inspect.signature(value).parameters}
    except (TypeError, ValueError):
        return set()


def _as_section(block: str, known: set[str]) -> str:
    """`path: of the file. size: its bytes.` as lines of Args, if these are arguments; else the block as it is."""
    name = "|".join(known)
    first, *parts = re.split(rf"(?:^|(?<=[.;)] )|(?<=\n))((?:(?:{name}), )*(?:{name})):\s", block) if known else [block]
    if first.strip() or not parts:
        return block
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "Args:\n" + "\n".join(f"    {names}: {' '.join(text.split())}" for names, text in pairs)


def _one_by_one(entry: "re.Match[str]") -> str:
    """Several names with one text, each with the text."""
    return "\n".join(f"    {name}{entry[2]}" for name in entry[1].split(", "))


def _kind(field: "dataclasses.Field[Any]") -> str:
    kind = getattr(field.type, "__name__", str(field.type))
    if field.default_factory is dataclasses.MISSING:
        return kind
    return f"{kind}, {field.default_factory()!r}"


def short_signature(app: Any, kind: str, name: str, value: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Of data, whose attributes are listed below, and of a type that has a function for Flyte's cache as a note."""
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
        return "(...)", None
    return signature, re.sub(r".*Annotated\[\W*(?:\w+\.)*(\w+), .*", r"\1", returns or "") or None


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", add_names)
    app.connect("autodoc-process-docstring", lists_of_arguments, priority=400)  # before Napoleon reads the sections
    app.connect("autodoc-process-signature", short_signature)
    return {}
