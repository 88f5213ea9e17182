"""What a task of Flyte 2 does around its work."""

from collections.abc import Iterator
from contextlib import contextmanager

from flyte_ddp.attempt.failures import failure_of, platform_errors
from flyte_ddp.flyte2 import platform


@contextmanager
def one_attempt() -> Iterator[None]:
    """On a cluster, raises the platform's error. In a local run, makes every failure final: the SDK would try again,
    after a pause, and nobody has asked for that.
    """
    try:
        with platform_errors(platform):
            yield
    except Exception as error:
        if platform.is_local():
            failure = failure_of(platform, error)
            raise platform.FinalError(failure, str(failure)) from None
        raise
