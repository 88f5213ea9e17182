"""Text of unknown origin and length, made fit for files, protocols and people."""


def encodable(text: str) -> str:
    """The text with lone surrogates escaped: they stem from file names that are not text, and UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int) -> str:
    """The text, or about `most` characters from its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"
