"""A training loop of the user's own keeps the promises of a recipe that docs/own-loop.md lists."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flyte_ddp.engine.checkpoints.checkpoint import read_checkpoint
from flyte_ddp.engine.own_loop.kept_parts import KeptParts, _fitting
from flyte_ddp.engine.own_loop.unsaved import Unsaved
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import CheckpointWritten, EpochChosen, EpochFinished, RanksTimed, RunStarted, StepLogged
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train
from flyte_ddp.watch.traces import read_trace
from tests.engine import own_loop_mistakes
from tests.small_training import TWO_HOSTS, Unplugged, first_and_slow, identical, relative_difference, unplug_at

LOOPS, MISTAKES = "tests.engine.own_loops:", "tests.engine.own_loop_mistakes:"
# Mistakes that one rank cannot make, or only after two whole epochs
OF_SEVERAL_RANKS = {
    "forgets_to_wrap", "evaluates_on_the_first_rank", "has_other_samples_on_each_rank",
    "evaluates_more_on_the_first_rank", "evaluates_on_the_first_rank_alone",
    "logs_more_on_the_last_rank", "skips_a_step_on_the_last_rank",
    "repeats_a_closure_on_the_first_rank", "leaves_the_steps_on_the_first_rank", "starts_the_ranks", "ends_the_ranks",
    "returns_on_the_last_rank", "unfreezes_what_was_wrapped", "averages_over_the_training_batches",
}  # fmt: skip
# Mistakes that show only once the loop has returned
WITHOUT_LINE = {"trains_without_a_loop", "ends_the_ranks", "takes_nothing", "returns_on_the_last_rank"}
SMALL = {"keep_checkpoint": False, "batch_size": 12, "epochs": 2, "log_interval": 1}  # seven steps an epoch


@pytest.fixture
def own(train):
    return lambda nproc=2, loop="train", **more: train(nproc, recipe=LOOPS + loop, **{**SMALL, **more})


@pytest.fixture
def mistaken(train):
    return lambda loop, nproc=2, **more: train(nproc, recipe=MISTAKES + loop, **{**SMALL, **more})


@pytest.fixture
def mistaken_here(request, small_data, tmp_path):
    """A training in this process, if one rank can make the mistake."""

    def run(loop):
        if loop in OF_SEVERAL_RANKS:
            request.getfixturevalue("mistaken")(loop)
        request.getfixturevalue("alone")
        settings = Hyperparameters(batch_size=12, epochs=2, log_interval=1, precision="float32")
        train(MISTAKES + loop, settings, RunOptions(loader_workers=0, tracking="off"), small_data, tmp_path)

    return run


@pytest.fixture(scope="module")
def undisturbed(whole):
    return lambda nproc=2, loop="train", **more: whole(nproc, recipe=LOOPS + loop, **{**SMALL, **more})


@pytest.mark.parametrize(("step", "nproc"), first_and_slow((4, 3), (7, 2)))
def test_killed_at_any_step_it_ends_with_the_same_bits(own, undisturbed, step, nproc):
    with pytest.raises(Unplugged):
        own(nproc, on_event=unplug_at(step), checkpoint_seconds=0, name="cut")
    resumed = own(nproc, name="cut", loader_workers=1)
    started = resumed.events[0]
    assert (started.first_epoch, started.first_step) > (0, 0) or step == 1
    assert identical(undisturbed(nproc), resumed)
    assert resumed.result.digest == undisturbed(nproc).result.digest


@pytest.mark.slow
@pytest.mark.parametrize(("step", "epoch"), [(2, 0), (4, 1)])
def test_a_checkpoint_waits_for_the_optimizer_while_gradients_are_accumulated(own, undisturbed, step, epoch):
    with pytest.raises(Unplugged):
        own(3, "accumulates", on_event=unplug_at(step, epoch), checkpoint_seconds=0, name="cut")
    resumed = own(3, "accumulates", name="cut")
    assert (7 * resumed.events[0].first_epoch + resumed.events[0].first_step) % 3 == 0
    assert resumed.result.digest == undisturbed(3, "accumulates").result.digest


def test_it_waits_for_each_optimizer_and_draws_the_same_before_the_steps_of_an_epoch(own, undisturbed):
    loop = "trains_layers_at_their_own_pace"
    with pytest.raises(Unplugged):
        own(2, loop, on_event=unplug_at(2, 1), checkpoint_seconds=0, name="cut")
    assert own(2, loop, name="cut").result.digest == undisturbed(2, loop).result.digest


@pytest.mark.slow
def test_it_does_not_wait_without_end(mistaken):
    epochs, loop = 40, "never_steps_by_the_last_gradients"
    trained = mistaken(loop, 2, checkpoint_seconds=0, epochs=epochs, log_interval=100)
    written = [event.epoch for event in trained.events if isinstance(event, CheckpointWritten)]
    assert any(1 < epoch < epochs for epoch in written)
    (warning,) = trained.result.warnings
    assert "an optimizer has some that it has not stepped by in 256 steps" in warning.reason


def test_what_has_changed_since_the_start_is_as_it_was_in_a_resume(own, undisturbed):
    step, epoch = 4, 1
    loop = "changes_what_it_trains"
    with pytest.raises(Unplugged):
        own(1, loop, on_event=unplug_at(step, epoch), checkpoint_seconds=0, name="cut", epochs=3)
    resumed = own(1, loop, name="cut", epochs=3)
    assert 7 * resumed.events[0].first_epoch + resumed.events[0].first_step >= 7 * epoch + step - 2
    assert resumed.result.digest == undisturbed(1, loop, epochs=3).result.digest
    assert [epoch.test for epoch in resumed.result.epochs] == [
        epoch.test for epoch in undisturbed(1, loop, epochs=3).result.epochs
    ]


def test_a_resume_predicts_by_the_buffers_that_an_undisturbed_training_has_after_a_step(own, undisturbed):
    loop = "learns_from_what_it_predicts"
    with pytest.raises(Unplugged):
        own(2, loop, on_event=unplug_at(3), checkpoint_seconds=0, name="cut")
    assert own(2, loop, name="cut").result.digest == undisturbed(2, loop).result.digest


def test_a_cache_grows_on_each_rank_by_itself(undisturbed):
    assert not undisturbed(2, "grows_a_cache").result.warnings


def test_an_optimizer_that_holds_another_one_is_resumed_if_both_are_kept(own, undisturbed):
    loop = "holds_an_optimizer_that_is_kept"
    with pytest.raises(Unplugged):
        own(1, loop, on_event=unplug_at(4), checkpoint_seconds=0, name="cut")
    assert own(1, loop, name="cut").result.digest == undisturbed(1, loop).result.digest


def test_an_optimizer_that_saves_what_it_counts_is_trained(mistaken):
    assert len(mistaken("counts_in_the_state", 1).result.epochs) == 2


def test_ranks_do_not_wait_for_one_another_once_the_steps_are_left(own):
    assert len(own(2, "leaves_the_steps_and_evaluates").result.epochs) == 2


def test_whoever_accumulates_ends_with_a_checkpoint(own, tmp_path):
    own(1, "accumulates", epochs=1, checkpoint_seconds=1000)
    assert read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]["progress"]["epoch"] == 1


@pytest.mark.slow
def test_ranks_whose_weights_drift_apart_are_told_of_once(mistaken, undisturbed):
    for loop in ("adds_noise_of_its_own", "learns_a_weight_of_its_loss"):
        (warning,) = mistaken(loop, 3, name=loop).result.warnings
        assert warning.reason.startswith("the ranks have other weights than one another")
    assert not undisturbed(3, "accumulates").result.warnings


def test_a_request_to_stop_waits_for_the_optimizer(own, undisturbed):
    target = "tests.launch.targets:stop_after_the_fifth_step"
    assert own(3, "accumulates", target=target, name="stopped") == [(0, 6)] * 3
    assert own(3, "accumulates", name="stopped").result.digest == undisturbed(3, "accumulates").result.digest


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["steps_by_hand", "trains_two"])
def test_other_ways_to_step_are_kept_at_each_step(own, undisturbed, loop):
    with pytest.raises(Unplugged):
        own(2, loop, on_event=unplug_at(5), checkpoint_seconds=0, name="cut")
    resumed = own(2, loop, name="cut")
    assert resumed.events[0].first_step >= 3
    assert resumed.result.digest == undisturbed(2, loop).result.digest


def test_it_is_reported_as_a_recipe_is(undisturbed):
    trained = undisturbed()
    started = trained.events[0]
    assert isinstance(started, RunStarted)
    assert (started.train_samples, started.test_samples, started.steps_per_epoch) == (90, 9, 7)
    assert (started.headline, started.percent) == ("accuracy", ("accuracy",))
    steps = [event for event in trained.events if isinstance(event, StepLogged)]
    assert [(event.epoch, event.step, event.samples) for event in steps] == [
        (epoch, step, 12 * step) for epoch in (0, 1) for step in range(1, 8)
    ]
    assert all(event.measures.keys() == {"loss", "scale"} and event.measures["scale"] == 1 for event in steps)
    assert steps[0].learning_rate > steps[-1].learning_rate > 0
    assert all(0 < event.gradient_norm <= 1.001 for event in steps), "as they are when the optimizer steps"
    epochs = [event for event in trained.events if isinstance(event, EpochFinished)]
    assert epochs == trained.result.epochs
    assert all(set(epoch.test) == {"accuracy", "loss"} and epoch.test["accuracy"] > 0.3 for epoch in epochs)
    assert epochs[-1].train["loss"] == pytest.approx(sum(event.measures["loss"] for event in steps[7:]) / 7)
    assert any(isinstance(event, RanksTimed) and len(event.data) == 2 for event in trained.events)
    assert trained.result.digest == epochs[-1].digest
    assert trained.weights.keys() == {"0.weight", "0.bias", *(f"1.{name}" for name in (
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked")), "4.weight", "4.bias"}  # fmt: skip


def test_without_dropout_and_batch_norm_the_number_of_ranks_changes_rounding_alone(undisturbed):
    assert relative_difference(undisturbed(1, "plain"), undisturbed(2, "plain")) < 1e-5
    assert relative_difference(undisturbed(1, "plain"), undisturbed(3, "plain")) < 1e-5


def test_a_request_to_stop_is_obeyed_by_all_ranks_after_a_checkpoint_also_in_the_last_step(own, whole):
    batch_size = 18  # five steps an epoch
    target = "tests.launch.targets:stop_after_the_fifth_step"
    assert own(target=target, name="stopped", batch_size=batch_size) == [(0, 5)] * 2
    resumed = own(name="stopped", batch_size=batch_size)
    assert (resumed.events[0].first_epoch, resumed.events[0].first_step) == (0, 5)
    assert identical(whole(2, recipe=LOOPS + "train", **{**SMALL, "batch_size": batch_size}), resumed)


def test_a_request_to_stop_in_the_step_that_an_epoch_is_left_after_waits_for_the_end_of_the_epoch(own, undisturbed):
    """A resume in between would go on with the steps that were left out."""
    loop, target = "leaves_after_the_fifth_step", "tests.launch.targets:stop_after_the_fifth_step"
    assert own(2, loop, target=target, name="stopped") == [(1, 0)] * 2
    resumed = own(2, loop, name="stopped")
    assert [epoch.samples for epoch in resumed.result.epochs] == [5 * 12] * 2
    assert resumed.result.digest == undisturbed(2, loop).result.digest


def test_ranks_of_a_host_without_the_checkpoint_are_sent_it(own, undisturbed):
    with pytest.raises(Unplugged):
        own(on_event=unplug_at(4), checkpoint_seconds=0, name="cut", target=TWO_HOSTS)
    assert identical(undisturbed(), own(name="cut", target=TWO_HOSTS))


@pytest.mark.parametrize(("nproc", "log_interval"), [(2, 1), (1, 1000)])
def test_a_loop_that_is_left_early_has_measures_of_what_it_did(own, nproc, log_interval):
    trained = own(nproc, "left_early", epochs=9, checkpoint_seconds=0, log_interval=log_interval)
    assert [(epoch.epoch, epoch.fraction, epoch.samples) for epoch in trained.result.epochs] == [
        (0, pytest.approx(3 / 7), 36), (1, pytest.approx(3 / 7), 36),
    ]  # fmt: skip
    assert all(0 < epoch.train["loss"] < 5 and epoch.train_seconds > 0 for epoch in trained.result.epochs)
    steps = [event.step for event in trained.events if isinstance(event, StepLogged)]
    assert steps == ([1, 2, 3] * 2 if log_interval == 1 else [])


def test_an_epoch_without_a_step_has_only_what_was_evaluated(own):
    first, second = own(1, "left_before_the_first_step").result.epochs
    assert (first.train, first.samples, first.test, second.test) == ({}, 0, {"loss": 1.0}, {"loss": 1.0})


def test_ranks_train_together_while_an_evaluation_is_half_done(own, undisturbed):
    trained = own(loop="trains_beside_an_evaluation")
    assert all(torch.equal(weight, undisturbed(2, "plain").weights[name]) for name, weight in trained.weights.items())


def test_it_may_evaluate_within_a_step_and_come_back_to_the_steps(own, undisturbed):
    trained = own(loop="evaluates_within")
    assert trained.events[0].steps_per_epoch == 7
    assert [event.step for event in trained.events if isinstance(event, StepLogged)] == [*range(1, 8)] * 2
    assert all(torch.equal(weight, undisturbed(2, "plain").weights[name]) for name, weight in trained.weights.items())


@pytest.mark.slow
def test_a_compiled_network_has_the_names_and_bits_of_the_network_in_it(own, undisturbed):
    trained = own(loop="compiles")
    assert trained.result.digest == undisturbed(2, "plain").result.digest


def test_a_loop_that_returns_within_an_epoch_is_told_that_its_weights_have_no_measures(mistaken):
    trained = mistaken("returns_within_an_epoch").result
    (warning,) = trained.warnings
    assert warning.reason.startswith("the loop has returned within an epoch, so no measures are those of the weights")
    assert [epoch.epoch for epoch in trained.epochs] == [0]
    assert trained.digest != trained.epochs[0].digest
    with pytest.raises(RankError, match="NonFiniteError: loss is not finite in epoch 2, step 3"):
        mistaken("returns_nan", 1, name="nan", log_interval=100)


def test_an_epoch_whose_steps_go_on_after_its_evaluation_is_warned_of_once(mistaken):
    (warning,) = mistaken("returns_what_it_has_not_evaluated", 1).result.warnings
    assert warning.reason.startswith("an epoch has ended with other weights than those that its measures are of: call")


def test_each_evaluation_has_its_own_blocks(own):
    trained = own(2, "evaluates_two_folders_of_blocks", epochs=1, test_batch_size=4)
    assert trained.result.tested["right"] == 1


def test_ranks_without_a_sample_to_evaluate_wait_for_nobody(own):
    assert own(3, loop="tests_one_sample", epochs=1).result.tested["accuracy"] in (0, 1)


def test_a_loss_that_is_not_finite_ends_it_before_a_checkpoint_has_it(mistaken, tmp_path):
    words = "NonFiniteError: loss is not finite in epoch 1, step 5, on rank 1: "
    with pytest.raises(RankError, match=words):
        mistaken("not_finite", checkpoint_seconds=0)
    assert read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]["progress"]["step"] <= 4


def test_weights_that_are_not_finite_end_it_before_a_checkpoint_has_them(mistaken, tmp_path):
    words = "NonFiniteError: a weight is not finite in epoch 1, step 5, on rank 0, 1: "
    with pytest.raises(RankError, match=words):
        mistaken("steps_to_nan", checkpoint_seconds=0)
    state = read_checkpoint(tmp_path / "training" / "checkpoint", {})["state"]
    assert state["progress"]["step"] == 4
    assert all(weight.isfinite().all() for weight in state["parts"]["model"].values())


@pytest.mark.parametrize(
    ("loop", "place"),
    [
        ("ends_with_nan", "epoch 2, step 7"),
        ("returns_with_nan", "epoch 2, step 3"),
        ("is_stopped_with_nan", "epoch 1, step 7"),
    ],
)
def test_weights_that_are_not_finite_are_not_returned(mistaken_here, loop, place):
    with pytest.raises(NonFiniteError, match=f"a weight is not finite in {place}, on rank 0: "):
        mistaken_here(loop)


def test_measures_go_by_their_names_on_each_rank_and_one_that_is_not_finite_is_warned_of(mistaken):
    result = mistaken("evaluates_in_any_order", 3).result
    measured = {name: value for name, value in result.tested.items() if name != "score"}
    assert measured == {"loss": 0.1, "share": 0.7 / 3, "rank": 1.0}, (
        "the sum of three is another number, or not a third"
    )
    (warning,) = result.warnings
    assert warning.reason.startswith("score on the test split is not finite after epoch 1")


def test_a_loss_of_an_evaluation_that_is_not_finite_ends_it(mistaken):
    with pytest.raises(RankError, match="NonFiniteError: the loss on the test split is nan after epoch 1"):
        mistaken("evaluates_nan", 1)


def test_a_buffer_that_is_saved_under_another_name_is_saved():
    parts = KeptParts(torch.device("cpu"))
    parts["model"] = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(2)))
    assert not Unsaved(parts)._unsaved_buffers()


class Observer(nn.Module):
    """Sees how large features are, whose number it learns from the first batch, as those of quantization do."""

    least: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def _load_from_state_dict(self, state, prefix, *others):
        self.least = torch.zeros_like(state[f"{prefix}least"])
        super()._load_from_state_dict(state, prefix, *others)


def test_a_buffer_that_gets_its_shape_from_the_first_batch_may_stay_if_it_can_be_loaded():
    parts = KeptParts(torch.device("cpu"))
    parts["model"] = observer = Observer()
    parts.first_shapes = parts.shapes()
    observer.least = torch.ones(3)
    Unsaved(parts)._check_shapes()
    assert torch.equal(observer.least, torch.ones(3))


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # in this process torch warns once
@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("forgets_to_keep", r"call loop.keep before loop.epochs: a checkpoint could not be resumed without"),
        ("forgets_epochs", r"iterate over loop.batches within `for epoch in loop.epochs\(\):`"),
        ("forgets_to_log", r"call loop.log\(loss=...\) once in each step"),
        ("logs_a_word", r"loop.log: phase must be a number or a tensor, got 'warm-up': give the step's value"),
        ("logs_no_loss", r"loop.log must have a measure named loss, got error: give it"),
        (
            "keeps_an_array_from_the_first_epoch_on",
            r"a checkpoint cannot hold state\['parts'\]\['history'\]\['rows'\]\[0\], of type ndarray",
        ),
        ("forgets_to_evaluate", r"call loop.evaluated\(loss=...\) at the end of each epoch, on every rank"),
        (
            "names_another_headline",
            r"epochs\(headline='IoU'\) must name a measure of loop.evaluated, got iou: name one",
        ),
        ("evaluates_on_the_first_rank", r"call loop.evaluated\(loss=...\) at the end of each epoch, on every rank"),
        ("calls_the_network_itself", r"call what loop.wrap has returned, not the network in it"),
        (
            "leaves_a_layer_unused",
            r"each parameter must have a gradient.*, and 1.unused.(weight|bias), 1.unused.(weight|bias) had none",
        ),
        (
            "has_a_generator_of_its_own",
            r'split "train": its HoldsGenerator gives another sample.*self.generator = numpy',
        ),
        ("has_other_samples_on_each_rank", r'split "test": gives each rank other samples: sort what it lists'),
        (
            "forgets_to_wrap",
            r"loop.keep: model must be what loop.wrap has returned, as ranks train together, got Linear",
        ),
        ("keeps_another_optimizer", r"loop.keep must have the SGD that steps: a resume would begin with a new one"),
        ("keeps_a_schedule_alone", r"loop.keep must have the SGD that steps: a resume would begin with a new one"),
        (
            "forgets_its_schedule",
            r"loop.keep must have the OneCycleLR of the SGD: .*keep\(model=.*, schedule=schedule\)",
        ),
        ("forgets_a_schedule_by_measures", r"loop.keep must have the ReduceLROnPlateau of the SGD"),
        ("forgets_the_optimizer_within", r"Outer holds the Adam, whose state is not in .* of Outer.*give both to"),
        (
            "counts_beside_the_state",
            r"loop.keep: Slow keeps (before, )?steps outside of its state_dict.*state_dict\(\)$",
        ),
        (
            "keeps_a_buffer_to_itself",
            r"change the buffer model.last, which is in no state_dict, .*with persistent=T",
        ),
        (
            "creates_a_buffer_in_its_steps",
            r"the buffer model.bank the shape \(12, 8\), and the network .* could not load it in a resume: create it",
        ),
        ("forgets_a_weight_of_its_loss", r"loop.keep must have all that the SGD changes: a weight of shape \(3,\) is"),
        ("unfreezes_what_was_wrapped", r"loop.wrap was given 0.weight with requires_grad False, and it is trained now"),
        ("keeps_without_a_name", r"Loop.keep\(\) takes 2 .* but 3 were given: give .* as in .*optimizer=optimizer\)$"),
        ("logs_without_a_name", r"Loop.log\(\) takes 1 .* but 2 were given: give .* as in loop.log\(loss=loss\)"),
        ("keeps_twice", r"loop.keep must be called once, with all that changes"),
        ("wraps_what_is_not_trained", r"loop.wrap: the network must have a weight that is trained"),
        ("steps_outside_of_a_step", r"an optimizer must step within `for … in loop.batches`"),
        ("trains_on_two_in_turn", r"in one loop at a time, and over those of one call in an epoch: put several"),
        ("trains_on_two_at_once", r"in one loop at a time, and over those of one call in an epoch: put several"),
        ("passes_twice", r"iterate over loop.batches once an epoch, got another time after all 7 steps: .*ers.epochs"),
        ("keeps_an_iterator", r"has the steps of one epoch, got it again in epoch 2: call iter\(batches\) within"),
        (
            "goes_on_with_an_iterator",
            r"has the steps of one epoch, got it again in epoch 2: call iter\(batches\) within",
        ),
        ("evaluates_nothing", r"loop.evaluated: loss must have samples, or weights that are not 0, on some rank"),
        (
            "evaluates_a_list",
            r"loop.evaluated: accuracy must be a number, a tensor or a tuple .*, got \[.*: give",
        ),
        (
            "evaluates_an_array",
            r"loop.evaluated: loss must be a number, a tensor or a tuple .*, got array.*: give",
        ),
        ("evaluates_three", r"loop.evaluated: loss must be a number, a tensor or a tuple .*, got \(.*: give"),
        (
            "measures_an_array",
            r"loop.measured: accuracy must be a number, a tensor or a tuple .*, got array.*: give",
        ),
        ("measures_a_mean", r"loop.measured: accuracy must have a value for each sample, .* got a single number: use"),
        (
            "evaluates_more_on_the_first_rank",
            r"same measures on all ranks, got loss, score on rank 0 and loss on rank 1",
        ),
        ("evaluates_on_the_first_rank_alone", r"same measures on all ranks, got loss on rank 0 and none on rank 1"),
        ("logs_more_on_the_last_rank", r"loop.log must .* on all ranks, got loss on rank 0 and loss, score on rank 1"),
        ("keeps_what_has_no_state", r"loop.keep: learning_rate must have state_dict and load_state_dict, got float"),
        (
            "trains_without_a_loop",
            r"own_loop_mistakes:trains_without_a_loop must train in `for epoch in loop.epochs\(\):`",
        ),
        ("skips_a_step_on_the_last_rank", r"after 2 steps of epoch 1 rank 0 computes gradients and rank 1 ends the st"),
        ("repeats_a_closure_on_the_first_rank", r"after 0 steps of epoch 1 rank 0 computes gradients and rank 1 ends"),
        ("leaves_the_steps_on_the_first_rank", r"rank 0 calls loop.evaluated and rank 1 ends the step: let each comp"),
        ("returns_on_the_last_rank", r"after 0 steps of epoch 1 rank 0 ends the step and rank 1 has returned: let"),
        (
            "averages_over_the_training_batches",
            r"within `for epoch in loop.epochs\(\):`; to pass over the data without training.*loop.evaluation\(data\)",
        ),
        ("gives_a_loader", r"a DataLoader makes batches of its own.*: give its Dataset, as in loader.dataset"),
        ("wraps_what_is_wrapped", r"loop.wrap must be given the network itself, got DataParallel: leave out DataPar"),
        ("starts_the_ranks", r"leave out torch.distributed.init_process_group: the ranks are a process group before"),
        ("ends_the_ranks", r"leave out torch.distributed.destroy_process_group: the ranks are a process group before"),
        ("trains_in_two_phases", r"loop.epochs must be called once, .*: give one loop all epochs, with `if epoch"),
        ("tests_after_it_has_left_the_epochs", r"loop.evaluated must be called once in each epoch .*on the validation"),
        ("evaluates_before_the_last_steps", r"after an epoch's last step with .*, got step 5 of 7: the weights have"),
        ("takes_nothing", r"own_loop_mistakes:takes_nothing must take one argument, the loop, as in def train\(loop\)"),
    ],
)
def test_a_mistake_is_one_error_with_its_remedy(mistaken_here, loop, words):
    with pytest.raises(InputError, match=words) as caught:
        mistaken_here(loop)
    assert loop in WITHOUT_LINE or re.match(r"\S+/tests/engine/own_loop\w+\.py, line \d+: ", caught.value.message)


@pytest.mark.parametrize(("loop", "offset"), [("keeps_twice", 3), ("steps_outside_of_a_step", 6)])
def test_the_line_of_a_mistake_is_that_which_calls_the_library(mistaken_here, loop, offset):
    """Through frames of torch, too."""
    line = getattr(own_loop_mistakes, loop).__code__.co_firstlineno + offset
    with pytest.raises(InputError, match=rf"^{re.escape(own_loop_mistakes.__file__)}, line {line}: "):
        mistaken_here(loop)


BEST = {"loop": "gets_worse_after_two_epochs", "epochs": 6, "keep_best": 2, "patience": 2, "kind": TrainingSettings}


@pytest.mark.parametrize(("step", "epoch"), first_and_slow((4, 3), (6, 1)))
def test_a_resume_returns_the_best_epoch_and_stops_as_early_as_an_undisturbed_training(own, undisturbed, step, epoch):
    whole = undisturbed(1, **BEST)
    with pytest.raises(Unplugged):
        own(1, on_event=unplug_at(step, epoch), checkpoint_seconds=0, name="cut", **BEST)
    resumed = own(2, name="cut", **BEST) if step == 6 else own(1, name="cut", **BEST)
    assert resumed.result.chosen_epoch == whole.result.chosen_epoch == 1
    assert len(resumed.result.epochs) == len(whole.result.epochs) == 4
    if step != 6:
        assert identical(whole, resumed)
        assert resumed.result.tested == whole.result.tested
        assert resumed.result.kept == whole.result.kept


def test_the_best_epoch_is_returned_and_measured_on_the_test_split(undisturbed):
    trained = undisturbed(1, **BEST)
    accuracies = [epoch.validation["accuracy"] for epoch in trained.result.epochs]
    assert [epoch.test for epoch in trained.result.epochs] == [{}] * 4
    assert max(accuracies) == accuracies[1] > accuracies[3]
    (chosen,) = [event for event in trained.events if isinstance(event, EpochChosen)]
    assert (chosen.epoch, chosen.epochs, chosen.stopped_early, chosen.is_best) == (1, 4, True, True)
    assert trained.result.tested == chosen.measures == {"accuracy": accuracies[1]}  # the same samples
    assert [model.epoch for model in trained.result.kept] == [2.0, sorted(range(4), key=accuracies.__getitem__)[-2] + 1]


def test_an_evaluation_after_the_last_epoch_is_of_the_test_split(undisturbed):
    trained = undisturbed(1, "tests_once_at_the_end")
    assert len(trained.result.epochs) == 2
    assert trained.result.tested == {"loss": trained.result.epochs[-1].test["loss"]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 13}, r"Hyperparameters.batch_size must be a multiple of the number of ranks \(2\).*got 13"),
        ({"batch_size": 92}, r"Hyperparameters.batch_size must be at most the number of samples \(90\), got 92: lower"),
        ({"freeze": "0"}, r"Hyperparameters.freeze must be '' for a loop of your own"),
        ({"keep_checkpoint": True}, r"RunOptions.keep_checkpoint must be False for a loop of your own"),
        ({"keep_best": 1}, r"RunOptions.keep_best must be 0 unless loop.epochs is told which headline is the best"),
        (
            {"patience": 1, "kind": TrainingSettings},
            r"TrainingSettings.patience must be 0 unless loop.epochs .*got 1",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(own, settings, words):
    with pytest.raises(InputError, match=words):
        own(**settings)


def test_an_epoch_that_is_left_early_may_be_the_best(own):
    trained = own(1, "leaves_each_epoch_early_and_takes_the_best", trace_every=1)
    assert len(trained.result.epochs) == 2
    (outputs,) = read_trace(f"{trained.folder}/progress.jsonl")[2].parts.values()
    assert [name for name, _ in outputs] == ["the batch", "model", "the loss"]


def test_a_device_that_fails_while_a_checkpoint_is_loaded_is_not_taken_for_a_wrong_one():
    for error, raised in ((torch.OutOfMemoryError("full"), torch.OutOfMemoryError), (IndexError("1"), InputError)):
        with pytest.raises(raised), _fitting():
            raise error
