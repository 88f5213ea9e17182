"""The file that a built-in training starts from, whose content is part of the cache key."""

from typing import Annotated

from flytekit import Cache, HashMethod, task
from flytekit.types.file import FlyteFile

from flyte_ddp.code_version import code_version
from flyte_ddp.storage import stream_digest
from flyte_ddp.tasks.caching import CodeVersion, OnClustersOnly
from flyte_ddp.tasks.execution import is_local
from flyte_ddp.tasks.resources import small_resources


def of_content(file: FlyteFile) -> str:
    """SHA-256 of the content, read from where the file is."""
    with FlyteFile(str(file.remote_source or file.path)).open("rb") as content:
        return stream_digest(content)


def of_init(init: FlyteFile | None) -> str | None:
    """None stays None: the cache key is then that of a training without this input."""
    return None if init is None else of_content(init)


InitByContent = Annotated[FlyteFile | None, HashMethod(of_init)]


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=CodeVersion(code_version(__name__), ())),
    **small_resources(),
)
def init_by_content(init: FlyteFile | None) -> InitByContent:
    """Returns the same file, a model_state or checkpoint, where it is. A cluster reads each path only once, so that a
    cached training starts no pod: other weights need another path."""
    return None if init is None else in_place(init)


def in_place(file: FlyteFile) -> FlyteFile:
    url = str(file.remote_source or file.path)
    return FlyteFile(url, remote_path=False) if is_local() else FlyteFile.from_source(url)
