"""The command of a Flyte 2 pod that runs a script: killed, and resumed by its own checkpoint."""

import pytest

from flyte_ddp.settings import RunOptions
from tests.flyte2.pod import Pod2
from tests.object_storage import object_storage
from tests.script.on_flyte2 import train

MANIFEST = "bucket/run/script/1/_flytecheckpoints/checkpoint"
NO_GPU = {"DDP_POD_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}  # so that this machine's do not matter


@pytest.mark.slow
def test_a_killed_pod_of_flyte_2_leaves_its_checkpoint_to_the_next_attempt():
    values = {"options": RunOptions(nproc=2, tracking="off")}
    with object_storage() as storage:
        Pod2(train, values, storage, 1, "script", NO_GPU).kill_when(lambda objects: MANIFEST in objects)
        second = Pod2(train, values, storage, 2, "script", NO_GPU)
        assert second.finish() == 0, second.log
        outputs = second.outputs()
        assert "resuming from the checkpoint" in second.log
        assert "[rank 1] rank 1 goes on from step 7" in second.log
        assert outputs.figures == {"loss": 0.5}
        assert storage.objects[f"{outputs.checkpoint.path.removeprefix('s3://')}/ckpt"] == b"step 7"
        assert any(name.startswith("bucket/run/script/2/logs/rank-1.log") for name in storage.objects)
        assert storage.objects[outputs.report.path.removeprefix("s3://")].startswith(b"<!")
