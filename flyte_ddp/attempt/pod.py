"""Checks that a pod is as it was registered."""

import os

from flyte_ddp.code.code_version import OTHER_CODE
from flyte_ddp.errors import RecoverableError, ReportedError
from flyte_ddp.launch.environment import host_name, visible_gpus

CODE_VARIABLE, GPUS_VARIABLE = "DDP_TRAINING_CODE", "DDP_POD_GPUS"  # nothing is checked if they are not set
SCRIPT_VARIABLES = CHECKPOINT_VARIABLE, EVENTS_VARIABLE = (
    "DDP_CHECKPOINT_DIR",
    "DDP_EVENTS",
)  # ranks of a script get them
RETRIES_VARIABLE = "DDP_POD_RETRIES"  # the retries of the task, if its pods avoid nodes
HANDOVER_VARIABLE, PREVIOUS_VARIABLE = "DDP_HANDOVER", "DDP_PREVIOUS_CHECKPOINT"  # flyte_ddp.flyte2.handover reads them


def check_code(version: str) -> None:
    """Raise ReportedError if this pod's code is not what was registered.

    With --copy none a pod has the code of its image, and its result would be cached as that of the registered code.
    """
    if os.environ.get(CODE_VARIABLE, version) != version:
        raise ReportedError(f"this pod's training code is not the code that was registered: {OTHER_CODE}")


def check_gpus() -> None:
    """Check that this pod sees as many GPUs as it asked for.

    A result computed with fewer GPUs would be cached all the same. In a local run, nothing was asked for, and nothing
    is checked.

    Raises:
        RecoverableError: The numbers differ. The platform then tries another pod.
    """
    asked, visible = os.environ.get(GPUS_VARIABLE), visible_gpus()
    if asked is not None and int(asked) != visible:
        raise RecoverableError(
            f"this pod must have as many GPUs as were registered ({asked}), got {visible} on {host_name()}: "
            "check that node's driver and device plugin and the platform's limits, or register with a DDP_GPUS "
            "(or give a --gpus) that the cluster can provide, or with DDP_PROFILE=sandbox for none"
        )
