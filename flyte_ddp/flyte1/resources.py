"""The resources that tasks request of a cluster, as arguments of @task, from the registration's settings."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from flytekit import Annotations, Email, Labels, PodTemplate, Resources, Secret, Slack
from flytekit.core.python_auto_container import PythonAutoContainerTask
from flytekit.extras import accelerators
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.attempt import requested
from flyte_ddp.attempt.avoided import exclude_nodes, find_nodes, is_avoiding, set_node_variable
from flyte_ddp.attempt.pod import GPUS_VARIABLE
from flyte_ddp.attempt.registration import MOST_GPUS, registration
from flyte_ddp.attempt.requested import Size, pod_environment, registered_environment, training_environment
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.caching import CodeVersion
from flyte_ddp.launch.grace import USUAL_SECONDS

IMAGE = "{{.image.trainer}}"  # flyte.config, or --image trainer=NAME, names the image


def sizes(size: Size) -> dict[str, Any]:
    """Return a size as keyword arguments of @task or with_overrides: "requests" and "limits".

    Both are flytekit's Resources with CPUs, memory, disk and GPUs; gpu is None for a size without GPUs.
    """
    requests, limits = (
        Resources(
            cpu=size.cpu[which],
            mem=size.memory[which],
            ephemeral_storage=size.disk[which],
            gpu=str(size.gpus) if size.gpus else None,
        )
        for which in (0, 1)
    )
    return {"requests": requests, "limits": limits}


def training_sizes(gpus: int) -> dict[str, Any]:
    """Return a training pod's "requests", "limits" and, with GPUs, "shared_memory", for @task or with_overrides."""
    needed = sizes(requested.training_size(gpus))
    return {**needed, "shared_memory": True} if gpus else needed


def resize(task: PythonAutoContainerTask, gpus: int, resume_from: str = "") -> dict[str, Any]:
    """Change a training task to a number of GPUs, and return the arguments of with_overrides for its pod.

    Call this function in a @dynamic, once for each task. It also sets the task's environment variable that tells the
    pod how many GPUs to expect. If DDP_AVOID_HOURS is registered, the task's pod template then keeps the pod away from
    nodes whose hardware has failed. If the storage that lists them fails, there is a warning, and the pod keeps away
    from none.

    Args:
        task: the training task, which is changed.
        gpus: the number of GPUs; 0 for a small pod without any.
        resume_from: the folder of an earlier execution's checkpoint, which lists the nodes to keep away from. If empty,
            the pod keeps away from none.

    Returns:
        "requests", "limits" and, with GPUs, "shared_memory".

    Raises:
        InputError: gpus is negative or above MOST_GPUS (64).
    """
    if not 0 <= gpus <= MOST_GPUS:
        raise InputError(f"gpus must be at least 0 and at most {MOST_GPUS}, got {gpus}")
    task.environment[GPUS_VARIABLE] = str(gpus)  # with_overrides has no environment
    if task.pod_template and is_avoiding(platform):
        exclude_nodes(task.pod_template.pod_spec, [one.node for one in find_nodes(platform, resume_from.rstrip("/"))])
    return training_sizes(gpus)


def training_resources(
    code: CodeVersion | None = None,
    most_gpus: int | None = None,
    requests: Resources | None = None,
    limits: Resources | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    secret_requests: Sequence[Secret] = (),
    labels: Mapping[str, str] = MappingProxyType({}),
    annotations: Mapping[str, str] = MappingProxyType({}),
    **own: Any,
) -> dict[str, Any]:
    """Return the arguments of @task for a training task, from the registered settings and these changes.

    Args:
        code: the version of the code that determines the result, which the pod checks; None checks nothing.
        most_gpus: the number of GPUs that the task can use at most. None means any number.
        requests: quantities that replace the registered ones. A quantity that is given only in requests, or only in
            limits, counts for both. The number of GPUs also decides the pod's registered size.
        limits: quantities that replace the registered limits, like requests.
        environment: variables to add. A variable replaces the registered one of the same name.
        secret_requests: secrets to add. A secret replaces the registered one of the same variable.
        labels: labels to add. A label replaces the registered one of the same name.
        annotations: annotations to add. An annotation replaces the registered one of the same name.
        own: other arguments of @task. They replace the computed ones.

    Returns:
        The arguments, with "requests", "limits", "environment" and more, but without cache and retries.

    Raises:
        InputError: a DDP_ environment variable is invalid, or a registered secret is not named GROUP/KEY.
    """
    asked = registration()
    secrets = requested.training_secrets(own=[secret.env_var for secret in secret_requests])
    quantities = {**_as_dict(limits), **_as_dict(requests)}, {**_as_dict(requests), **_as_dict(limits)}
    gpus = int(quantities[1].get("gpu", requested.training_gpus(most_gpus)))
    needed = training_sizes(gpus)
    return {
        "container_image": IMAGE,
        "labels": {**asked.labels, **labels} or None,
        "annotations": {**asked.annotations, **annotations} or None,
        **needed,
        **{name: replace(needed[name], **one) for name, one in zip(("requests", "limits"), quantities, strict=True)},
        "pod_template_name": asked.pod_template or None,
        "accelerator": getattr(accelerators, asked.accelerator, None),  # None for none, too
        "interruptible": asked.interruptible or None,  # None leaves it to the cluster
        "timeout": timedelta(seconds=asked.attempt_seconds),
        "secret_requests": [*secret_requests, *(_secret(variable, *name) for variable, name in secrets.items())]
        or None,
        "environment": {
            **training_environment(gpus, code.code if code else ""),
            **requested.webhook_environment(),
            **environment,
        },
        **own,
    }


def with_template(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a training @task's arguments with the pod template and variables for its grace and for faulty nodes.

    The grace is the seconds from a SIGTERM until the pod is killed. The pod's template sets it, and two environment
    variables tell the pod. Both depend on the template in the arguments:

    - A pod_template with a grace keeps it. The variables have the smaller one of its grace and a registered grace.
    - A pod_template without a grace gets the registered grace, or this library's default. The variables have the same.
    - A template in the cluster (pod_template_name) is not changed. The variables have the registered grace, or 30 s.
    - Without a template, a registered grace adds a pod_template that sets it, and the variables have it. If no grace is
      registered either, the variables have 30 s, Kubernetes' default.

    With registered avoid_hours, two more variables tell the pod for how many hours nodes are avoided, and how many
    retries the task has. With avoid_hours or avoid_hosts, Kubernetes tells the pod its node, and the pod gets an
    affinity that excludes avoid_hosts. These two need a pod_template, which is added where there is none; a template in
    the cluster gets neither.

    Args:
        arguments: what training_resources() has returned, and "retries". The dict is not changed. Its "environment"
            replaces variables of the same name.

    Returns:
        A new dict: the arguments, with "pod_template", a copy (None without one), and "environment".

    Raises:
        InputError: avoid_hosts is registered, and the template is one in the cluster.
    """
    asked = registration()
    template = copy.deepcopy(arguments.get("pod_template"))
    in_cluster = arguments.get("pod_template_name")
    own = template.pod_spec.termination_grace_period_seconds if template else None
    if own is None and not in_cluster and (template or asked.grace_seconds):
        template = template or PodTemplate()
        template.pod_spec.termination_grace_period_seconds = asked.pod_grace
    elif own is None and not asked.pod_template:  # Kubernetes' own, or that of a template which is not known here
        own = asked.grace_seconds or USUAL_SECONDS
    variables = requested.grace_environment(own)
    if asked.avoid_hours or asked.avoid_hosts:
        requested.check_template(in_cluster or "")
        if not in_cluster:
            template = template or PodTemplate()
            set_node_variable(template.pod_spec, template.primary_container_name)
            exclude_nodes(template.pod_spec, asked.hosts_to_avoid)
        variables |= requested.avoidance_environment(arguments["retries"] or 0)
    return {**arguments, "pod_template": template, "environment": {**variables, **arguments["environment"]}}


def _as_dict(quantities: Resources | None) -> dict[str, Any]:
    return {name: value for name, value in vars(quantities or Resources()).items() if value is not None}


def preparation_resources() -> dict[str, Any]:
    """Return the arguments of a @task that prepares a dataset, or otherwise needs torch but no ranks.

    The arguments are the container image, registered labels and annotations, requests and limits, a timeout of one
    hour, and "environment". Raises InputError if a DDP_ environment variable is invalid.
    """
    return {
        **_every_pod(),
        **sizes(requested.preparation_size()),
        "timeout": timedelta(hours=1),
        "environment": pod_environment(),
    }


def small_resources() -> dict[str, Any]:
    """Return the arguments of a @task that computes nothing."""
    return {**_every_pod(), **sizes(requested.small_size()), "environment": pod_environment()}


def dynamic_resources() -> dict[str, Any]:
    """Return the arguments of a @dynamic. Its pod compiles the tasks that it starts, for which it gets the settings."""
    return {**small_resources(), "environment": registered_environment()}


def _every_pod() -> dict[str, Any]:
    asked = registration()
    return {"container_image": IMAGE, "labels": asked.labels or None, "annotations": asked.annotations or None}


def _secret(variable: str, group: str, key: str) -> Secret:
    """Return the Flyte secret named GROUP/KEY as an environment variable."""
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR, env_var=variable)


# --- executions of a launch plan ---

KINDS: Any = {"slack": Slack, "email": Email}


def execution_options() -> dict[str, Any]:
    """Return the registered notifications, labels and annotations as keyword arguments of a LaunchPlan.

    "labels" and "annotations" are None if none are registered; "notifications" is a list, which may be empty.

    Raises:
        InputError: A DDP_ environment variable has an invalid value, or nothing reads it.
    """
    asked = registration()
    phases = [getattr(WorkflowExecutionPhase, name.upper()) for name in asked.notify_phases.split(",")]
    return {
        "notifications": [KINDS[kind](phases=phases, recipients_email=to) for kind, to in asked.recipients.items()],
        "labels": Labels(asked.labels) if asked.labels else None,
        "annotations": Annotations(asked.annotations) if asked.annotations else None,
    }
