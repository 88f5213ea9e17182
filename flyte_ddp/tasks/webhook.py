"""Notifies a webhook of a failed training: a JSON POST, which cannot fail a run and delays it by seconds at most."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from flytekit import current_context
from flytekit.core.base_task import IgnoreOutputs

from flyte_ddp.launch.failures import Failure, PreemptedError
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import warn
from flyte_ddp.tasks.addresses import CONSOLE_VARIABLE, WEBHOOK_SECRET_VARIABLE, WEBHOOK_VARIABLE
from flyte_ddp.tasks.execution import failure_of, is_local
from flyte_ddp.tasks.observing import attempt

FORMAT = 1
POST_SECONDS = 8.0  # in total: for name look-up, connection and a slow answer


@contextmanager
def telling_webhook() -> Iterator[None]:
    """Notifies the webhook of an error that ends the block, but not of Ctrl-C, nor if the pod was asked to stop."""
    try:
        yield
    except IgnoreOutputs:  # of a node without rank 0, when all has gone well
        raise
    except Exception as error:
        url = os.environ.get(WEBHOOK_SECRET_VARIABLE) or os.environ.get(WEBHOOK_VARIABLE)
        # With many nodes, the parent of each node's ranks does this, because it knows which rank failed first
        if url and "TORCHELASTIC_RUN_ID" not in os.environ:
            failure = failure_of(error)
            if failure.cause != PreemptedError.__name__:
                notify(url, content_of(failure))
        raise


def notify(url: str, content: dict[str, Any]) -> None:
    """Posts the content, for at most POST_SECONDS; a warning does not show the URL, which may be secret."""
    problems = ["no answer in time"]
    thread = threading.Thread(target=post, args=(url, content, problems), daemon=True)
    thread.start()
    thread.join(POST_SECONDS)
    if problems:
        warn(f"the webhook was not notified of the failure: {problems[-1]}")


def post(url: str, content: dict[str, Any], problems: "list[str]") -> None:
    """Clears problems once the server has accepted the content, or adds what went wrong."""
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError
        body = json.dumps(content).encode()
        request = Request(url, body, {"Content-Type": "application/json", "User-Agent": "flyte-ddp"})
        with build_opener(NoRedirects).open(request, timeout=POST_SECONDS):
            problems.clear()
    except HTTPError as error:
        problems.append(f"its server answered {error.code}")
    except Exception as error:  # of sockets, TLS and URLs, whose messages may have the URL in them
        problems.append(type(error).__name__)


class NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: a redirected POST becomes a GET without its content."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def content_of(failure: Failure) -> dict[str, Any]:
    """What is posted, see docs/on-a-cluster.md."""
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    message = one_line(Exception((failure.message.splitlines() or [""])[0]))
    execution, link = execution_of_this()
    return {
        "format": FORMAT,
        "event": "training_failed",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rank": failure.rank,
        "host": failure.host,
        "cause": failure.cause,
        "message": message,
        "recoverable": failure.recoverable,
        "attempt": attempt(),
        "execution": execution,
        "link": link,
        "text": f"Training failed: {who}: {failure.cause}: {message}" + (f"\n{link}" if link else ""),
    }


def execution_of_this() -> "tuple[str, str]":
    """The execution as project/domain/name, and its page in Flyte's console; empty in a local run or if unknown."""
    if is_local():
        return "", ""
    found = current_context().execution_id
    page = f"projects/{found.project}/domains/{found.domain}/executions/{found.name}"
    console = os.environ.get(CONSOLE_VARIABLE, "").rstrip("/")
    link = os.environ.get("FLYTE_EXECUTION_URL") or (f"{console}/{page}" if console else "")
    return f"{found.project}/{found.domain}/{found.name}", link
