"""What a local run finds out anew each time, though a cluster remembers it."""

from flyte_ddp.data.sources.datasets import prepared_dir
from flyte_ddp.flyte1.prepare import resolve_dataset
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.pod import small_dataset


def test_a_stand_in_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DATA_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):  # refuses all connections
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    resolved = [resolve_dataset(hp=Hyperparameters(), options=RunOptions()) for _ in range(2)]
    small_dataset(prepared_dir("mnist"))
    assert [*resolved, resolve_dataset(hp=Hyperparameters(), options=RunOptions())] == ["digits", "digits", "mnist"]
