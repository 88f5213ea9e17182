"""What a pod must be like: as it was registered."""

import os
import platform

from flyte_ddp.code.code_version import OTHER_CODE
from flyte_ddp.errors import RecoverableError, ReportedError

CODE_VARIABLE, GPUS_VARIABLE = "DDP_TRAINING_CODE", "DDP_POD_GPUS"  # where they are not set, nothing is checked
HANDOVER_VARIABLE, PREVIOUS_VARIABLE = "DDP_HANDOVER", "DDP_PREVIOUS_CHECKPOINT"  # see flyte_ddp.flyte2.handover


def check_code(version: str) -> None:
    """Raise ReportedError if this pod's code is not what was registered: with --copy none it has the code of its
    image, and the result would be cached as that of the registered code.
    """
    if os.environ.get(CODE_VARIABLE, version) != version:
        raise ReportedError(f"this pod's training code is not the code that was registered: {OTHER_CODE}")


def check_gpus(visible: int) -> None:
    """Raise RecoverableError, so that another pod is tried, if this one sees another number of GPUs than it asked for:
    the result with fewer would be cached all the same. A local run has asked for none.
    """
    asked = os.environ.get(GPUS_VARIABLE)
    if asked is not None and int(asked) != visible:
        raise RecoverableError(
            f"this pod must have as many GPUs as were registered ({asked}), got {visible} on {platform.node()}: "
            "check that node's driver and device plugin and the platform's limits, or register with a DDP_GPUS "
            "(or give a --gpus) that the cluster can provide, or with DDP_PROFILE=sandbox for none"
        )
