"""The private parts of fsspec that we use exist, and do what they are used for."""

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from flyte_ddp.data.fsspec_compat import own_client


class Others(MemoryFileSystem):
    """As flyte registers, whose options have other names."""

    def __init__(self, **options):
        raise TypeError("of no use here")


@pytest.fixture
def registered():
    """Others as the client of three protocols, in the whole process."""
    before = {protocol: fsspec.get_filesystem_class(protocol) for protocol in ("file", "memory", "s3")}
    for protocol in before:
        fsspec.register_implementation(protocol, Others, clobber=True)
    yield
    for protocol, kind in before.items():
        fsspec.register_implementation(protocol, kind, clobber=True)


def test_fsspecs_own_client_is_opened_whatever_is_registered(registered, monkeypatch, tmp_path):
    monkeypatch.setattr("fsspec.config.conf", {"s3": {"key": "of the settings", "anon": False}})
    for url in (str(tmp_path), f"file://{tmp_path}"):
        files, root = own_client(url)
        assert (type(files), root) == (LocalFileSystem, str(tmp_path))
    files, root = own_client("s3://bucket/x", {"secret": "word"})
    assert (files.key, files.secret, root) == ("of the settings", "word", "bucket/x")
    assert fsspec.get_filesystem_class("s3") is Others, "other threads go on with what is registered"


@pytest.mark.parametrize("protocol", ["file", "s3", "gs", "abfs", "abfss", "memory"])
def test_the_storages_are_known(protocol):
    assert known_implementations[protocol]["class"]
