"""What the tasks ask of a cluster, decided when they are registered.

The environment of the registering process decides, by the fields of Registration in capitals behind DDP_:
DDP_PROFILE=gpu DDP_GPUS=4 pyflyte ... register workflows. In a pod these variables are missing, and nothing there
depends on them.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Dict, Tuple

from flytekit import Resources, Secret
from flytekit.extras import accelerators

from workflows.tasks.versions import CODE_VARIABLE, registered_code
from workflows.training.environment import DEFAULT_CPU_RANKS
from workflows.training.errors import InputError
from workflows.training.settings import Settings, setting

IMAGE = "{{.image.trainer}}"  # named in flyte.config, or by --image trainer=NAME
ACCELERATORS = {
    name: value for name, value in vars(accelerators).items() if isinstance(value, accelerators.BaseAccelerator)
}


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
        variable = f"DDP_{field.name.upper()}"
        text = os.environ.get(variable)
        if text is None:
            continue
        values[field.name] = text if field.type is str else _parsed(text)
        try:
            Registration(**{field.name: values[field.name]})
        except InputError as error:
            raise InputError(f"environment variable {variable}: {error.message}") from None
    return Registration(**values)


def registered_environment() -> Dict[str, str]:
    """The settings as variables, for tasks whose pods import the decorators and use what these say."""
    values = dataclasses.asdict(registration())
    return {f"DDP_{name.upper()}": v if isinstance(v, str) else json.dumps(v) for name, v in values.items()}


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
        "environment": {CODE_VARIABLE: registered_code()},
    }


def preparation_resources() -> Dict[str, Any]:
    """Arguments of @task for downloading and preparing a dataset: MNIST takes 0.6 GB of memory."""
    size = Resources(cpu="500m", mem="1Gi", ephemeral_storage="2Gi")
    return {"container_image": IMAGE, "requests": size, "limits": size, "timeout": timedelta(hours=1)}


def small_resources() -> Dict[str, Any]:
    """Arguments of @task for a task that computes nothing: Python with flytekit and this package takes 0.1 GB."""
    size = Resources(cpu="250m", mem="400Mi")
    return {"container_image": IMAGE, "requests": size, "limits": size}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _wandb_secret(name: str) -> Secret:
    group, separator, key = name.partition("/")
    if not (group and separator and key):
        raise InputError(f"environment variable DDP_WANDB_SECRET must be GROUP/KEY, got {json.dumps(name)}")
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR, env_var="WANDB_API_KEY")
