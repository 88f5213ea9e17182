"""The private parts of wandb that we use exist, and do what they are used for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

KILL = """if True:
    import os, wandb
    from flyte_ddp.report.wandb_compat import kill_service
    kill_service()  # where none has begun
    run = wandb.init(mode="offline", settings=wandb.Settings(silent=True, console="off"))
    run.log({"loss": 1.0})
    kill_service()
    print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
"""


def test_wandbs_own_process_is_killed_and_not_waited_for(tmp_path):
    command = [sys.executable, "-c", KILL]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "-9\n"
        process.kill()  # how wandb itself ends a run whose process is gone is not tested here
