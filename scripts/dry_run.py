"""A list of what would be registered, made without a cluster: python -m scripts.dry_run [IMAGE]."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from flyteidl.admin.launch_plan_pb2 import LaunchPlan, LaunchPlanSpec
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.core.literals_pb2 import Literal
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from google.protobuf.json_format import MessageToDict

from flyte_ddp.attempt.registration import is_secret

ROOT = Path(__file__).resolve().parents[1]


class Package(NamedTuple):
    """The content of a package made by `pyflyte package`, by name, in the order of registration."""

    tasks: dict[str, TaskTemplate]
    workflows: dict[str, WorkflowSpec]
    launch_plans: dict[str, LaunchPlan]
    files: dict[str, bytes]


def build_package(
    image: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    package: str = "workflows",
    folder: Path = ROOT,
) -> Package:
    """Package the workflows of a Python package in the folder for this image, and read the result.

    Raises RuntimeError with pyflyte's output.
    """
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary, "package.tgz")
        command = ["pyflyte", "--pkgs", package, "package", "--image", f"trainer={image}", "--output", str(archive)]
        environment = {**os.environ, **(environment or {})}
        made = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        if not archive.exists():
            raise RuntimeError(f"{made.stdout}{made.stderr}")
        return read_package(archive.read_bytes())


def read_package(archive: bytes) -> Package:
    package = Package({}, {}, {}, {})
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for name in sorted(tar.getnames()):
            content = tar.extractfile(name).read()  # type: ignore[union-attr]
            package.files[name] = content
            if name.endswith("_1.pb"):
                task = TaskSpec.FromString(content).template
                package.tasks[task.id.name] = task
            elif name.endswith("_2.pb"):
                workflow = WorkflowSpec.FromString(content)
                package.workflows[workflow.template.id.name] = workflow
            elif name.endswith("_3.pb"):
                plan = LaunchPlan.FromString(content)
                package.launch_plans[plan.id.name] = plan
    return package


class Container(NamedTuple):
    """A task's main container, and in more the other settings of its pod."""

    image: str
    requests: str
    limits: str
    environment: dict[str, str]
    more: dict[str, Any]


def container_of(task: Any) -> Container:
    """Read the main container from the task, or from its own pod template."""
    if not task.HasField("k8s_pod"):
        one, resources = task.container, task.container.resources
        environment = {variable.key: variable.value for variable in one.env}
        return Container(one.image, amounts(resources.requests), amounts(resources.limits), environment, {})
    pod = MessageToDict(task.k8s_pod.pod_spec)
    name = task.k8s_pod.primary_container_name or task.config["primary_container_name"]
    (main,) = [one for one in pod["containers"] if one["name"] == name]
    requests, limits = (main.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
    return Container(
        main.get("image", ""),
        ", ".join(f"{name} {amount}" for name, amount in sorted(requests.items())),
        ", ".join(f"{name} {amount}" for name, amount in sorted(limits.items())),
        {variable["name"]: variable.get("value", "") for variable in main.get("env", [])},
        {
            **{name: value for name, value in pod.items() if name != "containers"},
            **{name: main[name] for name in main.keys() - {"name", "image", "resources", "env", "args", "command"}},
            **{f"container {one['name']}": one for one in pod["containers"] if one is not main},
        },
    )


def describe_task(task: Any) -> Iterator[tuple[str, str]]:
    """Name the facts of a task, a TaskTemplate of Flyte 1 or 2, that differ from Flyte's defaults."""
    metadata, extended, container = task.metadata, task.extended_resources, container_of(task)
    yield "type", task.type
    if task.custom:
        custom = MessageToDict(task.custom)
        yield "nodes", str(custom.get("elasticConfig", custom))
    yield "image", container.image
    yield "requests", container.requests
    yield "limits", container.limits
    if extended.gpu_accelerator.device:
        yield "accelerator", extended.gpu_accelerator.device
    if extended.HasField("shared_memory"):
        yield "shared memory", extended.shared_memory.size_limit or "as much as the memory limit"
    if metadata.discoverable:
        ignored = ", ".join(metadata.cache_ignore_input_vars)
        yield "cache", f"version {metadata.discovery_version[:12]}" + (f", ignores {ignored}" if ignored else "")
    yield "retries", str(metadata.retries.retries)
    seconds = metadata.timeout.ToSeconds()
    yield "timeout", f"{seconds} s" if seconds else "no limit"
    if metadata.interruptible:
        yield "interruptible", "yes"
    for secret in task.security_context.secrets:
        yield "secret", f"{secret.group}/{secret.key} as {secret.env_var}"
    if metadata.pod_template_name:
        yield "pod template", metadata.pod_template_name
    for kind in ("labels", "annotations"):
        for name, value in {**getattr(metadata.metadata, kind), **getattr(task.k8s_pod.metadata, kind)}.items():
            yield kind.removesuffix("s"), f"{name}={value}"
    for name, value in container.more.items():
        yield name, json.dumps(value, sort_keys=True)
    for name, value in container.environment.items():
        if not name.startswith("_F_"):  # Flyte's own
            yield "environment", f"{name}={'***' if is_secret(name, value) else value}"


def describe_launch_plan(spec: LaunchPlanSpec, defaults: LaunchPlanSpec) -> Iterator[tuple[str, str]]:
    """Name the facts of a launch plan, including inputs that differ from the workflow's own defaults."""
    yield "workflow", spec.workflow_id.name
    for name, parameter in spec.default_inputs.parameters.items():
        value, default = decode(parameter.default), decode(defaults.default_inputs.parameters[name].default)
        if value != default:
            changed = {key: value[key] for key in value if value[key] != default[key]}
            yield name, ", ".join(f"{key} {value}" for key, value in changed.items())
    for notified in spec.entity_metadata.notifications:
        kind = notified.WhichOneof("type")
        phases = ", ".join(WorkflowExecution.Phase.Name(phase).lower() for phase in notified.phases)
        yield "notifies", f"{kind} {', '.join(getattr(notified, kind).recipients_email)}: {phases}"
    if spec.entity_metadata.schedule.cron_schedule.schedule:
        yield "schedule", f"{spec.entity_metadata.schedule.cron_schedule.schedule} (UTC), once activated"


def summary(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Return a heading, and a line for each task: its name, image, limits and secrets."""
    lines = [("Task", "image", "limits", "secrets")]
    for name, task in tasks.items():
        container = container_of(task)
        secrets = ", ".join(f"{secret.group}/{secret.key}" for secret in task.security_context.secrets)
        lines.append((name, container.image, container.limits, secrets or "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()


def amounts(resources: Iterable[Any]) -> str:
    names = Resources.ResourceName
    return ", ".join(f"{names.Name(entry.name).lower().replace('_', ' ')} {entry.value}" for entry in resources)


def decode(literal: Literal) -> Any:
    """Return the value of a scalar literal; a dataclass becomes a dictionary."""
    if literal.scalar.HasField("binary"):
        return msgpack.unpackb(literal.scalar.binary.value)
    primitive = literal.scalar.primitive
    return getattr(primitive, primitive.WhichOneof("value") or "string_value")


def main(image: str = "flyte-ddp-training:latest", *arguments: str) -> None:
    show_package(build_package(image, *arguments))


def show_package(package: Package) -> None:
    """Print tasks, workflows and launch plans, and a summary of the tasks."""
    plans = package.launch_plans
    described = {
        name: describe_launch_plan(plan.spec, plans[plan.spec.workflow_id.name].spec) for name, plan in plans.items()
    }
    show("Tasks", {name: describe_task(task) for name, task in package.tasks.items()})
    show("Workflows", {name: iter(()) for name in package.workflows})
    show("Launch plans", described)
    print(*summary(package.tasks), sep="\n")


def show(title: str, entries: Mapping[str, Iterator[tuple[str, str]]]) -> None:
    print(title)
    for name, facts in entries.items():
        print(f"  {name}")
        for fact, value in facts:
            print(f"    {fact:<14} {value}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RuntimeError as error:
        sys.exit(str(error))
