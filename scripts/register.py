"""Registration by pyflyte, with explanations of refusals: python -m scripts.register CONFIG [ARGUMENT ...]."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from flyte_ddp.attempt.registration import Registration, registration
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1.resources import training_sizes
from flyte_ddp.reading import read_settings
from scripts.dry_run import ROOT

REFUSED = re.compile(r"Requested (\w+) \w+ \[(.+?)\] is greater than (current limit set in the platform .*?\[.+?\]|.*)")
ENDPOINT = re.compile(r"^Registering against (\S+)", re.MULTILINE)
REGISTERED = re.compile(r"\[✔\] (Task|Workflow): (\S+)")


class Registered(NamedTuple):
    """What was registered under a version, by name, and whether it was everything."""

    version: str
    tasks: list[str]
    workflows: list[str]
    complete: bool


def register(config: str, arguments: Sequence[str]) -> Registered:
    """Register workflows/ on the cluster that the file names, each time as a new version unless one is given.

    flytekit's own version ignores sizes, and it writes some lists in random order, so that registering the same version
    again would be refused.
    """
    try:
        if config.endswith(("yaml", "yml")) and not isinstance(read_settings(config), dict):
            raise InputError(f"{config} must name a cluster, as admin.endpoint: it has no such section")
        asked = registration()
    except InputError as error:
        sys.exit(error.message)
    arguments = list(arguments)
    named = [i for i, argument in enumerate(arguments[:-1]) if argument in ("--version", "-v")]
    version = arguments[named[-1] + 1] if named else time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    arguments += [] if named else ["--version", version]
    command = ["pyflyte", "--config", config, "register", *arguments, "workflows"]
    print(f"+ {shlex.join(command)}", flush=True)
    lines: list[str] = []
    held: list[str] = []  # a traceback, which is shown unless we can say the same in one sentence
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if held or "Traceback (most recent call last)" in line:
            held.append(line)
        else:
            print(line, end="", flush=True)
    complete, shown = process.wait() == 0, "".join(lines)
    found = REGISTERED.findall(shown)
    tasks, workflows = ([name for kind, name in found if kind == wanted] for wanted in ("Task", "Workflow"))
    result = Registered(version, tasks, workflows, complete)
    if not complete:
        if not is_unreachable(shown):
            print(*held, sep="")
        print(explain(shown, result, asked), file=sys.stderr)
    return result


def explain(shown: str, result: Registered, asked: Registration) -> str:
    """Explain a failed registration: which sizes were refused, which variables set them, and what has been stored."""
    parts = []
    if refused := REFUSED.search(shown):
        parts += [f"Refused because of its size: {refused[0]}.", sizes(asked, refused[1])]
    elif "different structure" in shown:
        parts += [f'Version {result.version} is taken: give another one (ARGS="--version NAME"), or none.']
    elif is_unreachable(shown):
        (endpoint,) = ENDPOINT.findall(shown)
        parts += [f"No Flyte answers at {endpoint}: start that cluster, or correct the file's endpoint and insecure."]
    if result.tasks:
        left = f"{len(result.tasks)} tasks and {len(result.workflows)} workflows"
        parts += [f"Version {result.version} is left with {left} (marked ✔ above). Register again as another version."]
    return "\n" + "\n".join(parts)


def is_unreachable(shown: str) -> bool:
    return "StatusCode.UNAVAILABLE" in shown and bool(ENDPOINT.search(shown))


def sizes(asked: Registration, resource: str) -> str:
    """List all sizes by their variables, those of the refused resource first."""
    names = {"CPU": "cpu", "MEMORY": "memory", "GPU": "gpus", "EPHEMERAL_STORAGE": "disk", "STORAGE": "disk"}
    values = {name: str(value) for name, value in asdict(asked).items() if name.endswith((*names.values(), "disk"))}
    limits = training_sizes(asked.training_gpus)["limits"]
    defaults = {"training_cpu": limits.cpu, "training_memory": limits.mem, "training_disk": limits.ephemeral_storage}
    shown = {f"DDP_{name.upper()}": value or defaults[name] for name, value in values.items()}
    wanted = names.get(resource, "")
    first = [f"{name}={value}" for name, value in shown.items() if name.lower().endswith(wanted)]
    rest = [f"{name}={value}" for name, value in shown.items() if not name.lower().endswith(wanted)]
    return (
        f"Now {', '.join(first)}: lower what is too large, or set DDP_PROFILE=sandbox for a cluster without GPUs.\n"
        f"The other sizes: {', '.join(rest)}"
    )


def main(config: str = "", *arguments: str) -> None:
    if not config or config.startswith("-"):  # pyflyte would take an option for the file, and look for another one
        sys.exit(__doc__)
    sys.exit(not register(config, arguments).complete)


if __name__ == "__main__":
    main(*sys.argv[1:])
