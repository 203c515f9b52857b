"""LoRA: two narrow matrices beside each of W_q, W_k, W_v and W_o learn in its place (Hu 2021,
arXiv:2106.09685).

    adapted = adapt(model, rank, new)           # of the model's own parameters, only those in `new` learn
    ...                                         # training
    merge_lora(adapted)                         # W becomes W + B A * 16 / r: a model like before

The weights that do not learn can be shared with a teacher, and the optimiser keeps nothing for them.
"""
import torch
from torch import nn


class LoRA(nn.Module):
    """What is added to W x: B A x * 16 / r. A (r, in) begins random, B (out, r) begins as zero. Hu 2021,
    arXiv:2106.09685. W may stack several projections; sizes: the rows of each, which gets its own A and B"""
    def __init__(self, W, rank, sizes):
        super().__init__()
        self.scale = 16 / rank
        self.A = nn.ParameterList()
        self.B = nn.ParameterList()
        n = W.shape[1]
        for size in sizes:
            self.A.append(torch.randn(rank, n, device=W.device) / n ** 0.5)
            self.B.append(torch.zeros(size, rank, device=W.device))

    def forward(self, x):
        added = [x @ A.mT @ B.mT for A, B in zip(self.A, self.B)]
        return self.scale * torch.cat(added, -1)

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
