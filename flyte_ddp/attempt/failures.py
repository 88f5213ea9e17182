"""The conversion of a failure to the error that ends an attempt, from which the platform knows whether to retry."""

from collections.abc import Iterator
from contextlib import contextmanager

from click import ClickException

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.errors import DataError, DownloadError
from flyte_ddp.launch.environment import host_name
from flyte_ddp.launch.failures import Failure, from_exception
from flyte_ddp.text import encodable, shortened

# Flyte does not read an error file above its storage's limit, 2 MB by default, and then neither shows the cause nor
# retries
MOST_CHARACTERS = 50_000


@contextmanager
def platform_errors(platform: Platform) -> Iterator[None]:
    """Turn errors of the block into the platform's error, which ends the attempt and says whether to retry.

    A context manager. It turns the errors of this library that have a message for users (InputError, ReportedError and
    their subclasses), and those of the platform's downloads. All other errors, and every error of a local run, are
    raised unchanged.
    """
    known: tuple[type[Exception], ...] = (ClickException, *platform.download_errors)
    try:
        yield
    except known as error:
        if platform.is_local():
            raise
        raise attempt_error(platform, to_failure(platform, error)) from None


def to_failure(platform: Platform, error: BaseException) -> Failure:
    """Return the failure that describes an error.

    An error of a rank carries its failure as the attribute `failure`. For any other error, the failure is a new one of
    this host, without a rank. An error of the platform's downloads, and on a cluster a DataError, counts as a
    DownloadError, so that the platform starts another attempt.
    """
    carried: Failure | None = getattr(error, "failure", None)
    if carried:
        return carried
    if isinstance(error, platform.download_errors):
        error = DownloadError(" ".join(str(error.args[0]).split()))
    elif isinstance(error, DataError) and not platform.is_local():
        error = DownloadError(f"{error.problem} in this pod: if each attempt ends so, run with --overwrite-cache")
    return from_exception(error, None, host_name())


def format_urls(platform: Platform) -> str:
    """Return the URLs of an attempt's files, for a message."""
    return f"Logs: {platform.logs_url()}\nCheckpoint, if one has been written: {platform.checkpoint_url()}"


def attempt_error(platform: Platform, failure: Failure, urls: str = "") -> Exception:
    """Return (not raise) the platform's error for a failure.

    Args:
        platform: the platform.
        failure: the failure, whose text is the error's message. Its first line and the rest are each cut to
            MOST_CHARACTERS.
        urls: lines that say where the attempt's logs and checkpoint are, to put after the first line; empty is none.
    """
    headline, separator, details = encodable(str(failure)).partition("\n")
    where = f"\n{urls}" if urls else ""
    message = f"{shortened(headline, MOST_CHARACTERS)}{where}{separator}{shortened(details, MOST_CHARACTERS)}"
    return platform.error(failure, message)
