"""The resources that tasks request of a cluster, as arguments of @task, from the registration's settings."""

import dataclasses
import json
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from flytekit import Resources, Secret
from flytekit.core.base_task import PythonTask

from flyte_ddp.attempt.pod import GPUS_VARIABLE
from flyte_ddp.attempt.webhook import WEBHOOK_SECRET_VARIABLE, WEBHOOK_VARIABLE
from flyte_ddp.data.download import MIRROR_VARIABLE, mirror_from_environment
from flyte_ddp.errors import InputError
from flyte_ddp.tasks.caching import CodeVersion
from flyte_ddp.tasks.platform import CONSOLE_VARIABLE
from flyte_ddp.tasks.registration import ACCELERATORS, Registration, registration, variable_of

IMAGE = "{{.image.trainer}}"  # named in flyte.config, or by --image trainer=NAME


def pod_environment() -> dict[str, str]:
    """The variables of every pod: the user's own, and the data mirror, unless its URL has a password, which everybody
    who can see the tasks in Flyte could see."""
    mirror = mirror_from_environment()
    parts = urlsplit(mirror or "")
    has_password = parts.scheme in ("http", "https") and "@" in parts.netloc
    return {**({MIRROR_VARIABLE: mirror} if mirror and not has_password else {}), **registration().env}


def registered_environment() -> dict[str, str]:
    """All settings as variables, for tasks in whose pods the decorators are evaluated again."""
    values = {variable_of(field): getattr(registration(), field.name) for field in dataclasses.fields(Registration)}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {**pod_environment(), **texts}


def training_environment(gpus: int, code: CodeVersion | None = None) -> dict[str, str]:
    """The variables of a training pod with this many GPUs and this code."""
    return {**pod_environment(), **(code.environment if code else {}), GPUS_VARIABLE: str(gpus)}


def sizes(cpu: str, memory: str, disk: str, gpus: int = 0) -> dict[str, Any]:
    """Arguments of @task or with_overrides for sizes in Registration's form; a single quantity is request and limit."""
    requests, limits = (
        Resources(
            cpu=cpu.split(":")[which],
            mem=memory.split(":")[which],
            ephemeral_storage=disk.split(":")[which],
            gpu=str(gpus) if gpus else None,
        )
        for which in (0, -1)
    )
    return {"requests": requests, "limits": limits}


def training_sizes(gpus: int) -> dict[str, Any]:
    """What a training pod with this many GPUs needs, as arguments of @task or with_overrides.

    Without GPUs, two ranks, their parent and the process they are forked from take 0.5 GB on digits and 0.7 GB on MNIST
    (0.8 GB with the pages of torch's libraries); two ranks of many nodes, which share nothing, 1.7 GB. With GPUs (not
    measured), each rank's CUDA context and libraries take a few GB of host memory, and NCCL uses /dev/shm, of which a
    container by default has 64 MB.
    """
    asked = registration()
    defaults = (str(2 * gpus), f"{8 * gpus}Gi", "10Gi") if gpus else ("500m:2", "1Gi:3Gi", "500Mi:2Gi")
    own = (asked.training_cpu, asked.training_memory, asked.training_disk)
    cpu, memory, disk = (size or default for size, default in zip(own, defaults, strict=True))
    needed = sizes(cpu, memory, disk, gpus)
    return {**needed, "shared_memory": True} if gpus else needed


def resize(task: PythonTask, gpus: int) -> dict[str, Any]:
    """Arguments of with_overrides for a training task that a @dynamic in this pod compiles with this many GPUs."""
    task.environment[GPUS_VARIABLE] = str(gpus)  # with_overrides has no environment
    return training_sizes(gpus)


def training_resources(code: CodeVersion | None = None) -> dict[str, Any]:
    """Arguments of @task for training; code is what determines the result, if that is cached."""
    asked = registration()
    variables = {WEBHOOK_VARIABLE: asked.webhook, CONSOLE_VARIABLE: asked.console}
    secrets = {"WANDB_API_KEY": asked.wandb_secret, WEBHOOK_SECRET_VARIABLE: asked.webhook_secret}
    return {
        "container_image": IMAGE,
        **training_sizes(asked.training_gpus),
        "accelerator": ACCELERATORS.get(asked.accelerator),
        "interruptible": asked.interruptible or None,  # None leaves it to the cluster
        "timeout": timedelta(seconds=asked.attempt_seconds),
        "secret_requests": [_secret(name, variable) for variable, name in secrets.items() if name] or None,
        "environment": {
            **training_environment(asked.training_gpus, code),
            **{name: value for name, value in variables.items() if value},
        },
    }


def preparation_resources() -> dict[str, Any]:
    """Arguments of @task for downloading and preparing a dataset, and for other tasks that need torch but no ranks."""
    asked = registration()
    needed = sizes(asked.preparation_cpu, asked.preparation_memory, asked.preparation_disk)
    return {
        "container_image": IMAGE,
        **needed,
        "timeout": timedelta(hours=1),
        "environment": pod_environment(),
    }


def small_resources() -> dict[str, Any]:
    """Arguments of @task for a task that computes nothing."""
    asked = registration()
    needed = sizes(asked.small_cpu, asked.small_memory, asked.small_disk)
    return {"container_image": IMAGE, **needed, "environment": pod_environment()}


def dynamic_resources() -> dict[str, Any]:
    """Arguments of @dynamic: its pod compiles the tasks that it starts, and needs the registration's settings for
    that."""
    return {**small_resources(), "environment": registered_environment()}


def _secret(name: str, variable: str) -> Secret:
    """The Flyte secret named GROUP/KEY as an environment variable."""
    group, separator, key = name.partition("/")
    if not (group and separator and key):
        registered = "DDP_WANDB_SECRET" if variable == "WANDB_API_KEY" else "DDP_WEBHOOK_SECRET"
        raise InputError(f"environment variable {registered} must be GROUP/KEY, got {json.dumps(name)}")
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR, env_var=variable)
