"""Train a model of Lightning on all ranks: fit, validate, test, predict and resume."""

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpistrat.torch as mt

mt.init_process_group()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.net = mt.SyncBatchNorm.convert(net)  # in place of Trainer(sync_batchnorm=True)

    def log_loss(self, name, batch):
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(batch[0]), batch[1])
        self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, index):
        return self.log_loss("train_loss", batch)

    def validation_step(self, batch, index):
        self.log_loss("val_loss", batch)

    def test_step(self, batch, index):
        self.log_loss("test_loss", batch)

    def predict_step(self, batch, index):
        return self.net(batch[0]).sigmoid()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def make_loader(count, **options):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    y = (x.sum(1, keepdim=True) > 0).float()
    return DataLoader(TensorDataset(x, y), batch_size=16, num_workers=1, **options)


def make_trainer(epochs):
    return L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="mpistrat"),
        plugins=[MPIEnvironment()],
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="bf16-mixed",
        callbacks=[
            ModelCheckpoint("saved", "best", monitor="val_loss"),
            EarlyStopping("val_loss", stopping_threshold=0.3),
        ],
        logger=False,
        enable_progress_bar=False,
    )


L.seed_everything(1)
train, valid = make_loader(256, shuffle=True), make_loader(128)
trainer = make_trainer(3)
trainer.fit(Classifier(), train, valid)
fit = trainer.callback_metrics
[valid_metrics] = trainer.validate(dataloaders=valid, ckpt_path="best", verbose=False)
[test_metrics] = trainer.test(dataloaders=valid, ckpt_path="best", verbose=False)
predictions = trainer.predict(dataloaders=valid, ckpt_path="best")
best = trainer.checkpoint_callback.best_model_path
trainer = make_trainer(20)
trainer.fit(Classifier(), train, valid, ckpt_path=best)
resumed = trainer.callback_metrics

if trainer.is_global_zero:
    print("fit:", {name: value.item() for name, value in fit.items()})
    print("validate:", valid_metrics)
    print("test:", test_metrics)
    print("predict:", sum(prediction.sum().item() for prediction in predictions))
    print("resume:", trainer.current_epoch, {name: value.item() for name, value in resumed.items()})
