"""Whole runs with everything switched on: by pyflyte as a user types it, and as a pod."""

import json
import re
from pathlib import Path

import pytest

from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.commands import ROOT, pyflyte, pyflyte_process
from tests.pod import Pod, literal, package_for_here, small_dataset
from tests.report.test_tracking import KEY, files_with
from tests.report.test_watch import watch
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
        for run in (pyflyte_process, pyflyte):
            result = run(*command, cwd=tmp_path, environment={**place, **key})
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


@pytest.mark.slow
def test_pod_shows_its_report_while_it_trains(tmp_path):
    data = small_dataset(tmp_path / "small")
    hp = Hyperparameters(epochs=3, batch_size=50, learning_rate=0.02, precision="float32")
    task = package_for_here().tasks["workflows.mnist.pytorch_mnist_task"]
    inputs = {"hp": literal(hp), "data": data, "options": literal(OPTIONS)}
    deck = tmp_path / "pod" / "deck.html"
    with Server("answers") as server:
        pod = Pod(task, inputs, tmp_path / "pod", {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url})
        with pod.running() as process:
            pod.wait_until(deck.exists, process)
            live = not pod.outputs_file.exists()
            process.wait(timeout=300)
        outputs = pod.outputs()
    assert live
    page = deck.read_text()
    assert page.count('role="img"') == 5
    assert "Finished" in page
    assert server.url in page
    uploaded = Path(outputs["report"].scalar.blob.uri).read_text()
    assert 'role="img"' in uploaded
    logs = Path(outputs["logs"].scalar.blob.uri)
    names = {path.name for path in logs.rglob("*")}
    assert {"predictions.npy", "rank0.pt.trace.json", "rank1.pt.trace.json", "operators.json"} <= names
    status, said = watch(logs)
    assert status == 0
    assert "Epoch 3 of 3: test accuracy" in said, "from Flyte's storage"
    assert not files_with(KEY, tmp_path)


@pytest.mark.parametrize("option", ['{"tracking": "sometimes"}', '{"profile": "yes"}', '{"wandb_project": 3}'])
def test_wrong_options_are_refused(option):
    with pytest.raises(ValueError, match=r"RunOptions\.\w+ must be"):
        RunOptions.from_json(option)
