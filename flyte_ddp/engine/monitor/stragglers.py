"""Names the ranks that the others wait for."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.events import RanksTimed, SlowRank

FACTOR = 1.25  # a rank is late if it needs more than so many times what a fast one needs
LEAST_STEP_SECONDS = 0.002  # by which it prolongs a step: less is the noise of short steps
IN_A_ROW = 3  # so many windows in which it is late make a warning
WINDOW_SECONDS = 1.0  # a window is a log, or as many as take so long: whatever runs beside would disturb shorter ones
MOST_WARNINGS = 16  # so that a large world that is slow does not fill its page
SAMPLES = 3  # the column of a table of times after those of StepPart
WORDS = {"data": "waits for its data", "compute": "computes"}
ON_CPUS = "look for other programs on its host"
ON_GPUS = f"{ON_CPUS}, and for a GPU that is hot or shared"


class Stragglers:
    """Compares the ranks' times in one attempt at a training; the same on all ranks.

    All of them end a step together. So the rank that needs longest, for its data and to compute its gradients, waits
    least for the others, and it is the one that these wait for.
    """

    def __init__(self, hosts: Sequence[str], remedy: str, meet_within: bool = False, has_gpus: bool = False):
        """hosts: by rank. remedy: for a rank that is slow in its data. meet_within: whether the ranks wait for each
        other while they compute, as those of a sharded network do: all seem to compute equally long, so only their data
        tell them apart. has_gpus: whether each rank computes on a GPU of its own.
        """
        self._hosts = hosts
        self._meet_within = meet_within
        self._has_gpus = has_gpus
        self._remedies = {"data": remedy, "compute": ON_GPUS if has_gpus else ON_CPUS}
        self._totals = np.zeros((len(hosts), 4))  # the last column: for how long the others have waited for it
        self._window = np.zeros((len(hosts), 4))
        self._steps = 0
        self._last: deque[tuple[np.ndarray, np.ndarray, int]] = deque(maxlen=IN_A_ROW)  # times, who was late, steps
        self._warned: set[tuple[int | str, str]] = set()

    def after_steps(self, epoch: int, step: int, steps: int, times: np.ndarray) -> list[SlowRank]:
        """Record the latest steps; returns warnings of ranks that keep being late.

        times: (ranks, 4) seconds waiting for data, computing, and waiting for the others; and samples.
        """
        if self._meet_within:
            times, least = times.copy(), times[:, StepPart.COMPUTING].min()
            times[:, StepPart.WAITING] += times[:, StepPart.COMPUTING] - least
            times[:, StepPart.COMPUTING] = least
        needed = needed_by(times)
        waited_for = (needed - fast(needed)).clip(0)
        self._totals += np.column_stack([times[:, :SAMPLES], waited_for])
        self._window = self._window + times
        self._steps = self._steps + steps
        if self._window[0, :SAMPLES].sum() < WINDOW_SECONDS:
            return []
        self._last.append((self._window, late(self._window, self._steps), self._steps))
        self._window = np.zeros_like(times)
        self._steps = 0
        new = []
        for slow in self._judge(epoch, step):
            # What slows data, or a rank on CPUs, slows all ranks of the host: another warning would tell nothing new
            is_own = self._has_gpus and slow.cause == "compute"
            key: tuple[int | str, str] = (slow.rank if is_own else slow.host, slow.cause)
            if key not in self._warned and len(self._warned) < MOST_WARNINGS:
                self._warned.add(key)
                new.append(slow)
        return new

    def _judge(self, epoch: int, step: int) -> list[SlowRank]:
        if len(self._last) < IN_A_ROW:
            return []
        each, were_late, steps = zip(*self._last, strict=True)
        times = np.sum(each, 0)
        count = sum(steps)
        usual = fast(times)
        slow_ranks = []
        in_data = ("data", StepPart.DATA)
        in_step = ("compute", StepPart.COMPUTING)
        for rank in np.flatnonzero(np.all(were_late, 0)).tolist():
            beyond = times[rank] - usual
            cause, part = in_data if beyond[StepPart.DATA] > beyond[StepPart.COMPUTING] else in_step
            its, of_fast = (f"{of[part] / count * 1e3:,.1f} ms" for of in (times[rank], usual))
            host = self._hosts[rank]
            reason = (
                f"rank {rank} on {host} is slow: it {WORDS[cause]} {its} in each step, a fast rank {of_fast} "
                f"({count} steps until step {step} of epoch {epoch + 1}): {self._remedies[cause]}"
            )
            slow_ranks.append(SlowRank(epoch, step, reason, rank, host, cause))
        return slow_ranks

    def so_far(self) -> RanksTimed:
        return RanksTimed(*self._totals.T.round(3).tolist())


def late(times: np.ndarray, steps: int) -> np.ndarray:
    """(ranks,) bool: who took much longer in so many steps than a fast rank, and than its share of the samples."""
    needed = needed_by(times)
    samples = times[:, SAMPLES]
    fair = fast(needed) * (samples / max(1, fast(samples))).clip(1)  # shares of a small batch are uneven
    return (needed > FACTOR * fair) & (needed - fair >= LEAST_STEP_SECONDS * steps)


def needed_by(times: np.ndarray) -> np.ndarray:
    """(ranks,) seconds of its own, of each rank."""
    return times[:, StepPart.DATA] + times[:, StepPart.COMPUTING]


def fast(of_ranks: np.ndarray) -> np.ndarray:
    """The lower quartile, of which up to four ranks have their fastest: more of them than half may be slow."""
    quartile: np.ndarray = np.sort(of_ranks, axis=0)[(len(of_ranks) - 1) // 4]
    return quartile
