"""Recipes that would fail in the first step, after an epoch or at the very end, and some that only look like it."""

import torch
from torch import nn

from flyte_ddp.recipe import Recipe
from tests.engine.probe_recipes import SIZE, WIDTH, Settings, Sound

# --- outputs ---


class MixedOutputs(Sound):
    def forward(self, model, batch):
        return {"rows": model(batch), "hidden": None, "temperature": model[0].weight.mean(), "layers": 3}

    def measure(self, outputs, batch):
        return super().measure(outputs["rows"], batch)


class Insisting(Sound):
    """Refuses outputs that are not those of the batch."""

    def forward(self, model, batch):
        return {"rows": model(batch), "inputs": batch}

    def measure(self, outputs, batch):
        assert torch.equal(outputs["inputs"], batch), "other samples"
        return super().measure(outputs["rows"], batch)


class InsistingWithConstantLoss(Insisting):
    def constant_loss(self):
        return 1.0


class Trimmed(Sound):
    """Outputs as long as the longest of a rank's own samples, which the measures make up for."""

    def forward(self, model, batch):
        longest = int((batch.abs() > 1).sum(1).max())
        return model(batch)[:, :longest]

    def measure(self, outputs, batch):
        is_there = torch.arange(outputs.shape[1]) < (batch.abs() > 1).sum(1, keepdim=True)
        return {"loss": ((outputs - batch[:, : outputs.shape[1]]).square() * is_there).sum(1)}


# --- data ---


class OfNumPy(Sound):
    def data(self, split):
        return super().data(split).double()


class Bytes(Sound):
    def data(self, split):
        return super().data(split).byte()


class Halved(Sound):
    def data(self, split):
        return super().data(split).half()


# --- weights ---


class ComplexWeights(Sound):
    def model(self):
        network = super().model()
        network[1].register_parameter("turns", nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64)))
        return network


class FrozenNumbers(Sound):
    def model(self):
        network = super().model()
        numbers = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
        network[1].register_parameter("numbers", numbers)
        return network


# --- predictions and pictures ---


class Predicting(Sound):
    dtype = torch.int16

    def predictions(self, outputs, batch):
        return (100 * outputs).to(self.dtype)


class PredictingBools(Predicting):
    dtype = torch.bool


class PredictingBfloat16(Predicting):
    dtype = torch.bfloat16


class PredictingOne(Sound):
    def predictions(self, outputs, batch):
        return outputs.mean()


class PredictingAList(Sound):
    def predictions(self, outputs, batch):
        return outputs.tolist()


class FlatPictures(Sound):
    def pictures(self, outputs, batch):
        return [("a row", row) for row in outputs]


class PicturesOfNumPy(Sound):
    def pictures(self, outputs, batch):
        return [("a row", row.view(1, 2, 4).numpy()) for row in outputs]


class PredictingWords(Sound):
    """Of sentences that are padded to the longest of their batch: those of the last batch have three words at most."""

    def data(self, split):
        words = torch.randn(1002, 4, WIDTH, generator=torch.Generator().manual_seed(0))
        return words * (torch.arange(4) < torch.tensor(self.lengths(split))[:, None])[:, :, None]

    def lengths(self, split):
        return [4] * 1000 + [3, 2]

    def constant_loss(self):
        return 1.0  # so that test samples are in their order

    def measure(self, outputs, batch):
        return {"loss": (outputs - batch).square().mean((1, 2))}

    def predictions(self, outputs, batch):
        return outputs.argmax(2)


# --- the step ---


class Sparse(Sound):
    def model(self):
        return nn.Sequential(nn.Embedding(SIZE, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, model, batch):
        return model(batch[:, 0].abs().long())


class LBFGS(Sound):
    def optimizer(self, model):
        return torch.optim.LBFGS(model.parameters())


class SparseAdam(Sound):
    def optimizer(self, model):
        return torch.optim.SparseAdam(model.parameters())


class TwoOptimizers(Sound):
    def optimizer(self, model):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (model[0], model[2])]


class LearnedWeights(Sound):
    def measure(self, outputs, batch):
        return {"loss": ((outputs - batch).square().mean(1), outputs.mean(1).exp())}


class LearnedWeightsElsewhere(Sound):
    """Only what is trained must not have them."""

    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), "mean": (outputs.mean(1), outputs.std(1))}


# --- the network and the data ---


class Lazy(Sound):
    def model(self):
        return nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class LazyButCalled(Lazy):
    def model(self):
        model = super().model()
        model(torch.zeros(1, WIDTH))
        return model


class Scripted(Sound):
    def model(self):
        return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))


class FrozenScripted(Scripted):
    def model(self):
        layers = super().model()
        for weight in layers.parameters():
            weight.requires_grad_(False)
        return nn.Sequential(layers, nn.Linear(WIDTH, WIDTH))


class Normalised(Sound):
    body = staticmethod(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)))


class Compiled(Normalised):
    def model(self):
        return torch.compile(super().model(), backend="aot_eager")


class InGraphs(Sound):
    def model(self):
        return torch.compile(super().model(), mode="reduce-overhead")


class LayerInGraphs(Sound):
    def model(self):
        network = super().model()
        network[0].compile(options={"triton.cudagraphs": True})
        return network


class ForwardInGraphs(Sound):
    def model(self):
        network = super().model()
        network[0].forward = torch.compile(network[0].forward, mode="max-autotune")
        return network


class WithAFunction(Sound):
    """Its layer's forward is torch's own function, which has no attributes."""

    def model(self):
        network = super().model()
        network[1].forward = torch.tanh
        return network


class NoNetwork(Sound):
    """Its author has forgotten a return, as those of the next have."""

    def model(self):
        super().model()


class NoOutputs(Sound):
    def forward(self, model, batch):
        model(batch)


class LossOfText(Sound):
    def constant_loss(self):
        return "unknown"


class NoFactor(Sound):
    def lr_lambda(self, step, steps):
        step / steps


class FactorOfText(Sound):
    def lr_lambda(self, step, steps):
        return "0.5"


class FactorNaN(Sound):
    def lr_lambda(self, step, steps):
        return float("nan")


class FactorTensor(Sound):
    def lr_lambda(self, step, steps):
        return torch.tensor([0.5])


class FactorUntilTheEnd(Sound):
    def lr_lambda(self, step, steps):
        return 1 / (steps - step)


class NoMeasure(Recipe):
    data, model, forward = Sound.data, Sound.model, Sound.forward
    body = nn.Identity


class NoModel(Recipe):
    data, measure = Sound.data, Sound.measure


class NoData(Recipe):
    model, measure = Sound.model, Sound.measure


class NoArguments(Sound):
    def __init__(self):
        super().__init__(Settings())


class InPlace(Sound):
    """What it changes is a copy, as in training."""

    def augment(self, batch, random):
        return batch.mul_(2)

    def forward(self, model, batch):
        return model(batch.sub_(1))


class SometimesNothing(Sound):
    """Has batches of which there is nothing to learn: their loss reaches no weights."""

    def measure(self, outputs, batch):
        loss = super().measure(outputs, batch)["loss"]
        return {"loss": loss if batch[0, 0] > 0 else loss.detach()}


class NumberedMeasure(Sound):
    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), 5: batch[:, 0]}


class YieldingPictures(Sound):
    def pictures(self, outputs, batch):
        yield "first", batch.expand(1, *batch.shape).clamp(0, 1)


class NoPictures(Sound):
    def pictures(self, outputs, batch):
        batch.clone()


class FactsOfTuples(Sound):
    def facts(self):
        return {"counts": {(0, 1): 3}}


class NoFacts(Sound):
    def facts(self):
        super().facts()


class OtherWeights(Sound):
    """Its optimizer has weights that are not the network's."""

    def optimizer(self, model):
        return torch.optim.SGD(super().model().parameters(), 0.1)


class OwnNetwork(Sound):
    """Its optimizer has the weights of the network that model() returned."""

    def model(self):
        self.network = super().model()
        return self.network

    def optimizer(self, model):
        return torch.optim.SGD(self.network.parameters(), 0.1)
