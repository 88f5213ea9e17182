"""The stand-in for torch's compiler steps aside for whoever needs the compiler."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """if True:
    import sys, torch
    from flyte_ddp.engine.torch_compat import leave_dynamo_out
    leave_dynamo_out()
    torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    assert "torch._dynamo.utils" not in sys.modules
    twice = torch.compile(lambda x: 2 * x, backend="eager")
    assert twice(torch.ones(2)).tolist() == [2, 2]
    assert "torch._dynamo.utils" in sys.modules
"""


def test_the_real_compiler_comes_when_it_is_needed():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
