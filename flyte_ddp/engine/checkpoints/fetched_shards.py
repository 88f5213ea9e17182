"""Downloads of a sharded checkpoint from the platform's storage: each host downloads each file that it needs once."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import distributed

from flyte_ddp.engine.batches.block_cache import locked
from flyte_ddp.engine.checkpoints.sharded_checkpoint import StoredTensor, find_problem, open_shards
from flyte_ddp.engine.collectives import broadcast_value, gather_values
from flyte_ddp.engine.job import RankStorage
from flyte_ddp.engine.sharding.sharded_state import Layout
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.whole_files import temporary_beside


@contextmanager
def fetch_shards(
    manifest: dict[str, Any], layout: Layout, storage: RankStorage, environment: Environment
) -> Iterator[dict[str, Any]]:
    """Download the files that have rows of this rank, verify them, and yield the checkpoint's content; a collective.

    The manifest's "url" is the folder in the storage. The host's ranks share a temporary folder for the files. After
    the block the ranks wait for one another, and the folder is removed. The content's tensors are StoredTensors: the
    block may read the rows that `layout` gives this rank, and no others.

    Raises:
        CheckpointError: Some rank's file is damaged or missing. All ranks raise it.
        RecoverableError: The storage fails. Only the rank that meets this raises it, and the other ranks wait for that
            rank.
    """
    name = broadcast_value(f"checkpoint-{uuid.uuid4().hex}")
    folder = Path(tempfile.gettempdir(), name)  # this job's ranks on this host share the folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = open_shards(folder, manifest)
    leaves = pytree.tree_flatten_with_path(content["state"])[0]
    tensors = [layout.local(path, leaf) for path, leaf in leaves if isinstance(leaf, StoredTensor)]
    parts = chain.from_iterable(tensor.parts() for tensor in tensors)
    needed = list(dict.fromkeys(file for file, _, _ in parts))
    first = len(needed) * environment.local_rank // environment.world.local_size
    shared_out = needed[first:] + needed[:first]  # each rank of a host begins with another file
    outcomes = (_fetch(file, content["shards"][file], manifest["url"], storage) for file in shared_out)
    problems = gather_values(next(filter(None, outcomes), ""))
    try:
        for problem in filter(None, problems):
            raise CheckpointError(problem)
        yield content
    finally:
        distributed.barrier()  # no rank of the host reads the files any more after this
        if environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(file: Path, digest: str, url: str, storage: RankStorage) -> str:
    """Download a checkpoint's file from the folder `url` to this host, unless another rank has, and verify its SHA-256.

    The host's ranks take turns by a lock. An incomplete or damaged download is deleted. RecoverableError is raised if
    the storage fails, by this rank alone.

    Returns:
        The problem, to follow the checkpoint's name in a message, such as "is damaged: …". Empty if there is none.
    """
    with locked(file.with_suffix(".lock")):
        if file.exists():
            return ""
        beside = temporary_beside(file)
        beside.mkdir()
        try:
            storage.get(f"{url}/{file.name}", beside / file.name)
            problem = find_problem(beside / file.name, digest)
            if not problem:
                os.replace(beside / file.name, file)
            return problem
        except FileNotFoundError:
            return f"is incomplete: {file.name} of its shards is not in the storage"
        finally:
            shutil.rmtree(beside, ignore_errors=True)
