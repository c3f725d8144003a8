"""A classifier of scikit-learn's digits in one's own loop with accelerate and CO2.

pip install ".[accelerate]" scikit-learn
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from co2_training import CO2Config
from co2_training.integrations.accelerate import CO2Training
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(x[300:], y[300:]), TensorDataset(x[:300], y[:300])


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    train, test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = CO2Config.recommended()
    # all but the model, which CO2Training prepares
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(train, batch_size=16, shuffle=True))
    with CO2Training(accelerator, model, optimizer, config) as co2:
        for epoch in range(6):
            model.train()
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    if co2.step():
                        seconds = co2.metrics()["co2/exposed_seconds"]
                        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {seconds:.4f} s waited")
    model.eval()
    x, y = (part.to(accelerator.device) for part in test.tensors)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    accelerator.print(f"accuracy {right:.3f} on {len(y)} digits")
    accelerator.end_training()


if __name__ == "__main__":
    main()
