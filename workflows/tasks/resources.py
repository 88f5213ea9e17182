"""What the tasks ask of a cluster, decided when they are registered.

The environment of the registering process decides, by the fields of Registration in capitals behind DDP_:
DDP_PROFILE=gpu DDP_GPUS=4 pyflyte ... register workflows. In a pod these variables are missing, and nothing there
depends on them.
"""

import dataclasses
import json
import os
import platform
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Dict, Tuple
from urllib.parse import urlsplit

from flytekit import Resources, Secret
from flytekit.core.base_task import PythonTask
from flytekit.extras import accelerators

from workflows.tasks.execution import flyte_retries
from workflows.tasks.versions import CODE_VARIABLE, registered_code
from workflows.training.download import MIRROR_VARIABLE, mirror_from_environment
from workflows.training.environment import DEFAULT_CPU_RANKS
from workflows.training.errors import InputError, RecoverableError
from workflows.training.settings import Settings, read_json, setting

IMAGE = "{{.image.trainer}}"  # named in flyte.config, or by --image trainer=NAME
ACCELERATORS = {
    name: value
    for name, value in vars(accelerators).items()
    if isinstance(value, accelerators.BaseAccelerator) and value.to_flyte_idl().device.startswith("nvidia-")
}
# Their compute capability; the lock's torch has code for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0, and what these run
TOO_OLD = {"K80": "3.7", "M60": "5.2", "P100": "6.0", "P4": "6.1", "V100": "7.0"}
GPUS_VARIABLE = "DDP_POD_GPUS"


@dataclass(frozen=True)
class Registration(Settings):
    """What the tasks ask for.

    Attributes:
        profile: gpu, or sandbox for a cluster without GPUs, as small as a laptop's.
        gpus: of the training task (of each node, where there are many) under profile gpu; one rank each.
        accelerator: the kind of GPU; none leaves it to the cluster.
        interruptible: whether training may run on machines that can be taken away; it goes on from its checkpoint.
        timeout_seconds: after which Flyte ends an attempt at training.
        wandb_secret: GROUP/KEY of the Flyte secret with the Weights & Biases API key. A pod whose secret the cluster
            lacks never starts, so none is asked for unless named.
        nnodes: number of nodes of workflows/multinode.py, or the range of it as MIN:MAX.
        nproc_per_node: ranks per node there; 0 is one per GPU, or two under profile sandbox.
        join_minutes: that the first nodes wait there for the last: one has the image, another has yet to be made.
        concurrency: shards of workflows/inference.py that are predicted at a time; 0 leaves it to the cluster.
        env: variables of the user's for all pods, by name. Everybody who sees the tasks in Flyte sees them.
    """

    profile: str = setting("gpu", choices=("gpu", "sandbox"))
    gpus: int = setting(2, minimum=1, maximum=64)
    accelerator: str = setting("none", choices=("none", *ACCELERATORS))
    interruptible: bool = setting(False)
    timeout_seconds: int = setting(86400, minimum=60)
    wandb_secret: str = setting("")
    nnodes: str = setting("2")
    nproc_per_node: int = setting(0, minimum=0, maximum=64)
    join_minutes: int = setting(15, minimum=1, maximum=1440)
    concurrency: int = setting(0, minimum=0)
    env: dict = setting({})  # noqa: RUF009 copied

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accelerator in TOO_OLD:
            raise InputError(
                f"Registration.accelerator must be a kind that torch has code for, compute capability 7.5 or more, got "
                f"{self.accelerator} ({TOO_OLD[self.accelerator]}): name another one, or build an image with an older "
                "torch"
            )
        ours = {MIRROR_VARIABLE, CODE_VARIABLE, GPUS_VARIABLE, *map(variable_of, dataclasses.fields(self))}
        for name, value in self.env.items():
            if not (re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) and isinstance(value, str)):
                raise InputError(
                    f"Registration.env must have names of variables and strings for them, got {json.dumps(name)} with "
                    f'{json.dumps(value)}: write it as {{"NAME": "value"}}'
                )
            if name in ours:
                raise InputError(f"Registration.env must not have {name}, got {json.dumps(value)}: set it beside this")

    @property
    def training_gpus(self) -> int:
        return self.gpus if self.profile == "gpu" else 0

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node or self.training_gpus or DEFAULT_CPU_RANKS

    @property
    def node_range(self) -> Tuple[int, int]:
        """The least and the largest number of nodes; raises InputError if nnodes is not of that form."""
        least, _, most = self.nnodes.partition(":")
        most = most or least
        if not (least.isdecimal() and most.isdecimal() and 2 <= int(least) <= int(most)):
            raise InputError(
                "environment variable DDP_NNODES must be a number of at least 2, or MIN:MAX, got "
                f"{json.dumps(self.nnodes)}: for one node there is workflows/mnist.py"
            )
        return int(least), int(most)


def registration() -> Registration:
    """Reads the environment; raises InputError that names the variable."""
    values: Dict[str, Any] = {}
    for field in dataclasses.fields(Registration):
        variable = variable_of(field)
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            values[field.name] = text if field.type is str else _parsed(text)
            Registration(**{field.name: values[field.name]})
        except InputError as error:
            raise InputError(f"environment variable {variable}: {error.message}") from None
    return Registration(**values)


def variable_of(field: "dataclasses.Field[Any]") -> str:
    return f"DDP_{field.name.upper()}"


def pod_environment() -> Dict[str, str]:
    """The variables of every pod: the user's own, and where the originals of datasets are, unless that holds a
    password, which everybody who sees the tasks in Flyte would see."""
    mirror = mirror_from_environment()
    parts = urlsplit(mirror or "")
    has_password = parts.scheme in ("http", "https") and "@" in parts.netloc
    return {**({MIRROR_VARIABLE: mirror} if mirror and not has_password else {}), **registration().env}


def registered_environment() -> Dict[str, str]:
    """All settings as variables, for tasks whose pods import the decorators and use what these say."""
    values = {variable_of(field): getattr(registration(), field.name) for field in dataclasses.fields(Registration)}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {**pod_environment(), **texts}


def training_environment(gpus: int) -> Dict[str, str]:
    """What a pod that trains, with so many GPUs, has to know."""
    return {**pod_environment(), CODE_VARIABLE: registered_code(), GPUS_VARIABLE: str(gpus)}


def check_gpus(visible: int) -> None:
    """Refuses to go on, so that Flyte tries another pod, where this one sees other GPUs than it asked for: with fewer
    the result would be remembered all the same. A local run has not asked."""
    asked = os.environ.get(GPUS_VARIABLE)
    with flyte_retries():
        if asked is not None and int(asked) != visible:
            raise RecoverableError(
                f"this pod must have as many GPUs as were registered ({asked}), got {visible} on {platform.node()}: "
                "look at that node's driver and device plugin and at the platform's limits, or register with DDP_GPUS "
                "(or give --gpus) as the cluster can have them, DDP_PROFILE=sandbox for none"
            )


def training_sizes(gpus: int) -> Dict[str, Any]:
    """What a training pod with so many GPUs needs, as arguments of @task or with_overrides.

    Without a GPU: two ranks, their parent and the process they are forked from hold 0.5 GB on digits and 0.7 GB on
    MNIST together (0.8 GB with the pages of torch's libraries). With (not measured): each rank's CUDA context and
    libraries take some GB of host memory, and NCCL's ranks speak through /dev/shm, where a container gets 64 MB.
    """
    if gpus == 0:
        return {
            "requests": Resources(cpu="500m", mem="1Gi", ephemeral_storage="500Mi"),
            "limits": Resources(cpu="2", mem="2Gi", ephemeral_storage="2Gi"),
        }
    size = Resources(cpu=str(2 * gpus), mem=f"{8 * gpus}Gi", ephemeral_storage="10Gi", gpu=str(gpus))
    return {"requests": size, "limits": size, "shared_memory": True}


def resize(task: PythonTask, gpus: int) -> Dict[str, Any]:
    """Arguments of with_overrides for a training task that this pod, of a @dynamic, compiles with so many GPUs."""
    task.environment[GPUS_VARIABLE] = str(gpus)  # with_overrides has no environment
    return training_sizes(gpus)


def training_resources() -> Dict[str, Any]:
    """Arguments of @task for training."""
    asked = registration()
    return {
        "container_image": IMAGE,
        **training_sizes(asked.training_gpus),
        "accelerator": ACCELERATORS.get(asked.accelerator),
        "interruptible": asked.interruptible or None,  # None leaves it to the cluster
        "timeout": timedelta(seconds=asked.timeout_seconds),
        "secret_requests": [_wandb_secret(asked.wandb_secret)] if asked.wandb_secret else None,
        "environment": training_environment(asked.training_gpus),
    }


def preparation_resources() -> Dict[str, Any]:
    """Arguments of @task for downloading and preparing a dataset: MNIST takes 0.6 GB of memory."""
    size = Resources(cpu="500m", mem="1Gi", ephemeral_storage="2Gi")
    return {
        "container_image": IMAGE,
        "requests": size,
        "limits": size,
        "timeout": timedelta(hours=1),
        "environment": pod_environment(),
    }


def small_resources() -> Dict[str, Any]:
    """Arguments of @task for a task that computes nothing: Python with flytekit and this package takes 0.1 GB."""
    size = Resources(cpu="250m", mem="400Mi")
    return {"container_image": IMAGE, "requests": size, "limits": size, "environment": pod_environment()}


def dynamic_resources() -> Dict[str, Any]:
    """Arguments of @dynamic: what it starts is compiled in its pod, which has to know the settings of the registration
    for that."""
    return {**small_resources(), "environment": registered_environment()}


def _parsed(text: str) -> Any:
    try:
        return read_json(text)
    except json.JSONDecodeError:
        return text


def _wandb_secret(name: str) -> Secret:
    group, separator, key = name.partition("/")
    if not (group and separator and key):
        raise InputError(f"environment variable DDP_WANDB_SECRET must be GROUP/KEY, got {json.dumps(name)}")
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR, env_var="WANDB_API_KEY")
