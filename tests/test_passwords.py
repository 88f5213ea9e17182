"""The passwords of URLs are in no message, and what is no password stays in it."""

import logging
import pickle

import pytest

from flyte_ddp.data.remote_files import stored_data
from flyte_ddp.errors import DataError, DownloadError, InputError, ReportedError
from flyte_ddp.launch.failures import Failure, from_exception
from flyte_ddp.report.console import say
from flyte_ddp.text import masked

URLS = [
    ("https://user:PASSWORD@host/x", "https://***@host/x"),
    ("s3://KEY:PASSWORD@bucket/x", "s3://***@bucket/x"),
    ("s3://KEY:PASS/WORD@bucket/x", "s3://***@bucket/x"),
    ("http://me:P@SSWORD@host:80/x", "http://***@host:80/x"),
    ("https://PASSWORD@host/x", "https://***@host/x"),
    ("https://:PASSWORD@host", "https://***@host"),
    ("https://host/x?sv=1&sig=PASSWORD&se=2", "https://host/x?sv=1&sig=***&se=2"),
    ("https://host/x?X-Amz-Signature=PASSWORD", "https://host/x?X-Amz-Signature=***"),
    ("abfs://container:PASSWORD@account/x", "abfs://***@account/x"),
]


@pytest.mark.parametrize(("url", "shown"), URLS)
def test_a_password_is_masked_and_the_words_around_it_stay(url, shown):
    message = f"neither '{url}' nor {url} could be read: ask me@example.org, or s3://bucket/a@b"
    assert masked(message) == message.replace(url, shown)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b",
        "https://host:8080/x, http://host/y?page=2",
        "abfs://container@account.dfs.core.windows.net/x",
        "abfss://container@account.dfs.core.windows.net/x",
        "//comment // me@example.org",
        "file:///home/me@work/x",
    ],
)
def test_what_is_no_password_stays(text):
    assert masked(text) == text


@pytest.mark.parametrize("kind", [InputError, ReportedError, DownloadError, DataError])
def test_no_error_of_ours_shows_one(kind):
    error = kind("s3://KEY:PASSWORD@bucket/x is not there")
    assert "PASSWORD" not in f"{error}{error.args}{error.message}{vars(error)}"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_neither_does_one_of_others_nor_a_line_that_is_said(caplog):
    try:
        raise OSError("s3://KEY:PASSWORD@bucket/x: no such bucket")
    except OSError as error:
        failure = from_exception(error, 0, "host")
    assert failure.message == "s3://***@bucket/x: no such bucket"
    assert "PASSWORD" not in str(failure)
    assert "PASSWORD" not in str(Failure(0, "host", "error", "OSError", "", "https://me:PASSWORD@host"))
    with caplog.at_level(logging.INFO, "flyte_ddp"):
        logging.getLogger("flyte_ddp").propagate = True
        say("Logs: s3://KEY:PASSWORD@bucket/logs")
    assert {*caplog.messages} == {"Logs: s3://***@bucket/logs"}


@pytest.mark.parametrize(
    "url", ["s3://KEY:PASSWORD@bucket/x", "https://user:PASSWORD@host/x", "gopher://user:PASSWORD@host/x"]
)
def test_data_at_a_url_that_cannot_be_read(url, monkeypatch):
    monkeypatch.setattr("flyte_ddp.data.remote_files.PAUSE_SECONDS", 0)
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises((InputError, DataError, DownloadError)) as refused:
        stored_data(url)
    assert "PASSWORD" not in str(refused.value)
