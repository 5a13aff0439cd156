"""Train a model on all ranks by Lightning Fabric."""

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import mpistrat.torch as mt

mt.init_process_group()
fabric = L.Fabric(
    accelerator="cpu",
    devices=dist.get_world_size(),
    strategy=DDPStrategy(process_group_backend="mpistrat"),
    plugins=[MPIEnvironment()],
    precision="bf16-mixed",
)
fabric.launch()

fabric.seed_everything(1)
x = torch.randn(256, 8)
dataset = TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())
loader = fabric.setup_dataloaders(DataLoader(dataset, 16, shuffle=True, num_workers=1))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
net, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), 0.01))
losses = []
for _ in range(3):
    for index, (inputs, labels) in enumerate(loader):
        is_accumulating = index % 2 == 0
        with fabric.no_backward_sync(net, enabled=is_accumulating):
            loss = binary_cross_entropy_with_logits(net(inputs), labels)
            fabric.backward(loss / 2)
        if not is_accumulating:
            fabric.clip_gradients(net, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
fabric.save("saved/fabric.ckpt", {"net": net, "optimizer": optimizer})
fabric.load("saved/fabric.ckpt", {"net": net, "optimizer": optimizer})
if fabric.is_global_zero:
    print("loss:", *losses)
    print("weights:", sum(weight.abs().sum().item() for weight in net.parameters()))
