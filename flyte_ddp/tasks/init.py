"""What the built-in trainings begin with, where they are given a file: their cache goes by its content."""

import hashlib
from typing import Optional

from flytekit import Cache, HashMethod, task
from flytekit.types.file import FlyteFile
from typing_extensions import Annotated

from flyte_ddp.tasks.caching import OnClustersOnly
from flyte_ddp.tasks.execution import is_local
from flyte_ddp.tasks.resources import small_resources
from flyte_ddp.tasks.versions import CodeVersion


def of_content(file: FlyteFile) -> str:
    """SHA-256 over what is in it, read where it is."""
    digest = hashlib.sha256()
    with FlyteFile(str(file.remote_source or file.path)).open("rb") as content:
        while piece := content.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def of_init(init: Optional[FlyteFile]) -> Optional[str]:
    """None goes by itself, as where a training is not asked what it begins with: these are the same training."""
    return None if init is None else of_content(init)


KnownInit = Annotated[Optional[FlyteFile], HashMethod(of_init)]


@task(
    task_config=OnClustersOnly(),
    cache=Cache(policies=CodeVersion(["flyte_ddp/tasks/init.py"], [])),
    **small_resources(),
)
def known_init(init: Optional[FlyteFile]) -> KnownInit:
    """The same file, a model_state or checkpoint to begin with, where it is. A cluster reads what lies at a place once,
    so that a cached training starts no pod: other weights have to be put elsewhere."""
    return None if init is None else in_place(init)


def in_place(file: FlyteFile) -> FlyteFile:
    place = str(file.remote_source or file.path)
    return FlyteFile(place, remote_path=False) if is_local() else FlyteFile.from_source(place)
