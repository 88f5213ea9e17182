from typing import Any

import pytest

from flyte_ddp.manifest import read_manifest, write_manifest


@pytest.mark.parametrize("folder", ["..", "../other", "a/b", "", 5, None])
def test_a_manifest_that_names_anything_but_a_folder_beside_it_is_none(tmp_path, folder: Any):
    write_manifest(tmp_path / "checkpoint", {"folder": folder, "files": []})
    assert read_manifest(tmp_path / "checkpoint") is None


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = {"folder": "step-5", "files": {"0.safetensors": "0" * 64}}
    write_manifest(tmp_path / "checkpoint", manifest)
    assert read_manifest(tmp_path / "checkpoint") == manifest
