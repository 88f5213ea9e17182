"""A user's own observers, "package.module:Name", which cannot hurt a run."""

import copy
import pkgutil
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flyte_ddp.code.user_code import UserCode
from flyte_ddp.events import Observer, tell
from flyte_ddp.report.background import Background, one_line
from flyte_ddp.report.console import warn

OBSERVER_SECONDS = 10.0  # how long the end of a run waits for them
ERRORS = (Exception, SystemExit)


class OwnObservers(Observer):
    """Passes events to the observers, each of which is made and told in a thread of its own.

    Their modules are imported here and now: later ones would be the recipe's, where this process is a rank.
    """

    def __init__(self, codes: Sequence[UserCode]):
        self._opened = []
        for code in codes:
            sys.path.insert(0, code.root)  # pyflyte has it there only while it loads the workflow
            try:
                make = partial(OwnObserver, code.name, pkgutil.resolve_name(code.name))
                self._opened.append(Background(f"observer {code.name}", make, OBSERVER_SECONDS))
            except ERRORS as error:
                _give_up(code.name, error)
            finally:
                sys.path.remove(code.root)

    def __call__(self, event: Any) -> None:
        for observer in self._opened:
            observer(event)

    def close(self, *last: Any) -> None:
        """Passes the last events; all have handled everything, or been abandoned, when this returns."""
        closing = [threading.Thread(target=one.close, args=last, daemon=True) for one in self._opened]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


class OwnObserver(Observer):
    """Passes events to one of them until it raises, which is said once."""

    def __init__(self, name: str, make: Callable[[], object]):
        self._name, self._observer = name, make()

    def __call__(self, event: Any) -> None:
        try:
            tell(self._observer, copy.deepcopy(event))  # others read the event too
        except ERRORS as error:
            self._observer = None
            _give_up(self._name, error)


def _give_up(name: str, error: BaseException) -> None:
    warn(f"observer {name} gave up: {type(error).__name__}: {one_line(error)}. Training was not affected.")
