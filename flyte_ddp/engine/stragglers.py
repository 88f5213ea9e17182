"""Names the ranks that the others wait for. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from flyte_ddp.events import RanksTimed, RankTimes, SlowRank

FACTOR = 1.25  # a rank is late if it needs more than so many times what the median rank needs
LEAST_STEP_SECONDS = 0.002  # by which it prolongs each step: less is the noise of short steps
IN_A_ROW = 3  # so many logs make a warning
LEAST_SECONDS = 2.0  # that these take together: a single hiccup can spoil several short ones
MOST_TOLD = 16  # warnings, with which a large world would fill its page
REMEDIES = {
    "data": "look at what its host reads from, or raise loader_workers",
    "compute": "look for other programs on its host, and for a GPU that is hot or shared",
}


@dataclass
class _Late:
    """A rank's last logs in a row in which it was late: seconds, and those of the median rank."""

    logs: int = 0
    steps: int = 0
    data: float = 0.0
    computing: float = 0.0
    usual_data: float = 0.0
    usual_computing: float = 0.0

    def slow_rank(self, rank: int, host: str, epoch: int, step: int) -> SlowRank:
        in_data = self.data - self.usual_data > self.computing - self.usual_computing
        cause, does = ("data", "waits for its data") if in_data else ("compute", "computes")
        found = (self.data, self.usual_data) if in_data else (self.computing, self.usual_computing)
        own, usual = (f"{seconds / self.steps * 1e3:,.1f} ms" for seconds in found)
        reason = (
            f"the others wait for rank {rank} on {host}, which {does} {own} in each step, the median rank {usual} "
            f"({self.steps} steps until step {step} of epoch {epoch + 1}): {REMEDIES[cause]}"
        )
        return SlowRank(epoch, step, reason, rank, host, cause)


class Stragglers:
    """Compares the ranks' times in one attempt at a training; the same on all ranks.

    All of them end a step together. So the rank that needs longest, for its data and to compute its gradients, waits
    least for the others, and it is the one that these wait for.
    """

    def __init__(self, hosts: Sequence[str], meet_within: bool = False):
        """hosts: by rank. meet_within: whether the ranks wait for each other while they compute, as those of a sharded
        network do: all seem to compute equally long, so only their data tell them apart."""
        self._hosts, self._meet_within = hosts, meet_within
        self._totals = [RankTimes(0.0, 0.0, 0.0, 0)] * len(hosts)
        self._waited_for = [0.0] * len(hosts)
        self._late: dict[int, _Late] = {}
        self._told: set[tuple[int, str]] = set()

    def after_steps(self, epoch: int, step: int, steps: int, times: Sequence[RankTimes]) -> list[SlowRank]:
        """Records each rank's seconds in the latest steps; returns warnings of those that have been late for long."""
        if self._meet_within:
            least = min(one.computing for one in times)
            times = [one._replace(computing=least, waiting=one.waiting + one.computing - least) for one in times]
        needed = [one.data + one.computing for one in times]
        data, computing, usual = (median_low(each) for each in (*list(zip(*times, strict=True))[:2], needed))
        samples = max(1, median_low(one.samples for one in times))
        warnings = []
        for rank, (one, seconds) in enumerate(zip(times, needed, strict=True)):
            self._totals[rank] = RankTimes(*map(sum, zip(self._totals[rank], one, strict=True)))
            self._waited_for[rank] += max(0.0, seconds - usual)
            fair = usual * max(1.0, one.samples / samples)  # shares of a small batch are uneven
            if seconds <= FACTOR * fair or seconds - fair < LEAST_STEP_SECONDS * steps:
                self._late.pop(rank, None)
                continue
            late = self._late.setdefault(rank, _Late())
            late.logs, late.steps = late.logs + 1, late.steps + steps
            late.data, late.computing = late.data + one.data, late.computing + one.computing
            late.usual_data, late.usual_computing = late.usual_data + data, late.usual_computing + computing
            if late.logs >= IN_A_ROW and late.data + late.computing >= LEAST_SECONDS:
                warnings.append(late.slow_rank(rank, self._hosts[rank], epoch, step))
        new = [one for one in warnings if (one.rank, one.cause) not in self._told][: MOST_TOLD - len(self._told)]
        self._told.update((one.rank, one.cause) for one in new)
        return new

    def so_far(self) -> RanksTimed:
        data, computing, waiting, _ = ([round(one, 3) for one in each] for each in zip(*self._totals, strict=True))
        return RanksTimed(data, computing, waiting, [round(one, 3) for one in self._waited_for])
