"""Fetches what ranks need of a sharded checkpoint from the platform's storage: each file once for a host."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed

from flyte_ddp.engine.batches.block_cache import locked
from flyte_ddp.engine.checkpoints.sharded_checkpoint import StoredTensor, open_shards, problem_of
from flyte_ddp.engine.job import RankStorage
from flyte_ddp.engine.sharding.sharded_state import Layout
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import CheckpointError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.whole_files import temporary_beside


@contextmanager
def fetched(
    manifest: dict[str, Any], layout: Layout, storage: RankStorage, environment: Environment
) -> Iterator[dict[str, Any]]:
    """The content of the checkpoint with this manifest, of whose files those that have rows of this rank are on its
    disk while the block runs, verified; raises CheckpointError on all ranks if one of theirs is damaged or missing. A
    collective.
    """
    names = [uuid.uuid4().hex]
    distributed.broadcast_object_list(names)
    folder = Path(tempfile.gettempdir(), f"checkpoint-{names[0]}")  # of this job's ranks on this host, and no others
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = open_shards(folder, manifest)
    leaves = pytree.tree_flatten_with_path(content["state"])[0]
    tensors = [layout.local(path, leaf) for path, leaf in leaves if isinstance(leaf, StoredTensor)]
    needed = list(dict.fromkeys(file for tensor in tensors for file, _, _ in tensor.parts()))
    first = len(needed) * environment.local_rank // environment.world.local_size
    shared_out = needed[first:] + needed[:first]  # each of a host's ranks begins with others
    outcomes = (_fetch(file, content["shards"][file], manifest["url"], storage) for file in shared_out)
    problems: list[Any] = [None] * environment.world.size
    distributed.all_gather_object(problems, next(filter(None, outcomes), ""))
    try:
        for problem in filter(None, problems):
            raise CheckpointError(problem)
        yield content
    finally:
        distributed.barrier()  # until no rank of the host reads them any more
        if environment.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(file: Path, digest: str, url: str, storage: RankStorage) -> str:
    """Make the file be there, unless another rank of the host has done so; what is wrong with it, if anything is."""
    with locked(file.with_suffix(".lock")):
        if file.exists():
            return ""
        beside = temporary_beside(file)
        beside.mkdir()
        try:
            storage.get(f"{url}/{file.name}", beside / file.name)
            problem = problem_of(beside / file.name, digest)
            if not problem:
                os.replace(beside / file.name, file)
            return problem
        except FileNotFoundError:
            return f"is incomplete: {file.name} of its shards is not in the storage"
        finally:
            shutil.rmtree(beside, ignore_errors=True)
