"""What is not known of an accelerator is not made up."""

import pytest

from flyte_ddp.launch.peaks import peak


@pytest.mark.parametrize(
    ("device", "precision", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA A1000", "bfloat16", None),
        ("NVIDIA L40S", "bfloat16", None),
        ("CPU, AVX512", "float32", None),
    ],
)
def test_a_peak_is_of_that_very_product_and_precision(device, precision, flops):
    assert peak(device, precision) == flops
