"""The script of lightning_plain.py by node-based communications: compare the two files line by line.

Run it on three ranks of two pretended nodes: evenly launch --nodes 2,1 examples/tools/lightning_evenly.py
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenly.integrations.lightning import EvenlyStrategy


def spirals(count: int, seed: int) -> TensorDataset:
    """Returns the points of two spiral arms and which arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator)
    angle = 7 * turn + torch.pi * label
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)  # [count, 2]
    return TensorDataset(points + 0.01 * torch.randn(count, 2, generator=generator), label)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        strategy=EvenlyStrategy(every=5),
        max_epochs=12,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint("checkpoints", monitor="accuracy", mode="max")],
    )
    model = Classifier()
    data, checks = spirals(1500, seed=0), spirals(501, seed=1)
    trainer.fit(model, DataLoader(data, batch_size=50, shuffle=True), DataLoader(checks, batch_size=50))
    right = trainer.validate(model, DataLoader(checks, batch_size=50), ckpt_path="best", verbose=False)[0]["accuracy"]
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
