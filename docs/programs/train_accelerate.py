"""Train a model on all ranks by Accelerate; a second start continues in mid-epoch."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import mpistrat.torch as mt

mt.init_process_group()
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16",
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
set_seed(1)
x = torch.randn(256, 8)
dataset = TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), 0.01)
loader = DataLoader(dataset, 16, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

losses = []
is_continued = Path("saved").exists()
if is_continued:
    accelerator.load_state("saved")  # of epoch 1, after 4 batches
for epoch in range(1 if is_continued else 0, 3):
    loader.set_epoch(epoch)
    skipped = 4 if is_continued and epoch == 1 else 0
    batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    for index, (inputs, labels) in enumerate(batches, skipped + 1):
        with accelerator.accumulate(net):
            loss = binary_cross_entropy_with_logits(net(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (epoch, index) == (1, 4):
            accelerator.save_state("saved")
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
outputs = accelerator.gather_for_metrics(net(inputs).detach())
if accelerator.is_main_process:
    print("loss:", *losses)
    print("gather:", len(outputs), outputs.sum().item())
accelerator.end_training()
