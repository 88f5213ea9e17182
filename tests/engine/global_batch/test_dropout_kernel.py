"""The dropout kernel by Triton's own compiler, which needs no GPU; tests/test_random_numbers.py has its numbers."""

import pytest

pytest.importorskip("triton", reason="Triton is for Linux alone")


@pytest.mark.parametrize("generation", [80, 90, 100], ids=["A100", "H100", "B200"])
def test_it_compiles_for_each_generation_of_gpus(generation, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # or an earlier result would be taken
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is today; unset, a warning
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flyte_ddp.engine.global_batch import dropout_kernel

    numbers = dict.fromkeys(("key", "first", "count"), "i64") | {"threshold": "i32", "scale": "fp32"}
    for values in ("fp32", "bf16", "fp16"):
        tensors = dict.fromkeys(("features", "dropped"), f"*{values}")
        kinds, constants = {**tensors, **numbers, "block": "constexpr"}, {"block": dropout_kernel.BLOCK}
        source = ASTSource(dropout_kernel._kernel, kinds, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", generation, 32))
        assert f".target sm_{generation}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]
