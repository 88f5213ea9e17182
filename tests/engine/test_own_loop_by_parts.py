"""A training loop of the user's own by virtual ranks: the same bits on any number of ranks."""

import pytest
import torch

from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, StepLogged
from flyte_ddp.launch.failures import RecoverableRankError
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train
from tests.engine.test_own_loop import LOOPS, SMALL
from tests.small_training import Unplugged, relative_difference, unplug_at

BY_PARTS, EXACT = "tests.engine.own_loops_by_parts:", {**SMALL, "virtual_ranks": 4}


@pytest.fixture
def own(train):
    return lambda nproc=2, loop="train", **more: train(nproc, recipe=BY_PARTS + loop, **{**EXACT, **more})


@pytest.fixture(scope="module")
def plain(whole):
    """The loop as people write it."""
    return whole(2, recipe=LOOPS + "plain", **SMALL)


@pytest.fixture(scope="module")
def one_rank(whole):
    return whole(1, recipe=BY_PARTS + "train", **EXACT)


@pytest.mark.kernels
def test_it_has_equal_bytes_on_any_number_of_ranks(own, one_rank):
    """With dropout, batch norm, clipping, a schedule, an average, and what Python and NumPy draw in a step."""
    trained = own(3)
    assert trained.result.digest == one_rank.result.digest
    logged = [[event.measures for event in run.events if isinstance(event, StepLogged)] for run in (one_rank, trained)]
    assert logged[0] == logged[1]


def test_killed_on_three_ranks_it_ends_with_the_same_bits_on_two(own, one_rank):
    with pytest.raises(Unplugged):
        own(3, on_event=unplug_at(4), checkpoint_seconds=0, name="cut")
    resumed = own(2, name="cut", loader_workers=1)
    assert resumed.events[0].first_step > 0
    assert resumed.result.digest == one_rank.result.digest


def test_an_audit_names_the_rank_that_computes_wrongly_and_changes_nothing_else(own, one_rank):
    with pytest.raises(RecoverableRankError, match=r"WrongBitsError: in epoch 1, step 4, rank 1 on \S+ .* computed"):
        own(2, "flips_a_bit", audit_every=1, name="flipped")
    assert own(3, audit_every=1).result.digest == one_rank.result.digest
    assert len(own(2, "takes_turns", audit_every=1, name="turns").result.epochs) == 2
    with pytest.raises(InputError, match="audit_every must be 0 without virtual_ranks"):
        own(1, audit_every=1, virtual_ranks=0)


@pytest.fixture
def own_here(alone, tmp_path):
    """own_here(loop, virtual_ranks): the weights of a training in this process."""

    def run(loop, virtual_ranks, **more):
        settings = TrainingSettings(virtual_ranks=virtual_ranks, **{"batch_size": 12, "epochs": 2, **more})
        options = RunOptions(tracking="off", loader_workers=0)  # of a loop that fails, workers would stay
        trained = train(BY_PARTS + loop, settings, options, output=tmp_path / f"{virtual_ranks}")
        return torch.load(trained.model_path, weights_only=True)

    return run


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # in this process torch warns once
@pytest.mark.parametrize("loop", ["adds_up_two", "has_two_losses"])
def test_gradients_of_several_losses_are_those_without_virtual_ranks(own_here, loop):
    torch.testing.assert_close(own_here(loop, 4), own_here(loop, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # in this process torch warns once
def test_a_part_of_a_single_sample_leaves_statistics_that_are_finite(own_here):
    assert all(weight.isfinite().all() for weight in own_here("train", 4, batch_size=4).values())


@pytest.mark.slow
def test_gradients_are_accumulated_as_without_virtual_ranks(own):
    plain = own(1, "adds_up_two", virtual_ranks=0, name="plain")
    one, three = (own(nproc, "adds_up_two", name=str(nproc)) for nproc in (1, 3))
    assert relative_difference(plain, one) < 1e-5
    assert three.result.digest == one.result.digest
    with pytest.raises(Unplugged):
        own(3, "adds_up_two", on_event=unplug_at(5), checkpoint_seconds=0, name="cut")
    assert own(2, "adds_up_two", name="cut").result.digest == one.result.digest


def test_two_networks_in_one_train_by_turns_with_virtual_ranks_and_without(own):
    loop = "trains_players_by_turns"
    plain = own(2, loop, virtual_ranks=0, name="plain")
    one, two = (own(nproc, loop, virtual_ranks=2, name=str(nproc)) for nproc in (1, 2))
    assert two.result.digest == one.result.digest
    assert relative_difference(plain, one) < 1e-5
    with pytest.raises(Unplugged):
        own(2, loop, virtual_ranks=0, on_event=unplug_at(5), checkpoint_seconds=0, name="cut")
    assert own(2, loop, virtual_ranks=0, name="cut").result.digest == plain.result.digest


@pytest.mark.slow
def test_losses_of_a_step_may_be_of_very_different_sizes(own):
    plain = own(1, "has_two_losses", virtual_ranks=0, name="plain")
    one = own(1, "has_two_losses", name="one")
    assert relative_difference(plain, one) < 1e-5
    with pytest.raises(Unplugged):
        own(3, "has_two_losses", on_event=unplug_at(5), checkpoint_seconds=0, name="cut")
    assert own(2, "has_two_losses", name="cut").result.digest == one.result.digest


@pytest.mark.parametrize("loop", ["counts", "trains_one_of_two"])
def test_buffers_draws_and_unused_weights_are_alike_on_any_number_of_ranks(own, loop):
    one, two = (own(nproc, loop, name=str(nproc), checkpoint_seconds=0) for nproc in (1, 2))
    assert two.result.digest == one.result.digest
    for run in (one, two):  # an idle optimizer has no gradients, which a checkpoint would lack
        assert not run.result.warnings
        assert sum(isinstance(event, CheckpointWritten) for event in run.events) > 2


def test_evaluations_have_the_same_bits_on_any_number_of_ranks(own):
    one, *others = (own(nproc, "follows_its_evaluations", name=str(nproc), epochs=3) for nproc in (1, 2, 3))
    for other in others:
        assert other.result.digest == one.result.digest
        assert [epoch.test for epoch in other.result.epochs] == [epoch.test for epoch in one.result.epochs]
    plain = own(2, "follows_its_evaluations", name="plain", virtual_ranks=0, epochs=3)
    assert plain.result.tested["loss"] == pytest.approx(one.result.tested["loss"], rel=0.05)


def test_a_resume_has_what_was_measured_and_drawn_before(own):
    settings = {"loop": "evaluates_first", "virtual_ranks": 4, "epochs": 3, "log_interval": 1}
    whole = own(2, name="whole", **settings)
    with pytest.raises(Unplugged):
        own(2, on_event=unplug_at(2, 1), checkpoint_seconds=0, name="cut", **settings)
    resumed = own(2, name="cut", **settings)
    assert resumed.events[0].first_step > 0
    assert resumed.result.digest == whole.result.digest
    assert [epoch.test for epoch in resumed.result.epochs] == [epoch.test for epoch in whole.result.epochs]


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("leaves_an_evaluation", r"an evaluation must go over all of its batches, and was left before its end"),
        ("adds_nothing_up", r"loop.evaluated must be called after an evaluation, before a step ends, as a checkpoint"),
        ("evaluates_in_training_mode", r"an evaluation must leave buffers as they are, and it changes model\."),
    ],
)
def test_evaluations_by_which_the_result_would_follow_the_ranks_are_refused(own, loop, words):
    with pytest.raises(InputError, match=words):
        own(2, loop)


@pytest.mark.parametrize("change", ["replaces", "fills"])
def test_a_buffer_that_an_evaluation_changes_is_refused_on_one_rank_too(own_here, change):
    with pytest.raises(InputError, match=r"an evaluation must leave buffers as they are, and it changes other\.seen"):
        own_here(f"{change}_a_buffer_while_it_evaluates", 4)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("measures_outside", r"loop.measured must be called for each batch, while you iterate over loop"),
        ("measures_a_mean", r"loss must have a value for each sample, or be a pair .* got a single num"),
    ],
)
def test_measures_belong_to_batches_of_an_evaluation(own_here, loop, words):
    with pytest.raises(InputError, match=words):
        own_here(loop, 4)


@pytest.mark.parametrize("change", ["replaced", "scaled", "zeroed"])
def test_a_gradient_that_a_hook_or_zero_grad_changes_is_added_up_as_it_is_then(own, change):
    one, three = (own(nproc, f"has_gradients_{change}", name=str(nproc)) for nproc in (1, 3))
    assert three.result.digest == one.result.digest
    plain = own(1, f"has_gradients_{change}", virtual_ranks=0, name="plain")
    assert relative_difference(plain, one) < 1e-5


def test_an_evaluation_within_a_step_draws_alike_on_any_number_of_ranks(own):
    one, three = (own(nproc, "evaluates_in_a_step", name=str(nproc)) for nproc in (1, 3))
    assert three.result.digest == one.result.digest
    logged = [[event.measures for event in run.events if isinstance(event, StepLogged)] for run in (one, three)]
    assert logged[0] == logged[1]


def test_without_virtual_ranks_it_is_the_loop_as_people_write_it(own, plain):
    trained = own(loop="plain", virtual_ranks=0)
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in trained.weights.items())


def test_the_mean_of_the_parts_is_that_of_the_batch(own, plain):
    assert relative_difference(plain, own(loop="plain")) < 1e-5


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            "trains_in_bfloat16",
            r"must be float32, and weight is bfloat16: call .float\(\) on the network, or set",
        ),
        ("freezes_later", r"with virtual_ranks the same parameters must be trained in each step: call requires_grad_"),
        ("draws_by_itself", r": in epoch 1, step 1, gradients of the same samples have other bits each time"),
        (
            "moves_a_teacher",
            r"loss_of must change no weight, .* and teacher.weight was changed: change it after the opt",
        ),
        ("sets_a_weight", r"must be computed without a change of weights, and offset was changed: change it after the"),
        ("moves_a_kept_teacher", r"loss_of must change no weight, .* and teacher.weight was changed: change it after"),
        ("grows", r"the buffer seen must keep its shape, .* got \(4, 8\) after \(1, 8\): create it in __init__"),
        ("unpacks", r"a batch must go to loop.backward with virtual_ranks, as it has several parts"),
        ("calls_the_network", r"with virtual_ranks a step's gradients must come from loop.backward\(batch, loss_of\)"),
        (
            "has_gradients_twice",
            r"the gradient of layer\.\w+ must come once in a backward pass, and it came twice: give",
        ),
        ("trains_the_loss", r"all weights .* must be in the network that loop.wrap is given, got another one of shape"),
        ("returns_no_loss", r"loss_of must return a part's mean loss, .* depends on the network, got shape \(\)"),
        (
            "synchronises_batch_norm",
            r"loop.wrap: 1 must not be nn.SyncBatchNorm with virtual_ranks, .*: leave convert_",
        ),
        ("wraps_twice", r"loop.wrap must be called once with virtual_ranks: put both networks into one module"),
        ("accumulates", r"no_sync must not be called with virtual_ranks: a batch has parts already"),
    ],
)
def test_a_mistake_is_one_error_with_its_remedy(own_here, loop, words):
    with pytest.raises(InputError, match=words):
        own_here(loop, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 14}, r"batch_size must be a multiple of virtual_ranks \(4\) in a loop of your own, got 14"),
        ({"virtual_ranks": 1}, r"virtual_ranks must be at least the number of ranks \(2\), got 1"),
    ],
)
def test_batches_that_cannot_be_cut_into_parts_are_refused(own, settings, words):
    with pytest.raises(InputError, match=words):
        own(**settings)
