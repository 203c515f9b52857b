"""LoRA: train two small matrices beside each large one. Hu 2021, arXiv:2106.09685

    adapted = adapt(model, 8, new)      # rank 8; of the other parameters only those named in `new` learn
    ...                                 # train
    merge_lora(adapted)                 # W becomes W + B A * 16 / r: the model is as large as before
"""
import torch
from torch import nn


class LoRA(nn.Module):
    """What is added to W x: B A x * 16 / r. A (r, in) begins random, B (out, r) begins as zero. W may stack
    several projections; sizes: the rows of each, which gets its own A and B"""
    def __init__(self, W, rank, sizes):
        super().__init__()
        self.scale = 16 / rank
        self.A = nn.ParameterList()
        self.B = nn.ParameterList()
        for size in sizes:
            self.A.append(torch.randn(rank, W.shape[1], device=W.device) / W.shape[1] ** 0.5)
            self.B.append(torch.zeros(size, rank, device=W.device))

    def forward(self, x):
        return self.scale * torch.cat([x @ A.mT @ B.mT for A, B in zip(self.A, self.B)], -1)

    def merged(self):
        """What is added to W"""
        return self.scale * torch.cat([B @ A for A, B in zip(self.A, self.B)])


def adapt(model, rank, new):
    """Put LoRA on W_q, W_k, W_v and W_o of every mixer -> the linear layers that have it, each with the hook
    that adds it. Of the other parameters, only those in `new` will learn."""
    def added(linear, given, y):
        return y + linear.lora(*given)
    for name, p in model.named_parameters():
        p.requires_grad_(name in new)
    adapted = []
    for mixer in model.mixers().values():
        for linear, sizes in (mixer.qkv, mixer.sizes), (mixer.proj, [len(mixer.proj.weight)]):
            linear.lora = LoRA(linear.weight, rank, sizes)
            adapted.append((linear, linear.register_forward_hook(added)))
    return adapted


def merge_lora(adapted):
    """Merge LoRA into the weights: W becomes W + B A * 16 / r, without changing the teacher's."""
    for linear, hook in adapted:
        hook.remove()
        linear.weight.data = linear.weight.data + linear.lora.merged().data
        del linear.lora
