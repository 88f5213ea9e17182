"""What is registered: packaged offline by the real pyflyte, and read back from its protobufs."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from flyteidl.core.interface_pb2 import VariableMap
from flyteidl.core.types_pb2 import LiteralType, SimpleType
from flytekit import Secret

from scripts import register, smoke
from scripts.dry_run import ROOT, amounts, decode, summary
from tests.packages import KEY, sandbox_package
from tests.pod import IMAGE, container_of, package

TEMPLATE = ROOT / "flyte_ddp" / "new" / "template"
GOLDEN = Path(__file__).with_name("pytorch_training_wf.json")
TRAINING = "workflows.mnist.pytorch_mnist_task"


@pytest.fixture(scope="module")
def gpu():
    return package()


@pytest.fixture(scope="module")
def sandbox():
    return sandbox_package()


# --- tasks ---


def test_gpu_is_the_default_profile(gpu):
    task = gpu.tasks[TRAINING]
    wanted = container_of(task).resources
    assert amounts(wanted.requests) == amounts(wanted.limits) == "ephemeral storage 10Gi, cpu 4, gpu 2, memory 16Gi"
    assert task.extended_resources.HasField("shared_memory")
    assert not task.metadata.interruptible
    assert task.metadata.timeout.ToSeconds() == 86400
    assert not task.security_context.secrets


def test_sandbox_asks_for_no_gpu(sandbox):
    task = sandbox.tasks[TRAINING]
    wanted = container_of(task).resources
    assert "gpu" not in amounts(wanted.requests) + amounts(wanted.limits)
    assert "memory 3Gi" in amounts(wanted.limits)
    assert not task.HasField("extended_resources")
    assert task.metadata.interruptible
    assert task.metadata.timeout.ToSeconds() == 3600
    found = {one.env_var: (one.group, one.key, one.mount_requirement) for one in task.security_context.secrets}
    assert found["WANDB_API_KEY"] == ("tracking", "key", Secret.MountType.ENV_VAR.value)
    assert found["MLFLOW_TRACKING_URI"] == ("tracking", "address", Secret.MountType.ENV_VAR.value)


def test_promotion_and_roll_back_know_the_mlflow_server_and_no_other_secret(sandbox):
    for name in ("promote_images", "roll_back"):
        task = sandbox.tasks[f"flyte_ddp.promote.task.{name}"]
        assert [one.env_var for one in task.security_context.secrets] == ["MLFLOW_TRACKING_URI"]


@pytest.mark.parametrize("profile", ["gpu", "sandbox"])
def test_preparation_asks_for_less(request, profile):
    tasks = request.getfixturevalue(profile).tasks
    for name in ("flyte_ddp.flyte1.prepare.resolve_dataset", "flyte_ddp.flyte1.prepare.prepare_dataset"):
        assert "gpu" not in amounts(container_of(tasks[name]).resources.limits)
        assert not tasks[name].security_context.secrets


def test_every_task_is_a_container_of_the_named_image(gpu):
    assert {container_of(task).image for task in gpu.tasks.values()} == {IMAGE}
    plain = {name: task.type for name, task in gpu.tasks.items() if not name.startswith("workflows.multinode.")}
    assert set(plain.values()) == {"python-task"}
    for task in gpu.tasks.values():
        assert container_of(task).args[0] in ("pyflyte-execute", "pyflyte-map-execute")
    assert not [name for name, task in gpu.tasks.items() if task.HasField("k8s_pod")]


def test_caches_and_retries(gpu):
    resolve = gpu.tasks["flyte_ddp.flyte1.prepare.resolve_dataset"].metadata
    prepare = gpu.tasks["flyte_ddp.flyte1.prepare.prepare_dataset"].metadata
    init = gpu.tasks["flyte_ddp.flyte1.data.init_by_content"].metadata
    train = gpu.tasks[TRAINING].metadata
    assert all(metadata.discoverable for metadata in (resolve, prepare, init, train)), "a cached run starts no pod"
    assert prepare.cache_serializable
    assert train.cache_serializable
    assert list(resolve.cache_ignore_input_vars) == list(train.cache_ignore_input_vars) == ["options"]
    assert (prepare.retries.retries, train.retries.retries) == (3, 2)


def test_the_smoke_run_has_inputs_for_every_workflow(gpu):
    small = smoke.small_inputs(seed=1)
    for name, workflow in gpu.workflows.items():
        assert set(small[name]) <= set(workflow.template.interface.inputs.variables), name


@pytest.mark.parametrize("given", [(), ("--image", "trainer=x:1")])
def test_a_registration_without_a_config_file_says_how_it_is_called(given):
    with pytest.raises(SystemExit, match=r"python -m scripts.register CONFIG \[ARGUMENT ...\]"):
        register.main(*given)


@pytest.mark.parametrize("content", ["", "hello", "admin: [1"])
def test_a_config_file_that_names_no_cluster_is_refused(tmp_path, content):
    config = tmp_path / "config.yaml"
    config.write_text(content)
    with pytest.raises(SystemExit, match=f"{config} (must name a cluster|is neither JSON nor YAML)"):
        register.main(str(config))


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_one_sentence(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("admin: {endpoint: 'dns:///localhost:9', insecure: true}")
    said = {
        "register": "No Flyte answers at localhost:9: start that cluster, or correct the file's endpoint and insecure",
        "smoke2": 'Correct it, or add ARGS="--project NAME --domain NAME"',
    }
    processes = []
    for script in said:  # each of which waits for a time
        option = [str(config)] if script == "register" else ["--config", str(config)]
        command = [sys.executable, "-m", f"scripts.{script}", *option, "--image", "trainer=x:1"]
        started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(started)
    for process, words in zip(processes, said.values(), strict=True):
        stdout, stderr = process.communicate()
        assert process.returncode == 1
        assert words in stderr
        assert "Traceback" not in stdout + stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            (
                [option, "mnits"],
                "must be in a workflow's name, got 'mnits': there are workflows.mnist.pytorch_training_wf, ",
            )
            for option in ("--only", "--skip", "--once")
        ],
        (["--only", "mnist", "--skip", "mnist"], "--skip leaves out all that --only names"),
    ],
)
def test_a_smoke_run_of_no_workflow_is_refused_before_it_registers(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["smoke", "--config", "missing.yaml", *arguments])
    with pytest.raises(SystemExit, match="2"):
        smoke.main()
    assert message in capsys.readouterr().err


def test_cache_does_not_depend_on_where_it_runs(gpu, sandbox):
    versions = [p.tasks[TRAINING].metadata.discovery_version for p in (gpu, sandbox)]
    assert versions[0] == versions[1]


def test_a_cached_run_with_gpus_of_its_own_starts_no_pod_either(gpu):
    metadata = gpu.tasks["workflows.gpus.train_on_gpus"].metadata
    assert metadata.discoverable
    assert sorted(metadata.cache_ignore_input_vars) == ["gpus", "options"]


# --- workflows and launch plans ---


def test_a_dry_run_ends_with_a_line_for_each_task(sandbox):
    head, *lines = summary(sandbox.tasks)
    assert head.split() == ["Task", "image", "limits", "secrets"]
    assert len(lines) == len(sandbox.tasks)
    (training,) = [line for line in lines if line.startswith(TRAINING)]
    assert all(word in training for word in (IMAGE, "memory 3Gi", "tracking/key", "tracking/address"))
    assert next(line for line in lines if "prepare.prepare_dataset" in line).endswith("-")


def test_launch_plans(gpu):
    plans = gpu.launch_plans
    of_plans = {
        name: (
            plans[name].spec.workflow_id.name.rpartition(".")[2],
            decode(plans[name].spec.default_inputs.parameters["hp"].default)["dataset"],
        )
        for name in ("mnist", "nightly", "fashion_mnist", "cifar10", "digits_smoke")
    }
    assert of_plans == {
        "mnist": ("pytorch_training_wf", "mnist"),
        "nightly": ("pytorch_training_wf", "mnist"),
        "fashion_mnist": ("fashion_mnist_wf", "fashion_mnist"),
        "cifar10": ("cifar10_wf", "cifar10"),
        "digits_smoke": ("pytorch_training_wf", "digits"),
    }
    scheduled = [
        name for name, plan in plans.items() if plan.spec.entity_metadata.schedule.WhichOneof("ScheduleExpression")
    ]
    assert scheduled == ["nightly"]
    assert not any(plan.spec.HasField("security_context") for plan in plans.values())


def shown(kind: LiteralType) -> object:
    if kind.HasField("collection_type"):
        return [shown(kind.collection_type)]
    if kind.HasField("map_value_type"):
        return {"any name": shown(kind.map_value_type)}
    if kind.HasField("blob"):
        return f"{'folder' if kind.blob.dimensionality else 'file'} {kind.blob.format}".strip()
    if kind.structure.dataclass_type:
        return {name: shown(field) for name, field in sorted(kind.structure.dataclass_type.items())}
    return SimpleType.Name(kind.simple).lower()


def variables(found: VariableMap) -> dict:
    return {name: shown(variable.type) for name, variable in sorted(found.variables.items())}


def test_interface_has_not_changed_by_accident(gpu):
    interface = gpu.workflows["workflows.mnist.pytorch_training_wf"].template.interface
    now = {"inputs": variables(interface.inputs), "outputs": variables(interface.outputs)}
    text = json.dumps(now, indent=2) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), (
        "the interface of pytorch_training_wf, which others' scripts rely on, has changed; if that is meant: "
        "UPDATE_GOLDEN=1 make test ARGS=tests/test_registration.py, and name it in CHANGELOG.md"
    )


# --- what travels ---


def code_files():
    return [file for folder in ("flyte_ddp", "workflows") for file in (ROOT / folder).rglob("*.py")]


def test_code_archive_holds_code_only_and_all_of_it(sandbox):
    (archive,) = (content for name, content in sandbox.files.items() if name.endswith(".tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        shipped = {name for name in tar.getnames() if not tar.getmember(name).isdir()}
    code = {str(file.relative_to(ROOT)) for file in code_files()}
    template = {str(file.relative_to(ROOT)) for file in TEMPLATE.parent.glob("**/template/**/*") if file.is_file()}
    for_type_checkers = {"flyte_ddp/__init__.pyi", "flyte_ddp/py.typed"}
    assert shipped - code - template - for_type_checkers == {"requirements.txt", ".dockerignore"}, (
        "flytekit reads the latter as docker does"
    )
    assert code <= shipped


@pytest.mark.slow
def test_a_remote_run_ships_the_ranks_modules_without_importing_them():
    program = f"""if True:
        import sys
        import workflows.mnist
        from flytekit.constants import CopyFileDetection
        from flytekit.tools.script_mode import ls_files
        assert not {{"torch", "flyte_ddp.engine.worker"}} & set(sys.modules)
        files, _ = ls_files("{ROOT}", CopyFileDetection.LOADED_MODULES)
        print("\\n".join(files))
        import workflows.promote
        assert "torch" not in sys.modules
    """
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    shipped = [str(Path(file).relative_to(ROOT)) for file in shown.split()]
    library = {str(file.relative_to(ROOT)) for file in code_files() if file.parts[len(ROOT.parts)] == "flyte_ddp"}
    assert library | {"workflows/mnist.py"} <= set(shipped) <= {str(file.relative_to(ROOT)) for file in code_files()}
    assert len(shipped) == len(set(shipped))


def test_flyte_2s_shim_is_refused_with_the_reason():
    program = "import sys, types; sys.modules['flyte_migrate'] = types.ModuleType('shim'); import workflows.mnist"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ReportedError: this package cannot be run by Flyte 2's flyte_migrate" in done.stderr


def test_no_secret_travels(sandbox):
    for name, content in sandbox.files.items():
        assert KEY.encode() not in content, name
        if name.endswith(".tar.gz"):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                for member in tar.getmembers():
                    file = tar.extractfile(member)
                    assert file is None or KEY.encode() not in file.read(), member.name
    for template in ("Dockerfile", ".dockerignore", "flyte.config", "Makefile"):
        assert not re.search(r"api.?key|token|password", (ROOT / template).read_text(), re.IGNORECASE), template


# --- without optional packages ---


@pytest.mark.slow
def test_modules_import_without_optional_packages():
    """In an interpreter that cannot find them: `pyflyte register` imports every module."""
    program = """if True:
        import importlib, sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                optional = "flytekitplugins lightning mlflow onnx onnxruntime safetensors tensorboard".split()
                if name.partition(".")[0] in optional:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        for module in sys.argv[1:]:
            importlib.import_module(module)
    """
    files = [file for file in code_files() if TEMPLATE not in file.parents]
    modules = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    ranks = ("checkpoint", "measures", "modules", "observer", "rank", "results")  # for those who have the package
    left_out = ("__init__", "flyte1.multinode", *(f"lightning.{name}" for name in ranks))
    modules = [module for module in modules if not module.endswith(left_out)]
    result = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
