"""Text of unknown origin and length, made fit for files, protocols and people."""

import difflib
import re
from collections.abc import Iterable, Sequence

GIB = 2**30
# A URL's user, alone or with a password, in which there may be a / or an @; in abfs://CONTAINER@ACCOUNT there is none
USER = re.compile(
    r"(?<=://)(?:[^\s/@:'\"]*:(?:(?!://)[^\s'\"])*@|(?<!abfs://)(?<!abfss://)[^\s/?#@'\"]+@)", re.IGNORECASE
)
SECRET = re.compile(r"([?&][^\s=&#]*(?:sig|token|secret|password|key|credential)[^\s=&#]*=)[^\s&#'\"]+", re.IGNORECASE)
# What a terminal obeys; and what reorders the text around it, or breaks its line (Unicode's annexes 9 and 14)
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
CONTROLS |= {code: f"\\u{code:04x}" for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))}


def without_controls(text: str) -> str:
    """The text with what would steer a terminal, or reorder what it shows, escaped."""
    return text.translate(CONTROLS)


def encodable(text: str) -> str:
    """The text with lone surrogates escaped: they stem from file names that are not text, and UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def masked(text: str) -> str:
    """The text without the users and passwords of the URLs in it, nor the secrets of their queries."""
    return SECRET.sub(r"\1***", USER.sub("***@", text)) if "://" in text else text


def reason_of(error: BaseException) -> str:
    """What went wrong, on one line: as the system says it, or with the type of the error."""
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(said).split())


def counted(epochs: float) -> str:
    """A number of epochs with at most two decimals: 2, 1.25."""
    return f"{round(epochs, 2):g}"


def gib(count: float) -> str:
    """A number of bytes."""
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:,.0f} GiB"


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest of the known names, in brackets; empty if none is near."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def shortened(text: str, most: int) -> str:
    """The text, or about `most` characters from its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"
