"""A script with Accelerate, as its users have it."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, epochs = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    project_config=ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True, total_limit=2),
)
set_seed(1)
samples = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, 8))
first = 0
if os.path.isdir(os.path.join(out, "checkpoints")):
    accelerator.load_state()
    first = max(int(name.rpartition("_")[2]) for name in os.listdir(os.path.join(out, "checkpoints"))) + 1
    accelerator.project_configuration.iteration = first
accelerator.print("resumes from epoch", first)
for epoch in range(first, epochs):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    accelerator.save_state()
    accelerator.print("epoch", epoch)
accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, "model.pt"))
accelerator.end_training()
