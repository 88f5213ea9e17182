"""The surroundings of a task's work in Flyte 2."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.attempt.failures import platform_errors, to_failure
from flyte_ddp.flyte2 import platform


@contextmanager
def one_attempt() -> Iterator[None]:
    """Turn the block's errors into the platform's, in a with statement.

    On a cluster, an error that this library explains ends the attempt, and says whether Flyte retries; other errors are
    unchanged. In a local run every exception becomes a FinalError, which is not retried: the SDK would otherwise repeat
    a local run after a pause, which nobody has asked for.
    """
    try:
        with platform_errors(platform):
            yield
    except Exception as error:
        if platform.is_local():
            failure = to_failure(platform, error)
            raise platform.FinalError(failure, str(failure)) from None
        raise
