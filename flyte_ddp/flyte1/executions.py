"""The executions of a launch plan: Flyte's own notifications of how they ended, labels and annotations."""

from typing import Any

from flytekit import Annotations, Email, Labels, Slack
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.attempt.registration import registration

KINDS: Any = {"slack": Slack, "email": Email}


def execution_options() -> dict[str, Any]:
    """Return the arguments of a LaunchPlan: the registered notifications, labels and annotations."""
    asked = registration()
    phases = [getattr(WorkflowExecutionPhase, name.upper()) for name in asked.notify_phases.split(",")]
    return {
        "notifications": [KINDS[kind](phases=phases, recipients_email=to) for kind, to in asked.recipients.items()],
        "labels": Labels(asked.labels) if asked.labels else None,
        "annotations": Annotations(asked.annotations) if asked.annotations else None,
    }
