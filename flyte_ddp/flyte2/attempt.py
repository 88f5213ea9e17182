"""The surroundings of a task's work in Flyte 2."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.attempt.failures import platform_errors, to_failure
from flyte_ddp.flyte2 import platform


@contextmanager
def one_attempt() -> Iterator[None]:
    """Turn the block's errors into the platform's own errors; a context manager.

    On a cluster, an error with a message of this library becomes an error that ends the attempt, and says whether Flyte
    retries. Other errors are unchanged. In a local run, every exception becomes a FinalError, which is not retried.
    (The SDK would otherwise repeat a local run after a pause.)
    """
    try:
        with platform_errors(platform):
            yield
    except Exception as error:
        if platform.is_local():
            failure = to_failure(platform, error)
            raise platform.FinalError(failure, str(failure)) from None
        raise
