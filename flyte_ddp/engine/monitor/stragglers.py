"""The detection of ranks that the others wait for."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.events import RanksTimed, SlowRank

FACTOR = 1.25  # a rank is late if it needs more than so many times what a fast one needs
LEAST_STEP_SECONDS = 0.002  # a rank is late if it prolongs a step by this at least; less is the noise of short steps
IN_A_ROW = 3  # a rank that is late in so many windows gets a warning
WINDOW_SECONDS = 1.0  # a window has one log or more, and so many seconds: other programs would disturb shorter ones
MOST_WARNINGS = 16  # keeps a large world that is slow from filling its page
SAMPLES = 3  # the column with numbers of samples, after those of StepPart
WORDS = {"data": "waits for its data", "compute": "computes"}
ON_CPUS = "look for other programs on its host"
ON_GPUS = f"{ON_CPUS}, and for a GPU that is hot or shared"


class Stragglers:
    """A comparison of the ranks' times in one attempt at a training. It is the same on all ranks.

    All ranks end a step together. So the rank that needs longest, for its data and to compute its gradients, waits
    least for the others, and the others wait for it.
    """

    def __init__(self, hosts: Sequence[str], remedy: str, meet_within: bool = False, has_gpus: bool = False):
        """Begin with no times.

        Args:
            hosts: the host of each rank.
            remedy: what helps a rank that is slow in its data.
            meet_within: whether the ranks wait for each other while they compute, as those of a sharded network do. All
                then seem to compute equally long, so only their data tell them apart.
            has_gpus: whether each rank computes on a GPU of its own.
        """
        self._hosts = hosts
        self._meet_within = meet_within
        self._has_gpus = has_gpus
        self._remedies = {"data": remedy, "compute": ON_GPUS if has_gpus else ON_CPUS}
        self._totals = np.zeros((len(hosts), 4))  # the last column has the seconds that the others waited for the rank
        self._window = np.zeros((len(hosts), 4))
        self._steps = 0
        self._last: deque[tuple[np.ndarray, np.ndarray, int]] = deque(maxlen=IN_A_ROW)  # times, who was late, steps
        self._warned: set[tuple[int | str, str]] = set()

    def after_steps(self, epoch: int, step: int, steps: int, times: np.ndarray) -> list[SlowRank]:
        """Record the times of the latest steps, and return new warnings of ranks that keep being late.

        Steps are collected into windows of at least WINDOW_SECONDS. A rank is warned of if it was late in each of the
        last IN_A_ROW windows. The cause is "data" or "compute". For each host and cause there is one warning in all; if
        each rank has its own GPU, "compute" gives one for each rank. After MOST_WARNINGS warnings there are no more.
        The caller emits the warnings.

        Args:
            epoch: the epoch, from 0.
            step: the number of the epoch's steps so far.
            steps: the number of the steps that the times are from.
            times: (ranks, 4), sums over these steps: each rank's seconds of waiting for data, of computing, and of
                waiting for the others, and its number of samples.
        """
        if self._meet_within:
            times = times.copy()
            least = times[:, StepPart.COMPUTING].min()
            times[:, StepPart.WAITING] += times[:, StepPart.COMPUTING] - least
            times[:, StepPart.COMPUTING] = least
        needed = needed_seconds(times)
        waited_for = (needed - lower_quartile(needed)).clip(0)
        self._totals += np.column_stack([times[:, :SAMPLES], waited_for])
        self._window = self._window + times
        self._steps = self._steps + steps
        if self._window[0, :SAMPLES].sum() < WINDOW_SECONDS:
            return []
        self._last.append((self._window, find_late(self._window, self._steps), self._steps))
        self._window = np.zeros_like(times)
        self._steps = 0
        new = []
        for slow in self._judge(epoch, step):
            # Slow data, or a slow CPU, slows all ranks of a host, so one warning for the host is enough
            is_own = self._has_gpus and slow.cause == "compute"
            key: tuple[int | str, str] = (slow.rank if is_own else slow.host, slow.cause)
            if key not in self._warned and len(self._warned) < MOST_WARNINGS:
                self._warned.add(key)
                new.append(slow)
        return new

    def _judge(self, epoch: int, step: int) -> list[SlowRank]:
        """Return a warning for each rank that was late in all of the last IN_A_ROW windows.

        The list is empty if there were fewer windows so far. A warning names the cause, reading data or computing: the
        one in which the rank exceeds a fast rank by more time. It also gives both ranks' times for that cause in each
        step.
        """
        if len(self._last) < IN_A_ROW:
            return []
        each, were_late, steps = zip(*self._last, strict=True)
        times = np.sum(each, 0)
        count = sum(steps)
        usual = lower_quartile(times)
        slow_ranks = []
        in_data = ("data", StepPart.DATA)
        in_step = ("compute", StepPart.COMPUTING)
        for rank in np.flatnonzero(np.all(were_late, 0)).tolist():
            beyond = times[rank] - usual
            cause, part = in_data if beyond[StepPart.DATA] > beyond[StepPart.COMPUTING] else in_step
            its, usual_time = (f"{seconds[part] / count * 1e3:,.1f} ms" for seconds in (times[rank], usual))
            host = self._hosts[rank]
            reason = (
                f"rank {rank} on {host} is slow: it {WORDS[cause]} {its} in each step, a fast rank {usual_time} "
                f"({count} steps until step {step} of epoch {epoch + 1}): {self._remedies[cause]}"
            )
            slow_ranks.append(SlowRank(epoch, step, reason, rank, host, cause))
        return slow_ranks

    def so_far(self) -> RanksTimed:
        """Return the event that shows the seconds of all steps of this attempt, by rank."""
        return RanksTimed(*self._totals.T.round(3).tolist())


def find_late(times: np.ndarray, steps: int) -> np.ndarray:
    """Return which ranks were late in these steps: (ranks,) bool.

    A rank's seconds are those of waiting for data and of computing together. A fast rank's seconds are the lower
    quartile over all ranks. A rank is late if its seconds are above FACTOR times a fast rank's, and at least
    LEAST_STEP_SECONDS longer for each step. For a rank with more samples than a fast rank, the fast rank's seconds are
    first scaled up in proportion.

    Args:
        times: (ranks, 4), sums over these steps: each rank's seconds of waiting for data, of computing, and of waiting
            for the others, and its number of samples.
        steps: the number of the steps that the times are from.
    """
    needed = needed_seconds(times)
    samples = times[:, SAMPLES]
    share = samples / max(1, lower_quartile(samples))  # ranks' shares of a small batch are uneven
    fair = lower_quartile(needed) * share.clip(1)
    return (needed > FACTOR * fair) & (needed - fair >= LEAST_STEP_SECONDS * steps)


def needed_seconds(times: np.ndarray) -> np.ndarray:
    """Return the seconds for which each rank waited for its data or computed, (ranks,), of times as in after_steps."""
    return times[:, StepPart.DATA] + times[:, StepPart.COMPUTING]


def lower_quartile(by_rank: np.ndarray) -> np.ndarray:
    """Return the lower quartile of each column, as a fast rank's value, because more than half of ranks may be slow.

    For up to four ranks it is the lowest value.
    """
    quartile: np.ndarray = np.sort(by_rank, axis=0)[(len(by_rank) - 1) // 4]
    return quartile
