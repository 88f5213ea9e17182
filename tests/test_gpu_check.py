"""The check of GPUs, on whatever this machine has, and what training needs to be installed."""

import os
import subprocess
import sys

import pytest

from tests.commands import ROOT

pytestmark = pytest.mark.slow
# Python imports it first in every process; it makes this environment one with torch, numpy and what they need
BARE = "import sys; sys.modules.update(dict.fromkeys({names}))"
NAMES = {"click", "dataclasses_json", "flytekit", "marshmallow", "PIL", "requests", "rich", "sklearn", "wandb", "yaml"}


def check(*arguments, **environment):
    """The table's rows."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]


def test_quick_rows_pass_with_torch_and_numpy_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE.format(names=NAMES))
    rows = check("--quick", PYTHONPATH=str(tmp_path))
    assert len(rows) >= 20
    assert all(" | passed | " in row or " | left out | " in row for row in rows)
    assert sum(" | passed | " in row for row in rows) >= 10
