"""The model card: a model's training, measures, inputs and outputs, in Markdown and as a page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flyte_ddp.engine.job import Measured, Subject
from flyte_ddp.export.settings import FILES, ExportJob, Written
from flyte_ddp.report.article import Section, article, document
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.report.words import capitalised, format_measure, in_words


@dataclass(frozen=True)
class Card:
    """A model card as Markdown, and as the fragment of a page, for a Deck."""

    title: str
    markdown: str
    fragment: str

    @property
    def page(self) -> str:
        return document(self.title, self.fragment)


def make_card(asked: ExportJob, written: Written, formats: dict[str, Measured]) -> Card:
    """Build the model card of an export, as Markdown and as HTML; nothing is written.

    The card has the measures of each exported file beside those of the weights.

    Args:
        asked: the export, with the measures that the training reported.
        written: the model's facts, and the measures of the weights.
        formats: the measures of each exported file, by the name of its format, such as "onnx".
    """
    subject = asked.job
    name = str(written.metadata.facts.get("network") or subject.recipe.rpartition(":")[2])
    title = f"{name}, trained on {subject.dataset}"
    measures = written.measured.measures
    headline = written.metadata.headline
    score = format_measure(headline, measures[headline], written.measured.percent)
    subtitle = f"{capitalised(in_words(headline))} {score} on the test split"
    sections = [
        model_section(subject, written),
        measures_section(asked, written, formats),
        *([classes_section(written)] if written.classes else []),
        inputs_section(written),
        *([preprocessing_section(written)] if written.before else []),
        loading_section(
            written,
            tuple(formats),
            needs_data=bool(subject.data) and not subject.description,
            needs_init=bool(subject.init and subject.init.is_dir()),
        ),
        Section("Where it was exported", lines=list(surroundings().items())),
    ]
    return Card(title, markdown(title, subtitle, sections), article(title, subtitle, sections))


def model_section(subject: Subject, written: Written) -> Section:
    metadata = written.metadata
    description = subject.description
    data = [("Data", subject.dataset)]
    if subject.data_digest:
        data.append(("Digest of the data (SHA-256)", subject.data_digest))
    if description:
        data.append(("Training samples", f"{description.train_samples:,}"))
        data += list(description.remarks.items())
    trained = [(f"Training: {name.replace('_', ' ')}", str(value)) for name, value in metadata.training.items()]
    return Section(
        "Model",
        lines=[
            ("Recipe", metadata.recipe),
            ("Parameters", f"{written.parameters:,}"),
            *data,
            ("Test samples", f"{written.measured.samples:,} {written.samples}"),
            *trained,
            ("Settings", ", ".join(f"{name} {value}" for name, value in metadata.settings.items() if value != "")),
        ],
    )


def measures_section(asked: ExportJob, written: Written, formats: dict[str, Measured]) -> Section:
    options = asked.options
    columns = {"as reported": asked.reported} if asked.reported else {}
    columns["weights"] = written.measured.measures
    columns |= {FILES[name]: one.measures for name, one in formats.items()}
    return Section(
        "Measures",
        [
            "On the test split, in float32, for the weights and for each file, opened in a process of its own. "
            f"The files had to reproduce the measures of the weights within {options.tolerance:g}"
            + (f", and the weights the reported ones within {options.reported_tolerance:g}." if asked.reported else ".")
        ],
        caption="Measures on the test split",
        heads=("Measure", *columns),
        lines=[
            (name, *(f"{column[name]:.6g}" if name in column else "-" for column in columns.values()))
            for name in written.measured.measures
        ],
    )


def classes_section(written: Written) -> Section:
    return Section(
        "By class",
        caption="Share of each class's test samples that is predicted correctly",
        heads=("Class", "Accuracy"),
        lines=[(name, f"{accuracy:.2%}") for name, accuracy in written.classes.items()],
    )


def inputs_section(written: Written) -> Section:
    facts = written.metadata.facts
    lines = [("Input", str(spec)) for spec in written.inputs] + [("Output", str(spec)) for spec in written.outputs]
    if "mean" in facts and "std" in facts:
        mean, std = (", ".join(f"{value:g}" for value in facts[name]) for name in ("mean", "std"))
        lines.append(("Normalisation", f"(pixels / 255 - mean) / std by channel; mean {mean}; std {std}"))
    if "classes" in facts:
        lines.append(("Classes", ", ".join(map(str, facts["classes"]))))
    return Section("Inputs and outputs", ["batch is any number of samples."], lines=lines)


def preprocessing_section(written: Written) -> Section:
    """Return the card's section "Around the network", which lists the source of the recipe's forward (written.before).

    Call this function only if written.before is not empty.
    """
    source = enumerate(written.before.splitlines(), start=1)
    return Section(
        "Around the network",
        ["The files contain only the network. This is what the recipe does before and after it:"],
        # HTML keeps no-break spaces as indents
        lines=[(str(number), line.replace("    ", 4 * "\N{NO-BREAK SPACE}")) for number, line in source],
    )


def loading_section(written: Written, formats: Sequence[str], needs_data: bool, needs_init: bool) -> Section:
    """Return the card's section that shows how to load each file in one line of code.

    Args:
        written: the model.
        formats: the formats of the files, each one of "safetensors", "pt2", "pretrained" and "onnx".
        needs_data: whether building the network may need the training's data. The line for safetensors then passes
            data_path.
        needs_init: whether building the network needs the folder that the training was given as init. The line for
            safetensors then passes init_path.
    """
    names = [spec.name for spec in written.inputs]
    needed = (", data_path=DATA" if needs_data else "") + (", init_path=INIT" if needs_init else "")
    by_name = ", ".join(f'"{name}": {name}' for name in names)
    how = {
        "safetensors": f'flyte_ddp.recipes.models.load_model("model.safetensors"{needed})',
        "pt2": f'torch.export.load("model.pt2").module()({written.call})',
        "pretrained": 'from_pretrained("pretrained") of its class, or PeftModel.from_pretrained(base, "pretrained")',
        "onnx": f'onnxruntime.InferenceSession("model.onnx").run(None, {{{by_name}}})',
    }
    return Section(
        "How to load it",
        ["model.json has the same facts for programs. torch takes tensors, ONNX Runtime NumPy arrays."],
        lines=[(FILES[name], how[name]) for name in formats],
    )


def markdown(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    parts = [f"# {_escaped(title)}", _escaped(subtitle)]
    for section in sections:
        parts += [f"## {_escaped(section.title)}", *map(_escaped, section.paragraphs)]
        if section.lines:
            parts.append("\n".join(_table(section.heads or ("", ""), section.lines)))
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    head, *others = [f"| {' | '.join(map(_escaped, row))} |" for row in (heads, *lines)]
    return [head, f"| {' | '.join(['---'] * len(heads))} |", *others]


def _escaped(text: str) -> str:
    """Return the text on one line, escaped for Markdown."""
    shown = re.sub(r"[ \t\r\n]+", " ", text)
    for character in "\\`*_{}[]<>|#":
        shown = shown.replace(character, f"\\{character}")
    return shown
