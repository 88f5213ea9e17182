"""The settings of a registration, read from the environment of the process that registers.

Each field of Registration is a variable, its name in capitals after DDP_: DDP_PROFILE=gpu DDP_GPUS=4 pyflyte ...
register workflows. In a pod these variables are not set, and nothing there depends on them.
"""

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flyte_ddp.attempt.pod import (
    CODE_VARIABLE,
    GPUS_VARIABLE,
    HANDOVER_VARIABLE,
    PREVIOUS_VARIABLE,
    RETRIES_VARIABLE,
    SCRIPT_VARIABLES,
)
from flyte_ddp.attempt.webhook import WEBHOOK_SECRET_VARIABLE
from flyte_ddp.data.sources.download import MIRROR_VARIABLE
from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, read_json, setting
from flyte_ddp.launch.environment import DEFAULT_CPU_RANKS, NODE_VARIABLE
from flyte_ddp.launch.grace import MOST_SECONDS, POD_VARIABLE, USUAL_SECONDS
from flyte_ddp.text import masked

DEFAULT_GRACE = 120  # seconds, as long as the longest notice of a cloud's spot machine
PHASES = ("succeeded", "failed", "timed_out", "aborted")
ADDRESS = r"[^@\s,:]+@[^@\s,:]+"
# Kubernetes' rules: a name that a host could have, a key with such a name as its prefix, a value
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
KEY = f"({NAME}/)?{WORD}"
# Kubernetes' notation
UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
QUANTITY = rf"[0-9]+(\.[0-9]+)?({'|'.join(UNITS)})?"
SIZES = (
    "training_cpu", "training_memory", "training_disk", "preparation_cpu", "preparation_memory", "preparation_disk",
    "small_cpu", "small_memory", "small_disk",
)  # fmt: skip
MOST_CPUS = 4096
MOST_GPUS = 64
LEAST_BYTES = 2**20
COUNT = "[1-9][0-9]{0,5}"  # a number of nodes
# NVIDIA's accelerators, by flytekit's names
ACCELERATORS = (
    "A10G", "L4", "L4_VWS", "L40S", "K80", "M60", "P4", "P100", "T4", "V100", "H100", "H200", "RTX_PRO_6000", "A100",
    "A100_80GB",
)  # fmt: skip
# These GPUs, with their compute capabilities, are too old for torch. The locked torch has code for 7.5, 8.0, 8.6, 9.0,
# 10.0, 12.0 and compatible ones.
TOO_OLD = {"K80": "3.7", "M60": "5.2", "P100": "6.0", "P4": "6.1", "V100": "7.0"}
SUPPORTED = tuple(name for name in ACCELERATORS if name not in TOO_OLD)


@dataclass(frozen=True)
class Registration(Settings):
    """The requests of the tasks."""

    profile: str = setting(
        "gpu",
        choices=("gpu", "sandbox"),
        help="gpu, or sandbox for a small cluster without GPUs, such as one on a laptop.",
    )
    gpus: int = setting(
        2,
        minimum=1,
        maximum=MOST_GPUS,
        help="GPUs of the training task (of each node, if there are many) with profile gpu; one rank each.",
    )
    training_cpu: str = setting(
        "",
        help="CPUs of a training pod, however many GPUs it has: a quantity, or REQUEST:LIMIT. If empty, they depend on "
        "profile and gpus, as training_sizes says.",
    )
    training_memory: str = setting("", help="memory of a training pod, chosen as training_cpu is.")
    training_disk: str = setting("", help="disk of a training pod, chosen as training_cpu is.")
    preparation_cpu: str = setting("500m:1", help="CPUs of a pod that prepares data.")
    preparation_memory: str = setting(
        "1Gi:2Gi",
        help="memory of a pod that prepares data. torchvision, which unpacks the data, imports torch: MNIST takes 0.9 "
        "GB.",
    )
    preparation_disk: str = setting("2Gi", help="disk of a pod that prepares data.")
    small_cpu: str = setting(
        "100m:1",
        help="CPUs of a pod that computes nothing. Its imports take 9 s with a quarter of a CPU and 2 s with one, so "
        "it requests little and is allowed more.",
    )
    small_memory: str = setting("400Mi", help="memory of a pod that computes nothing.")
    small_disk: str = setting("100Mi:1Gi", help="disk of a pod that computes nothing.")
    accelerator: str = setting("none", choices=("none", *SUPPORTED), help="kind of GPU; none leaves it to the cluster.")
    interruptible: bool = setting(
        False, help="whether training may run on preemptible machines; it resumes from its checkpoint."
    )
    attempt_seconds: int = setting(86400, minimum=60, maximum=366 * 86400, help="time limit of a training attempt.")
    retries: int = setting(2, minimum=0, maximum=100, help="further attempts after failures that may not recur.")
    grace_seconds: int = setting(
        0,
        minimum=0,
        maximum=MOST_SECONDS,
        help="how long a training pod has from a SIGTERM to its end, for which it asks the cluster. 0 is 120, or 30, "
        "without asking, for a pod of Flyte 1 whose task has no pod template of its own. A cluster's pod_template "
        "decides that itself: the setting then only tells the ranks, and 0 is 30.",
    )
    wandb_secret: str = setting(
        "",
        help="GROUP/KEY of the Flyte secret with the Weights & Biases API key. A pod whose secret the cluster lacks "
        "never starts, so none is requested unless named.",
    )
    mlflow_secret: str = setting(
        "", help="GROUP/KEY of the Flyte secret with the address of the MLflow server, if the address has a password."
    )
    nnodes: str = setting(
        "2",
        help="number of nodes of workflows/multinode.py and flyte2/multinode.py; or several numbers, any of which will "
        "do: 8,4,2, or MIN:MAX. A PyTorchJob starts with as many nodes as come, from the smallest number to the "
        "largest. Flyte 2 asks for one number after the other; for a range these are MAX, its half, and so on.",
    )
    nproc_per_node: int = setting(
        0, minimum=0, maximum=64, help="ranks per node of many nodes; 0 is one per GPU, or two with profile sandbox."
    )
    join_minutes: int = setting(
        15,
        minimum=1,
        maximum=1440,
        help="how long the first nodes wait for the last: one has the image, another must be created.",
    )
    queue_minutes: int = setting(
        30,
        minimum=1,
        maximum=10080,
        help="under Flyte 2, how long to wait for a number of nodes before a smaller one is asked for.",
    )
    concurrency: int = setting(
        0,
        minimum=0,
        maximum=5000,
        help="how many shards of workflows/inference.py run at a time; 0 leaves it to the cluster.",
    )
    promote_to: str = setting(
        "",
        help="where workflows/promote.py, and then also the launch plan nightly, promotes models to: a URL of Flyte's "
        "storage, or the path of a folder that all pods can access.",
    )
    notify: str = setting(
        "",
        help="whom Flyte notifies of how an execution of a launch plan ended, as slack:ADDRESS or email:ADDRESS, or "
        "several addresses separated by commas. An address without a kind has that of the one before.",
    )
    notify_phases: str = setting("failed,timed_out,aborted", help="the phases to notify of.")
    webhook: str = setting("", help="URL to notify of failed trainings; all who can see the tasks in Flyte can see it.")
    webhook_secret: str = setting("", help="GROUP/KEY of the Flyte secret with that URL, if it is secret.")
    console: str = setting("", help="URL of Flyte's console, for the link in the webhook's message.")
    env: dict = setting(  # noqa: RUF009 copied
        {},
        help="the user's own variables for all pods, by name. Everybody who can see the tasks in Flyte can see them.",
    )
    labels: dict = setting(  # noqa: RUF009
        {}, help="labels of all pods and of the executions of the launch plans, by key; for Kueue, for instance."
    )
    annotations: dict = setting(  # noqa: RUF009
        {}, help="annotations of all pods and of the executions of the launch plans, by key."
    )
    avoid_hours: int = setting(
        0,
        minimum=0,
        maximum=8760,
        help="for how many hours later attempts keep away from a node whose hardware has failed, or is odd; 0 is off.",
    )
    avoid_hosts: str = setting(
        "", help="names of nodes, separated by commas, on which no training pod of this registration may run."
    )
    pod_template: str = setting(
        "",
        help="name of a PodTemplate in the cluster for the pods of training: tolerations, node selectors, and whatever "
        "else that cluster asks for.",
    )

    def __post_init__(self) -> None:
        if self.accelerator in TOO_OLD:  # this message says why; that of the choices would not
            raise InputError(
                f"Registration.accelerator must be a GPU that torch supports, of compute capability 7.5 or more, got "
                f"{self.accelerator} ({TOO_OLD[self.accelerator]}): name another one, or build an image with an older "
                "torch"
            )
        super().__post_init__()
        check_place(self.promote_to)
        check_notify(self.notify, self.notify_phases)
        check_urls(self.webhook, self.webhook_secret, self.console)
        registered = [name_variable(field) for field in dataclasses.fields(self)]
        ours = {MIRROR_VARIABLE, CODE_VARIABLE, GPUS_VARIABLE, POD_VARIABLE, WEBHOOK_SECRET_VARIABLE, *registered}
        check_names(self.env, registered)
        check_strings("env", self.env, "[A-Za-z_][A-Za-z0-9_]*")
        check_secrets(self.env)
        check_strings("labels", self.labels, KEY, f"({WORD})?")
        check_strings("annotations", self.annotations, KEY)
        if not re.fullmatch(f"({NAME})?", self.pod_template):
            raise InputError(
                "Registration.pod_template must be the name of a PodTemplate in the cluster, got "
                f"{json.dumps(self.pod_template)}: `kubectl get podtemplates` lists them"
            )
        for node in self.hosts_to_avoid:
            if not re.fullmatch(NAME, node):
                raise InputError(
                    "avoid_hosts must be names of nodes, separated by commas, in lower case as `kubectl get nodes` "
                    f"lists them, got {json.dumps(node)}: write them as node-1,node-2"
                )
        for name, value in self.env.items():
            if name in ours:
                raise InputError(f"Registration.env must not have {name}, got {json.dumps(value)}: set {name} itself")
        for size in SIZES:
            value = getattr(self, size)
            if not re.fullmatch(f"{QUANTITY}(:{QUANTITY})?", value) and (value or not size.startswith("training")):
                raise InputError(
                    f"{size} must be a quantity such as 500m, 2 or 4Gi, or REQUEST:LIMIT, got {json.dumps(value)}"
                )
            request, _, limit = value.partition(":")
            if limit and amount(request) > amount(limit):
                raise InputError(f"{size} must request no more than its limit, got {value}: write REQUEST:LIMIT")
            # Kubernetes takes 16 for bytes, 500m for half a byte, 4Gi for a number of CPUs. No pod starts with these.
            if value and size.endswith("_cpu") and not 0 < amount(limit or request) <= MOST_CPUS:
                raise InputError(f"{size} must be a number of CPUs such as 500m or 2, got {value}: bytes are of memory")
            if value and not size.endswith("_cpu") and amount(limit or request) < LEAST_BYTES:
                raise InputError(
                    f"{size} must be at least a megabyte, got {value}: write the unit, such as 400Mi or 4Gi"
                )

    @property
    def recipients(self) -> dict[str, list[str]]:
        """Return the addresses in `notify` as lists by kind, "slack" or "email".

        A kind without addresses is left out. An address without a kind has the kind of the address before:
        slack:a@x,b@x has two addresses of kind "slack".
        """
        found: dict[str, list[str]] = {}
        kind = ""
        for one in filter(None, self.notify.split(",")):
            named, _, address = one.rpartition(":")
            kind = named or kind
            found.setdefault(kind, []).append(address)
        return found

    @property
    def hosts_to_avoid(self) -> list[str]:
        return [node.strip() for node in self.avoid_hosts.split(",")] if self.avoid_hosts else []

    @property
    def training_gpus(self) -> int:
        return self.gpus if self.profile == "gpu" else 0

    @property
    def pod_grace(self) -> int:
        """Return the seconds of grace of a training pod, unless its template in code sets them."""
        return self.grace_seconds or (USUAL_SECONDS if self.pod_template else DEFAULT_GRACE)

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node or self.training_gpus or DEFAULT_CPU_RANKS

    @property
    def node_sizes(self) -> list[int]:
        """Return the numbers of nodes that the training may run on, the largest first, each once.

        For nnodes "4" or "8,4,2" these are the numbers themselves. A range "MIN:MAX" gives MAX, its repeated halves
        (rounded down) above MIN, and MIN: 8, 4 and 3 for "3:8".

        Raises:
            InputError: nnodes is no number, list or range, its MIN is above its MAX, or its largest number is 1.
        """
        is_well_formed = re.fullmatch(f"{COUNT}(:{COUNT}|(,{COUNT})*)", self.nnodes)
        numbers = [int(number) for number in re.split("[:,]", self.nnodes)] if is_well_formed else [0]
        is_range = ":" in self.nnodes
        least = min(numbers)
        most = max(numbers)
        if most < 2 or (is_range and numbers[0] > numbers[1]):
            raise InputError(
                "environment variable DDP_NNODES must be a number of at least 2, MIN:MAX, or several numbers such as "
                f"8,4,2, got {json.dumps(self.nnodes)}: for one node there is workflows/mnist.py"
            )
        if is_range:
            numbers += [half for halvings in range(most.bit_length()) if (half := most >> halvings) > least]
        return sorted({*numbers}, reverse=True)

    @property
    def node_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes."""
        return self.node_sizes[-1], self.node_sizes[0]


def registration() -> Registration:
    """Read the registered settings from the environment variables DDP_...

    Returns:
        The settings. A setting whose variable is not set has its default.

    Raises:
        InputError: A variable has an invalid value, settings do not go together, or nothing reads a DDP_ variable. (In
            Flyte 1's pods, the last is allowed.) The message names the variable or the settings.
    """
    check_variables()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Registration):
        variable = name_variable(field)
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            values[field.name] = text if field.type is str else _parsed(text)
            Registration(**{field.name: values[field.name]})
        except InputError as error:
            raise InputError(f"environment variable {variable}: {error.message}") from None
    return Registration(**values)


def check_variables() -> None:
    """Raise InputError for a variable of this process with our prefix that nothing reads. Do nothing in Flyte 1's pods.

    There, others may have set such variables.
    """
    if "FLYTE_INTERNAL_EXECUTION_ID" not in os.environ:
        check_names(os.environ, map(name_variable, dataclasses.fields(Registration)))


def name_variable(field: "dataclasses.Field[Any]") -> str:
    return f"DDP_{field.name.upper()}"


def _parsed(text: str) -> Any:
    """Return the value of JSON text, or the text itself if it is no JSON. Raises InputError for repeated keys."""
    try:
        return read_json(text)
    except InputError:
        raise
    except ValueError:
        return text


def amount(quantity: str) -> float:
    """Return a quantity in Kubernetes' notation as a number: 0.5 for 500m."""
    number, unit = re.fullmatch(r"([\d.]+)(.*)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * UNITS.get(unit, 1)


def check_strings(field: str, values: dict[str, Any], names: str, texts: str = "(?s:.*)") -> None:
    """Raise InputError unless all values of a dict are strings, and names and values match their patterns as a whole.

    Args:
        field: the name of the Registration's field that has the dict, for the message.
        values: the dict.
        names: the regular expression for names.
        texts: the regular expression for values; by default any string will do.
    """
    for name, value in values.items():
        if not (re.fullmatch(names, name) and isinstance(value, str) and re.fullmatch(texts, value)):
            raise InputError(
                f"Registration.{field} must map names to strings, in the characters that Kubernetes allows, got "
                f'{json.dumps(name)} with {json.dumps(value)}: write it as {{"NAME": "value"}}'
            )


def check_notify(notify: str, phases: str) -> None:
    """Raise InputError if `notify` or `notify_phases` is malformed.

    Args:
        notify: empty, or KIND:NAME@HOST with kind slack or email; more addresses follow after commas, with or without a
            kind.
        phases: the value of notify_phases: some of succeeded, failed, timed_out and aborted, separated by commas; not
            empty.
    """
    if notify and not re.fullmatch(f"(slack|email):{ADDRESS}(,((slack|email):)?{ADDRESS})*", notify):
        raise InputError(
            "notify must be slack:ADDRESS or email:ADDRESS, or several addresses separated by commas, got "
            f"{json.dumps(notify)}: an address is NAME@HOST, also for a Slack channel"
        )
    if not {*phases.split(",")} <= {*PHASES}:
        raise InputError(
            f"notify_phases must be some of {', '.join(PHASES)}, separated by commas, got {json.dumps(phases)}"
        )


def check_urls(webhook: str, webhook_secret: str, console: str) -> None:
    """Raise InputError for a URL that is incomplete or has a password, and if webhook and webhook_secret are both set.

    The messages do not show the URLs, which may be secret.

    Args:
        webhook: the URL to notify; empty is none.
        webhook_secret: GROUP/KEY of the Flyte secret that has this URL instead; empty is none. It is not checked
            further.
        console: the URL of Flyte's console; empty is none.
    """
    for name, url in (("webhook", webhook), ("console", console)):
        try:
            parts = urlsplit(url)
            is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # urlsplit() refuses single brackets, and ports that are no numbers
            is_whole = False
        if url and not is_whole:
            raise InputError(f"{name} must be a URL such as https://host/path: write it in full")
        if "@" in parts.netloc:
            raise InputError(f"{name} must not have a password, which everybody would see: put it into a Flyte secret")
    if webhook and webhook_secret:
        raise InputError("webhook and webhook_secret must not both be set: leave one of them out")


def check_place(place: str) -> None:
    """Raise InputError unless a promote_to is empty, an absolute path, or a URL without access keys."""
    if place and "://" not in place and not place.startswith("/"):
        raise InputError(
            f"promote_to must be a URL of Flyte's storage (s3://…) or an absolute path, got {json.dumps(place)}"
        )
    if masked(place) != place:
        raise InputError(
            "promote_to must not have keys in it, which everybody would see: leave them to Flyte's settings"
        )


# --- variables ---

PREFIX = "DDP_"
# The variables, in addition to those of a registration, that users set, and that are set in pods
USERS = (MIRROR_VARIABLE, "DDP_DATA_DIR", "DDP_RUNS_DIR", "DDP_CACHE_DIR")
PODS = (
    CODE_VARIABLE,
    GPUS_VARIABLE,
    HANDOVER_VARIABLE,
    NODE_VARIABLE,
    POD_VARIABLE,
    PREVIOUS_VARIABLE,
    RETRIES_VARIABLE,
    WEBHOOK_SECRET_VARIABLE,
    *SCRIPT_VARIABLES,
)
# The variables of our tests, and those that Kubernetes sets in all pods for a service whose name begins like ours
NOT_OURS = re.compile(r"DDP_TEST_.*|.*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?)")
# The variables that have a secret in a pod, and the fields of a Registration that name the secrets
SECRETS = {
    "WANDB_API_KEY": "wandb_secret",
    "MLFLOW_TRACKING_URI": "mlflow_secret",
    WEBHOOK_SECRET_VARIABLE: "webhook_secret",
}
SECRET_NAME = re.compile(r"(.*_)?(API_?KEY|ACCESS_?KEY|SECRET(_KEY)?|TOKEN|PASSWORD)", re.IGNORECASE)


def check_names(names: Iterable[str], registered: Iterable[str]) -> None:
    """Raise InputError for an environment variable whose name begins with DDP_ if nothing reads it.

    The message proposes a similar name, or lists all names. Some DDP_ variables are always allowed: those for data and
    folders that users set, those that this library sets in pods, those of tests (DDP_TEST_...) and those that
    Kubernetes makes for a service.

    Args:
        names: the names of all environment variables.
        registered: the names of the variables that a registration reads.
    """
    users = {*USERS, *registered}
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in {*PODS, *users} and not NOT_OURS.fullmatch(name):
            nearest = _nearest(name, users)
            if nearest:
                raise InputError(
                    f"environment variable {name} is unknown (did you mean {nearest}?): rename or unset it"
                )
            known = ", ".join(sorted(users))
            raise InputError(f"environment variable {name} is unknown: unset it, or rename it to one of {known}")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's name is one that secrets have, such as API_KEY, or its value a URL with a password.

    Variables with our prefix only name secrets, so their names don't count.
    """
    return masked(value) != value or bool(SECRET_NAME.fullmatch(name) and not name.startswith(PREFIX))


def check_secrets(variables: Mapping[str, str]) -> None:
    """Raise InputError if a variable of DDP_ENV looks like a secret, by its name or value.

    Everybody who can see the tasks in Flyte could see the secret. The message says how to pass it instead, and does not
    show it.
    """
    for name, value in variables.items():
        if is_secret(name, value):
            named_by = "secret_requests of the task that needs it (under Flyte 2: secrets of its environment)"
            if name in SECRETS:
                named_by = f"DDP_{SECRETS[name].upper()}=GROUP/KEY"
            raise InputError(
                f"{name} must not be in DDP_ENV, which Flyte shows: put it into a Flyte secret, named by {named_by}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that contains this one as whole words, or that is spelt like it; empty if none does."""
    short = name.removeprefix(PREFIX)
    others = {one.removeprefix(PREFIX): one for one in sorted(known)}
    parts = [one for one in others if f"_{short}_" in f"_{one}_"]
    near = parts or difflib.get_close_matches(short, others, n=1)
    return others[near[0]] if near else ""
