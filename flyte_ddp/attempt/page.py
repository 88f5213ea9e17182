"""The page of a task, written once. The live page of a training is in flyte_ddp.report."""

from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.report.article import document
from flyte_ddp.whole_files import write_whole


def write_page(platform: Platform, folder: Path, title: str, fragment: str) -> Path:
    """Write a page as an HTML file in the folder, and show it on the platform, too.

    Args:
        platform: the platform.
        folder: the folder of the new file.
        title: the page's title.
        fragment: the content of <body>.
    """
    path = folder / "report.html"
    write_whole(path, document(title, fragment).encode())
    platform.publisher(title)(fragment)
    return path
