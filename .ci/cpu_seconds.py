#!/usr/bin/env python3
"""A limit for the CPU seconds of a command: .ci/cpu_seconds.py 1500 make test

The seconds of all its processes count, even of those that outlive their parents, as ranks do.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_SECONDS = 60  # for what the command has left behind


def stop_waiting(*_: object) -> None:
    raise ChildProcessError("some that have not ended are left out of the sum")


def main(limit: float, *command: str) -> int:
    # An orphan's CPU time goes to whoever waits for it: from now on that is this process, not the system's first
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")
    process = subprocess.Popen(command)
    signal.signal(signal.SIGALRM, stop_waiting)
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.wait()
            if pid == process.pid:
                status = os.waitstatus_to_exitcode(ended)
                signal.alarm(PATIENCE_SECONDS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"{seconds:.0f} CPU seconds of at most {limit:.0f}: {' '.join(command)}", flush=True)
    if seconds > limit:
        print("too many: a test that starts pyflyte, a pod or a training is slow, or can share one", flush=True)
    return status or int(seconds > limit)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
