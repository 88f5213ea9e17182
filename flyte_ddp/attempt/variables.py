"""The names of this package's environment variables, and refusals of unknown ones and of secrets among them."""

import difflib
import re
from collections.abc import Iterable, Mapping

from flyte_ddp.attempt.pod import CODE_VARIABLE, GPUS_VARIABLE, HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.attempt.webhook import WEBHOOK_SECRET_VARIABLE
from flyte_ddp.data.sources.download import MIRROR_VARIABLE
from flyte_ddp.errors import InputError
from flyte_ddp.launch.grace import POD_VARIABLE
from flyte_ddp.text import masked

PREFIX = "DDP_"
# The variables, in addition to those of a registration, that users set, and that are set in pods
USERS = (MIRROR_VARIABLE, "DDP_DATA_DIR", "DDP_RUNS_DIR", "DDP_CACHE_DIR")
PODS = (CODE_VARIABLE, GPUS_VARIABLE, HANDOVER_VARIABLE, POD_VARIABLE, PREVIOUS_VARIABLE, WEBHOOK_SECRET_VARIABLE)
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
    """Raise InputError for a name with our prefix that nothing reads."""
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
    """Return whether a variable's name is that of a secret, or its value a URL with one.

    Our variables only name secrets.
    """
    return masked(value) != value or bool(SECRET_NAME.fullmatch(name) and not name.startswith(PREFIX))


def check_secrets(variables: Mapping[str, str]) -> None:
    """Raise InputError for a secret, which everybody who can see the tasks in Flyte could see."""
    for name, value in variables.items():
        if is_secret(name, value):
            named_by = "secret_requests of the task that needs it (under Flyte 2: secrets of its environment)"
            if name in SECRETS:
                named_by = f"DDP_{SECRETS[name].upper()}=GROUP/KEY"
            raise InputError(
                f"{name} must not be in DDP_ENV, which Flyte shows: put it into a Flyte secret, named by {named_by}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that contains this one, or that is spelt like it; empty if there is none."""
    short = name.removeprefix(PREFIX)
    others = {one.removeprefix(PREFIX): one for one in sorted(known)}
    parts = [one for one in others if f"_{short}_" in f"_{one}_"]
    near = parts or difflib.get_close_matches(short, others, n=1)
    return others[near[0]] if near else ""
