"""Tasks that are cached on a cluster but not in a local run."""

from dataclasses import dataclass, replace
from typing import Any

from flytekit import PythonFunctionTask
from flytekit.extend import TaskPlugins

from flyte_ddp.tasks.flytekit_compat import metadata_of


@dataclass(frozen=True)
class OnClustersOnly:
    """The task_config of a task, or dynamic, that is cached only on a cluster.

    For what a local run must find out each time: whether this machine can do what is asked, and which dataset is
    available here. On a cluster the same inputs have the same answer, and a cached one needs no pod.
    """


class ClusterCachedTask(PythonFunctionTask):
    def local_execute(self, ctx: Any, **inputs: Any) -> Any:
        forgetful = replace(self.metadata, cache=False, cache_serialize=False, cache_ignore_input_vars=())
        with metadata_of(self, forgetful):
            return super().local_execute(ctx, **inputs)


TaskPlugins.register_pythontask_plugin(OnClustersOnly, ClusterCachedTask)
