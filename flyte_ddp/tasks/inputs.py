"""Readable errors for invalid command-line inputs."""

from typing import Any

from flytekit.interaction.click_types import DirParamType, FileParamType, UnionParamType

from flyte_ddp.reading import read_settings
from flyte_ddp.settings import Settings
from flyte_ddp.tasks.flytekit_compat import alternatives, read_json_inputs


def explain_unreadable_settings() -> None:
    """Makes `pyflyte run` read settings with read_settings: flytekit's own reader shows a traceback for a broken file
    and takes the name of a missing file for JSON. Other inputs are still read by flytekit."""
    read_json_inputs(Settings, read_settings)


def explain_missing_paths() -> None:
    """Makes `pyflyte run` say that an optional file or folder is missing: flytekit tries to convert the path to None,
    and shows a traceback. Other optional inputs are still converted by flytekit."""
    if getattr(UnionParamType.convert, "explains", False):
        return
    flytekits = UnionParamType.convert

    def convert(self: UnionParamType, value: Any, param: Any, context: Any) -> Any:
        of_paths = [one for one in alternatives(self) if isinstance(one, (DirParamType, FileParamType))]
        if len(of_paths) == 1 and isinstance(value, str):
            return of_paths[0].convert(value, param, context)
        return flytekits(self, value, param, context)

    convert.explains = True  # type: ignore[attr-defined]
    UnionParamType.convert = convert
