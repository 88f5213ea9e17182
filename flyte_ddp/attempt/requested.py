"""The requests of a registration's pods: sizes, variables and secrets, in no platform's own words."""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from flyte_ddp.attempt.pod import CODE_VARIABLE, GPUS_VARIABLE, RETRIES_VARIABLE
from flyte_ddp.attempt.registration import SECRETS, name_variable, registration
from flyte_ddp.attempt.webhook import CONSOLE_VARIABLE, WEBHOOK_VARIABLE
from flyte_ddp.data.sources.download import MIRROR_VARIABLE, mirror_from_environment
from flyte_ddp.errors import InputError
from flyte_ddp.launch.grace import MOST_SECONDS, POD_VARIABLE

TORCHRUN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
HOURS_VARIABLE = "DDP_AVOID_HOURS"


@dataclass(frozen=True)
class Size:
    """The size of a pod: request and limit of each quantity, and a number of GPUs."""

    cpu: tuple[str, str]
    memory: tuple[str, str]
    disk: tuple[str, str]
    gpus: int = 0


def size(cpu: str, memory: str, disk: str, gpus: int = 0) -> Size:
    """Build a Size from quantities in Registration's form, REQUEST:LIMIT. A single quantity is request and limit."""
    return Size(_request_and_limit(cpu), _request_and_limit(memory), _request_and_limit(disk), gpus)


def _request_and_limit(quantity: str) -> tuple[str, str]:
    request, _, limit = quantity.partition(":")
    return request, limit or request


def small_size() -> Size:
    asked = registration()
    return size(asked.small_cpu, asked.small_memory, asked.small_disk)


def preparation_size() -> Size:
    asked = registration()
    return size(asked.preparation_cpu, asked.preparation_memory, asked.preparation_disk)


def training_gpus(most: int | None = None) -> int:
    """Return how many GPUs a training pod asks for: the registered number, or 0 with the profile "sandbox".

    Args:
        most: the most GPUs that the task can use, to which the number is limited; None is no limit.
    """
    registered = registration().training_gpus
    return registered if most is None else min(most, registered)


def training_size(gpus: int) -> Size:
    """Return the registered CPUs, memory and disk of a training pod, with this many GPUs.

    What is not registered has a default. With GPUs, that is 2 CPUs and 8 GiB for each GPU, and 10 GiB of disk. Without,
    it is a range from request to limit: half a CPU to 2, 1 to 3 GiB, and 500 MiB to 2 GiB of disk.
    """
    asked = registration()
    # Without GPUs, two ranks, their parent and the process they are forked from take 0.5 GB on digits and 0.7 GB on
    # MNIST (0.8 GB with the pages of torch's libraries). Two ranks of many nodes, which share nothing, take 1.7 GB.
    # With GPUs (not measured), each rank's CUDA context and libraries take a few GB of host memory, and NCCL uses
    # /dev/shm, of which a container by default has 64 MB.
    defaults = (str(2 * gpus), f"{8 * gpus}Gi", "10Gi") if gpus else ("500m:2", "1Gi:3Gi", "500Mi:2Gi")
    own = (asked.training_cpu, asked.training_memory, asked.training_disk)
    cpu, memory, disk = (one or default for one, default in zip(own, defaults, strict=True))
    return size(cpu, memory, disk, gpus)


def pod_environment() -> dict[str, str]:
    """Return the environment variables of every pod: those in DDP_ENV, and DDP_DATA_MIRROR if this process has it.

    DDP_DATA_MIRROR, the place that datasets are downloaded from, is left out if it is an HTTP URL with a user or
    password, because everybody who can see the tasks in Flyte could see it.

    Raises:
        InputError: A DDP_ variable of this process is invalid.
    """
    mirror = mirror_from_environment()
    parts = urlsplit(mirror or "")
    has_password = parts.scheme in ("http", "https") and "@" in parts.netloc
    return {**({MIRROR_VARIABLE: mirror} if mirror and not has_password else {}), **registration().env}


def registered_environment() -> dict[str, str]:
    """Return the variables that make registration() return the same settings in a pod as in this process.

    They are pod_environment(), and a variable DDP_... for each setting, which replaces one of the same name. Tasks need
    them if their pods import a workflow's file that calls registration().

    Raises:
        InputError: A DDP_ variable of this process is invalid.
    """
    asked = registration()  # is called once, because each call checks all settings
    values = {name_variable(field): getattr(asked, field.name) for field in dataclasses.fields(asked)}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {**pod_environment(), **texts}


def training_environment(gpus: int, code: str = "") -> dict[str, str]:
    """Return the variables of a training pod: pod_environment(), and what the pod is checked against.

    That is the number of GPUs that it must see, and the version of the code that it must have; empty if any will do.
    """
    return {**pod_environment(), **({CODE_VARIABLE: code} if code else {}), GPUS_VARIABLE: str(gpus)}


def grace_environment(own: int | None = None) -> dict[str, str]:
    """Return the variables that tell a training pod, and torchrun in it, the seconds from a SIGTERM to the pod's end.

    The number is at least 1. Without `own`, it is the registered grace_seconds, or else the default.

    Args:
        own: the seconds that the pod template in the task's code gives; None if it gives none. If grace_seconds is
            registered, too, the smaller number counts.
    """
    asked = registration()
    seconds = asked.pod_grace if own is None else min(own, asked.grace_seconds or MOST_SECONDS)
    text = str(max(1, seconds))
    return {POD_VARIABLE: text, TORCHRUN_VARIABLE: text}  # torchrun would kill its ranks after 30 s


def avoidance_environment(retries: int) -> dict[str, str]:
    """Return the variables of a training pod that avoids nodes: for how many hours, and the retries of its task."""
    hours = registration().avoid_hours
    return {HOURS_VARIABLE: str(hours), RETRIES_VARIABLE: str(retries)} if hours else {}


def check_template(name: str) -> None:
    """Raise InputError if a task uses a named pod template of the cluster and avoid_hosts is registered.

    Nodes can be avoided only by a node affinity in the pod's template, and nothing can be added to a template of the
    cluster.

    Args:
        name: the name of the template; empty if the task uses none, in which case nothing is checked.
    """
    nodes = registration().avoid_hosts
    if name and nodes:
        raise InputError(
            f"environment variable DDP_AVOID_HOSTS must be empty beside a pod template of the cluster ({name}), got "
            f"{nodes}: put the node affinity into that template"
        )


def webhook_environment() -> dict[str, str]:
    """Return the variables of a training pod that notifies a webhook of its failure."""
    asked = registration()
    variables = {WEBHOOK_VARIABLE: asked.webhook, CONSOLE_VARIABLE: asked.console}
    return {name: value for name, value in variables.items() if value}


def training_secrets(own: Collection[str | None] = ()) -> dict[str, tuple[str, str]]:
    """Return the registered secrets of a training pod: (group, key) of each, by its environment variable.

    Args:
        own: environment variables that the task sets from secrets of its own. A registered secret for one of these
            variables is left out.

    Raises:
        InputError: A registered secret is not named GROUP/KEY.
    """
    named = {variable: getattr(registration(), field) for variable, field in SECRETS.items()}
    return {
        variable: _group_and_key(name, variable) for variable, name in named.items() if name and variable not in own
    }


def _group_and_key(name: str, variable: str) -> tuple[str, str]:
    group, separator, key = name.partition("/")
    if not (group and separator and key):
        registered = f"DDP_{SECRETS[variable].upper()}"
        raise InputError(f"environment variable {registered} must be GROUP/KEY, got {json.dumps(name)}")
    return group, key
