"""A GPT on Python's own documentation, byte by byte, in the manner of nanoGPT's train.py. "CO2" marks what CO2 needs.

torchrun --nproc-per-node 2 examples/nanogpt.py [out_dir]

It goes on from the last checkpoint in out_dir.
"""

import math
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from co2_training import CO2, CO2Config, load, save  # CO2
from torch import Tensor, nn

out_dir = sys.argv[1] if len(sys.argv) > 1 else "out"
eval_interval, eval_iters, batch_size, block_size, gradient_accumulation_steps = 40, 5, 16, 32, 2
n_layer, n_head, n_embd, vocab_size = 2, 2, 64, 256
learning_rate, min_lr, warmup_iters, max_iters = 4e-3, 4e-4, 10, 120
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.99, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, n_head, C // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks, self.ln_f = nn.Sequential(*(Block() for _ in range(n_layer))), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)
        self.lm_head.weight = self.wte.weight  # tied before CO2 is made

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")  # with a GPU each: "cpu:gloo,cuda:nccl"
rank, world_size = dist.get_rank(), dist.get_world_size()
text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
data = dict(zip(("train", "val"), text.split(len(text) * 9 // 10), strict=False))
torch.manual_seed(1337 + rank)  # each worker draws batches of its own


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data[split]) - block_size, (batch_size,))
    rows = torch.stack([data[split][i : i + block_size + 1] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return min_lr + (learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * it / max_iters))


@torch.no_grad()
def estimate(split: str) -> tuple[float, float]:
    model.eval()
    accuracy, loss = [], []
    for x, y in (get_batch(split) for _ in range(eval_iters)):
        logits, batch_loss = model(x, y)
        accuracy.append(logits.argmax(-1).eq(y).float().mean().item())
        loss.append(batch_loss.item())
    model.train()
    return sum(accuracy) / eval_iters, sum(loss) / eval_iters


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay)
co2 = CO2(model.parameters(), CO2Config.recommended(steps=max_iters, tau=5))  # CO2: in place of DDP(model)
iter_num = resumed_at = load(out_dir, model, optimizer, co2) or 0  # CO2: in place of torch.load(ckpt.pt)
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(gradient_accumulation_steps):  # CO2: no no_sync()
        (model(*get_batch("train"))[1] / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    co2.step()  # CO2: once an update
    if iter_num % eval_interval == 0:
        co2.finish()  # CO2: all workers hold one model
        accuracy, val_loss = estimate("val")
        if rank == 0:
            print(f"step {iter_num}: val loss {val_loss:.4f}")
        save(out_dir, model, optimizer, co2, step=iter_num)  # CO2: on every worker, in place of torch.save(ckpt.pt)
co2.close()  # CO2
if rank == 0:
    print(f"resumed at step {resumed_at}\naccuracy {estimate('val')[0]:.4f} of the next byte")
dist.destroy_process_group()
