"""Tasks that a cluster remembers and a local run does not."""

from dataclasses import dataclass, replace
from typing import Any

from flytekit import PythonFunctionTask
from flytekit.core.base_task import TaskMetadata
from flytekit.extend import TaskPlugins


@dataclass(frozen=True)
class OnClustersOnly:
    """The task_config of a task, or dynamic, whose cache is that of the cluster alone.

    For what a local run has to find out each time: whether this machine can do what is asked, which dataset is to be
    had here. On a cluster the same inputs have the same answer, and a remembered one needs no pod.
    """


class ClusterCachedTask(PythonFunctionTask):
    def local_execute(self, ctx: Any, **inputs: Any) -> Any:
        registered: TaskMetadata = self.metadata
        self._metadata = replace(registered, cache=False, cache_serialize=False, cache_ignore_input_vars=())
        try:
            return super().local_execute(ctx, **inputs)
        finally:
            self._metadata = registered


TaskPlugins.register_pythontask_plugin(OnClustersOnly, ClusterCachedTask)
