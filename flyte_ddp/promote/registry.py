"""The promoted model in MLflow's model registry.

An entry points to the model's place, and an alias follows the promoted version. The registry has a client of its own,
because MLflow's global run and address belong to the user.
"""

import contextvars
import os
import threading
from importlib.util import find_spec
from typing import Any

from flyte_ddp.errors import not_installed
from flyte_ddp.promote.place import Place
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say, warn
from flyte_ddp.report.mlflow_run import ADDRESS, find_run, new_client, to_text

ALIAS = "champion"  # MLflow's own documentation has this name
VERSION = "flyte_ddp.version"  # the tag with the version's name in its place
TAGS = ("sha256", "dataset", "measure", "score", "run")  # facts of a version that are tags of its entry, too
SECONDS = 30.0  # the time limit for all requests together


def register(place: Place, version: str, name: str) -> str:
    """Register a promoted version in MLflow; if it is still promoted, set the registered model's alias to it.

    Errors are not raised. A failure, or no answer within SECONDS, is printed as a warning. After these seconds the
    requests go on in the background, so the version may still be registered later.

    Args:
        place: the place of the promoted models.
        version: the promoted version.
        name: the name of the registered model, which is created if there is none.

    Returns:
        The version's entry in MLflow, "models:/NAME/NUMBER", whether or not the alias was set; "" after a failure or
        without an answer.
    """
    entry = [""]
    promoted = [""]
    problem = [f"no answer within {SECONDS:g} s"]

    def work() -> None:
        try:
            number, promoted[0] = _register(place, version, name)
            entry[0] = f"models:/{name}/{number}"
            problem[0] = ""
        except Exception as error:  # MLflow, the network and the place have errors of their own
            problem[0] = one_line(error) or type(error).__name__

    # Only in this thread's context does the platform know its storage. A daemon thread does not keep the process alive.
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(work,), name="MLflow's registry", daemon=True)
    thread.start()
    thread.join(SECONDS)
    if problem[0]:
        warn(
            f"{version} is promoted, but not registered in MLflow as {name}: {problem[0]}. Once that is mended, roll "
            f"back to {version} in {place.root}, which registers it"
        )
        return ""
    if promoted[0] == version:
        say(f"MLflow: {entry[0]} is {name}@{ALIAS}")
    else:
        say(f"MLflow: {entry[0]} is registered, but not as {name}@{ALIAS}: {promoted[0]} has been promoted since")
    return entry[0]


def _register(place: Place, version: str, name: str) -> tuple[str, str]:
    """Find or create the entry of a version in MLflow's registry, and set the registered model's alias.

    A registered model that does not exist is created first. The alias is set to the version that is promoted now.

    Args:
        place: the place of the promoted models.
        version: the name of a version in the place.
        name: the name of the registered model.

    Returns:
        The entry's number, and the version that is promoted now.

    Raises:
        RuntimeError: MLflow is not installed, or no address of a server is set.
        Exception: any error of MLflow, the network or the place.
    """
    if find_spec("mlflow") is None:
        raise RuntimeError(f"it needs {not_installed('mlflow-skinny', 'mlflow')}")
    if not (address := os.environ.get(ADDRESS)):
        raise RuntimeError(f"it needs a server: set {ADDRESS}, such as to http://mlflow.example.org:5000")
    client = new_client(address)
    facts = place.facts(version)
    if not client.search_registered_models(f"name = '{name}'", max_results=1):
        _create(client, name)
    entry = _find(client, place, name, version) or _entry(client, name, _source(place, version), version, facts)
    return str(entry.version), _set_alias(client, place, name)


def _source(place: Place, version: str) -> str:
    return f"{place.root}/versions/{version}"


def _find(client: Any, place: Place, name: str, version: str) -> Any:
    """Return the entry whose tag names the version, and whose source is the version's folder in the place, or None."""
    known = client.search_model_versions(f"name = '{name}' and tags.`{VERSION}` = '{version}'")
    return next((one for one in known if one.source == _source(place, version)), None)


def _set_alias(client: Any, place: Place, name: str) -> str:
    """Set the registered model's alias "champion" to the entry of the version that is promoted now.

    If another version is promoted meanwhile, the alias is set again. If the promoted version has no entry yet, the
    alias stays as it is: that version's own promotion sets it.

    Returns:
        The version that is promoted now. Errors of MLflow and the place are raised as they are.
    """
    while True:
        version = place.read().version
        if entry := _find(client, place, name, version):
            client.set_registered_model_alias(name, ALIAS, entry.version)
        if place.read().version == version:
            return version


def _create(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another promotion may have created the model
            raise


def _entry(client: Any, name: str, source: str, version: str, facts: dict[str, Any]) -> Any:
    """Create an entry, with a link to the run of the version's training if the run is known."""
    run = find_run(client, facts.get("metadata", ""))
    tags = {VERSION: version, **{tag: to_text(facts[tag]) for tag in TAGS if tag in facts}}
    return client.create_model_version(
        name, source, run_id=run.info.run_id if run else None, tags=tags, await_creation_for=None
    )
