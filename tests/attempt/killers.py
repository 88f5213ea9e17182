"""Observers that kill a rank of the training that they watch."""

import multiprocessing
import os
import signal


class Early:
    """Kills one before there is a checkpoint."""

    def on_run_started(self, event):
        kill_one()


class Once:
    """Kills one after the first checkpoint of so many starts of the ranks."""

    times = 1

    def __init__(self):
        self.starts, self.armed = 0, False

    def on_run_started(self, event):
        self.starts += 1
        self.armed = self.starts <= self.times

    def on_checkpoint_written(self, event):
        if self.armed:
            self.armed = False
            kill_one()


class Always(Once):
    times = 100


def kill_one():
    rank = max(multiprocessing.active_children(), key=lambda process: process.pid or 0)
    os.kill(rank.pid or 0, signal.SIGKILL)
