"""The signals by which a run is asked to stop, handled in the process that launches ranks."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, the end of a pod, the end of a terminal


@contextmanager
def stop_requests(is_writing: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
    """Yield a list for a with statement; each SIGINT, SIGTERM or SIGHUP that arrives in the block is appended to it.

    A second Ctrl-C raises KeyboardInterrupt in the block. The other signals never raise. Outside the main thread, the
    list stays empty.

    Args:
        is_writing: returns whether a checkpoint is being written. If so, a second Ctrl-C is only appended.
    """
    received: list[int] = []

    # The other signals may come several times, forwarded by a parent and sent to the group
    def note(signum: int, _: Any) -> None:
        if signum == signal.SIGINT in received and not is_writing():
            raise KeyboardInterrupt
        received.append(signum)

    with on_signals(STOP_SIGNALS, note):
        yield received


@contextmanager
def finishing() -> Iterator[Callable[[], None]]:
    """Yield a function for a with statement. Once it is called, SIGTERM and SIGHUP do nothing until the block ends.

    A task calls the yielded function before it launches its ranks, so that these signals do not interrupt the upload of
    what the ranks have left. While the ranks run, the launcher handles the signals.
    """
    with ExitStack() as stack:
        yield lambda: stack.enter_context(on_signals([signal.SIGTERM, signal.SIGHUP], lambda *_: None))


@contextmanager
def on_signals(
    numbers: Sequence[signal.Signals], handler: Callable[[int, Any], None] | signal.Handlers
) -> Iterator[None]:
    """Have the handler called for these signals in the block, and restore the earlier handlers at its end.

    With the handler SIG_DFL, the signals have their default effect, such as the end of the process.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored, except SIGINT. Outside the main thread, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals only to the main thread
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number in numbers if number == signal.SIGINT or previous[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])
