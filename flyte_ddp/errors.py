"""Errors, by what should happen next: fix the input, try again, or give up."""

from collections.abc import Collection

from flyte_ddp.text import counted, masked

try:
    from click import ClickException
except ModuleNotFoundError:  # a rank, or a program that loads a model, may have only torch and this library

    class ClickException(Exception):  # type: ignore[no-redef]
        def __init__(self, message: str):
            super().__init__(message)
            self.message = message


def not_installed(packages: str, extra: str) -> str:
    """Return the end of a message about missing packages: the command that installs this library's extra."""
    return f'{packages}, which is not installed: pip install "flyte-ddp-training[{extra}]"'


class InputError(ClickException, ValueError):
    """An error that the user can fix. The message names the value, the rule and the remedy.

    Python callers can catch it as a ValueError. As a ClickException it ends `pyflyte run` with a short message and exit
    status 2, without usage instructions. The message never shows passwords in URLs.
    """

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(masked(message))


class ReportedError(ClickException, RuntimeError):
    """A failure whose message says everything: `pyflyte run` prints the message without the parent's traceback.

    The message never shows passwords in URLs.
    """

    def __init__(self, message: str):
        super().__init__(masked(message))


class RecoverableError(ReportedError):
    """A failure that another attempt may not have: a lost peer, a killed rank, an unreachable mirror.

    Attributes:
        bad_hosts: the hosts whose hardware is surely to blame; mostly none.
    """

    def __init__(self, message: str, bad_hosts: Collection[str] = ()):
        super().__init__(message)
        self.bad_hosts = tuple(bad_hosts)


class DownloadError(RecoverableError):
    """A file that was damaged or not delivered. With several mirrors, the message gives each mirror's reason."""


class DataError(ReportedError):
    """A prepared dataset that is damaged, incomplete or of another format.

    Args:
        problem: what is wrong.
        remedy: what a user can do about the problem in a local run.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = masked(problem)


class StopRequested(Exception):
    """A request to stop, raised on all ranks at the same step, after a checkpoint.

    Args:
        epoch: the epoch of the next step, from 0.
        step: the next step within that epoch, from 0.
        is_evaluating: whether an evaluation comes before that step.
    """

    def __init__(self, epoch: int, step: int, is_evaluating: bool = False):
        where = f"before epoch {epoch + 1}, step {step + 1}"
        if is_evaluating and (epoch or step):
            after = f"epoch {epoch + 1}, step {step}" if step else f"epoch {epoch}"
            where = f"in the evaluation after {after}, with which a resume begins"
        super().__init__(f"stopped on request {where}")
        self.epoch = epoch
        self.step = step


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight that became NaN or infinite, so that training cannot continue."""

    @classmethod
    def in_step(cls, what: str, ranks: "list[int]", epoch: int, step: int) -> "NonFiniteError":
        """Build the error for a value that is not finite in a training step.

        Args:
            what: which value is not finite: "loss", "gradient" or "a weight".
            ranks: the ranks on which the value is not finite.
            epoch: the number of the epoch, from 0.
            step: the number of the step within the epoch, from 0.
        """
        causes = {
            "loss": "broken values in the data",
            "gradient": "an operation whose derivative is not finite everywhere, such as a square root at 0",
            "a weight": "a step by a gradient that is not finite, such as that of a square root at 0",
        }
        return cls(
            f"{what} is not finite in epoch {epoch + 1}, step {step + 1}, on rank {', '.join(map(str, ranks))}: "
            f"lower learning_rate, or look for {causes[what]}; the last good checkpoint, if there is one, is kept"
        )

    @classmethod
    def in_evaluation(cls, value: float, split: str, epochs: float) -> "NonFiniteError":
        """Build the error for an evaluation whose loss on the whole split is NaN or infinite.

        Args:
            value: the loss.
            split: the name of the split.
            epochs: how many epochs had been trained, such as 1.25.
        """
        return cls(
            f"the loss on the {split} split is {value:g} after epoch {counted(epochs)}, although training had finite "
            f"losses: lower learning_rate, or look for broken values in the {split} split, or for what a network does "
            "in evaluation alone, such as batch norm with running statistics that are not finite; the last good "
            "checkpoint, if there is one, is kept"
        )


class WrongBitsError(RecoverableError):
    """Bits of a rank that differ from another rank's, or from the same rank's before.

    Another attempt, on other hosts, continues from the last checkpoint.
    """

    def __init__(self, epoch: int, step: int, reason: str, bad_hosts: Collection[str] = ()):
        super().__init__(f"in epoch {epoch + 1}, step {step + 1}, {reason}", bad_hosts)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message completes the sentence "the checkpoint …"."""


class OtherTrainingError(CheckpointError):
    """A checkpoint of another training, or another version, for which the checkpoint may still be of use."""
