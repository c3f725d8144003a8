"""torchtitan 0.3's Llama and FSDP2 in a node, CO2 across: torchrun --nproc-per-node 4 examples/torchtitan_llama.py

Its Trainer calls torch.cuda.set_device, so the loop is ours."""

import torch
import torch.distributed as dist
from co2_training import CO2, CO2Config, node_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # what parallelize_llama calls, over a mesh of our own
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

STEPS, OF_A_NODE, VOCABULARY = 60, 2, 64
dist.init_process_group("gloo")  # with GPUs: "cpu:gloo,cuda:nccl", and a mesh of "cuda"
mesh = node_mesh("cpu", OF_A_NODE)
torch.manual_seed(0)  # the workers of a node must begin alike
model = model_registry("debugmodel").model.build()
model.init_states(buffer_device=torch.device("cpu"))
for block in model.layers.values():  # on a CPU, its FlexAttention has no backward pass
    block.attention.inner_attention = ScaledDotProductAttention.Config().build()
apply_fsdp_to_decoder(model, mesh["shard"], torch.float32, torch.float32, pp_enabled=False)
for module in model.modules():
    if isinstance(module, FSDPModule):  # torchtitan sets 1, because its own loss counts the tokens of all ranks
        module.set_gradient_divide_factor(OF_A_NODE)
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
torch.manual_seed(dist.get_rank())
following = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))  # token -> the token after it
with CO2(model.parameters(), CO2Config.recommended(steps=STEPS, tau=3), mesh=mesh) as co2:
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, 16))
        cross_entropy(model(tokens).flatten(0, 1), following[tokens].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        co2.step()

accuracy = (model(tokens).argmax(-1) == following[tokens]).float().mean()  # every worker: FSDP2 gathers
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.4f} after {STEPS} steps of {dist.get_world_size()} workers, {OF_A_NODE} a node")
dist.destroy_process_group()
