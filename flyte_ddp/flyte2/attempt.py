"""The surroundings of a task's work in Flyte 2."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.attempt.failures import platform_errors, to_failure
from flyte_ddp.flyte2 import platform


@contextmanager
def one_attempt() -> Iterator[None]:
    """Turn the block's errors into those of flyte_ddp.flyte2.platform; a context manager.

    On a cluster, an error of this library with a message for users becomes an AttemptError, after which Flyte retries,
    or a FinalError, if another attempt would fail alike. Other errors are unchanged. In a local run, every exception
    becomes a FinalError, because the SDK would repeat the run after another error.
    """
    try:
        with platform_errors(platform):
            yield
    except Exception as error:
        if platform.is_local():
            failure = to_failure(platform, error)
            raise platform.FinalError(failure, str(failure)) from None
        raise
