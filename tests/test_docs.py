"""docs/your-own-model.md as its reader follows it: the files are written, the commands are run, in their order."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_guide_to_an_own_model_works_as_it_stands(tmp_path):
    text = (ROOT / "docs" / "your-own-model.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") == 3
    said = []
    for kind, block in blocks:
        if kind == "python":
            file = tmp_path / block.partition("\n")[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block)
        else:
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
            done = subprocess.run(["sh", "-ec", block], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
    assert "'within': " in said[0]
    assert "2177 parameters" in said[1]
    assert (tmp_path / "trained-by-torchrun" / "model.pt").is_file()
