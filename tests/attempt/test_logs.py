"""The upload of a run's logs: what is not there is passed over, what the storage refuses is said."""

import os

from flyte_ddp.attempt.logs import kept_logs
from tests.attempt.folders import Folders


class NoBucket(Folders):
    def put(self, path, url):
        raise FileNotFoundError("The specified bucket does not exist")


def test_a_link_that_leads_nowhere_keeps_no_other_file_from_the_storage(tmp_path):
    platform = Folders(tmp_path)
    with kept_logs(platform, tmp_path / "run") as logs:
        (logs.folder / "a-link").symlink_to(tmp_path / "nowhere")
        (logs.folder / "notes.txt").write_text("kept")
    assert (tmp_path / "0" / "logs" / "notes.txt").read_text() == "kept"


def test_a_file_that_cannot_be_uploaded_keeps_no_other_from_the_storage(tmp_path, capsys):
    platform = Folders(tmp_path)
    with kept_logs(platform, tmp_path / "run") as logs:
        os.mkfifo(logs.folder / "a-pipe")
        (logs.folder / "a-circle").symlink_to("a-circle")
        (logs.folder / "notes.txt").write_text("kept")
    assert (tmp_path / "0" / "logs" / "notes.txt").read_text() == "kept"
    assert "SpecialFileError: `" in capsys.readouterr().err


def test_a_storage_that_does_not_have_the_bucket_is_said(tmp_path, capsys):
    with kept_logs(NoBucket(tmp_path), tmp_path / "run"):
        pass
    said = capsys.readouterr().err
    assert f"the logs are not in {tmp_path}/0 yet: FileNotFoundError: The specified bucket does not exist" in said
