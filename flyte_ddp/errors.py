"""Errors by what should happen next: fix the input, try again, or give up."""

from flyte_ddp.text import counted, masked

try:
    from click import ClickException
except ModuleNotFoundError:  # a rank, or a model that is loaded, may have nothing but torch and this library

    class ClickException(Exception):  # type: ignore[no-redef]
        def __init__(self, message: str):
            super().__init__(message)
            self.message = message


def not_installed(packages: str, extra: str) -> str:
    """How a message ends that says what is missing: with the command that installs an extra of this library."""
    return f'{packages}, which is not installed: pip install "flyte-ddp-training[{extra}]"'


class InputError(ClickException, ValueError):
    """The user can fix this: the message names the value, the rule and the remedy.

    A ValueError to Python callers; as a ClickException it ends `pyflyte run` with a short message and exit status 2,
    without a word on usage. Like that of a ReportedError, the message never shows the passwords of URLs.
    """

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(masked(message))


class ReportedError(ClickException, RuntimeError):
    """A failure whose message says everything: `pyflyte run` prints it without the parent's traceback."""

    def __init__(self, message: str):
        super().__init__(masked(message))


class RecoverableError(ReportedError):
    """Trying again can succeed: a lost peer, a killed rank, an unreachable mirror."""


class DownloadError(RecoverableError):
    """A file was not delivered, or damaged; where there are mirrors, the message lists each with its reason."""


class DataError(ReportedError):
    """A prepared dataset is damaged, incomplete or of another format; the remedy is that of a local run."""

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = masked(problem)


class StopRequested(Exception):
    """Raised on all ranks at the same step, after a checkpoint, because one of them was asked to stop."""

    def __init__(self, epoch: int, step: int):
        super().__init__(f"stopped on request before epoch {epoch + 1}, step {step + 1}")
        self.epoch = epoch
        self.step = step


class NonFiniteError(ArithmeticError):
    """Something became NaN or infinite, with which there is nothing to go on with, and nothing to compare."""

    @classmethod
    def in_step(cls, what: str, ranks: "list[int]", epoch: int, step: int) -> "NonFiniteError":
        """What: loss, gradient (both with the weights as before that step) or a weight."""
        causes = {
            "loss": "broken values in the data",
            "gradient": "an operation whose derivative is not finite everywhere, such as a square root at 0",
            "a weight": "a step of the module's own optimization by a gradient that is not finite",
        }
        return cls(
            f"{what} is not finite in epoch {epoch + 1}, step {step + 1}, on rank {', '.join(map(str, ranks))}: "
            f"lower learning_rate, or look for {causes[what]}; the last good checkpoint, if there is one, is kept"
        )

    @classmethod
    def in_evaluation(cls, value: float, split: str, epochs: float) -> "NonFiniteError":
        """The loss of a whole split, after so many epochs."""
        return cls(
            f"the loss on the {split} split is {value:g} after epoch {counted(epochs)}, although training had finite "
            f"losses: lower learning_rate, or look for broken values in the {split} split, or for what a network does "
            "in evaluation alone, such as batch norm with running statistics that are not finite; the last good "
            "checkpoint, if there is one, is kept"
        )


class WrongBitsError(RecoverableError):
    """Ranks have computed other bits than others, or than before; an attempt elsewhere goes on from the last
    checkpoint.
    """

    def __init__(self, epoch: int, step: int, reason: str):
        super().__init__(f"in epoch {epoch + 1}, step {step + 1}, {reason}")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message completes the sentence 'the checkpoint …'."""


class OtherTrainingError(CheckpointError):
    """It is another training's, or another version's, for which it may be of use."""
