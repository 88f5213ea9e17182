"""The nodes that a training keeps away from, because their hardware has failed or is odd.

They are in a file beside the checkpoint in the platform's storage. Nothing is written or read unless DDP_AVOID_HOURS is
set. Pods that are made anew get a node affinity. The pods of a plain retry can go anywhere: there a rank leaves such a
node at most once.
"""

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flyte_ddp.attempt.checkpoints import ELSEWHERE
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.pod import RETRIES_VARIABLE
from flyte_ddp.attempt.registration import NAME, registration
from flyte_ddp.attempt.requested import HOURS_VARIABLE
from flyte_ddp.attempt.restarts import Start
from flyte_ddp.attempt.storage_folder import StorageFolder, retry_storage
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.errors import RecoverableError
from flyte_ddp.events import Event, OddNodes
from flyte_ddp.launch.environment import NODE_VARIABLE, is_first_rank
from flyte_ddp.launch.failures import RankError, how_to_avoid
from flyte_ddp.report.background import one_line
from flyte_ddp.report.console import say, warn
from flyte_ddp.text import explain_error

FILE, FORMAT = "avoided-nodes.json", 1
NOT_STORED = "the nodes to avoid are not in the storage"
LABEL = "kubernetes.io/hostname"  # of a node; the same as its name, except on clusters that choose otherwise


@dataclass(frozen=True)
class AvoidedNode:
    """A node to keep away from.

    Attributes:
        node: the name of the node.
        reason: what is wrong with its hardware.
        time: when that was found, in seconds since 1970.
        execution: the name of the execution that found it.
        url: the folder in the storage where pods mark that they have left the node.
    """

    node: str
    reason: str
    time: float
    execution: str
    url: str


def is_avoiding(platform: Platform) -> bool:
    """Return whether this attempt keeps away from nodes: on a cluster, with DDP_AVOID_HOURS."""
    return HOURS_VARIABLE in os.environ and not platform.is_local() and registration().avoid_hours > 0


# --- the file ---


def find_nodes(platform: Platform, *urls: str, limit: float | None = None) -> list[AvoidedNode]:
    """Return the nodes to avoid, from the first list of them in these folders; [] if no folder has a list.

    Entries older than `limit` are left out. A folder without a list may have a file ELSEWHERE, which names the folder
    of an earlier attempt. That folder is then searched before the next URL. A damaged list counts as none, with a
    warning. If the storage still fails after several tries, the function warns and returns [].

    Args:
        platform: the platform.
        urls: the URLs of folders of checkpoints in the storage; an empty text is skipped.
        limit: the age in hours at which an entry is left out; None means DDP_AVOID_HOURS.
    """
    with _only_warning("it is not known which nodes to avoid"):
        return _read(platform, urls, registration().avoid_hours if limit is None else limit)
    return []


def _read(platform: Platform, urls: Sequence[str], hours: float) -> list[AvoidedNode]:
    """Do as find_nodes does, but raise RecoverableError if the storage still fails after several tries."""
    searched: set[str] = set()
    for url in urls:
        while url and url not in searched:
            searched.add(url)
            found = _parse(_fetch(platform, url, FILE), f"{url}/{FILE}")
            if found is not None:
                # The clock that wrote the time may be ahead of this one, but not by as much as the limit
                return [one for one in found if abs(time.time() - one.time) <= hours * 3600]
            url = _fetch(platform, url, ELSEWHERE).rstrip("/")
    return []


def _fetch(platform: Platform, url: str, name: str) -> str:
    return retry_storage(f"cannot read {url}/{name}", lambda: StorageFolder(platform, url).fetch_text(name))


def _parse(text: str, place: str) -> list[AvoidedNode] | None:
    """Return the nodes in the text of a file avoided-nodes.json, however long ago they were listed.

    An empty text, which means that there is no file, gives None. A malformed text also gives None, with a warning.

    Args:
        text: the text.
        place: the URL of the file, for the warning.
    """
    if not text:
        return None
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']} is not {FORMAT}")
        found = [AvoidedNode(**one) for one in content["nodes"]]
        if not all(re.fullmatch(NAME, one.node) and one.time > 0 for one in found):
            raise ValueError("no node can have such a name, or time")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        warn(f"{place} is ignored, because it is no list of nodes to avoid: {explain_error(error)}")
        return None
    return found


def _write(platform: Platform, nodes: Collection[AvoidedNode]) -> None:
    """Replace the list of nodes to avoid beside this attempt's checkpoint in the storage. Raises OSError."""
    content = {"format": FORMAT, "nodes": [dataclasses.asdict(one) for one in nodes]}
    StorageFolder(platform, platform.checkpoint_url()).put_text(json.dumps(content), FILE)


def add_nodes(platform: Platform, names: Sequence[str], reason: str) -> None:
    """Add nodes to the list of nodes to avoid, beside this attempt's checkpoint in the storage.

    If this attempt has no list yet, its list begins as a copy of the previous attempt's. A node that is listed already
    gets the new reason and time. Entries older than DDP_AVOID_HOURS are dropped. A line on the console names the nodes.
    Nothing happens in a local run or without DDP_AVOID_HOURS. If the list cannot be read or written, it stays as it is,
    with a warning.

    Args:
        platform: the platform.
        names: the names of the nodes; if there are none, nothing happens.
        reason: what is wrong with their hardware.
    """
    if not names or not is_avoiding(platform):
        return
    own = platform.checkpoint_url()
    hours = registration().avoid_hours
    execution, _ = platform.execution()
    with _only_warning(NOT_STORED):
        listed = {one.node: one for one in _read(platform, (own, platform.previous_checkpoint_url()), hours)}
        for name in names:
            url = listed[name].url if name in listed else own
            listed[name] = AvoidedNode(name, one_line(Exception(reason)), time.time(), execution, url)
        _write(platform, listed.values())
        say(f"Avoided for {hours} hours, as {HOURS_VARIABLE} says: {', '.join(names)}")


@contextmanager
def _only_warning(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each storage has errors of its own; training goes on without the file
        warn(f"{problem}: {explain_error(error)}")


# --- an attempt ---


def keep_away(platform: Platform, resume_from: str = "") -> dict[str, str]:
    """Raise an error if this pod must leave its node; otherwise return warnings about the nodes to avoid.

    Call it before a training starts: in the process that starts the ranks, or on many nodes in each rank.

    The pod must leave if its node is to be avoided, the task has retries left, and no pod of this execution has left
    the node before. Pods mark in the storage that they leave. The list of nodes to avoid comes from the first of these
    folders that has one: this attempt's checkpoint folder, the previous attempt's, resume_from. Rank 0, or the process
    that starts the ranks, copies the list to this attempt's folder. If the storage fails, there is a warning, and the
    pod stays.

    Args:
        platform: the platform.
        resume_from: the folder of an earlier execution's checkpoint; empty is none.

    Returns:
        A warning for each node to avoid, by the node's name. Show it if a rank trains there. The dict is empty in a
        local run, without DDP_AVOID_HOURS, and, with a warning, if the pod does not know its node's name.

    Raises:
        RecoverableError: This pod must leave its node. The next attempt may come to another one.
    """
    if not is_avoiding(platform):
        return {}
    node = os.environ.get(NODE_VARIABLE, "")
    if not node:
        warn(f"{HOURS_VARIABLE} has no effect, because the pod's template does not set {NODE_VARIABLE}")
        return {}
    own, previous = platform.checkpoint_url(), platform.previous_checkpoint_url()
    nodes = {one.node: one for one in find_nodes(platform, own, previous, resume_from.rstrip("/"))}
    if nodes and is_first_rank():
        with _only_warning(NOT_STORED):
            _write(platform, nodes.values())  # the next attempt may know this one's folder alone
    if node in nodes and _try_to_leave(platform, nodes[node]):
        raise RecoverableError(f"left {_describe(nodes[node])}")
    return {name: f"trains on {_describe(one)}" for name, one in nodes.items()}


def _describe(node: AvoidedNode) -> str:
    return f"node {node.node}, which {HOURS_VARIABLE} avoids ({node.reason}): {how_to_avoid([node.node])}"


def _try_to_leave(platform: Platform, node: AvoidedNode) -> bool:
    """Return whether this pod can leave its node; if it can, mark in the storage that it does.

    The pod can leave if the task has retries left, and if no pod of this execution has marked that it left the node. If
    the storage cannot be read or written to, there is a warning, and the result is False.
    """
    if platform.earlier_attempts() >= int(os.environ.get(RETRIES_VARIABLE, "0")):
        return False
    with _only_warning(f"node {node.node} is not left"):
        if not _fetch(platform, node.url, _name_mark(platform, node)):
            mark_left(platform, node)
            return True
    return False


def mark_left(platform: Platform, node: AvoidedNode) -> None:
    """Mark in the storage that this execution has left the node, so that no further pod leaves it. Raises OSError."""
    StorageFolder(platform, node.url).put_text(node.reason or "-", _name_mark(platform, node))


def _name_mark(platform: Platform, node: AvoidedNode) -> str:
    return f"left-{node.node}-{platform.execution()[0].rpartition('/')[2]}"  # each pod writes the same file


@contextmanager
def listing_bad_nodes(platform: Platform) -> Iterator[None]:
    """Add nodes to the list of nodes to avoid if a RankError ends the block and blames their hardware.

    A context manager; it raises the error again. Rank 0, or the process that starts the ranks, adds all nodes that the
    error blames. Any other rank adds its own node, and only if the error blames that node alone. Nothing is added
    locally or without DDP_AVOID_HOURS. A failure of the storage is only a warning.
    """
    try:
        yield
    except RankError as error:
        failure = error.failure
        if is_first_rank() or failure.bad_nodes == (failure.host,):
            add_nodes(platform, failure.bad_nodes, failure.message)
        raise


def with_bad_nodes_listed(platform: Platform, start: Start) -> Start:
    """Return a function like `start` that also adds nodes with bad hardware to the list of nodes to avoid.

    These are the nodes that an event OddNodes names during the training, and those that a RankError blames if it ends
    the training. The RankError is raised again. In a local run, or without DDP_AVOID_HOURS, `start` itself is returned.

    Args:
        platform: the platform.
        start: start(job, on_event) runs the ranks, and returns their results by rank.
    """

    def start_noting(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
        def note(event: Event) -> None:
            if isinstance(event, OddNodes):
                add_nodes(platform, event.nodes, event.reason)
            on_event(event)

        with listing_bad_nodes(platform):
            return start(job, note)

    return start_noting if is_avoiding(platform) else start


# --- pods ---


def set_node_variable(spec: Any, container: str) -> None:
    """Have Kubernetes put the name of the pod's node into a container's environment variable DDP_NODE_NAME.

    Args:
        spec: a V1PodSpec, which is changed.
        container: the name of the container, which is added if the spec lacks it.
    """
    from kubernetes import client  # takes 0.4 s

    spec.containers = spec.containers or []
    found = [one for one in spec.containers if one.name == container]
    if not found:
        found = [client.V1Container(name=container)]
        spec.containers += found
    source = client.V1EnvVarSource(field_ref=client.V1ObjectFieldSelector(field_path="spec.nodeName"))
    found[0].env = [*(found[0].env or []), client.V1EnvVar(name=NODE_VARIABLE, value_from=source)]


def exclude_nodes(spec: Any, nodes: Sequence[str]) -> None:
    """Forbid a pod to run on these nodes, and keep the other rules of its affinity.

    Kubernetes recognises the nodes by their label kubernetes.io/hostname.

    Args:
        spec: a V1PodSpec, whose affinity is changed.
        nodes: the names of the nodes; if there are none, nothing changes.
    """
    from kubernetes import client

    if not nodes:
        return
    spec.affinity = spec.affinity or client.V1Affinity()
    spec.affinity.node_affinity = spec.affinity.node_affinity or client.V1NodeAffinity()
    required = spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
    if required is None:
        required = client.V1NodeSelector(node_selector_terms=[client.V1NodeSelectorTerm()])
        spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution = required
    rule = client.V1NodeSelectorRequirement(key=LABEL, operator="NotIn", values=[*nodes])
    for term in required.node_selector_terms:  # a node needs to fit one of them
        term.match_expressions = [*(term.match_expressions or []), rule]
