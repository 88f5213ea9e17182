"""Where local runs leave their files."""

from pathlib import Path

import pytest

from flyte_ddp.attempt.folders import runs_dir
from flyte_ddp.errors import InputError


def test_runs_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDP_RUNS_DIR", "~/here")
    assert runs_dir() == tmp_path / "here"
    monkeypatch.setenv("DDP_RUNS_DIR", "~nobody-of-this-name/runs")
    with pytest.raises(InputError, match="no home folder for ~nobody-of-this-name/runs: set DDP_RUNS_DIR to an abs"):
        runs_dir()
    monkeypatch.delenv("DDP_RUNS_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # which counts as not set, says its specification
    assert runs_dir() == tmp_path / ".local/share/flyte-ddp/runs"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert runs_dir() == Path("/data/flyte-ddp/runs")
