"""The promotion of a candidate that is better than the promoted model, for any recipe, on any platform."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flyte_ddp.attempt.folders import run_folder, runs_dir, write_page
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.engine.job import Measured, Subject, make_job
from flyte_ddp.errors import InputError, RecoverableError, ReportedError
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.launch.launcher import run_alone
from flyte_ddp.model_files.model_metadata import read_metadata
from flyte_ddp.promote.job import PromotionOptions, Verdict, judge
from flyte_ddp.promote.place import PROMOTED, Place, Pointer, local_root, now, version_name
from flyte_ddp.promote.registry import register
from flyte_ddp.report.article import Section, article, setup_section
from flyte_ddp.report.console import Console, say, say_last
from flyte_ddp.report.words import capitalised, format_measure, in_words
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.whole_files import content_digest

MEASURE = "flyte_ddp.promote.rank:measure_models"


@dataclass(frozen=True)
class PromotionSummary:
    """The outcome in figures.

    Attributes:
        place: where models are promoted to.
        version: the promoted version, a folder in the place's folder versions.
        promoted: whether the promoted version is the candidate.
        measure: the measure that decided, on the test split.
        candidate: the measure of the candidate.
        current: the measure of the model that was promoted before; None if there was none.
        margin: the candidate had to be better by more than this.
        samples: number of samples of the test split.
        registered: the entry in MLflow's registry, models:/NAME/NUMBER; empty if none was asked for, or made.
    """

    place: str
    version: str
    promoted: bool
    measure: str
    candidate: float
    current: float | None
    margin: float
    samples: int
    registered: str


@dataclass(frozen=True)
class Promotion:
    """The outcome, and its files on this machine.

    Attributes:
        model: the promoted weights, either the candidate's or still the previous ones.
        report: an HTML page, which the platform shows, too.
    """

    summary: PromotionSummary
    model: Path
    report: Path


def writable_place(platform: Platform, place: str) -> Place:
    """Open the place that models are promoted to, and check that it can be read and, if it is new, written to.

    A training calls this function before it starts, so that a bad place is found early. A new place gets an empty
    current.json. Whether an existing place in object storage can still be written to is not tried.

    Args:
        platform: the platform.
        place: a URL. A local run also takes a folder, and has a default for "".

    Raises:
        InputError: the place is empty outside of a local run, is no valid URL, cannot be read, or written if it is new,
            or has a current.json of a newer program.
        ReportedError: current.json is damaged, or missing although there are versions. RecoverableError, which derives
            from this error, means that the storage fails.
    """
    models = open_place(platform, place)
    models.read()
    models.begin()
    return models


def open_place(platform: Platform, place: str) -> Place:
    """Return the place that models are promoted to, without reading or writing it.

    Args:
        platform: the platform.
        place: a URL. A local run also takes a folder, and has a default for "".

    Raises:
        InputError: The place is empty outside of a local run, or is no valid URL.
    """
    if platform.is_local():
        place = local_root(place or str(runs_dir().with_name("promoted")))
    if not place:
        raise InputError("place must be a URL of Flyte's storage, such as s3://bucket/mnist, got none: set it")
    return Place(platform, place)


def promote(platform: Platform, subject: Subject, model: Path, place: Place, options: PromotionOptions) -> Promotion:
    """Measure a candidate beside the promoted model, and promote it if it is better or if there is no promoted model.

    If another process promotes a model in the meantime, the candidate is compared again, with that model. If an earlier
    attempt of this run has already promoted the candidate, nothing is promoted again; only the comparison is repeated,
    for the report. The function also writes a page and prints the outcome. If options.registered_model is set, a
    promoted candidate is registered in MLflow; if this fails, a warning is printed.

    Args:
        platform: the platform.
        subject: the candidate's training.
        model: the candidate's weights.
        place: where models are promoted.
        options: the measure, the margin, the time limit and the name in MLflow.

    Returns:
        The figures, the weights that are promoted now (the candidate's or the previous ones), and the page.
        `summary.promoted` says whether they are the candidate's.

    Raises:
        InputError: the measure is unknown, the candidate's measure or loss is not finite, the promoted model has
            another recipe, or is for images of another kind, or the place cannot be used.
        ReportedError: the promoted version or current.json is damaged. If the storage fails, it is a RecoverableError.
        RankError: the process that measures has failed. On a cluster, all of these are raised as the platform's errors.
    """
    digest = content_digest(model)
    with run_folder(platform, f"{subject.dataset}-promotion") as folder:
        run = platform.execution()[0] or folder.name
        while True:
            pointer = place.read()
            before = place.facts(pointer.version) if pointer.version else {}
            done = (before.get("run"), before.get("sha256")) == (run, digest)  # the previous attempt has promoted it
            against = before["against"] if done else pointer.version
            models = measure_both(subject, model, place, against, folder / "before.pt", options)
            verdict = judge(models[0][1], models[1][1] if against else None, options)
            if done or not verdict.is_better:
                break
            version = version_name(digest)
            facts = describe_promotion(subject, verdict, against)
            metadata = read_metadata(model)
            facts |= {"registered_model": options.registered_model, "metadata": metadata.digest if metadata else ""}
            place.add(version, model, {"sha256": digest, "run": run, **facts})
            if written := place.point(pointer, version, PROMOTED):
                pointer = written  # another process may have promoted its own model since
                done = True
                break
            say(f"{place.root} has changed in the meantime: comparing with the model that is promoted now")
        promoted = model if done else folder / "before.pt"
        asked = options.registered_model if done else ""
        registered = register(place, pointer.version, asked) if asked else ""
        summary = PromotionSummary(
            place.root, pointer.version, done, verdict.measure, verdict.candidate, verdict.current, verdict.margin,
            models[0][1].samples, registered,
        )  # fmt: skip
        shown = [("Place", place.root), ("Version", pointer.version), ("Data", subject.dataset)]
        if asked:
            shown.append(("MLflow's registry", registered or f"not registered as {asked}: the log says why"))
        fragment = promotion_page(f"Promotion on {subject.dataset}", verdict, models, pointer, shown)
        report = write_page(platform, folder, "Promotion", fragment)
        say_last(f"{place.root}: {outcome(verdict, models[0][1].percent)}")
        return Promotion(summary, promoted, report)


def roll_back(place: Place, version: str) -> Pointer:
    """Promote an earlier version again, after verifying its weights, and return the new pointer.

    A current.json that is damaged or missing is replaced by a new one, without the history. If this version, or the
    version that it replaces, was promoted with a name for MLflow, the registered model's alias moves to this version,
    which gets an entry in MLflow if it has none. If MLflow fails, a warning is printed.

    Args:
        place: the place of the promoted models.
        version: the name of a version in the place.

    Raises:
        InputError: the place has no versions, or none of this name; it cannot be read or written; or a newer program
            has written its current.json.
        ReportedError: the version is damaged. RecoverableError, which derives from this error, means that the storage
            fails, perhaps after the version was promoted.
    """
    pointer = place.roll_back(version)
    names = []
    for change in pointer.history[-2:]:  # the version before, and this one
        try:
            names.append(place.facts(change.name).get("registered_model"))
        except RecoverableError:
            raise
        except ReportedError:  # a damaged version
            continue
    for name in filter(None, dict.fromkeys(names)):
        register(place, version, name)
    return pointer


def roll_back_or_show(platform: Platform, place: str, version: str) -> tuple[str, Path]:
    """Roll back to a version, or only show the history; in both cases print the versions, and write a page.

    Args:
        platform: the platform.
        place: a URL. A local run also takes a folder, and has a default for "".
        version: the name of the version; "" only shows the history.

    Returns:
        The version that is promoted now, "" if none is; and the path of the page.

    Raises:
        InputError: there is no such version, or the place cannot be used. (A place that does not exist yet has no
            history, which is no error.)
        ReportedError: the version to roll back to is damaged, or current.json if the history is shown. If the storage
            fails, it is a RecoverableError. On a cluster, the errors are raised as the platform's.
    """
    with run_folder(platform, "roll-back") as folder:
        models = open_place(platform, place)
        pointer = roll_back(models, version) if version else models.read()
        current = f"Promoted: {pointer.version or 'nothing yet'}"
        fragment = article(models.root, current, [history(pointer)])
        report = write_page(platform, folder, f"Models in {models.root}", fragment)
    say_last(f"{current}\nVersions: {', '.join(models.versions()) or 'none'}")
    return pointer.version, report


def measure_both(
    subject: Subject, model: Path, place: Place, against: str, copy: Path, options: PromotionOptions
) -> list[tuple[str, Measured]]:
    """Measure the candidate and the version that it is compared with, on the test split, in one new process.

    Args:
        subject: the candidate's training.
        model: the candidate's weights.
        place: the place of the promoted models.
        against: the name of the version; "" to measure only the candidate.
        copy: the file that the version's weights are copied to.
        options: the options, with the time limit.

    Returns:
        The name and the measures of each model: first "Candidate", then the version if there is one.

    Raises:
        InputError: the version has another recipe, is for images of another kind, or does not fit its network; the
            candidate's weights cannot be used; or the place cannot be read.
        ReportedError: the version is damaged, or this code does not know its settings. If the storage fails, it is a
            RecoverableError.
        RankError: the process has failed, or was silent for options.timeout_seconds.
    """
    jobs = {"Candidate": make_job(subject, model_path=model)}
    if against:
        settings = load_settings(subject, place, against, place.fetch(against, copy))
        other = replace(subject, settings=settings)
        jobs[against] = make_job(other, model_path=copy)
    asked = [*jobs.values()], f"version {against} in {place.root}"
    measured = run_alone(MEASURE, asked, options.timeout_seconds, Console(), choose_world("auto", 1, 1), subject.root)
    return list(zip(jobs, measured, strict=True))


def load_settings(subject: Subject, place: Place, version: str, facts: dict[str, Any]) -> TrainingSettings:
    """Return the settings that a promoted version was trained with, in the class of the candidate's settings.

    Args:
        subject: the candidate's training.
        place: the place of the promoted models, for messages.
        version: the name of the version, for messages.
        facts: the content of the version's version.json.

    Raises:
        InputError: the version has another recipe than the candidate; or the candidate has a prepared dataset, and the
            version has another dataset's name, other classes or images of another shape.
        ReportedError: this code does not know the version's settings.
    """
    own = describe_data(subject)
    saved = {name: facts.get(name) for name in own}
    if own != saved:
        name = next(name for name in own if own[name] != saved[name])
        raise InputError(
            f"{place.root} has a model whose {name} is {saved[name]}, got one with {own[name]}: choose another place"
        )
    try:
        settings: TrainingSettings = type(subject.settings).from_dict(facts["settings"])
        return settings
    except (InputError, KeyError) as error:
        raise ReportedError(f"version {version} in {place.root} has settings unknown to this code: {error}") from None


def describe_promotion(subject: Subject, verdict: Verdict, against: str) -> dict[str, Any]:
    """Return most of the content of version.json: time, settings, dataset, code, measure, scores and margin.

    The caller adds the weights' hash, the run, the hash of the metadata and the registered model.

    Args:
        subject: the candidate's training.
        verdict: the decision, with both scores.
        against: the version that the candidate was compared with; "" for the first model.
    """
    return {
        "time": now(),
        **describe_data(subject),
        "settings": asdict(subject.settings),
        "dataset": subject.dataset,
        "data_digest": subject.data_digest,
        "code": subject.code_version,
        "measure": verdict.measure,
        "score": verdict.candidate,
        "against": against,
        "score_of_against": verdict.current,
        "margin": verdict.margin,
    }


def describe_data(subject: Subject) -> dict[str, Any]:
    """Return what all models of a place have in common, as JSON values: the recipe and, for images, their kind."""
    facts: dict[str, Any] = {"recipe": subject.recipe}
    if about := subject.description:
        facts |= {"data": about.name, "classes": list(about.classes), "image_shape": list(about.image_shape)}
    return facts


# --- page ---

MOST_EVENTS = 50


def outcome(verdict: Verdict, percent: Sequence[str]) -> str:
    """Return a line with both scores and the decision. `percent` names the measures that are shown in per cent."""
    candidate = format_measure(verdict.measure, verdict.candidate, percent)
    if verdict.current is None:
        return f"promoted with {in_words(verdict.measure)} {candidate}, as the first model"
    current = format_measure(verdict.measure, verdict.current, percent)
    by = f" by more than {verdict.margin:g}" if verdict.margin else ""
    decision = "promoted" if verdict.is_better else "not promoted"
    needed = "higher" if verdict.higher else "lower"
    return f"{decision}: {in_words(verdict.measure)} {candidate}, before {current}; had to be {needed}{by}"


def promotion_page(
    title: str,
    verdict: Verdict,
    models: Sequence[tuple[str, Measured]],
    pointer: Pointer,
    facts: Sequence[tuple[str, str]],
) -> str:
    """Return the page of a promotion, as the HTML content of <body>.

    Args:
        title: the page's title.
        verdict: the decision.
        models: names and measures of the candidate and, after it, of the model that was promoted before, if there is
            one. That model must have all the candidate's measures.
        pointer: the promoted version and the history.
        facts: labels and texts of the set-up.
    """
    first = models[0][1]
    lines = [
        (capitalised(in_words(name)), *(format_measure(name, one.measures[name], one.percent) for _, one in models))
        for name in first.measures
    ]
    both = "Both on the same" if len(models) > 1 else "On the"
    text = f"{both} {first.samples:,} samples of the test split, in float32, by the candidate's measures."
    caution = "Models chosen repeatedly on one split look better on it than they are: quote their measures on another."
    measures = Section("Scores", [text, caution], heads=("Measure", *(name for name, _ in models)), lines=lines)
    subtitle = capitalised(outcome(verdict, first.percent))
    return article(title, subtitle, [measures, history(pointer), setup_section(*facts)])


def history(pointer: Pointer) -> Section:
    lines: list[tuple[str, ...]] = [(event.time, event.how, event.name) for event in reversed(pointer.history)]
    left_out = f", the last {MOST_EVENTS} of {len(lines):,}" if len(lines) > MOST_EVENTS else ""
    if not lines:
        return Section("History", ["Nothing has been promoted yet."])
    heads = ("Time (UTC)", "", "Version")
    return Section("History", caption=f"Newest first{left_out}", heads=heads, lines=lines[:MOST_EVENTS])
