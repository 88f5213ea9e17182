"""What the tasks of an environment ask of a cluster, as Flyte 2 writes it."""

import json
from pathlib import Path

import pytest
from flyte._internal.image_cache import ImageCache
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext

from flyte_ddp.errors import InputError
from flyte_ddp.flyte2.environment import preparation_environment, training_environment

LABELS = {"kueue.x-k8s.io/queue-name": "research"}


@pytest.fixture
def written(monkeypatch):
    """A function that sets a registration's variables and returns the training and a preparing task's protobuf."""

    def write(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for environment in (training_environment("training", "code"), preparation_environment("preparing")):

            @environment.task
            async def work() -> None: ...

            images = ImageCache(image_lookup={environment.name: "trainer:1"})
            context = SerializationContext(
                project="p", domain="d", org="o", version="v", image_cache=images, root_dir=Path()
            )
            yield translate_task_to_wire(work, context).task_template

    return write


def test_labels_and_annotations_reach_every_pod(written):
    for task in written(DDP_LABELS=json.dumps(LABELS), DDP_ANNOTATIONS='{"cost": "7"}'):
        metadata = task.k8s_pod.metadata
        assert (dict(metadata.labels), dict(metadata.annotations)) == (LABELS, {"cost": "7"})


def test_a_pod_template_is_for_training(written):
    assert [task.metadata.pod_template_name for task in written(DDP_POD_TEMPLATE="spot")] == ["spot", ""]


def test_a_pod_template_and_labels_are_refused(written):
    with pytest.raises(InputError, match="put them into that template"):
        [*written(DDP_LABELS=json.dumps(LABELS), DDP_POD_TEMPLATE="spot")]
