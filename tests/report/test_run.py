"""A whole run with everything switched on, by pyflyte. A pod's is in tests/test_pod.py."""

import json
import re

import pytest

from flyte_ddp.settings import RunOptions
from tests.commands import ROOT, pyflyte
from tests.pod import small_dataset
from tests.report.test_tracking import KEY, files_with
from tests.report.wandb_server import Server

OPTIONS = RunOptions(tracking="online", profile=True)


@pytest.mark.slow
def test_local_run_shows_itself_and_keeps_the_key(tmp_path):
    """The second one is a cache hit, which says so and costs no training."""
    small_dataset(tmp_path / "data" / "prepared" / "digits")  # 1,000 images, once an epoch, are enough here
    hp = json.dumps({"dataset": "digits", "epochs": 2, "batch_size": 100})
    command = [str(ROOT / "workflows" / "mnist.py"), "pytorch_training_wf", "--hp", hp, "--options", OPTIONS.to_json()]
    place = {"HOME": str(tmp_path), "DDP_DATA_DIR": str(tmp_path / "data"), "DDP_RUNS_DIR": str(tmp_path / "runs")}
    said: list[str] = []
    with Server("answers") as server:
        key = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        for _ in range(2):
            result = pyflyte(*command, cwd=tmp_path, environment={**place, **key})
            said += [result.stdout, result.stderr]
        asked = zip(server.operations, server.variables, strict=True)  # more than once where the machine is busy
        runs = {variables["name"] for operation, variables in asked if operation == "RunResumeStatus"}
        assert len(runs) == 1, "one run, whatever the number of ranks and of cache hits"
    (folder,) = (tmp_path / "runs").glob("2*")
    assert said[0] == said[2], "the same outputs"
    assert f"report={folder}/report.html" in said[0]
    assert f"logs={folder}/logs" in said[0]
    assert re.search(rf"tracking_url='{server.url}/ent/proj/runs/[0-9a-f-]+'", said[0])
    assert (folder / "report.html").read_text().count('role="img"') == 5
    assert server.url in (folder / "report.html").read_text()
    assert not re.search(r"warning|USDT|deprecat", said[1], re.IGNORECASE)
    assert "Report:   " in said[1]
    assert "nothing was trained now. To train again, put --overwrite-cache before the file" in said[3]
    assert KEY not in "".join(said)
    assert not files_with(KEY, tmp_path), "not in the report, the logs, W&B's files, nor Flyte's cache"


@pytest.mark.parametrize("option", ['{"tracking": "sometimes"}', '{"profile": "yes"}', '{"wandb_project": 3}'])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=r"RunOptions\.\w+ must be"):
        RunOptions.from_json(option)
