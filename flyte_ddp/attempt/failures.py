"""How a failure becomes the error with which an attempt ends, and from which the platform knows whether to retry."""

import platform as machine
from collections.abc import Iterator
from contextlib import contextmanager

from click import ClickException

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.errors import DataError, DownloadError
from flyte_ddp.launch.failures import Failure, from_exception
from flyte_ddp.text import encodable, shortened

# Flyte does not read an error file above its storage's limit, 2 MB by default, and then knows neither cause nor retry
MOST_CHARACTERS = 50_000


@contextmanager
def platform_errors(platform: Platform) -> Iterator[None]:
    """On a cluster, raises the platform's error instead of our own errors and those of a download."""
    known: tuple[type[Exception], ...] = (ClickException, *platform.download_errors)
    try:
        yield
    except known as error:
        if platform.is_local():
            raise
        raise attempt_error(platform, failure_of(platform, error)) from None


def failure_of(platform: Platform, error: BaseException) -> Failure:
    """The failure that an error carries; else the error itself, outside of the ranks."""
    carried: Failure | None = getattr(error, "failure", None)
    return carried or from_exception(_of_a_download(platform, error), None, machine.node())


def _of_a_download(platform: Platform, error: BaseException) -> BaseException:
    """An input that was not downloaded, or is damaged in a pod, which has but a copy, is worth another attempt."""
    if isinstance(error, platform.download_errors):
        return DownloadError(" ".join(str(error.args[0]).split()))
    if isinstance(error, DataError) and not platform.is_local():
        return DownloadError(f"{error.problem} in this pod: if each attempt ends so, run with --overwrite-cache")
    return error


def urls_of(platform: Platform) -> str:
    """Where an attempt's files are, in a message."""
    return f"Logs: {platform.logs_url()}\nCheckpoint, if one has been written: {platform.checkpoint_url()}"


def attempt_error(platform: Platform, failure: Failure, urls: str = "") -> Exception:
    """The platform's error for a failure; the lines after the first say where the attempt's files are."""
    headline, separator, details = encodable(str(failure)).partition("\n")
    where = f"\n{urls}" if urls else ""
    message = f"{shortened(headline, MOST_CHARACTERS)}{where}{separator}{shortened(details, MOST_CHARACTERS)}"
    return platform.error(failure, message)
