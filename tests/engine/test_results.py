"""What a training leaves in its folder is whole, or not there."""

import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import SIZE, Settings, Sound

pytestmark = pytest.mark.usefixtures("alone")


class Seen(Sound):
    """Has predictions and pictures, the former larger than all else."""

    def predictions(self, outputs, batch):
        return outputs[:, :1].expand(-1, 20_000)

    def pictures(self, outputs, batch):
        return [("one", batch[0].expand(1, 8, 8))]


class Titled(Sound):
    """Its pictures have a caption from a file."""

    def pictures(self, outputs, batch):
        return [(Path("caption").read_text(), batch[0].expand(1, 8, 8))]


class OldNorm(Sound):
    """Its layer computes its weight before each forward, and keeps it; its weights are averaged."""

    ema_decay = 0.9

    def model(self):
        model = super().model()
        model[0] = nn.utils.weight_norm(model[0])
        return model


@contextmanager
def small_files(size):
    """No file can grow larger, which is what a full disk looks like to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(recipe, output, on_event=lambda event: None):
    return train(recipe, Settings(), RunOptions(), output=output, on_event=on_event)


def test_a_full_disk_leaves_no_predictions_and_says_why(tmp_path):
    np.save(tmp_path / "predictions.npy", np.ones(3))
    with small_files(500_000), pytest.raises(InputError, match=f"^cannot write to {tmp_path}: File too large; free"):
        run(Seen, tmp_path)
    assert not [*tmp_path.glob("predictions.npy"), *tmp_path.glob(".*")]


def test_a_file_that_pictures_miss_is_not_taken_for_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caption = tmp_path / "caption"
    caption.write_text("one")

    def lose_it(event):
        if isinstance(event, EpochFinished):
            caption.unlink(missing_ok=True)

    with pytest.raises(FileNotFoundError, match="caption"):
        run(Titled, tmp_path / "trained", lose_it)
    assert (tmp_path / "trained" / "model.pt").exists()


ONTO_A_FULL_DISK = """if True:
    import sys
    from pathlib import Path
    from types import SimpleNamespace
    import torch
    from torch import distributed
    from flyte_ddp.engine.results import write_predictions
    class Test:
        split = range(1_000_000)
        def whole(self):
            yield torch.arange(len(self.split)), (0, len(self.split))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    setup = SimpleNamespace(test=Test(), state=SimpleNamespace(device=torch.device("cpu")))
    try:
        write_predictions(torch.ones(len(Test.split)), setup, Path(sys.argv[1], "predictions.npy"))
    finally:
        distributed.destroy_process_group()  # whose threads may abort a process that ends with them
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_does_not_kill_who_writes_predictions(tmp_path):
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    script = 'mount -t tmpfs -o size=1m none "$1"; "$2" -c "$3" "$1"'
    command = [*mounted, script, "sh", str(tmp_path), sys.executable, ONTO_A_FULL_DISK]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "No space left on device" in ended.stderr


def test_a_link_in_the_folder_is_replaced_and_what_it_leads_to_stays(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "trained"
    folder.mkdir()
    outside.write_text("another's")
    names = ("model.pt", "predictions.npy", "pictures.npz", "progress.jsonl")
    for name in names:
        (folder / name).symlink_to(outside)
    run(Seen, folder)
    assert outside.read_text() == "another's"
    assert not any((folder / name).is_symlink() for name in names)
    assert np.load(folder / "predictions.npy").shape == (SIZE, 20_000)
    assert np.load(folder / "pictures.npz")["captions"].tolist() == ["one"]


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("recipe", [Sound, "tests.engine.own_loops:plain"])
def test_what_a_training_does_not_write_is_not_an_earlier_ones(recipe, tmp_path):
    earlier = {"predictions.npy", "pictures.npz", "last.pt", "final-checkpoint", "best-1-epoch-2.5.pt"}
    for name in earlier | {"mine.pt"}:
        (tmp_path / name).touch()
    run(recipe, tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"model.pt", "mine.pt"} <= left
    assert not earlier & left


def test_torchs_older_weight_norm_is_trained_and_averaged(tmp_path):
    result = run(OldNorm, tmp_path)
    assert "0.weight_g" in OldNorm.load_model(result.model_path).state_dict()
