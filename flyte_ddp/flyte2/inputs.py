"""The set-up of every workflow file of Flyte 2, which flyte_ddp.flyte2.environment calls before its tasks run."""

import logging
import os

from flyte.errors import RuntimeUserError
from flyteidl2.task.common_pb2 import Outputs

from flyte_ddp.attempt.failures import attempt_error, to_failure
from flyte_ddp.attempt.folders import local_paths
from flyte_ddp.attempt.options import explain_settings
from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.flyte_compat import get_python_type, local_cache, read_json_inputs, refuse_inputs
from flyte_ddp.reading import read_settings
from flyte_ddp.report.console import show_output


def set_up_flyte() -> None:
    """Adapt Flyte 2's SDK to this library. A second call does no harm.

    The SDK then prints the library's messages, reads settings strictly, explains wrong options and settings, ends an
    attempt with a clear error for a wrong input, and hides log records of failures that `flyte run --local` shows
    anyway. The call also drops local cache entries whose files are gone.
    """
    show_output()
    read_json_inputs(Settings, read_settings)
    explain_settings(get_python_type)
    refuse_inputs(InputError, lambda error: attempt_error(platform, to_failure(platform, error)))
    forget_lost_results()
    logging.getLogger("flyte").addFilter(should_log)


def should_log(record: logging.LogRecord) -> bool:
    """Return whether to log a record, as a logging filter: False for a task's failure in a local run.

    `flyte run --local` shows that failure at its end, too. The record would also have the stacks of all tasks that
    waited for the failed one.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeUserError) and platform.is_local())


def forget_lost_results() -> None:
    """Drop all local cache entries whose files are gone, so that their tasks run again instead of failing.

    Flyte's local cache stores paths, never contents, and offers no such check.
    """
    with local_cache() as cache:
        for key, value in cache.execute("SELECT key, value FROM task_cache").fetchall():
            literals = [output.value for output in Outputs.FromString(value).literals]
            if not all(map(os.path.exists, local_paths(literals))):
                cache.execute("DELETE FROM task_cache WHERE key = ?", (key,))
