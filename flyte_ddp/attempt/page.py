"""The page of a task, written once: that of a training is live, see flyte_ddp.report."""

from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.report.article import document
from flyte_ddp.whole_files import write_whole


def write_page(platform: Platform, folder: Path, title: str, fragment: str) -> Path:
    """An HTML file of its own in the folder, which the platform shows, too; fragment: the content of <body>."""
    path = folder / "report.html"
    write_whole(path, document(title, fragment).encode())
    platform.publisher(title)(fragment)
    return path
