"""Downloads of original files from a list of mirrors, which leave nothing half-written."""

import hashlib
import os
import re
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.data.sources.open_url import Opener, RefusedError, UnreachableError
from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.text import USER, masked
from flyte_ddp.whole_files import content_digest, whole_file, writing_to

MIRROR_VARIABLE = "DDP_DATA_MIRROR"
STORAGES = ("s3", "gs", "abfs", "abfss")  # only Flyte's tasks, which have settings and keys, read from these
SCHEMES = ", ".join(("http", "https", "file", *STORAGES))
REMEDIES = (
    f"set {MIRROR_VARIABLE} to the URL ({SCHEMES}) of a folder with the original files, or train on the dataset "
    '"digits", which needs no network'
)

Progress = Callable[[str, int, int | None], None]


@dataclass
class Mirrors:
    """The folders to try, in this order, and what became known about their hosts.

    Attributes:
        urls: the URLs of the folders.
        progress: called with (file name, bytes so far, total bytes or None); the next mirror starts at 0 again.
        opener: opens the URLs.
        unreachable: hosts that are not worth asking again, each with the reason.
    """

    urls: Sequence[str]
    progress: Progress | None = None
    opener: Opener = field(default_factory=Opener)
    unreachable: dict[str, str] = field(default_factory=dict)

    def fetch(self, filename: str, md5: str, directory: Path) -> Path:
        """Download a file, unless it is there with this MD5, and return its path. The file appears whole or not at all.

        The folders in `urls` are tried in order, until one has the file with this MD5. A host that could not be reached
        is not asked again by this object, even for other files.

        Args:
            filename: the file's name below each of the folders, and below `directory`.
            md5: the MD5 of the file, in hex.
            directory: the folder on this machine, which is created if it is missing. A file of this name with another
                MD5 is replaced.

        Raises:
            DownloadError: no mirror delivered the file; the message has the reason of each.
            InputError: the directory cannot be written to.
        """
        target = Path(directory) / filename
        if target.is_file() and content_digest(target, "md5") == md5:
            return target
        reasons: dict[str, str] = {}
        for folder in self.urls:
            url = f"{folder.rstrip('/')}/{filename}"
            host = _host(folder)
            if host in self.unreachable:
                reasons[host] = self.unreachable[host]
                continue
            try:
                self._copy(url, filename, md5, target)
                return target
            except UnreachableError as error:
                self.unreachable[host] = reasons[host] = str(error)
            except RefusedError as error:
                reasons[masked(url)] = str(error)
        lines = "".join(f"  {url}: {reason}\n" for url, reason in reasons.items())
        raise DownloadError(f"no mirror delivered {filename}:\n{lines}{REMEDIES}")

    def _copy(self, url: str, filename: str, md5: str, target: Path) -> None:
        """Download a URL to a file, which appears whole or not at all. An earlier file is replaced at the end.

        Args:
            url: the URL.
            filename: the name for `progress`.
            md5: the MD5 that the content must have, in hex.
            target: the path of the file.

        Raises:
            UnreachableError: The host is not worth asking again. This is a subclass of RefusedError, so catch it first.
            RefusedError: The URL cannot be read, or its content is too large or has another MD5.
            InputError: The folder of `target` cannot be written to.
        """
        pieces, total = self.opener.open(url)
        digest = hashlib.md5(usedforsecurity=False)
        done = 0
        start = b""
        with closing(pieces), writing_to(target.parent, "DDP_DATA_DIR"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as file:
                if self.progress:
                    self.progress(filename, 0, total)
                for piece in pieces:
                    start = start or piece[:256]
                    done += len(piece)
                    if max(done, total or 0) > self.opener.limits.max_bytes:
                        raise RefusedError(f"larger than {self.opener.limits.max_bytes:,} bytes")
                    digest.update(piece)
                    file.write(piece)
                    if self.progress:
                        self.progress(filename, done, total)
                if digest.hexdigest() != md5:
                    page = start.lstrip().lower().startswith((b"<!doctype", b"<html"))
                    what = "a web page instead of the file" if page else "another file, or a damaged one (MD5 differs)"
                    raise RefusedError(f"sent {what}")


def mirror_from_environment() -> str | None:
    """Return DDP_DATA_MIRROR, or None if it is not set.

    Raises:
        InputError: The variable is not the URL of a folder, or is the URL of a storage with keys in it.
    """
    url = os.environ.get(MIRROR_VARIABLE, "").strip()
    if not url:
        return None
    if url.partition("://")[0].lower() in STORAGES and USER.search(url):
        raise InputError(
            f"{MIRROR_VARIABLE} must not have keys in it, got {masked(url)!r}: leave them to the environment, as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://, or to Flyte's settings"
        )
    with suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        is_remote = parts.scheme in ("http", "https", *STORAGES) and parts.hostname and parts.port != 0
        if (is_local or is_remote) and not parts.query and not parts.fragment:
            return url
    hint = f": write file://{url}" if url.startswith("/") else ""
    shown = re.split("[?#]", masked(url))[0]
    raise InputError(f"{MIRROR_VARIABLE} must be the URL of a folder ({SCHEMES}), got {shown!r}{hint}")


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return masked(f"{parts.scheme}://{parts.netloc}")
