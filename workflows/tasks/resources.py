"""What the tasks ask of a cluster, decided when they are registered.

The environment of the registering process decides, by the fields of Registration in capitals behind DDP_:
DDP_PROFILE=gpu DDP_GPUS=4 pyflyte ... register workflows. In a pod these variables are missing, and nothing there
depends on them.
"""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Dict, Tuple

from flytekit import FlyteContextManager, Resources, Secret
from flytekit.core.context_manager import ExecutionState
from flytekit.extras import accelerators

from workflows.tasks.versions import CODE_VARIABLE, registered_code
from workflows.training.environment import DEFAULT_CPU_RANKS
from workflows.training.errors import InputError
from workflows.training.settings import Settings, setting

IMAGE, KERAS_IMAGE = "{{.image.trainer}}", "{{.image.keras}}"  # named in flyte.config, or by --image trainer=NAME
QUANTITY = r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"  # Kubernetes' notation
ACCELERATORS = {
    name: value for name, value in vars(accelerators).items() if isinstance(value, accelerators.BaseAccelerator)
}


@dataclass(frozen=True)
class Registration(Settings):
    """What the tasks ask for.

    Attributes:
        profile: gpu, or sandbox for a cluster without GPUs, as small as a laptop's.
        gpus: of the training task (of each node, where there are many) under profile gpu; one rank each.
        training_cpu, training_memory, training_disk: of a training pod, whatever its GPUs: a quantity, or
            REQUEST:LIMIT. Empty leaves them to profile and gpus, see training_sizes.
        preparation_cpu, preparation_memory, preparation_disk: of a pod that prepares data. torchvision, which unpacks
            them, imports torch: MNIST takes 0.9 GB of memory.
        small_cpu, small_memory, small_disk: of a pod that computes nothing. It imports for 9 s with a quarter of a CPU
            and for 2 s with one, so it asks for little and may take more.
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
    training_cpu: str = setting("")
    training_memory: str = setting("")
    training_disk: str = setting("")
    preparation_cpu: str = setting("500m:1")
    preparation_memory: str = setting("1Gi:2Gi")
    preparation_disk: str = setting("2Gi")
    small_cpu: str = setting("100m:1")
    small_memory: str = setting("400Mi")
    small_disk: str = setting("100Mi:1Gi")
    accelerator: str = setting("none", choices=("none", *ACCELERATORS))
    interruptible: bool = setting(False)
    timeout_seconds: int = setting(86400, minimum=60)
    wandb_secret: str = setting("")
    nnodes: str = setting("2")
    nproc_per_node: int = setting(0, minimum=0, maximum=64)
    join_minutes: int = setting(15, minimum=1, maximum=1440)
    concurrency: int = setting(0, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in (f"{pod}_{of}" for pod in ("training", "preparation", "small") for of in ("cpu", "memory", "disk")):
            value = getattr(self, size)
            if not re.fullmatch(f"{QUANTITY}(:{QUANTITY})?", value) and (value or not size.startswith("training")):
                raise InputError(
                    f"{size} must be a quantity as 500m, 2 or 4Gi, or REQUEST:LIMIT, got {json.dumps(value)}"
                )

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


def sizes(cpu: str, memory: str, disk: str, gpus: int = 0) -> Dict[str, Any]:
    """Arguments of @task or with_overrides for sizes as Registration has them; a lone quantity is request and limit."""
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


def training_sizes(gpus: int) -> Dict[str, Any]:
    """What a training pod with so many GPUs needs, as arguments of @task or with_overrides.

    Without a GPU: two ranks, their parent and the process they are forked from hold 0.5 GB on digits and 0.7 GB on
    MNIST together (0.8 GB with the pages of torch's libraries). With (not measured): each rank's CUDA context and
    libraries take some GB of host memory, and NCCL's ranks speak through /dev/shm, where a container gets 64 MB.
    """
    asked = registration()
    defaults = (str(2 * gpus), f"{8 * gpus}Gi", "10Gi") if gpus else ("500m:2", "1Gi:2Gi", "500Mi:2Gi")
    own = (asked.training_cpu, asked.training_memory, asked.training_disk)
    cpu, memory, disk = (size or default for size, default in zip(own, defaults, strict=True))
    needed = sizes(cpu, memory, disk, gpus)
    return {**needed, "shared_memory": True} if gpus else needed


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
    """Arguments of @task for downloading and preparing a dataset, and for what else needs torch but no ranks."""
    asked = registration()
    needed = sizes(asked.preparation_cpu, asked.preparation_memory, asked.preparation_disk)
    return {"container_image": IMAGE, **needed, "timeout": timedelta(hours=1)}


def small_resources() -> Dict[str, Any]:
    """Arguments of @task for a task that computes nothing."""
    asked = registration()
    return {"container_image": IMAGE, **sizes(asked.small_cpu, asked.small_memory, asked.small_disk)}


def is_named(image: str) -> bool:
    """Whether the registration that is under way names this image; True where none is, as in a pod or a local run."""
    context = FlyteContextManager.current_context()
    settings, state = context.serialization_settings, context.execution_state
    if settings is None or (state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION):
        return True
    return settings.image_config.find_image(image) is not None


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
