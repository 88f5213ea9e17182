"""The promoted model in MLflow's model registry: an entry that points to its place, and an alias that goes with the
promoted version. By a client of its own: MLflow's global run and address are the user's.
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
from flyte_ddp.report.mlflow_run import ADDRESS, new_client, run_of, text_of

ALIAS = "champion"  # as MLflow's own documentation calls it
VERSION = "flyte_ddp.version"  # a tag: the version's name in its place
TAGS = ("sha256", "dataset", "measure", "score", "run")  # facts of a version that are tags of its entry, too
SECONDS = 30.0  # for all requests together


def register(place: Place, version: str, name: str) -> str:
    """Has the registered model's alias point to the promoted version; returns the entry, models:/NAME/NUMBER.

    Never fails: what has been promoted stays so. If the server refuses, hangs or is not there, a warning says why, and
    how to do it later, and the entry is empty.
    """
    entry = [""]
    problem = [f"no answer within {SECONDS:g} s"]

    def work() -> None:
        try:
            entry[0] = f"models:/{name}/{_register(place, version, name)}"
            problem[0] = ""
        except Exception as error:  # MLflow's own, the network's, and those of the place
            problem[0] = one_line(error) or type(error).__name__

    # In this one's context, in which the platform knows its storage; a daemon does not keep the process from ending
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
    """The number of the version's entry, which is made if there is none."""
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
    if place.read().version == version:  # else another one has been promoted meanwhile, which sees to the alias
        client.set_registered_model_alias(name, ALIAS, entry.version)
    return str(entry.version)


def _create(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by another promotion
            raise


def _entry(client: Any, name: str, source: str, version: str, facts: dict[str, Any]) -> Any:
    """A new entry, with a link to the run of the version's training, if that is known."""
    run = run_of(client, facts.get("metadata", ""))
    tags = {VERSION: version, **{tag: text_of(facts[tag]) for tag in TAGS if tag in facts}}
    return client.create_model_version(
        name, source, run_id=run.info.run_id if run else None, tags=tags, await_creation_for=None
    )
