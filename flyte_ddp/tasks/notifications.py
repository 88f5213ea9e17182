"""Flyte's own notifications of how the executions of a launch plan ended."""

from typing import Any

from flytekit import Email, Slack
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.attempt.registration import registration

KINDS: Any = {"slack": Slack, "email": Email}


def notifications() -> list[Any]:
    """The notifications of a LaunchPlan, from DDP_NOTIFY and DDP_NOTIFY_PHASES; empty without them."""
    asked = registration()
    if not asked.notify:
        return []
    kind, _, recipients = asked.notify.partition(":")
    phases = [getattr(WorkflowExecutionPhase, name.upper()) for name in asked.notify_phases.split(",")]
    return [KINDS[kind](phases=phases, recipients_email=recipients.split(","))]
