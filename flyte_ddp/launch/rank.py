"""The child's side of the launcher: the process of one rank, from its start to its end."""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from flyte_ddp.errors import StopRequested
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import from_exception
from flyte_ddp.launch.link import ParentLink
from flyte_ddp.launch.output import capture_lines
from flyte_ddp.launch.phases import STARTING
from flyte_ddp.launch.signals import STOP_SIGNALS

# The variables that the launcher sets when it starts the process that ranks are forked from
SET_FOR_RANKS = {"GOMP_SPINCOUNT"}


def _detach_child(connection: Connection) -> None:
    """Undo in a forked child of a rank, such as a loader worker, what serve() has set up for the rank.

    A fork hook calls this function in the child. SIGTERM ends the child again. The child's output goes straight to the
    original files. The child's copy of the pipe to the rank's parent is closed, so that the parent notices the end of
    the rank even if children live on.

    Args:
        connection: the rank's pipe to its parent.
    """
    connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def serve(
    connection: Connection,
    environment: Environment,
    target: str,
    argument: Any,
    private: str,
    variables: dict[str, str],
) -> None:
    """Run a rank: call the target, send its value or failure to the parent, and end this process with status 0.

    This function never returns, and exit handlers are not called. Heartbeats, events and printed lines are sent first.
    The last message is ("done", value), ("stopped", why) if the target raises StopRequested, or ("failed", Failure) if
    it raises anything else. When the parent is gone, the process ends at once. The process leads a new process group,
    ignores SIGINT, and takes SIGTERM as a request to stop. After SIGUSR1 it writes its stacks to the file stack-RANK in
    `private`. Under Linux, processes that it starts by multiprocessing are forked.

    Args:
        connection: the pipe to the parent.
        environment: the rank, its device and threads.
        target: "module:function", which is called with the environment, the link to the parent, and the argument.
        argument: the target's argument.
        private: a folder of this launch.
        variables: the parent's environment variables, which replace those of this process.
    """
    # The fork server, which starts the ranks, still has the variables of the parent's first launch
    for name in os.environ.keys() - variables.keys() - SET_FOR_RANKS:
        del os.environ[name]
    os.environ.update(variables)
    atexit.unregister(os._exit)  # fork_server.py has registered it
    gc.freeze()  # a collection need not look at the objects that the ranks share, which stay
    gc.enable()
    # listen() ends a rank with its parent, as if it were a daemon. But a rank may have children, such as loader workers
    multiprocessing.current_process().daemon = False
    if sys.platform == "linux":  # the loader workers of the user's code would otherwise each import torch anew
        multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=partial(_detach_child, connection))
    os.setpgrp()  # a group with whatever this process starts, so that all of it can be ended
    link = ParentLink(connection, environment.rank, environment.local_rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, link.on_signal)
    # The process that this one was forked from blocks these signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        stacks = open(os.path.join(private, f"stack-{environment.rank}"), "w")  # noqa: SIM115 open until the end
    except FileNotFoundError:  # the parent has been interrupted while this rank was starting
        os._exit(1)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=link.listen, args=(private,), daemon=True).start()
    try:
        link.heartbeat(STARTING)
        with capture_lines(link.on_line, link.on_line):  # only the parent writes to the terminal
            value = pkgutil.resolve_name(target)(environment, link, argument)
        link.send("done", value)
    except StopRequested as stopped:
        link.send("stopped", str(stopped))
    except BaseException as error:
        link.send("failed", from_exception(error, environment.rank, environment.host))
    link.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the exit handlers of CUDA and gloo, which can hang or abort
