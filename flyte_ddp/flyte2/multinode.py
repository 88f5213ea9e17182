"""Training on many nodes, which Flyte 2 starts as a JobSet whose pods run torchrun."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from flyte import storage

from flyte_ddp.attempt.failures import attempt_error, failure_of, urls_of
from flyte_ddp.attempt.webhook import telling_webhook
from flyte_ddp.flyte2 import handover, platform
from flyte_ddp.launch.failures import Failure


@contextmanager
def naming_the_cause() -> Iterator[None]:
    """Let rank 0 raise the failure that was the cause, because Flyte shows, and acts upon, the error of rank 0 alone.

    Each rank leaves its own failure in the storage. If rank 0 has only lost another rank or waited for it, rank 0
    raises that rank's failure instead of its own.
    """
    try:
        yield
    except Exception as error:
        if platform.is_local():
            raise
        own = failure_of(platform, error)
        others = f"{platform.logs_url()}/failures"
        rank = os.environ.get("RANK", "0")  # without torchrun there are no other ranks
        if (own.is_effect or own.kind == "hang") and rank == "0":
            own = next(iter(_causes(others)), own)
        elif not own.is_effect:
            handover.put_failure(own, f"{others}/rank-{rank}.json")
        if rank == "0":
            handover.leave_failure(own)
            with telling_webhook(platform):
                raise attempt_error(platform, own, urls_of(platform)) from None
        raise


def _causes(folder: str) -> list[Failure]:
    """Return the failures that ranks have left, the first one first."""
    try:
        files = storage.get_underlying_filesystem(path=folder)
        left = [Failure(**json.loads(files.cat_file(path))) for path in files.find(folder)]
    except Exception:  # each storage has errors of its own, and may raise one if there is no such folder
        return []
    return sorted(left, key=lambda failure: failure.at)
