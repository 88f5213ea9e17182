"""The messages that docs/troubleshooting.md explains are those of the library."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_OTHERS = {
    'Cache directory "…/.flyte/local-cache" does not exist',
    "flyte.config",
    "Forbidden",
    "Permission denied: '/root/…'",
    "Requested GPU default [2] is greater than current limit set in the platform configuration [1]",
    "task with different structure already exists",
    "task() got multiple values for keyword argument 'requests'",
    "Image Config with name trainer not found",
    "OOMKilled",
    "currentAttempt done. Last Error: …",
}


def headed_messages() -> list[str]:
    """Return what stands in code within the page's headings; … stands for names and numbers."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [
        message for line in re.findall(r"^### (.*)$", page, re.MULTILINE) for message in re.findall("`(.+?)`", line)
    ]


def library_text() -> str:
    """Return the library's source, with string literals joined that Python joins."""
    text = "\n".join(path.read_text() for path in (ROOT / "flyte_ddp").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_each_message_is_in_the_library():
    messages, library = headed_messages(), library_text()
    assert set(messages) >= OF_OTHERS, "OF_OTHERS has a message that the page lacks"
    parts = {part.strip() for message in set(messages) - OF_OTHERS for part in message.split("…") if part.strip()}
    assert len(parts) > 20
    assert not {part for part in parts if part not in library}
