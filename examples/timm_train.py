"""An image classifier with a model, optimizer, schedule and EMA of timm, as in its train.py. "CO2" marks CO2's lines.

pip install timm scikit-learn
torchrun --nproc-per-node 2 examples/timm_train.py [--output FOLDER] [--resume FOLDER]
"""

import argparse

import torch
import torch.distributed as dist
from co2_training import CO2, CO2Config, load, save  # CO2
from sklearn.datasets import load_digits
from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="test_resnet")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--opt", default="adamw")
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--weight-decay", type=float, default=0.05)
parser.add_argument("--sched", default="cosine")
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--output", default="", help="folder for checkpoints")
parser.add_argument("--resume", default="", help="folder to go on from")


def datasets() -> tuple[TensorDataset, TensorDataset]:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = nn.functional.interpolate(images.float().view(-1, 1, 8, 8) / 8 - 1, size=16)
    return TensorDataset(images[300:], labels[300:]), TensorDataset(images[:300], labels[:300])


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, co2, scheduler, model_ema) -> float:
    model.train()
    losses, updates = AverageMeter(), epoch * len(loader)
    for input, target in loader:
        loss = loss_fn(model(input), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        co2.step()  # CO2: once after each optimizer step
        model_ema.update(model, step=updates)
        scheduler.step_update(updates)
        losses.update(loss.item(), len(input))
    co2.finish()  # CO2: in place of distribute_bn(): all workers hold one model, and one EMA model
    return losses.avg


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    top1 = AverageMeter()
    for input, target in loader:
        top1.update(model(input).argmax(1).eq(target).float().mean().item(), len(target))
    return top1.avg


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo")  # with a GPU each: "cpu:gloo,cuda:nccl"
    rank = dist.get_rank()
    torch.manual_seed(42 + rank)
    model = create_model(args.model, num_classes=10, in_chans=1)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay)
    model_ema = ModelEmaV3(model, decay=args.model_ema_decay)
    train, held_out = datasets()
    sampler = DistributedSampler(train, seed=42)
    loader_train = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    loader_eval = DataLoader(held_out, args.batch_size)
    updates = len(loader_train)
    warmup = {"warmup_epochs": args.warmup_epochs, "warmup_lr": args.lr / 10}
    per_update = {"step_on_epochs": False, "updates_per_epoch": updates}
    scheduler, _ = create_scheduler_v2(optimizer, args.sched, args.epochs, **warmup, **per_update)
    config = CO2Config.recommended(steps=args.epochs * updates, tau=4)  # CO2
    co2 = CO2(model.parameters(), config, buffers=model.buffers(), average=model_ema)  # CO2: in place of DDP(model)
    parts = {"ema": model_ema, "scheduler": scheduler}
    step = load(args.resume, model, optimizer, co2, others=parts) if args.resume else 0  # CO2: for resume_checkpoint()
    start_epoch = (step or 0) // updates
    loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, args, co2, scheduler, model_ema)
        top1, top1_ema = validate(model, loader_eval), validate(model_ema.module, loader_eval)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, top1 {top1:.4f}, of the EMA model {top1_ema:.4f}")
        if args.output:
            save(args.output, model, optimizer, co2, step=(epoch + 1) * updates, others=parts)  # CO2: CheckpointSaver
    co2.close()  # CO2
    if rank == 0:
        print(f"resumed at step {start_epoch * updates}")
        print(f"accuracy {validate(model_ema.module, loader_eval):.4f} of the EMA model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
