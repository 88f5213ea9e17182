"""Which time-out counts: a start and writing may take long, and a hang in them is said to be one."""

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine import worker
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.events import EpochChosen, EpochFinished, RunStarted
from flyte_ddp.launch.environment import environment_from_variables
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.launch.phases import STARTING, STEPPING, WRITING
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings, Validated

NOW = [""]
SEEN: list[tuple[str, str]] = []


class Noting(Validated):
    """Notes in which phase its methods are called."""

    def data(self, split):
        SEEN.append(("data", NOW[0]))
        return super().data(split)

    def model(self):
        SEEN.append(("model", NOW[0]))
        return super().model()

    def pictures(self, outputs, batch):
        SEEN.append(("pictures", NOW[0]))
        return ()


class NotingLink(DirectLink):
    def heartbeat(self, phase=STEPPING):
        super().heartbeat(phase)
        NOW[0] = phase
        SEEN.append(("heartbeat", phase))

    def emit(self, event):
        SEEN.append((type(event).__name__, NOW[0]))


def test_each_rank_says_when_it_starts_steps_and_writes(alone, tmp_path):
    NOW[0] = STARTING
    SEEN.clear()
    job = job_in(tmp_path, make_subject(find_code(f"{__name__}:Noting"), Settings(epochs=2)), RunOptions())
    worker.run(environment_from_variables("gloo"), NotingLink(None), job)
    events = [(name, phase) for name, phase in SEEN if name != "heartbeat"]
    first = [phase for name, phase in events[: events.index((RunStarted.__name__, STARTING)) + 1]]
    assert {*first} == {STARTING}
    assert {"data", "model", "pictures"} <= {name for name, _ in events[: len(first)]}
    # from the last step of an epoch to the next step: evaluated, written
    phases = [phase for name, phase in SEEN if name == "heartbeat"]
    assert phases[0] == STEPPING
    assert (EpochFinished.__name__, STEPPING) in events
    assert (EpochChosen.__name__, STEPPING) in events
    assert events[-1] == ("pictures", WRITING)
    ends = [at for at, (name, _) in enumerate(SEEN) if name == EpochFinished.__name__]
    assert all(("heartbeat", WRITING) in SEEN[at : at + 4] for at in ends)
