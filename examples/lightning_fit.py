"""A classifier of scikit-learn's digits with Lightning and CO2.

pip install ".[lightning]" scikit-learn
torchrun --nproc-per-node 2 examples/lightning_fit.py [folder]
"""

import os
import sys

import torch
from co2_training import CO2Config
from co2_training.integrations.lightning import CO2Strategy
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = torch.utils.data.Subset(data, range(300, len(data))), torch.utils.data.Subset(data, range(300))
    folder = sys.argv[1] if len(sys.argv) > 1 else "out_lightning_fit"
    trainer = Trainer(
        strategy=CO2Strategy(CO2Config.recommended()),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=4,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(f"{folder}/checkpoints", monitor="accuracy", mode="max")],
        log_every_n_steps=8,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=100))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} on {len(test)} digits")


if __name__ == "__main__":
    main()
