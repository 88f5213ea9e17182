"""The detection of ranks that the others wait for."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from flyte_ddp.engine.monitor.step_clock import StepPart
from flyte_ddp.events import RanksTimed, SlowRank

FACTOR = 1.25  # a rank is late if it needs more than so many times what a fast one needs
LEAST_STEP_SECONDS = 0.002  # a late rank prolongs a step by this at least: less is the noise of short steps
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
        """Record the latest steps, and return warnings of ranks that keep being late.

        Args:
            epoch: from 0.
            step: the step within the epoch.
            steps: how many steps the times are of.
            times: (ranks, 4) seconds waiting for data, computing, and waiting for the others; and samples.
        """
        if self._meet_within:
            times = times.copy()
            least = times[:, StepPart.COMPUTING].min()
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
            # Slow data, or a slow CPU, slows all ranks of a host, so one warning for the host is enough
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
    """Return which ranks are late: (ranks,) bool.

    A late rank took much longer in so many steps than a fast rank, and than its share of the samples explains.
    """
    needed = needed_by(times)
    samples = times[:, SAMPLES]
    fair = fast(needed) * (samples / max(1, fast(samples))).clip(1)  # ranks' shares of a small batch are uneven
    return (needed > FACTOR * fair) & (needed - fair >= LEAST_STEP_SECONDS * steps)


def needed_by(times: np.ndarray) -> np.ndarray:
    """Return the seconds that each rank needed for itself: (ranks,)."""
    return times[:, StepPart.DATA] + times[:, StepPart.COMPUTING]


def fast(of_ranks: np.ndarray) -> np.ndarray:
    """Return the lower quartile, which for up to four ranks is their fastest.

    More than half of the ranks may be slow.
    """
    quartile: np.ndarray = np.sort(of_ranks, axis=0)[(len(of_ranks) - 1) // 4]
    return quartile
