"""The message of a local run that takes a training from the cache. No code of the task runs then."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
from flytekit.models.literals import Literal

from flyte_ddp.flyte1.flytekit_compat import on_cache_hit
from flyte_ddp.report.console import say_last

TRAIN_AGAIN = "To train again, put --overwrite-cache before the file: pyflyte run --overwrite-cache FILE WORKFLOW …"


def explain_cached_trainings() -> None:
    """Print a message whenever a local run takes a training from the cache. A second call does no harm."""
    on_cache_hit(say_cached)


def say_cached(outputs: Mapping[str, Literal]) -> None:
    """Print the message for a training's outputs, and nothing for others."""
    if not outputs.keys() >= {"model_state", "summary", "report"}:
        return
    model, report = (outputs[name].scalar.blob.uri for name in ("model_state", "report"))
    summary = msgpack.loads(outputs["summary"].scalar.binary.value)
    ranks = f"{summary['world_size']} rank" + "s" * (summary["world_size"] != 1)
    lines = [
        ("Cached", f"trained before on {ranks} with the same inputs, so nothing was trained now. {TRAIN_AGAIN}"),
        ("Tested", _measured(summary)),
        ("Model", model),
        ("Report", report),
        ("Next", f"python3 -m webbrowser {Path(report).as_uri()}"),
    ]
    say_last("\n" + "\n".join(f"{label + ':':<9}{text}" for label, text in lines))


def _measured(summary: Mapping[str, Any]) -> str:
    """Return the measures of the test samples. An image classifier's are fields of their own."""
    own = {name.removeprefix("test_"): summary[name] for name in ("accuracy", "test_loss") if name in summary}
    return ", ".join(f"{name} {value:.4g}" for name, value in (summary.get("measures") or own).items())
