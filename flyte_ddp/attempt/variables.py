"""The names of this package's environment variables, and what is said of one that is only like them."""

import difflib
import re
from collections.abc import Iterable

from flyte_ddp.attempt.pod import CODE_VARIABLE, GPUS_VARIABLE, HANDOVER_VARIABLE, PREVIOUS_VARIABLE
from flyte_ddp.attempt.webhook import WEBHOOK_SECRET_VARIABLE
from flyte_ddp.data.sources.download import MIRROR_VARIABLE
from flyte_ddp.errors import InputError

PREFIX = "DDP_"
# Besides those of a registration
OTHERS = (
    CODE_VARIABLE,
    GPUS_VARIABLE,
    HANDOVER_VARIABLE,
    PREVIOUS_VARIABLE,
    WEBHOOK_SECRET_VARIABLE,
    MIRROR_VARIABLE,
    "DDP_DATA_DIR",
    "DDP_RUNS_DIR",
    "DDP_CACHE_DIR",
)
# Of our tests, and what Kubernetes sets in all pods for a service whose name begins like ours
NOT_OURS = re.compile(r"DDP_TEST_.*|.*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?)")


def check_names(names: Iterable[str], registered: Iterable[str]) -> None:
    """Raises InputError for a name that is like one of ours, which would be ignored; others with our prefix may be the
    user's own."""
    known = {*OTHERS, *registered}
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in known and not NOT_OURS.fullmatch(name):
            nearest = _nearest(name, known)
            if nearest:
                raise InputError(
                    f"environment variable {name} is unknown (did you mean {nearest}?): rename or unset it"
                )


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known name that it is a part of, or that is spelt like it; empty if there is none."""
    short, others = name.removeprefix(PREFIX), {one.removeprefix(PREFIX): one for one in sorted(known)}
    parts = [one for one in others if f"_{short}_" in f"_{one}_"]
    near = parts or difflib.get_close_matches(short, others, n=1)
    return others[near[0]] if near else ""
