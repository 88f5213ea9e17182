"""Checks the addresses that a registration names: for notifications, webhooks and promotion."""

import json
import re
from urllib.parse import urlsplit

from flyte_ddp.errors import InputError

# The last one is for the URL from a Flyte secret
WEBHOOK_VARIABLE, CONSOLE_VARIABLE, WEBHOOK_SECRET_VARIABLE = "DDP_WEBHOOK", "DDP_CONSOLE", "DDP_POD_WEBHOOK"
PHASES = ("succeeded", "failed", "timed_out", "aborted")
ADDRESS = r"[^@\s,:]+@[^@\s,:]+"


def check_notify(notify: str, phases: str) -> None:
    if notify and not re.fullmatch(f"(slack|email):{ADDRESS}(,{ADDRESS})*", notify):
        raise InputError(
            "notify must be slack:ADDRESS or email:ADDRESS, or several addresses separated by commas, got "
            f"{json.dumps(notify)}: an address is NAME@HOST, also for a Slack channel"
        )
    if not {*phases.split(",")} <= {*PHASES}:
        raise InputError(
            f"notify_phases must be some of {', '.join(PHASES)}, separated by commas, got {json.dumps(phases)}"
        )


def check_urls(webhook: str, webhook_secret: str, console: str) -> None:
    """The messages do not show the URLs, which may be secret."""
    for name, url in (("webhook", webhook), ("console", console)):
        parts = urlsplit(url)
        if url and not (parts.scheme in ("http", "https") and parts.hostname):
            raise InputError(f"{name} must be a URL such as https://host/path: write it in full")
        if "@" in parts.netloc:
            raise InputError(f"{name} must not have a password, which everybody would see: put it into a Flyte secret")
    if webhook and webhook_secret:
        raise InputError("webhook and webhook_secret must not both be set: leave one of them out")


def check_place(place: str) -> None:
    if place and "://" not in place and not place.startswith("/"):
        raise InputError(
            f"promote_to must be a URL of Flyte's storage (s3://…) or an absolute path, got {json.dumps(place)}"
        )
