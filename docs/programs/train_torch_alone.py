"""Train a small network: PyTorch in one process."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(1000, 8)
y = x.square().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
batches = DataLoader(TensorDataset(x, y), batch_size=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for _ in range(5):
    for inputs, targets in batches:
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    print(functional.mse_loss(model(x), y).item())
