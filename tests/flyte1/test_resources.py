"""What the variables of a registration ask for, and what is said of those that are wrong or refused."""

import dataclasses
import importlib
import json
import re
from collections import OrderedDict

import pytest
import torch
from flytekit import PodTemplate, Resources, Secret, task
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.extras import accelerators
from flytekit.tools.translator import get_serializable
from kubernetes.client import V1Container, V1PodSpec, V1Toleration

from flyte_ddp.attempt import registration, requested
from flyte_ddp.attempt.registration import Registration, check_names
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1 import resources, train
from flyte_ddp.flyte1.resources import execution_options
from scripts.dry_run import describe_task
from scripts.register import Registered, explain
from tests.commands import ROOT
from tests.packages import full_package
from tests.pod import container_of, package


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        ("DDP_PROFILE", "gpuu", "gpu, sandbox"),
        ("DDP_GPUS", "0", "at least 1"),
        ("DDP_GPUS", "two", "whole number"),
        ("DDP_TRAINING_MEMORY", "16 GB", "4Gi"),
        ("DDP_TRAINING_MEMORY", "8Gi:4Gi", "no more than its limit, got 8Gi:4Gi"),
        ("DDP_SMALL_CPU", "2:1500m", "no more than its limit"),
        ("DDP_PREPARATION_CPU", "1:2:3", "REQUEST:LIMIT"),
        ("DDP_SMALL_DISK", "", "quantity"),
        ("DDP_TRAINING_MEMORY", "16", "at least a megabyte, got 16: write the unit"),
        ("DDP_PREPARATION_DISK", "500m", "at least a megabyte"),
        ("DDP_SMALL_MEMORY", "٤Gi", "quantity"),
        ("DDP_TRAINING_CPU", "4Gi", "a number of CPUs such as 500m or 2, got 4Gi"),
        ("DDP_TRAINING_CPU", "0", "a number of CPUs"),
        ("DDP_ACCELERATOR", "H1000", "H100"),
        ("DDP_INTERRUPTIBLE", "yes", "true or false"),
        ("DDP_RETRIES", "-1", "at least 0"),
        ("DDP_GRACE_SECONDS", "-1", "at least 0"),
        ("DDP_GRACE_SECONDS", "3601", "at most 3600"),
        ("DDP_GRACE_SECONDS", "2 minutes", "whole number"),
        ("DDP_AVOID_HOURS", "-1", "at least 0"),
        ("DDP_AVOID_HOURS", "9000", "at most 8760"),
        ("DDP_AVOID_HOURS", "a day", "whole number"),
        ("DDP_AVOID_HOSTS", "node-1,Node_2", 'lists them, got "Node_2": write them as node-1,node-2'),
        ("DDP_AVOID_HOSTS", "node-1,", 'got ""'),
        ("DDP_AVOID_HOSTS", "-1", 'got "-1"'),
        ("DDP_AVOID_HOSTS", "n" * 254, "names of nodes, separated by commas"),
        ("DDP_ENV", '{"DDP_POD_GRACE": "8"}', "must not have DDP_POD_GRACE"),
        ("DDP_RETRIES", "9" * 5000, "whole number"),
        ("DDP_ENV", "[" * 100_000, "an object"),
        ("DDP_ATTEMPT_SECONDS", "6h", "whole number"),
        ("DDP_ATTEMPT_SECONDS", "999999999999999", "at most 31622400"),
        ("DDP_CONCURRENCY", "99999999999", "at most 5000"),
        ("DDP_WANDB_SECRET", "key", "GROUP/KEY"),
        ("DDP_MLFLOW_SECRET", "key", "GROUP/KEY"),
        ("DDP_ACCELERATOR", "V100", "7.0"),
        ("DDP_ACCELERATOR", "V5E", "L40S, T4, H100"),
        ("DDP_ENV", "NAME=value", "an object"),
        ("DDP_ENV", '{"NAME": 1}', '"NAME" with 1'),
        ("DDP_ENV", '{"A=B": "1"}', '"A=B"'),
        ("DDP_ENV", '{"A": "1", "A": "2"}', '"A" is given twice'),
        ("DDP_ENV", '{"DDP_GPUS": "8"}', "must not have DDP_GPUS"),
        (
            "DDP_ENV",
            '{"WANDB_API_KEY": "PASSWORD"}',
            "put it into a Flyte secret, named by DDP_WANDB_SECRET=GROUP/KEY",
        ),
        ("DDP_ENV", '{"HF_TOKEN": "PASSWORD"}', "put it into a Flyte secret, named by secret_requests"),
        (
            "DDP_ENV",
            '{"HTTPS_PROXY": "http://me:PASSWORD@host"}',
            "put it into a Flyte secret, named by secret_requests",
        ),
        ("DDP_SERVICE_ACCOUNT", "trainer", "rename it to one of DDP_ACCELERATOR, "),
        ("DDP_NODE_SELECTOR", "pool=h100", ", DDP_POD_TEMPLATE, "),
        ("DDP_LABELS", "team=vision", "an object"),
        ("DDP_LABELS", '{"team": "computer vision"}', '"computer vision"'),
        ("DDP_LABELS", '{"-team": "vision"}', '"-team"'),
        ("DDP_LABELS", json.dumps({"team": "v" * 64}), "Kubernetes allows"),
        ("DDP_ANNOTATIONS", '{"cost": 1}', '"cost" with 1'),
        ("DDP_POD_TEMPLATE", "Spot_nodes", "kubectl get podtemplates"),
        ("DDP_PROMOTE_TO", "models", "an absolute path"),
        ("DDP_PROMOTE_TO", "s3://KEY:PASSWORD@bucket/models", "must not have keys"),
        ("DDP_NOTIFY", "me@example.org", "slack:ADDRESS or email:ADDRESS"),
        ("DDP_NOTIFY", "slack:channel", "NAME@HOST"),
        ("DDP_NOTIFY", "slack:me@example.org,mail:me@example.org", "slack:ADDRESS or email:ADDRESS"),
        ("DDP_NOTIFY_PHASES", "failed,running", "succeeded, failed, timed_out, aborted"),
        ("DDP_WEBHOOK", "hooks.example.org/1", "https://host/path"),
        ("DDP_WEBHOOK", "https://me:word@host/1", "Flyte secret"),
        ("DDP_WEBHOOK", "https://[host/1", "https://host/path"),
        ("DDP_WEBHOOK", "https://host:port/1", "https://host/path"),
        ("DDP_WEBHOOK_SECRET", "hooks", "GROUP/KEY"),
        ("DDP_CONSOLE", "flyte", "https://host/path"),
        ("DDP_DATA_MIRROR", "/some/folder", "write file:///some/folder"),
        ("DDP_DATA_MIRROR", "s3://KEY:PASSWORD@bucket/folder", "must not have keys"),
        ("DDP_DATA_MIRROR", "gs://KEY:PASS/PASSWORD@bucket/folder", "must not have keys"),
    ],
)
def test_wrong_settings_are_refused(monkeypatch, variable, value, names):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError) as raised:
        resources.training_resources()
    assert variable in str(raised.value)
    assert names in str(raised.value)
    assert "PASSWORD" not in str(raised.value)


def test_one_registration_may_notify_both_by_slack_and_by_email(monkeypatch):
    monkeypatch.setenv("DDP_NOTIFY", "slack:a@example.org,b@example.org,email:c@example.org,slack:d@example.org")
    slack, email = execution_options()["notifications"]
    assert slack.slack.recipients_email == ["a@example.org", "b@example.org", "d@example.org"]
    assert email.email.recipients_email == ["c@example.org"]


def test_wrong_setting_ends_a_command_without_a_traceback(tmp_path):
    with pytest.raises(RuntimeError) as raised:
        package(DDP_PROFILE="gpuu")
    assert "must be one of gpu" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("gpus", [-1, 65])
def test_a_number_of_gpus_that_no_pod_has_is_refused_before_anything_is_prepared(gpus):
    from workflows.gpus import training_on_gpus_wf  # here: it sets up pyflyte, and modules of Flyte 2 do the like

    with pytest.raises(InputError, match=f"gpus must be at least 0 and at most 64, got {gpus}"):
        training_on_gpus_wf(gpus=gpus)


def test_what_all_pods_get_reaches_every_pod():
    own = {"HTTPS_PROXY": "http://proxy.example:3128", "QUOTES": "\"'", "DDP_DATA_MIRROR": "s3://bucket/originals"}
    labels, annotations = {"kueue.x-k8s.io/queue-name": "research"}, {"example.org/cost": 'centre 7, "vision"'}
    packaged = full_package()
    for name, one in packaged.tasks.items():
        given = {variable.key: variable.value for variable in container_of(one).env}
        assert own.items() <= given.items(), name
        metadata = one.metadata.metadata
        assert (dict(metadata.labels), dict(metadata.annotations)) == (labels, annotations), name
    templates = {name.rpartition(".")[2]: one.metadata.pod_template_name for name, one in packaged.tasks.items()}
    assert (templates["pytorch_mnist_task"], templates["pytorch_multinode_task"]) == ("spot", "spot")
    assert (templates["prepare_dataset"], templates["plan_shards"]) == ("", "")
    for name, plan in packaged.launch_plans.items():
        own_plan = "." not in name  # not the one that Flyte makes for a workflow
        assert dict(plan.spec.labels.values) == (labels if own_plan else {}), name
        assert dict(plan.spec.annotations.values) == (annotations if own_plan else {}), name


def test_mirror_with_a_password_stays_here(monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", "https://me:word@host/folder")
    assert requested.pod_environment() == {}
    monkeypatch.setenv("DDP_DATA_MIRROR", "abfs://container@account.example/folder")
    assert requested.pod_environment() == {"DDP_DATA_MIRROR": "abfs://container@account.example/folder"}


def test_accelerators_are_those_that_torch_has_code_for():
    oldest = min(int(name.removeprefix("sm_")) for name in (torch._C._cuda_getArchFlags() or "sm_75").split())
    assert {int(float(capability) * 10) < oldest for capability in registration.TOO_OLD.values()} == {True}


def test_accelerators_are_nvidias_of_flytekit():
    devices = {
        name: kind.to_flyte_idl().device
        for name, kind in vars(accelerators).items()
        if isinstance(kind, accelerators.BaseAccelerator)
    }
    assert {*registration.ACCELERATORS} == {name for name, device in devices.items() if device.startswith("nvidia-")}
    assert {"T4", "A10G", "L4", "A100", "H100", "H200"} <= {*registration.ACCELERATORS} - {*registration.TOO_OLD}


def test_gpus_and_accelerator(monkeypatch):
    monkeypatch.setenv("DDP_GPUS", "8")
    monkeypatch.setenv("DDP_ACCELERATOR", "A100")
    arguments = resources.training_resources()
    assert arguments["requests"] == Resources(cpu="16", mem="64Gi", ephemeral_storage="10Gi", gpu="8")
    assert arguments["accelerator"].to_flyte_idl().device == "nvidia-tesla-a100"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("DDP_GPU", "DDP_GPUS"),
        ("DDP_RUN_DIR", "DDP_RUNS_DIR"),
        ("DDP_NODES", "DDP_NNODES"),
        ("DDP_WANDB", "DDP_WANDB_SECRET"),
        ("DDP_NPROC", "DDP_NPROC_PER_NODE"),
        ("DDP_ATTEMPT_TIMEOUT", "DDP_ATTEMPT_SECONDS"),
    ],
)
def test_a_variable_that_is_spelt_wrong_is_refused(monkeypatch, name, nearest):
    says = rf"environment variable {name} is unknown \(did you mean {nearest}\?\): rename or unset it"
    with pytest.raises(InputError, match=says):
        Registration(env={name: "4"})
    monkeypatch.setenv(name, "4")
    with pytest.raises(InputError, match=says):
        registration.registration()


def test_other_peoples_variables_are_theirs(monkeypatch):
    """Kubernetes names a service's host and port in every pod of its namespace; in a pod, others may set variables."""
    for name in ("DDP_TRAINING_SERVICE_HOST", "DDP_TRAINING_PORT_8080_TCP_ADDR", "DDP_TRAINING_PORT", "DDP_TEST_DATA"):
        monkeypatch.setenv(name, "1")
    registration.registration()
    monkeypatch.setenv("DDP_MY_OWN_KEY", "1")
    with pytest.raises(InputError, match="DDP_MY_OWN_KEY is unknown: unset it, or rename it"):
        registration.registration()
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "a1b2c3")
    registration.registration()


def test_all_variables_that_the_code_reads_are_known():
    texts = [
        file.read_text() for folder in ("flyte_ddp", "workflows", "flyte2") for file in (ROOT / folder).rglob("*.py")
    ]
    named = {name for text in texts for name in re.findall(r"\bDDP_[A-Z_]*[A-Z]\b", text)}
    assert len(named) > 15
    check_names(named, map(registration.name_variable, dataclasses.fields(Registration)))


def test_a_task_may_have_its_own_resources_and_other_arguments(monkeypatch):
    monkeypatch.setenv("DDP_TRAINING_MEMORY", "8Gi:9Gi")
    arguments = train.training_arguments(
        requests=Resources(gpu="4", cpu="6"), limits=Resources(mem="64Gi"), retries=7, environment={"MINE": "1"}
    )
    assert arguments["requests"] == Resources(cpu="6", mem="64Gi", ephemeral_storage="10Gi", gpu="4")
    assert arguments["limits"] == Resources(cpu="6", mem="64Gi", ephemeral_storage="10Gi", gpu="4")
    assert (arguments["retries"], arguments["shared_memory"]) == (7, True)
    assert arguments["environment"].items() >= {"MINE": "1", "DDP_POD_GPUS": "4"}.items()
    none = train.training_arguments(requests=Resources(gpu="0"))
    assert "shared_memory" not in none
    assert none["environment"]["DDP_POD_GPUS"] == "0"
    one = train.training_arguments(most_gpus=1)
    assert (one["limits"].gpu, one["environment"]["DDP_POD_GPUS"]) == ("1", "1")

    @task(**train.training_arguments(requests=Resources(gpu="4")))
    def accepted() -> None: ...

    assert accepted.resources.limits.gpu == "4"


def test_a_tasks_own_secrets_and_labels_stand_beside_those_that_are_registered(monkeypatch):
    for name in ("WANDB", "MLFLOW", "WEBHOOK"):
        monkeypatch.setenv(f"DDP_{name}_SECRET", f"{name.lower()}/key")
    monkeypatch.setenv("DDP_LABELS", '{"team": "vision", "queue": "research"}')
    mine = [Secret(group="hub", key="token"), Secret(group="mine", key="key", env_var="WANDB_API_KEY")]
    own = train.training_arguments(secret_requests=mine, labels={"team": "text"}, annotations={"cost": "7"})
    assert [one.group for one in own["secret_requests"]] == ["hub", "mine", "mlflow", "webhook"]
    assert own["labels"] == {"team": "text", "queue": "research"}
    assert own["annotations"] == {"cost": "7"}
    assert [one.group for one in train.training_arguments()["secret_requests"]] == ["wandb", "mlflow", "webhook"]


def test_the_pages_task_with_its_own_pod_is_registered_and_shown_as_it_stands(tmp_path, monkeypatch):
    page = (ROOT / "docs/on-a-cluster.md").read_text()
    for block, name in re.findall(
        r"^```python\n(# (flowers/\S+)\n.*?)^```", (ROOT / "README.md").read_text() + page, re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DDP_WANDB_SECRET", "wandb/key")
    monkeypatch.setenv("DDP_LABELS", '{"team": "vision"}')
    monkeypatch.setenv("DDP_POD_TEMPLATE", "spot")
    task = importlib.import_module("flowers.own_pod").train_iris
    task.environment["HUB_PASSWORD"] = "hush"
    settings = SerializationSettings(ImageConfig.from_images("x:1", {"trainer": "x:1"}))
    shown = [*describe_task(get_serializable(OrderedDict(), settings, task).template.to_flyte_idl())]
    assert {
        ("image", "x:1"),
        ("limits", "cpu 8, ephemeral-storage 10Gi, gpu 4, memory 32Gi"),
        ("secret", "hub/token as "),
        ("secret", "wandb/key as WANDB_API_KEY"),
        ("pod template", "spot"),
        ("label", "team=vision"),
        ("serviceAccountName", '"trainer"'),
        ("nodeSelector", '{"pool": "h100"}'),
        ("terminationGracePeriodSeconds", "120.0"),
        ("tolerations", '[{"effect": "NoSchedule", "key": "sku", "operator": "Equal", "value": "gpu"}]'),
        ("environment", "DDP_POD_GPUS=4"),
        ("environment", "DDP_POD_GRACE=120"),
        ("environment", "HUB_PASSWORD=***"),
    } <= {*shown}


@pytest.mark.parametrize(
    ("registered", "asks", "knows"),
    [({}, None, "30"), ({"DDP_GRACE_SECONDS": "45"}, 45, "45"), ({"DDP_POD_TEMPLATE": "spot"}, None, "30"),
     ({"DDP_POD_TEMPLATE": "spot", "DDP_GRACE_SECONDS": "600"}, None, "600")],
)  # fmt: skip
def test_a_training_pod_asks_for_its_grace_and_knows_it(monkeypatch, registered, asks, knows):
    """What a PodTemplate of the cluster says is unknown."""
    for name, value in registered.items():
        monkeypatch.setenv(name, value)
    arguments = train.training_arguments()
    template = arguments["pod_template"]
    assert (template and template.pod_spec.termination_grace_period_seconds) == asks
    assert {arguments["environment"][name] for name in ("DDP_POD_GRACE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")} == {knows}


def pod_spec(**own):
    """The pod of a training task, as it is registered."""

    @task(**train.training_arguments(**own))
    def trained() -> None: ...

    image = ImageConfig.from_images("trainer:1", {"trainer": "trainer:1"})
    spec = get_serializable(OrderedDict(), SerializationSettings(image_config=image), trained)
    return spec.template.k8s_pod.pod_spec


def test_a_training_pod_keeps_away_from_nodes_only_if_that_is_registered(monkeypatch):
    assert "pod_template" in train.training_arguments()
    assert train.training_arguments()["pod_template"] is None
    monkeypatch.setenv("DDP_AVOID_HOURS", "24")
    monkeypatch.setenv("DDP_AVOID_HOSTS", "node-1, node-2")
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1", "node-2"]}
    pool = V1Toleration(key="sku", operator="Exists")
    own = PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary")], tolerations=[pool]))
    for template in (None, own):
        spec = pod_spec(retries=7, environment={"MINE": "1"}, **({"pod_template": template} if template else {}))
        affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert affinity == {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
        (container,) = spec["containers"]
        environment = {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"] for one in container["env"]}
        assert (
            environment.items()
            >= {
                "MINE": "1",
                "DDP_AVOID_HOURS": "24",
                "DDP_POD_RETRIES": "7",
                "DDP_NODE_NAME": {"fieldPath": "spec.nodeName"},
            }.items()
        )
        assert spec.get("tolerations", []) == ([{"key": "sku", "operator": "Exists"}] if template else [])
    assert own.pod_spec.affinity is None
    assert requested.registered_environment()["DDP_AVOID_HOSTS"] == "node-1, node-2", "as a dynamic task's pod reads it"
    monkeypatch.setenv("DDP_GRACE_SECONDS", "45")
    assert pod_spec()["terminationGracePeriodSeconds"] == 45


def test_a_pod_template_of_the_cluster_has_its_own_affinity(monkeypatch):
    monkeypatch.setenv("DDP_POD_TEMPLATE", "spot")
    monkeypatch.setenv("DDP_AVOID_HOURS", "24")
    arguments = train.training_arguments()
    assert (arguments["pod_template"], arguments["environment"]["DDP_AVOID_HOURS"]) == (None, "24")
    monkeypatch.setenv("DDP_AVOID_HOSTS", "node-1")
    with pytest.raises(InputError, match=r"of the cluster \(spot\), got node-1: put the node affinity into that temp"):
        train.training_arguments()


@pytest.mark.parametrize(("own", "registered", "knows"), [(300, "", "300"), (300, "60", "60"), (None, "60", "60")])
def test_a_pod_template_of_ones_own_keeps_its_grace(monkeypatch, own, registered, knows):
    monkeypatch.setenv("DDP_GRACE_SECONDS", registered or "0")
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], termination_grace_period_seconds=own))
    arguments = train.training_arguments(pod_template=template)
    assert arguments["pod_template"].pod_spec.termination_grace_period_seconds == (own or 60)
    assert template.pod_spec.termination_grace_period_seconds == own
    assert arguments["environment"]["DDP_POD_GRACE"] == knows


def test_every_size_has_a_variable(monkeypatch):
    for pod in ("TRAINING", "PREPARATION", "SMALL"):
        for of, value in {"CPU": "1:3", "MEMORY": "3Gi", "DISK": "5Gi:6Gi"}.items():
            monkeypatch.setenv(f"DDP_{pod}_{of}", value)
    for arguments in (resources.preparation_resources(), resources.small_resources(), resources.training_sizes(0)):
        assert arguments["requests"] == Resources(cpu="1", mem="3Gi", ephemeral_storage="5Gi")
        assert arguments["limits"] == Resources(cpu="3", mem="3Gi", ephemeral_storage="6Gi")
    assert resources.training_sizes(4)["limits"] == Resources(cpu="3", mem="3Gi", ephemeral_storage="6Gi", gpu="4")


PLATFORM = "is greater than current limit set in the platform configuration"


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (f"Requested GPU default [2] {PLATFORM} [1]", "Now DDP_GPUS=2: "),
        (
            f"Requested MEMORY limit [16Gi] {PLATFORM} [4Gi]",
            "Now DDP_TRAINING_MEMORY=16Gi, DDP_PREPARATION_MEMORY=1Gi:2Gi, ",
        ),
        ("Requested CPU default [3] is greater than the limit [2]. Please fix", "Now DDP_TRAINING_CPU=4, "),
        (f"Requested EPHEMERAL_STORAGE limit [9Gi] {PLATFORM} [1Gi]", "Now DDP_TRAINING_DISK=10Gi, "),
        ("workflows.mnist task with different structure already exists", 'ARGS="--version NAME"'),
    ],
)
def test_a_refused_registration_names_the_variables_and_what_is_there(refusal, said):
    result = Registered("v1", ["workflows.mnist.pytorch_mnist_task"], [], False)
    text = explain(f"[✔] Task: workflows.mnist.pytorch_mnist_task\nDetails: {refusal}\n", result, Registration())
    assert said in text
    assert "Version v1 is left with 1 tasks and 0 workflows" in text
