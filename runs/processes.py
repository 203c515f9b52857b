"""Several processes that train one model, as torchrun starts them. Without it there is one, and each function
here does nothing.

    rank, world, device = join(device)          # this process, of how many, and its GPU
    average(model, loss, world)                 # the gradients of all
    leave(world)
"""
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def join(device):
    """-> rank, world, and the device of this process"""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if device.type == 'cuda' and world > 1:
        device = torch.device(f'cuda:{os.environ.get("LOCAL_RANK", "0")}')
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group()                           # gloo for CPU tensors, nccl for GPU tensors
    if rank > 0:                                            # only the first process prints
        sys.stdout = open(os.devnull, 'w')                  # noqa: SIM115
    return rank, world, device


def average(model, loss, world):
    """Average the gradients and the loss (1,) over the processes, in place (see train.losses)."""
    if world == 1:
        return
    parts = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    flat = parameters_to_vector(parts)                      # one message for all of them
    dist.all_reduce(flat)
    vector_to_parameters(flat / world, parts)


def add_up(world, *tensors):
    """Replace tensors by their sums over the processes."""
    for x in tensors if world > 1 else ():
        dist.all_reduce(x)


def share_buffers(model, world):
    """All use the first process's buffers, such as random features."""
    for x in model.buffers() if world > 1 else ():
        dist.broadcast(x, 0)


def leave(world):
    """Wait for the others, and part: the first may then work longer than they would wait for it."""
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
