"""The private parts of fsspec that this package uses, as of version 2026.9.0; tests/compat tests them."""

import pkgutil
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import split_protocol
from fsspec.registry import known_implementations

from flyte_ddp.errors import InputError
from flyte_ddp.text import USER

BUCKETS = ("s3", "s3a", "gs", "gcs")


def own_client(url: str, options: dict[str, Any] | None = None) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's own client for a URL or path, and the path without the protocol, as the client takes it.

    Args:
        url: a URL or path. A relative path becomes absolute.
        options: options for the client, which take precedence over those in the URL.

    Raises:
        InputError: fsspec knows no client for the protocol, the client's package cannot be imported, or the URL of an
            S3 or Google bucket has keys in it.
        Exception: Another error of the client, such as a failing connection.
    """
    # fsspec's url_to_fs would return a client that another package has registered for the whole process: flyte
    # registers clients whose options have other names
    protocol = split_protocol(url)[0] or "file"
    known = known_implementations.get(protocol)
    if known is None:
        raise InputError(
            f"{url} must be a path, or the URL of a storage such as s3://, gs:// or abfs://: {protocol}:// is none"
        )
    if protocol in BUCKETS and USER.search(url):  # the client would take the key for the bucket, and show it
        raise InputError(
            f"{url} must not have keys in it: leave them to the environment, as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY for s3://, or to Flyte's settings"
        )
    module, _, name = known["class"].rpartition(".")
    try:
        kind = pkgutil.resolve_name(f"{module}:{name}")
    except ImportError as error:
        remedy = known.get("err") or f"install what {protocol}:// needs"
        raise InputError(f"{url} cannot be read here ({error}): {remedy}") from None
    arguments = {**kind._get_kwargs_from_urls(url), **(options or {})}
    return kind(**arguments), kind._strip_protocol(url)
