"""Downloads against real loopback servers that misbehave: success from the next mirror, or one clear error."""

import hashlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flyte_ddp.data.sources import open_url
from flyte_ddp.data.sources.download import Mirrors, mirror_from_environment
from flyte_ddp.data.sources.open_url import Limits, Opener
from flyte_ddp.errors import DownloadError, InputError
from tests.data.file_server import CONTENT, HOSTILE, answer, good, served, silent

MD5 = hashlib.md5(CONTENT).hexdigest()
NAME = "original.gz"
LIMITS = Limits(max_bytes=2**20)
QUICK = replace(LIMITS, answer_seconds=1)
# Where it is waited for in vain; elsewhere a server on a busy machine has all its time
WAITS = {
    "hang": QUICK,
    "drip of headers": QUICK,
    "hang midway": replace(LIMITS, window_seconds=0.3, window_bytes=2000),
    "drip": replace(LIMITS, window_seconds=0.3, window_bytes=2000),
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")


def test_file_arrives_with_progress_and_is_not_fetched_again(folder):
    reports = []
    with served(good) as (url, asked):
        mirrors = Mirrors([url], lambda *report: reports.append(report), Opener(LIMITS))
        path = mirrors.fetch(NAME, MD5, folder)
        assert mirrors.fetch(NAME, MD5, folder) == path
        assert asked == [f"/{NAME}"]
        path.write_bytes(CONTENT[:-1])
        assert mirrors.fetch(NAME, MD5, folder).read_bytes() == CONTENT
    assert os.listdir(folder) == [NAME]
    assert reports[0] == (NAME, 0, len(CONTENT))  # when it begins, of which a log has a line
    assert reports[-1] == (NAME, len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_server_ends_in_one_clear_error(kind, folder):
    behave, reason = HOSTILE[kind]
    with served(behave) as (url, _), pytest.raises(DownloadError) as caught:
        Mirrors([url], opener=Opener(WAITS.get(kind, LIMITS))).fetch(NAME, MD5, folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"  {url}")
    assert reason in lines[1]
    assert "DDP_DATA_MIRROR" in lines[2]
    assert "digits" in lines[2]
    assert not folder.exists() or not os.listdir(folder)


@pytest.mark.parametrize("kind", ["404", "hang midway", "cut midway", "wrong"])
def test_hostile_server_is_survived_with_the_next_mirror(kind, folder):
    with served(HOSTILE[kind][0]) as (bad, _), served(good) as (url, _):
        mirrors = Mirrors([bad, url], opener=Opener(WAITS.get(kind, LIMITS)))
        assert mirrors.fetch(NAME, MD5, folder).read_bytes() == CONTENT
    assert os.listdir(folder) == [NAME]


def test_slow_but_alive_connection_outlasts_every_limit(folder):
    def slow(request, ended):
        answer(request, b"", length=len(CONTENT))
        for start in range(0, len(CONTENT), 20_000):
            request.wfile.write(CONTENT[start : start + 20_000])
            ended.wait(0.2)

    with served(slow) as (url, _):
        limits = Limits(answer_seconds=1.5, window_seconds=1.5, window_bytes=2000, silence_seconds=2)  # of 2.6 in all
        assert Mirrors([url], opener=Opener(limits)).fetch(NAME, MD5, folder).read_bytes() == CONTENT


def test_time_that_the_caller_takes_is_not_the_servers(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(open_url, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with served(good) as (url, _):
        pieces, _ = Opener(replace(LIMITS, window_bytes=2**20)).open(url)
        read = b""
        for piece in pieces:
            read += piece
            now[0] += 60
        assert read == CONTENT


def test_gz_arrives_as_stored_whatever_the_server_calls_it(folder):
    with served(lambda request, ended: answer(request, CONTENT, Content_Encoding="gzip")) as (url, _):
        assert Mirrors([url], opener=Opener(LIMITS)).fetch(NAME, MD5, folder).read_bytes() == CONTENT


def test_unreachable_host_is_asked_once_and_listed_once(folder):
    with served(silent) as (bad, asked), served(good) as (url, _):
        mirrors = Mirrors([f"{bad}/MNIST/raw", bad, url], opener=Opener(QUICK))
        for name in ("a", "b", "c"):
            mirrors.fetch(name, MD5, folder)
        assert asked == ["/MNIST/raw/a"]
        with pytest.raises(DownloadError) as caught:
            mirrors.fetch("d", "0" * 32, folder)
    assert str(caught.value).count(bad) == 1


def test_refused_connection_and_unknown_host_are_named_plainly(folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        refused = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DownloadError) as caught:
            Mirrors([refused, "http://host.invalid"], opener=Opener(Limits())).fetch(NAME, MD5, folder)
    assert f"  {refused}: connection refused\n" in str(caught.value)
    assert "  http://host.invalid: host name not found\n" in str(caught.value)


def test_name_look_up_without_end_is_given_up(folder, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait())
    with pytest.raises(DownloadError, match=r"http://a\.example: no answer in time"):
        Mirrors(["http://a.example"], opener=Opener(QUICK)).fetch(NAME, MD5, folder)
    ended.set()


def test_all_silence_together_is_bounded(folder):
    with served(silent) as (first, _), served(silent) as (second, asked), pytest.raises(DownloadError) as caught:
        Mirrors([first, second], opener=Opener(Limits(answer_seconds=0.3, silence_seconds=0.3))).fetch(
            NAME, MD5, folder
        )
    assert asked == []
    assert f"{second}: not asked" in str(caught.value)


def test_credentials_are_used_and_never_shown(folder, monkeypatch):
    with served(lambda request, ended: request.send_error(403)) as (url, _):
        secret = url.replace("//", "//me:pa%40ss@")
        with pytest.raises(DownloadError) as caught:
            Mirrors([secret], opener=Opener(LIMITS)).fetch(NAME, MD5, folder)
    assert "pa%40ss" not in str(caught.value)
    for value in ("ftp://me:secret@host/", "http://me:secret@host:port/", "http://me:sec/ret@host", "http://h/?secret"):
        monkeypatch.setenv("DDP_DATA_MIRROR", value)
        with pytest.raises(InputError) as refused:
            mirror_from_environment()
        assert "sec" not in str(refused.value)


def test_file_mirrors(folder, tmp_path):
    source = tmp_path / "a mirror"
    for url in (source.as_uri(), f"{source.as_uri()}/missing"):
        with pytest.raises(DownloadError, match="no such folder"):
            Mirrors([url]).fetch(NAME, MD5, folder)
    source.mkdir()
    with pytest.raises(DownloadError, match="no such file"):
        Mirrors([source.as_uri()]).fetch(NAME, MD5, folder)
    (source / NAME).write_bytes(CONTENT)
    assert Mirrors([source.as_uri()]).fetch(NAME, MD5, folder).read_bytes() == CONTENT


def test_mirrors_in_a_storage(folder):
    storage = MemoryFileSystem()
    storage.pipe("memory://mirror/" + NAME, CONTENT)

    def open_stored(url):
        return storage.open(url.replace("s3://", "memory://"), "rb")

    told = []
    urls = ["s3://empty", "s3://mirror/"]
    mirrors = Mirrors(urls, lambda *report: told.append(report), opener=Opener(open_stored=open_stored))
    assert mirrors.fetch(NAME, MD5, folder).read_bytes() == CONTENT
    assert told[-1] == (NAME, len(CONTENT), len(CONTENT))
    for way, reason in ((open_stored, "no such file"), (None, "only Flyte's tasks")):
        with pytest.raises(DownloadError, match=reason):
            Mirrors(["s3://empty"], opener=Opener(open_stored=way)).fetch("other", MD5, folder)

    def refused(url):
        raise PermissionError("Forbidden\nfor you")

    with pytest.raises(DownloadError, match="s3://mirror: PermissionError: Forbidden for you"):
        Mirrors(["s3://mirror"], opener=Opener(open_stored=refused)).fetch("other", MD5, folder)


@pytest.mark.parametrize("value", ["ftp://host/x", "/some/folder", "host", "http:///x", "http://[", "file://host/x"])
def test_mirror_that_is_no_url_of_a_folder_is_refused(value, monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", value)
    with pytest.raises(InputError, match="DDP_DATA_MIRROR must be the URL of a folder"):
        mirror_from_environment()


@pytest.mark.parametrize(
    "value", ["http://host/x", "https://me:word@host:8443", "file:///x", "file://localhost/x", "s3://bucket/folder"]
)
def test_mirror_is_taken_from_the_environment(value, monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", value)
    assert mirror_from_environment() == value
    monkeypatch.setenv("DDP_DATA_MIRROR", " ")
    assert mirror_from_environment() is None


def test_interrupt_leaves_nothing_behind(folder):
    def interrupt(*report):
        assert len(os.listdir(folder)) == 1
        raise KeyboardInterrupt

    with served(good) as (url, _), pytest.raises(KeyboardInterrupt):
        Mirrors([url], interrupt, Opener(LIMITS)).fetch(NAME, MD5, folder)
    assert os.listdir(folder) == []


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with served(good) as (url, _), pytest.raises(InputError, match=r"cannot write to .*file/data.*DDP_DATA_DIR"):
        Mirrors([url], opener=Opener(LIMITS)).fetch(NAME, MD5, tmp_path / "file" / "data")


def test_full_disk_is_one_clear_error(folder, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT)
    code = f"""
        import pathlib, resource
        from flyte_ddp.data.sources.download import Mirrors
        from flyte_ddp.errors import InputError
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            Mirrors([{tmp_path.as_uri()!r}]).fetch({NAME!r}, {MD5!r}, pathlib.Path({str(folder)!r}))
        except InputError as error:
            print(error)
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert f"cannot write to {folder}" in ended.stdout
    assert "DDP_DATA_DIR" in ended.stdout
    assert os.listdir(folder) == []
