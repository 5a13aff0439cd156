"""A checkpoint takes modules, optimizers, schedulers, tensors and generators."""

from __future__ import annotations

import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
mt = pytest.importorskip("mpistrat.torch")
nn = torch.nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 5000), nn.BatchNorm1d(5000), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.two.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        return self.norm(self.one(self.tied(self.two(x)))).mean() * self.scale.float().sum()


class Training:
    """A model on some ranks with all that its training needs."""

    def __init__(self, seed, fused):
        self.strategy = ms.MirroredStrategy()
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1 * (1 + seed))
        model.scale.requires_grad_(not fused)
        self.model = mt.replicate(model, self.strategy)
        self.generator = torch.Generator().manual_seed(seed)
        trees = {"model": self.model, "generator": self.generator}
        if fused:
            self.optimizer = mt.FusedOptimizer(self.model, ms.optim.Adam(0.01))
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            trees["scheduler"] = self.scheduler
        self.checkpoint = ms.Checkpoint(optimizer=self.optimizer, **trees)

    def step(self):
        rank, size = self.strategy.rank, self.strategy.num_replicas_in_sync
        x = torch.rand(12, 4, generator=self.generator).chunk(size)[rank]
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if hasattr(self, "scheduler"):
            self.scheduler.step()

    def state(self):
        held = self.checkpoint.variables()
        return {
            name: torch.from_numpy(one.storage.array.astype("f8")) for name, one in held.items()
        }


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_from_a_checkpoint_at_another_number_of_ranks(tmp_path, fused):
    def first(comm):
        training = Training(0, fused)
        for _ in range(3):
            training.step()
        path = training.checkpoint.save(tmp_path / "ckpt")
        return path, training.state()

    path, saved = run_ranks(first, 2)[0]

    def again(comm):
        training = Training(1, fused)
        training.checkpoint.restore(path).assert_consumed()
        state = training.state()
        for name, value in saved.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
        if not fused:
            assert training.optimizer.param_groups[0]["lr"] == 0.005
            assert training.scheduler.last_epoch == 3
            steps = [s["step"] for s in training.optimizer.state.values()]
            assert steps and all(step == 3 for step in steps)
        training.step()
        weights = {name: x.detach() for name, x in training.model.named_parameters()}
        training.strategy.check_same(weights)

    for size in (1, 3):
        run_ranks(again, size)
    names = set(saved)
    assert {"model/one.weight", "model/two.weight", "model/norm.running_mean"} <= names
    assert "model/tied.weight" not in names  # it is two.weight
    if not fused:
        assert {"optimizer/groups/0/lr", "optimizer/state/0/exp_avg"} <= names


def test_tensors_are_saved_and_what_differs_is_told(tmp_path):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            tree = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
            path = ms.Checkpoint(tree=tree).save(tmp_path / "tensors")
            tree["a"].zero_()
            ms.Checkpoint(tree=tree).restore(path)
            assert tree["a"].tolist() == [0, 1, 2]
            with pytest.raises(ms.errors.StructureError, match=r"float32.3. there and float32.4."):
                ms.Checkpoint(tree={"a": torch.zeros(4), "b": tree["b"]}).restore(path)

    run_ranks(program, 2)


def test_the_state_of_an_optimizer_that_made_no_step_is_that_of_the_start():
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    held = ms.Checkpoint(optimizer=optimizer).variables()
    assert held["optimizer/state/0/step"].array == 0
    assert (held["optimizer/state/0/exp_avg"].array == 0).all()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight, before) and model.weight.grad is None
