"""Copies of files in a platform's storage: whole or not at all, and what went wrong."""

import threading
import time

import pytest

from flyte_ddp.attempt.storage_folder import StorageFolder, UploadThread
from tests.attempt.folders import Folders


class Torn(Folders):
    """A storage whose downloads break off."""

    def get(self, url, path):
        path.write_text("ha")
        raise ConnectionError("reset")


def test_a_download_that_breaks_off_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(ConnectionError):
        StorageFolder(Torn(tmp_path), f"{tmp_path}/stored", tmp_path).fetch("file")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_an_upload_that_fails_says_what_the_storage_said(tmp_path):
    class Refusing(Folders):
        def put(self, path, url):
            raise LookupError(f"no bucket for {url}")

    with pytest.raises(OSError, match="LookupError: no bucket for s3://bucket/folder/file"):
        StorageFolder(Refusing(tmp_path), "s3://bucket", tmp_path).put(tmp_path / "folder" / "file")


def test_a_text_comes_back_and_one_that_is_not_there_is_empty(tmp_path):
    stored = StorageFolder(Folders(tmp_path), f"{tmp_path}/stored")
    stored.put_text("Größe", "folder/text")
    assert stored.fetch_text("folder/text") == "Größe"
    assert stored.fetch_text("another") == ""


def test_a_thread_uploads_when_it_is_woken_and_once_more_as_it_closes():
    calls: list[bool] = []
    is_called = threading.Event()

    def upload(is_last):
        calls.append(is_last)
        is_called.set()

    thread = UploadThread(upload)
    thread.wake()
    assert is_called.wait(30)
    assert thread.close(time.monotonic() + 30)
    assert calls == [False, True]


def test_a_close_says_whether_the_upload_has_ended():
    go_on = threading.Event()

    def upload(is_last):
        go_on.wait()

    thread = UploadThread(upload)
    assert not thread.close(0)
    go_on.set()
    assert thread.close(time.monotonic() + 30)
