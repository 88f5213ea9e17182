"""The stand-in for torch's compiler steps aside for whoever needs the compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """if True:
    import os, sys, torch
    from torch.utils.checkpoint import checkpoint
    from flyte_ddp.engine.compiler_compat import defer_dynamo_import
    defer_dynamo_import()
    torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    import torchvision.models
    import torch._dynamo.config as settings
    settings.suppress_errors = True
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert "torch._dynamo.convert_frame" not in sys.modules
    for need in sys.argv[1:]:
        if not os.fork():
            exec(need)
            assert "torch._dynamo.convert_frame" in sys.modules
            assert torch._dynamo.config is settings
            assert settings.suppress_errors
            os._exit(0)
        assert os.wait()[1] == 0, need
"""
NEEDS = [
    'assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist() == [2, 2]',
    """if True:
        from torch._dynamo.utils import counters
        from torchvision.ops.roi_align import is_compile_supported
        assert is_compile_supported("cpu")
    """,
]


@pytest.mark.slow
def test_the_real_compiler_comes_when_it_is_needed():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *NEEDS], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
