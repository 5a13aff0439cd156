"""Fit a line on every rank: torch DistributedDataParallel, over gloo."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # rank and size come from RANK and WORLD_SIZE
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(10.0, dtype=torch.float64)[:, None]
line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(line.weight)
model = DistributedDataParallel(line)  # takes the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for global_batch in x.split(4):
    # The gradients of the ranks are averaged, so the pieces must be of one size.
    local_rows = global_batch.chunk(size)[rank]
    optimizer.zero_grad()
    loss = ((model(local_rows) - 3 * local_rows) ** 2).mean() / 2
    loss.backward()
    optimizer.step()

if rank == 0:
    print(line.weight.item())
dist.barrier()
dist.destroy_process_group()
