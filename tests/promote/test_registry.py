"""The promoted model in the registry of a real MLflow server, and of some that are of no use; promoted it is anyway."""

import json
import signal
from pathlib import Path

import pytest

from flyte_ddp.errors import InputError
from flyte_ddp.flyte1 import platform
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.promote import registry
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.place import PROMOTED, Place
from flyte_ddp.promote.promotion import roll_back
from flyte_ddp.promote.registry import ALIAS, register
from flyte_ddp.report.mlflow_run import ADDRESS, MODEL, new_client
from tests.commands import ROOT, free_port, output, pyflyte_process
from tests.flyte2.test_local import flyte_run
from tests.object_storage import object_storage
from tests.once import trained_classifier
from tests.promote.test_place import digest_of
from tests.report.mlflow_server import serving

PROMOTE = str(ROOT / "workflows" / "promote.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("mlflow.server", reason="mlflow and its server are not installed: uv pip install 'mlflow>=3'")
    with serving(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def place(tmp_path):
    return Place(platform, f"memory://{tmp_path.name}/models")


def promote(place, version, folder, name, **facts):
    """A promotion, and its entry."""
    model = Path(folder, "model")
    model.write_text(version)
    seen = place.read()
    place.add(version, model, {"sha256": digest_of(version), "registered_model": name, **facts})
    assert place.point(seen, version, PROMOTED)
    return register(place, version, name)


def champion(server, name):
    return server.client.get_model_version_by_alias(name, ALIAS)


@pytest.mark.slow
def test_the_alias_goes_with_the_promoted_version(server, place, tmp_path, monkeypatch):
    monkeypatch.setenv(ADDRESS, server.url)
    run = server.client.create_run("0", tags={MODEL: "0123"})
    name = "own model.2"
    assert promote(place, "first", tmp_path, name, score=0.75, metadata="0123") == f"models:/{name}/1"
    entry = champion(server, name)
    assert (entry.version, entry.source, entry.run_id) == ("1", f"{place.root}/versions/first", run.info.run_id)
    assert entry.tags == {"flyte_ddp.version": "first", "sha256": digest_of("first"), "score": "0.75"}
    assert server.client.get_model_version_download_uri(name, "1") == entry.source

    assert promote(place, "second", tmp_path, name, metadata="4567") == f"models:/{name}/2"
    assert (champion(server, name).version, champion(server, name).run_id or "") == ("2", "")
    assert register(place, "second", name) == f"models:/{name}/2", "as a retry does"
    roll_back(place, "first")
    assert champion(server, name).version == "1"
    assert len(server.client.search_model_versions(f"name = '{name}'")) == 2
    register(place, "second", name)
    assert champion(server, name).version == "1", "of what is no longer promoted the alias is not set"


@pytest.mark.slow
def test_the_alias_ends_at_what_is_promoted_while_it_is_set(server, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ADDRESS, server.url)
    others = [lambda: promote(place, "second", tmp_path, "contested")]

    def interrupted(address):
        client = new_client(address)
        set_alias = client.set_registered_model_alias

        def late(*given):
            if others:
                others.pop()()
            set_alias(*given)

        client.set_registered_model_alias = late
        return client

    monkeypatch.setattr(registry, "new_client", interrupted)
    promote(place, "first", tmp_path, "contested")
    assert champion(server, "contested").source == f"{place.root}/versions/second"
    said = capsys.readouterr().err
    assert "models:/contested/1 is registered, but not as contested@champion: second has been promoted since" in said


@pytest.mark.slow
def test_a_roll_back_registers_what_never_was_and_elsewhere_is_another_model(server, place, tmp_path, monkeypatch):
    monkeypatch.setenv(ADDRESS, server.url)
    other = Place(platform, f"{place.root}-other")
    assert promote(other, "first", tmp_path, "shared").endswith("/1")
    monkeypatch.delenv(ADDRESS)
    assert promote(place, "first", tmp_path, "") == ""
    monkeypatch.setenv(ADDRESS, server.url)
    assert promote(place, "second", tmp_path, "shared").endswith("/2")
    roll_back(place, "first")
    assert champion(server, "shared").source == f"{place.root}/versions/first"
    assert len(server.client.search_model_versions("name = 'shared'")) == 3


def test_without_a_server_it_is_promoted_and_says_what_is_missing(place, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(ADDRESS, raising=False)
    assert promote(place, "first", tmp_path, "model") == ""
    assert place.read().version == "first"
    said = capsys.readouterr().err
    assert "Warning: first is promoted, but not registered in MLflow as model: it needs " in said
    assert f"Once that is mended, roll back to first in {place.root}, which registers it" in said


@pytest.mark.slow
def test_a_server_that_refuses_hangs_or_is_not_there_costs_a_promotion_nothing(place, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow.server", reason="mlflow and its server are not installed")
    monkeypatch.setenv(ADDRESS, f"http://127.0.0.1:{free_port()}")
    assert promote(place, "first", tmp_path, "model") == ""
    assert "as model: API request to http" in capsys.readouterr().err
    with serving(tmp_path) as server:
        monkeypatch.setenv(ADDRESS, server.url)
        monkeypatch.setattr(registry, "SECONDS", 1.0)
        server.send(signal.SIGSTOP)
        assert promote(place, "second", tmp_path, "model") == ""
        assert "as model: no answer within 1 s. Once that" in capsys.readouterr().err
        assert place.read().version == "second"
        server.send(signal.SIGCONT)
        monkeypatch.undo()
        monkeypatch.setenv(ADDRESS, server.url)
        roll_back(place, "second")
        assert champion(server, "model").source == f"{place.root}/versions/second"
        folder = Place(platform, str(tmp_path / "folder"))
        assert promote(folder, "first", tmp_path, "local") == ""
        assert "Invalid model version source" in capsys.readouterr().err
        assert folder.read().version == "first"


def test_a_name_that_mlflow_would_refuse_is_refused_before_anything_is_promoted():
    for name in ("a/b", "a:b", "a'b", 'a"b'):
        with pytest.raises(InputError, match=r"registered_model must have no /, :, ' or \", got"):
            PromotionOptions(registered_model=name)


@pytest.mark.slow
def test_a_promotion_and_a_roll_back_by_pyflyte(server):
    models = [trained_classifier(train_fraction=share).model for share in (0.05, 0.5)]
    metadata = read_metadata(models[0])
    assert metadata
    run = server.client.create_run("0", tags={MODEL: metadata.digest})
    promotion = json.dumps({"registered_model": "digits"})
    with object_storage() as storage:
        environment = {**storage.environment, ADDRESS: server.url}
        given = [PROMOTE, "promote_wf", "--place", "s3://bucket/models", "--promotion", promotion, "--model_state"]
        done = [pyflyte_process(*given, str(model), environment=environment) for model in models]
        assert [output(one, "registered") for one in done] == ["models:/digits/1", "models:/digits/2"]
        assert champion(server, "digits").version == "2"
        first = output(done[0], "version")
        assert "models:/digits/2" in Path(output(done[1], "report")).read_text()
        back = ["roll_back_wf", "--place", "s3://bucket/models", "--name", first]
        pyflyte_process(PROMOTE, *back, environment=environment)
        entry = champion(server, "digits")
        assert (entry.version, entry.run_id) == ("1", run.info.run_id)
        assert entry.source == f"s3://bucket/models/versions/{first}"


@pytest.mark.slow
def test_a_promotion_under_flyte_2(server, tmp_path, monkeypatch):
    hp = json.dumps({"dataset": "digits", "epochs": 1, "train_fraction": 0.1})
    promotion = json.dumps({"registered_model": "nightly"})
    with object_storage() as storage:
        for name, value in {**storage.environment, ADDRESS: server.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
        given = ("--place", "s3://bucket/models", "--hp", hp, "--promotion", promotion)
        assert "models:/nightly/1" in flyte_run(*given, file="flyte2/promote.py")
    entry = champion(server, "nightly")
    assert entry.source.startswith("s3://bucket/models/versions/")
