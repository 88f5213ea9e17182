"""What the tasks of an environment ask of a cluster, as Flyte 2 writes it."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import flyte
import pytest
from flyte._internal.image_cache import ImageCache
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte._internal.runtime.trigger_serde import to_task_trigger
from flyte.models import SerializationContext
from flyte.syncify import syncify

from flyte_ddp.errors import InputError
from flyte_ddp.flyte2.environment import clustered, preparation_environment
from flyte_ddp.flyte2.train import ImageTraining, image_training
from scripts.dry_run import describe_task
from tests.commands import ROOT

LABELS = {"kueue.x-k8s.io/queue-name": "research"}


def context_of(environment):
    images = ImageCache(image_lookup={environment: "trainer:1"})
    return SerializationContext(project="p", domain="d", org="o", version="v", image_cache=images, root_dir=ROOT)


@pytest.fixture
def written(monkeypatch):
    """A function that sets a registration's variables and returns the training and a preparing task's protobuf."""

    def write(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for environment in (image_training.environment("training"), preparation_environment("preparing")):

            @environment.task
            async def work() -> None: ...

            yield translate_task_to_wire(work, context_of(environment.name)).task_template

    return write


def test_labels_and_annotations_reach_every_pod(written):
    for task in written(DDP_LABELS=json.dumps(LABELS), DDP_ANNOTATIONS='{"cost": "7"}'):
        metadata = task.k8s_pod.metadata
        assert (dict(metadata.labels), dict(metadata.annotations)) == (LABELS, {"cost": "7"})


def test_what_predicts_or_promotes_asks_for_one_device_of_those_that_training_has(monkeypatch):
    monkeypatch.setenv("DDP_GPUS", "4")
    found: dict[Any, Any] = {most: image_training.environment("shards", most_gpus=most) for most in (None, 1)}
    assert [one.resources.gpu for one in found.values()] == [4, 1]
    assert [one.env_vars["DDP_POD_GPUS"] for one in found.values()] == ["4", "1"]
    monkeypatch.setenv("DDP_PROFILE", "sandbox")
    none: Any = image_training.environment("shards", most_gpus=1)
    assert none.resources.gpu is None


def test_the_entry_files_ask_for_as_many_devices_as_they_use_and_ship_what_the_parent_does_not_import():
    """In a process of its own, since a file's environments are made when it is imported."""
    program = (
        "import sys, flyte2.inference as i, flyte2.promote as p, flyte2.mnist as m; "
        "print([one.resources.gpu for one in (i.prediction, p.promotion, m.training)]); "
        "print([name for name in ('flytekit', 'torch') if name in sys.modules]); "
        "print(*m.training.include)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DDP_GPUS": "4"}
    )
    assert done.stdout.startswith("[1, 1, 4]\n[]\n"), done.stderr
    shipped = {f"{ROOT}/flyte_ddp/{file}" for file in ("engine/worker.py", "attempt/platform_training.py")}
    assert shipped <= {*done.stdout.split()}


@pytest.mark.parametrize(("gpu", "count"), [("H100:3", 3), (3, 3), (0, 0), (flyte.GPU("T4", 3), 3)])
def test_a_training_may_have_its_own_resources(gpu, count):
    mine: Any = image_training.environment("training", resources=flyte.Resources(gpu=gpu, memory="64Gi"))
    assert (mine.resources.gpu, mine.resources.memory, mine.env_vars["DDP_POD_GPUS"]) == (gpu, "64Gi", str(count))
    assert mine.resources.disk
    assert image_training.arguments(retries=7, report=False).items() >= {"retries": 7, "report": False}.items()


@pytest.fixture
def registered(monkeypatch):
    """Secrets, labels and preemptible machines."""
    monkeypatch.setenv("DDP_WANDB_SECRET", "wandb/key")
    monkeypatch.setenv("DDP_WEBHOOK_SECRET", "hooks/url")
    monkeypatch.setenv("DDP_LABELS", '{"team": "vision", "queue": "research"}')
    monkeypatch.setenv("DDP_INTERRUPTIBLE", "true")


@pytest.mark.parametrize("nodes", [{}, clustered()])
def test_a_training_may_have_its_own_pod_beside_what_is_registered(registered, nodes):
    grace = flyte.PodTemplate(labels={"team": "text"}).with_termination_grace_period(120)
    secrets: Any = ["hub-token", flyte.Secret("key", "mine", as_env_var="WANDB_API_KEY")]
    mine: Any = image_training.environment(
        "training", secrets=secrets, interruptible=False, pod_template=grace, env_vars={"MINE": "1"},
        image="mine:1", include=("more.txt",), service_account="trainer", **nodes,
    )  # fmt: skip
    assert {one.as_env_var: one.group for one in mine.secrets} == {
        "HUB_TOKEN": None, "WANDB_API_KEY": "mine", "DDP_POD_WEBHOOK": "hooks",
    }  # fmt: skip
    assert not mine.interruptible
    assert mine.pod_template.labels == {"team": "text", "queue": "research"}
    assert mine.pod_template.pod_spec.termination_grace_period_seconds == 120
    assert mine.env_vars.items() >= {"MINE": "1", "DDP_POD_GPUS": "2", "DDP_POD_GRACE": "120"}.items()
    assert (mine.image, mine.include[-1], mine.service_account) == ("mine:1", "more.txt", "trainer")

    @mine.task
    async def work() -> None: ...

    if not nodes:
        shown = {*describe_task(translate_task_to_wire(work, context_of("training")).task_template)}
        assert {("label", "team=text"), ("terminationGracePeriodSeconds", "120.0")} <= shown
    usual: Any = image_training.environment("training", secrets="hub-token")
    assert [one.as_env_var for one in usual.secrets] == ["HUB_TOKEN", "WANDB_API_KEY", "DDP_POD_WEBHOOK"]
    assert usual.interruptible
    assert usual.pod_template.pod_spec.termination_grace_period_seconds == 120
    assert image_training.arguments(pod_template=grace)["pod_template"].labels == mine.pod_template.labels


def test_a_tasks_own_pod_template_has_the_grace_of_its_environment():
    registered, short = (flyte.PodTemplate().with_termination_grace_period(seconds) for seconds in (120, 60))
    training = ImageTraining()
    training.arguments(pod_template=registered)
    with pytest.raises(InputError, match=r"must have the grace of its environment, 120 s, got 60 s: give the template"):
        training.arguments(pod_template=short)
    training.environment("training", pod_template=short)
    training.arguments(pod_template=short)
    with pytest.raises(InputError, match=r"must have the grace of its environment, 60 s, got 120 s: give the template"):
        training.arguments(pod_template=registered)


@pytest.mark.slow
def test_a_dry_run_shows_all_tasks_without_a_cluster():
    command = [sys.executable, "-m", "scripts.dry_run2", "trainer:1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DDP_NNODES": "3"})
    assert "'replicas': 3.0" in done.stdout, done.stderr
    assert {*re.findall(r"^(\S+\.\S+) +trainer:1 ", done.stdout, re.MULTILINE)} >= {
        "mnist_training.train", "sweep.main", "promotion.promote", "roll_back.roll_back", "multinode_training.train",
    }  # fmt: skip


def test_a_promoted_model_sets_off_its_predictions():
    from flyte2.inference import main, on_promotion

    spec = translate_task_to_wire(main, context_of("inference"))
    trigger = syncify(to_task_trigger)(
        on_promotion, main.name, spec.task_template.interface.inputs, list(spec.default_inputs)
    )
    assert (trigger.automation_spec.artifact.artifact_name, trigger.automation_spec.artifact.input_arg) == (
        "mnist", "model_state",
    )  # fmt: skip
    assert not trigger.spec.active


def test_a_pod_template_is_for_training(written):
    assert [task.metadata.pod_template_name for task in written(DDP_POD_TEMPLATE="spot")] == ["spot", ""]


def test_a_training_pod_keeps_away_from_nodes_only_if_that_is_registered(written, monkeypatch):
    for spec in (task.k8s_pod.pod_spec for task in written()):
        assert "affinity" not in spec
        assert "DDP_NODE_NAME" not in str(spec)
    training, preparing = written(DDP_AVOID_HOURS="24", DDP_AVOID_HOSTS="node-1")
    assert not preparing.HasField("k8s_pod")
    (container,) = training.k8s_pod.pod_spec["containers"]
    environment = {one["name"]: one for one in container["env"]}
    assert environment["DDP_NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert (environment["DDP_AVOID_HOURS"]["value"], environment["DDP_POD_RETRIES"]["value"]) == ("24", "2")
    required = training.k8s_pod.pod_spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (rule,) = required["nodeSelectorTerms"][0]["matchExpressions"]
    assert (rule["key"], rule["operator"], [*rule["values"]]) == ("kubernetes.io/hostname", "NotIn", ["node-1"])
    assert training.k8s_pod.pod_spec["terminationGracePeriodSeconds"] == 120
    with pytest.raises(InputError, match=r"must be empty beside a pod template of the cluster \(spot\), got node-1"):
        image_training.environment("training", pod_template="spot")


def test_a_pod_template_of_the_cluster_says_the_grace_itself(monkeypatch):
    for grace in ("", "600"):
        monkeypatch.setenv("DDP_GRACE_SECONDS", grace or "0")
        mine: Any = image_training.environment("training", pod_template="spot")
        assert (mine.pod_template, mine.env_vars["DDP_POD_GRACE"]) == ("spot", grace or "30")


def test_a_pod_template_and_labels_are_refused(written):
    with pytest.raises(InputError, match="put them into that template"):
        [*written(DDP_LABELS=json.dumps(LABELS), DDP_POD_TEMPLATE="spot")]
