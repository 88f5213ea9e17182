"""Functions that make text of unknown origin and length fit for files, protocols and people."""

import difflib
import re
from collections.abc import Iterable, Sequence

GIB = 2**30
# A URL's user, alone or with a password. The password may contain a / or an @; abfs://CONTAINER@ACCOUNT has no user
USER = re.compile(
    r"(?<=://)(?:[^\s/@:'\"]*:(?:(?!://)[^\s'\"])*@|(?<!abfs://)(?<!abfss://)[^\s/?#@'\"]+@)", re.IGNORECASE
)
SECRET = re.compile(r"([?&][^\s=&#]*(?:sig|token|secret|password|key|credential)[^\s=&#]*=)[^\s&#'\"]+", re.IGNORECASE)
# Characters that control a terminal, reorder the text around them, or break its line (Unicode's annexes 9 and 14)
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
CONTROLS |= {code: f"\\u{code:04x}" for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))}


def without_controls(text: str) -> str:
    """Escape the characters that would control a terminal, or reorder what it shows."""
    return text.translate(CONTROLS)


def encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode. They stem from file names that are not text."""
    return text.encode("utf-8", "backslashreplace").decode()


def masked(text: str) -> str:
    """Hide the users and passwords of the URLs in a text, and the secrets in their queries."""
    return SECRET.sub(r"\1***", USER.sub("***@", text)) if "://" in text else text


def explain_error(error: BaseException) -> str:
    """Say what went wrong on one line: in the operating system's words, or as "ValueError: message"."""
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(said).split())


def counted(epochs: float) -> str:
    """Format a number of epochs with at most two decimals: "2", "1.25"."""
    return f"{round(epochs, 2):g}"


def gib(count: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:,.0f} GiB"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Join the first names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest of the known names, in brackets; empty if none is near."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def shortened(text: str, most: int) -> str:
    """Return the text, or about `most` characters from its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"
