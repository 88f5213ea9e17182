"""The outcome of a promotion or roll-back as a page."""

from collections.abc import Sequence

from flyte_ddp.engine.job import Measured
from flyte_ddp.promote.job import Verdict
from flyte_ddp.promote.place import Pointer
from flyte_ddp.report.article import Section, article
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.report.words import capitalised, in_words, written

MOST_EVENTS = 50


def outcome(verdict: Verdict, percent: Sequence[str]) -> str:
    """Return both scores and the decision, on one line."""
    candidate = written(verdict.measure, verdict.candidate, percent)
    if verdict.current is None:
        return f"promoted with {in_words(verdict.measure)} {candidate}, as the first model"
    current = written(verdict.measure, verdict.current, percent)
    by = f" by more than {verdict.margin:g}" if verdict.margin else ""
    decision = "promoted" if verdict.is_better else "not promoted"
    needed = "higher" if verdict.higher else "lower"
    return f"{decision}: {in_words(verdict.measure)} {candidate}, before {current}; had to be {needed}{by}"


def promotion_page(
    title: str,
    verdict: Verdict,
    models: Sequence[tuple[str, Measured]],
    pointer: Pointer,
    facts: Sequence[Sequence[str]],
) -> str:
    """Return the page of a promotion.

    Args:
        title: the page's title.
        verdict: the decision.
        models: the candidate and, if there is one, the model that was promoted before, each with a name.
        pointer: the promoted version and the history.
        facts: labels and texts of the set-up.
    """
    first = models[0][1]
    lines = [
        (capitalised(in_words(name)), *(written(name, one.measures[name], one.percent) for _, one in models))
        for name in first.measures
    ]
    both = "Both on the same" if len(models) > 1 else "On the"
    text = f"{both} {first.samples:,} samples of the test split, in float32, by the candidate's measures."
    caution = "Models chosen repeatedly on one split look better on it than they are: quote their measures on another."
    measures = Section("Scores", [text, caution], heads=("Measure", *(name for name, _ in models)), lines=lines)
    setup = Section("Set-up", caption="Inputs and environment", lines=[*facts, *surroundings().items()])
    return article(title, capitalised(outcome(verdict, first.percent)), [measures, history(pointer), setup])


def history(pointer: Pointer) -> Section:
    lines: list[tuple[str, ...]] = [(event.time, event.how, event.name) for event in reversed(pointer.history)]
    left_out = f", the last {MOST_EVENTS} of {len(lines):,}" if len(lines) > MOST_EVENTS else ""
    if not lines:
        return Section("History", ["Nothing has been promoted yet."])
    heads = ("Time (UTC)", "", "Version")
    return Section("History", caption=f"Newest first{left_out}", heads=heads, lines=lines[:MOST_EVENTS])
