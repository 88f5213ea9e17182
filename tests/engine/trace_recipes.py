"""A recipe, and others that do something else from the fourth step on, as after a change of one line."""

import torch

from flyte_ddp.recipes.images import ImageClassifier

FROM = 3  # the first step, from 0, that differs


class Usual(ImageClassifier):
    """The recipe without a change."""

    now = 0

    def lr_lambda(self, step, total_steps):
        self.now = step
        return super().lr_lambda(step, total_steps)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class InBatch(Usual):
    def augment(self, batch, random):
        images, labels = super().augment(batch, random)
        return images + (self.now >= FROM), labels


class InOutput(Usual):
    """As one who changes a line of the second convolution."""

    def model(self):
        model = super().model()
        model.conv2.__class__ = Doubled
        return model

    def lr_lambda(self, step, total_steps):
        Doubled.now = step
        return super().lr_lambda(step, total_steps)


class Doubled(torch.nn.Conv2d):
    now = 0

    def forward(self, inputs):
        return super().forward(inputs) * (1 + (Doubled.now >= FROM))


class InLoss(Usual):
    def measure(self, outputs, batch):
        measures = super().measure(outputs, batch)
        return {**measures, "objective": measures["objective"] * (1 + (self.now >= FROM))}


class InGradient(Usual):
    """The gradient of what comes before fc1 differs, and no output."""

    def model(self):
        model = super().model()

        def doubled(module, inputs):
            return _Twice.apply(inputs[0]) if self.now >= FROM else inputs[0]

        model.get_submodule("fc1").register_forward_pre_hook(doubled)
        return model


class InUpdate(Usual):
    def lr_lambda(self, step, total_steps):
        return super().lr_lambda(step, total_steps) * (1 if step < FROM else 1.5)


class OtherNetwork(Usual):
    def model(self):
        model = super().model()
        model.fc3 = torch.nn.Linear(2, 2, bias=False)
        return model

    def forward(self, model, batch):
        return super().forward(model, batch) + model.fc3.weight.sum()
