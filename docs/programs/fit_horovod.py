"""Fit a line on every rank: Horovod with torch."""

import horovod.torch as hvd
import torch

hvd.init()
x = torch.arange(10.0, dtype=torch.float64)[:, None]
line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(line.weight)
hvd.broadcast_parameters(line.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(line.parameters(), lr=0.01), named_parameters=line.named_parameters()
)

for global_batch in x.split(4):
    local_rows = global_batch.chunk(hvd.size())[hvd.rank()]
    optimizer.zero_grad()
    loss = ((line(local_rows) - 3 * local_rows) ** 2).mean() / 2
    loss.backward()
    optimizer.step()

if hvd.rank() == 0:
    print(line.weight.item())
