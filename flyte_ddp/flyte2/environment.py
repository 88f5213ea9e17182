"""The environments of tasks (image, resources, secrets and variables), and the arguments that their decorators share.

They follow from the registration's settings (DDP_GPUS and so on) of the process that deploys or runs. The pod of a task
that calls others reads this module again, and gets the settings as variables.
"""

import copy
import inspect
import math
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import flyte

import flyte_ddp
from flyte_ddp.attempt import requested
from flyte_ddp.attempt.avoided import exclude_nodes, set_node_variable
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.requested import Size, pod_environment, registered_environment
from flyte_ddp.code.code_version import hash_of_body, hash_parts, is_installed, with_installed
from flyte_ddp.errors import InputError
from flyte_ddp.flyte2.inputs import set_up_flyte
from flyte_ddp.launch.grace import USUAL_SECONDS

# Accelerators whose names here differ from flytekit's, which the registration has
ACCELERATORS: dict[str, Any] = {"L40S": "L40s", "A100_80GB": "A100_80G", "L4_VWS": "L4"}
Kind = type[flyte.TaskEnvironment]
PodTemplate: TypeAlias = str | flyte.PodTemplate | None
OwnSecrets: TypeAlias = str | flyte.Secret | Sequence[str | flyte.Secret]  # the SDK takes all of these
IMAGE = flyte.Image.from_ref_name("trainer")  # --image trainer=NAME, or Flyte's config file, names the image
# The pauses before retries give the cluster time to recover from a fault
PAUSES = flyte.Backoff(base=timedelta(seconds=10), factor=6.0, cap=timedelta(minutes=10))


def workflow_environment(
    name: str, *called: flyte.TaskEnvironment, secrets: Sequence[str] = ()
) -> flyte.TaskEnvironment:
    """Patch Flyte's SDK for this library, and return the environment of a task that computes little.

    Such a task may call others. Its pods get the registered settings as variables.

    Args:
        name: the environment's name.
        called: the environments of the tasks that the task calls.
        secrets: the variables of the secrets that the task needs, such as WANDB_API_KEY; those without a registered
            secret are left out.

    Raises:
        InputError: a DDP_ environment variable is invalid, or a registered secret is not named GROUP/KEY.
    """
    set_up_flyte()
    return make_environment(
        name, requested.small_size(), registered_environment(), depends_on=[*called], secrets=find_secrets(secrets)
    )


def find_secrets(variables: Collection[str], own: OwnSecrets = ()) -> list[flyte.Secret] | None:
    """Return a task's own secrets, and after them the registered secrets of these variables; None if there are none.

    Args:
        variables: the environment variables that get registered secrets, such as WANDB_API_KEY. Those for which no
            secret is registered are left out.
        own: the task's own secrets, each a key or a flyte.Secret. They replace registered secrets of the same
            variables.

    Raises:
        InputError: a registered secret is not named GROUP/KEY.
    """
    named = [own] if isinstance(own, (str, flyte.Secret)) else own
    mine = [flyte.Secret(one) if isinstance(one, str) else one for one in named]
    registered = requested.training_secrets(own=[one.as_env_var for one in mine]).items()
    mine += [flyte.Secret(key, group, as_env_var=name) for name, (group, key) in registered if name in variables]
    return mine or None


def preparation_environment(name: str) -> flyte.TaskEnvironment:
    """Return the environment of tasks that download and prepare a dataset, or need torch but no ranks."""
    return make_environment(name, requested.preparation_size(), pod_environment())


def clustered(rendezvous: Literal["static", "c10d"] = "static") -> dict[str, Any]:
    """Return arguments of a training's environment() for many nodes: a JobSet, each of whose pods runs torchrun.

    The numbers of nodes and of ranks per node are the registered ones. If several numbers of nodes are registered, the
    JobSet has the largest; flyte_ddp.flyte2.sizes runs the task on smaller ones.

    If a rank or a pod is lost, Flyte starts all of them again within the attempt, up to twice. Restarts because a node
    is taken away for maintenance do not count.

    Args:
        rendezvous: torchrun's --rdzv-backend.

    Returns:
        Keyword arguments of environment().

    Raises:
        InputError: A DDP_ environment variable, such as DDP_NNODES, is invalid.
    """
    from flyte.clustered import ClusteredTaskEnvironment, ClusterFailurePolicy, TorchRun

    asked = registration()
    return {
        "kind": ClusteredTaskEnvironment,
        "replicas": asked.node_sizes[0],
        "nproc_per_node": asked.ranks_per_node,
        "runtime": TorchRun(rdzv_backend=rendezvous),
        "failure_policy": ClusterFailurePolicy(max_restarts=2, restart_on_host_maintenance=True),
        "variables": {
            # Each rank imports the task's file, and must see the same registration there
            **registered_environment(),
            # A rank whose peers are gone ends at once, instead of waiting in NCCL until the job's time-out
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        },
    }


def make_environment(
    name: str,
    size: Size,
    variables: Mapping[str, str],
    files: Sequence[str] = (),
    kind: Kind = flyte.TaskEnvironment,
    own: flyte.Resources | None = None,
    image: str | flyte.Image = IMAGE,
    pod_template: PodTemplate = None,
    **more: Any,
) -> flyte.TaskEnvironment:
    """Return a task environment that ships the library's files and has the registered labels and annotations.

    Args:
        name: the environment's name.
        size: the registered size: CPUs, memory, disk and GPUs.
        variables: the pod's environment variables.
        files: files to ship in addition to the library's own.
        kind: the class of the environment.
        own: the user's resources. Each value that is not None replaces that of `size`.
        image: the container image.
        pod_template: a template, which gets the labels and annotations in a copy; or the name of one in the cluster.
        more: further arguments of `kind`.

    Raises:
        InputError: pod_template is a name, although labels or annotations are registered.
    """
    return kind(
        name=name, image=image, resources=resources(size, own), env_vars={**variables}, include=(*shipped(), *files),
        pod_template=labelled(pod_template), **more,
    )  # fmt: skip


def labelled(template: PodTemplate) -> PodTemplate:
    """Return a pod template with the registered labels and annotations added.

    The template's own labels and annotations win. The template is not changed, but copied; None becomes a new one. If
    nothing is registered, the template itself is returned.

    Raises:
        InputError: The template is the name of one in the cluster, to which nothing can be added.
    """
    asked = registration()
    if not (asked.labels or asked.annotations):
        return template or None
    if template and isinstance(template, str):
        raise InputError(
            "DDP_POD_TEMPLATE, or pod_template, must not be a name beside DDP_LABELS or DDP_ANNOTATIONS under Flyte 2, "
            f"got {template}: put them into that template"
        )
    mine = template if isinstance(template, flyte.PodTemplate) else flyte.PodTemplate()
    labels = {**asked.labels, **(mine.labels or {})}
    annotations = {**asked.annotations, **(mine.annotations or {})}
    return replace(mine, labels=labels, annotations=annotations)


def with_grace(template: PodTemplate) -> tuple[PodTemplate, dict[str, str]]:
    """Return a pod template with a grace, and the environment variables that tell the pod its grace in seconds.

    The grace is the time from a SIGTERM until the pod is killed.

    - A PodTemplate with a grace is returned as it is. The variables have its grace, or the registered one if that is
      smaller.
    - A PodTemplate without a grace is copied. The copy and the variables have the registered grace, or this library's
      default.
    - None or an empty name becomes a new template, with the registered grace or the default, too.
    - The name of a template in the cluster is returned as it is. The variables have the registered grace, or 30 s.

    Args:
        template: a PodTemplate, the name of a template in the cluster, or None. It is not changed.
    """
    if template and isinstance(template, str):
        return template, requested.grace_environment(registration().grace_seconds or USUAL_SECONDS)
    mine = template if isinstance(template, flyte.PodTemplate) else flyte.PodTemplate()
    own = mine.pod_spec.termination_grace_period_seconds if mine.pod_spec else None
    if own is None:
        mine = mine.with_termination_grace_period(registration().pod_grace)
    return mine, requested.grace_environment(own)


def with_avoidance(template: PodTemplate) -> PodTemplate:
    """Return the pod template of a training with what keeps its pods away from nodes, if that is registered.

    A copy of the template gets the affinity for avoid_hosts, and has Kubernetes tell the pod its node. The name of a
    template in the cluster is returned as it is. Raises InputError for such a name if avoid_hosts is registered.
    """
    asked = registration()
    if isinstance(template, str):
        requested.check_template(template)
        return template
    if not (template and (asked.avoid_hours or asked.avoid_hosts)):
        return template
    mine = without_nodes(template, asked.hosts_to_avoid)
    set_node_variable(mine.pod_spec, mine.primary_container_name)
    return mine


def without_nodes(template: flyte.PodTemplate, nodes: Sequence[str]) -> flyte.PodTemplate:
    """Return a copy of a pod template with a pod_spec, whose pods run on none of these nodes."""
    mine = copy.deepcopy(template)
    exclude_nodes(mine.pod_spec, nodes)
    return mine


def resources(size: Size, own: flyte.Resources | None = None) -> flyte.Resources:
    """Return Flyte's resources for a size, with the user's own values in place of the registered ones.

    The GPUs are of the registered accelerator's kind. A size with GPUs gets shared memory. Flyte 2 has only one number
    for the disk, so the disk's limit is used.

    Args:
        size: the registered size.
        own: the user's values. A value of None keeps the registered one.
    """
    kind = registration().accelerator
    gpu = cast(Any, size.gpus or None)
    if gpu and kind != "none":
        gpu = flyte.GPU(ACCELERATORS.get(kind, kind), gpu)
    registered = flyte.Resources(
        cpu=size.cpu, memory=size.memory, disk=size.disk[1], gpu=gpu, shm="auto" if size.gpus else None
    )
    return replace(registered, **{name: value for name, value in vars(own or registered).items() if value is not None})


def shipped() -> tuple[str, ...]:
    """Return the absolute paths of the library's Python files that Flyte has to ship to the pods.

    These are all of the library's modules, even those that only ranks import. If the library is installed, or is not
    below the current folder, there are none, and the image must have the library.
    """
    root = Path(flyte_ddp.__path__[0])
    if is_installed(str(root)) or not root.is_relative_to(os.getcwd()):
        return ()
    return tuple(map(str, sorted(root.rglob("*.py"))))


class CodeCache(flyte.Cache):
    """A cache whose version also follows the body of the task's function.

    Attributes:
        made: the time at which the file of the task was imported, in seconds since 1970.
    """

    made = math.inf

    def get_version(self, params: Any = None) -> str:
        version = super().get_version(params)
        if not (params and params.func):
            return version
        file = inspect.getsourcefile(inspect.unwrap(params.func))
        if file and os.path.exists(file) and os.path.getmtime(file) > self.made:
            # The SDK asks at each call of the task: the user has edited the file since it was imported, and the body
            # that runs is another one. So nothing is found in the cache, and nothing finds what is stored now
            return uuid.uuid4().hex
        return hash_parts({"": version, "body": hash_of_body(params.func)})


def cached(code: str, ignored: Sequence[str] = (), distributions: Sequence[str] = ()) -> flyte.Cache:
    """Return the cache of a task whose result is decided by this code, these distributions' versions and its own body.

    The versions are those installed where this function runs: in the image of the calling task's pod, if one task calls
    another. The types of inputs and outputs are part of Flyte's own key. Equal calls at the same time run once.

    Args:
        code: the version of the code.
        ignored: names of the task's inputs that the cache ignores.
        distributions: names of installed packages, whose versions count.
    """
    version = with_installed(code, distributions)
    cache = CodeCache("auto", version_override=version, ignored_inputs=tuple(ignored), serialize=True)
    cache.made = time.time()
    return cache
