"""A language model of hundreds of millions of parameters, sharded over the ranks of this machine.

It trains, is killed after its first checkpoint, and goes on from there. GB are those that the machine has less than at
the beginning, without what the kernel could take back.

    python -m benchmarks.large_model --width 2048 --layers 14 --ranks 4
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engine import hardware
from flyte_ddp.events import CheckpointWritten, Event, RunStarted, StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


class Killed(Exception):
    pass


def taken() -> float:
    """GB."""
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(found[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return (total - available) / 1e6


def main() -> None:
    from charlm.settings import Settings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    settings = Settings(
        width=arguments.width, layers=arguments.layers, batch_size=8, epochs=1, characters=3000, log_interval=1,
        precision="float32",
    )  # fmt: skip
    options = RunOptions(
        nproc=arguments.ranks, sharding="full", checkpoint_seconds=0, timeout_seconds=1200, tracking="off"
    )
    print(f"{hardware()}\n")
    is_first, moments, before = True, [time.monotonic()], taken()

    def listen(event: Event) -> None:
        seconds = time.monotonic() - moments[-1]
        if isinstance(event, RunStarted):
            parameters = sum(count for _, _, count in event.layers)
            where = f"epoch {event.first_epoch + 1}, step {event.first_step + 1}"
            said = f"{parameters:,} parameters on {event.world_size} ranks: {seconds:.0f} s until {where}"
        elif isinstance(event, StepLogged):
            said = f"step {event.step}: loss {event.measures['loss']:.4f} after {seconds:.0f} s"
        elif isinstance(event, CheckpointWritten):
            stood, wrote = event.stall_seconds, event.write_seconds
            said = f"checkpoint: training stood still for {stood:.1f} s, on disk {wrote:.1f} s later"
        else:
            return
        print(f"{said}; {taken() - before:.1f} GB", flush=True)
        moments.append(time.monotonic())
        if is_first and isinstance(event, CheckpointWritten):
            raise Killed

    with tempfile.TemporaryDirectory() as folder:
        try:
            train("charlm.recipe:CharLM", settings, options, output=folder, on_event=listen)
        except Killed:
            print("killed")
        is_first = False
        result = train("charlm.recipe:CharLM", settings, options, output=folder, on_event=listen)
        print(f"{time.monotonic() - moments[-1]:.0f} s later: test {result.tested}")


if __name__ == "__main__":
    main()
