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
    """Register a promoted version in MLflow, and set the registered model's alias to it if it is still promoted.

    Errors are not raised, because the promotion stands. A failure, or no answer within SECONDS, is printed as a
    warning. After these seconds the requests go on in the background, so the version may be registered later all the
    same.

    Args:
        place: the place of the promoted models.
        version: the promoted version.
        name: the name of the registered model, which is created if there is none.

    Returns:
        The version's entry, "models:/NAME/NUMBER", whether or not the alias was set; "" after a failure or without an
        answer.
    """
    entry = [""]
    problem = [f"no answer within {SECONDS:g} s"]

    def work() -> None:
        try:
            entry[0] = f"models:/{name}/{_register(place, version, name)}"
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
    say(f"MLflow: {entry[0]} is {name}@{ALIAS}")
    return entry[0]


def _register(place: Place, version: str, name: str) -> str:
    """Find or create the entry of a version in MLflow's registry, and return the entry's number.

    The entry is the one of this registered model whose tag names the version and whose source is the version's folder
    in the place. A registered model that does not exist is created first. The alias "champion" is set to the entry if
    the version is still the promoted one. Raises RuntimeError without MLflow or its address, and any error of MLflow.
    """
    if find_spec("mlflow") is None:
        raise RuntimeError(f"it needs {not_installed('mlflow-skinny', 'mlflow')}")
    if not (address := os.environ.get(ADDRESS)):
        raise RuntimeError(f"it needs a server: set {ADDRESS}, such as to http://mlflow.example.org:5000")
    client = new_client(address)
    facts = place.facts(version)
    if not client.search_registered_models(f"name = '{name}'", max_results=1):
        _create(client, name)
    source = f"{place.root}/versions/{version}"
    known = client.search_model_versions(f"name = '{name}' and tags.`{VERSION}` = '{version}'")
    entry = next((one for one in known if one.source == source), None) or _entry(client, name, source, version, facts)
    if place.read().version == version:  # a later promotion sets the alias itself
        client.set_registered_model_alias(name, ALIAS, entry.version)
    return str(entry.version)


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
