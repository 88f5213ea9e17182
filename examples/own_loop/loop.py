"""A training loop of one's own, with the lines that make it resume, report and train on many GPUs."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from flyte_ddp import Loop


def digits(split: str) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    chosen = [number for number in range(len(labels)) if (number % 5 == 0) == (split == "test")]
    return TensorDataset(torch.tensor(images[chosen]).float() / 16, torch.tensor(labels[chosen]))


def train(loop: Loop) -> None:
    settings = loop.settings
    model = loop.wrap(
        nn.Sequential(nn.Linear(64, settings.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(settings.width, 10))
    )
    batches, test = loop.batches(digits("train")), loop.evaluation(digits("test"))
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    schedule = OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.epochs * len(batches))
    loop.keep(model=model, optimizer=optimizer, schedule=schedule)

    for _ in loop.epochs(headline="accuracy", percent=["accuracy"]):
        model.train()
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loop.log(loss=loss)

        model.eval()
        with torch.no_grad():
            for images, labels in test:
                outputs = model(images)
                loop.measured(
                    loss=F.cross_entropy(outputs, labels, reduction="none"), accuracy=outputs.argmax(1) == labels
                )
        loop.evaluated()
