"""The notification of a webhook about a failed training: a JSON POST.

The POST cannot fail a run, and delays it by seconds at most.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import requests

from flyte_ddp.attempt.failures import to_failure
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.launch.failures import Failure, PreemptedError, how_to_avoid
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import warn

# The third variable is for the URL from a secret
WEBHOOK_VARIABLE, CONSOLE_VARIABLE, WEBHOOK_SECRET_VARIABLE = "DDP_WEBHOOK", "DDP_CONSOLE", "DDP_POD_WEBHOOK"
FORMAT = 1
POST_SECONDS = 8.0  # the limit for name look-up, connection and a slow answer together


@contextmanager
def notifying_webhook(platform: Platform) -> Iterator[None]:
    """Notify the webhook of an error that ends the block, and raise the error again.

    A context manager. The webhook's URL is in DDP_POD_WEBHOOK, or else in DDP_WEBHOOK; without either, nothing is sent.
    Nothing is sent after Ctrl-C, or if the pod was asked to stop. A failure to notify is only a warning.
    """
    try:
        yield
    except Exception as error:
        url = os.environ.get(WEBHOOK_SECRET_VARIABLE) or os.environ.get(WEBHOOK_VARIABLE)
        if url:
            failure = to_failure(platform, error)
            if failure.cause != PreemptedError.__name__:
                notify(url, make_content(failure, platform))
        raise


def notify(url: str, content: dict[str, Any]) -> None:
    """Post the content as JSON, for at most POST_SECONDS. Warn if that fails, without the URL, which may be secret."""
    problems = ["no answer in time"]
    thread = threading.Thread(target=post, args=(url, content, problems), daemon=True)
    thread.start()
    thread.join(POST_SECONDS)
    for problem in problems[-1:]:  # the thread may still clear the list
        warn(f"the webhook was not notified of the failure: {problem}")


def post(url: str, content: dict[str, Any], problems: list[str]) -> None:
    """Post the content as JSON, and leave in `problems` what went wrong. No error is raised.

    If the server accepts the content, the list is emptied. Otherwise its last text says what went wrong, without the
    URL. A redirect counts as a refusal.
    """
    headers = {"User-Agent": "flyte-ddp"}
    try:
        # A redirect would turn the POST into a GET without its content
        answer = requests.post(url, json=content, headers=headers, timeout=POST_SECONDS, allow_redirects=False)
    except Exception as error:  # the messages of sockets, TLS and URLs may contain the secret URL
        problems.append(type(error).__name__)
    else:
        problems[:] = [] if answer.status_code < 300 else [f"its server answered {answer.status_code}"]


def make_content(failure: Failure, platform: Platform) -> dict[str, Any]:
    """Return the JSON object to post: who has failed, why, whether Flyte retries, and where to look.

    docs/on-a-cluster.md lists its fields.
    """
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    message = one_line(Exception((failure.message.splitlines() or [""])[0]))
    execution, link = platform.execution()
    avoid = {"avoid_hosts": list(failure.bad_nodes)} if failure.bad_nodes else {}
    remedy = f"\n{how_to_avoid(failure.bad_nodes)}" if avoid else ""
    return {
        "format": FORMAT,
        "event": "training_failed",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rank": failure.rank,
        "host": failure.host,
        "cause": failure.cause,
        "message": message,
        "recoverable": failure.recoverable,
        "attempt": platform.earlier_attempts(),
        "execution": execution,
        "link": link,
        **avoid,
        "text": f"Training failed: {who}: {failure.cause}: {message}{remedy}" + (f"\n{link}" if link else ""),
    }
