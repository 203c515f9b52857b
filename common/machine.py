"""What a command runs on: its device, memory, type of products and threads, and the commit of the code."""
import itertools
import os
import statistics
import subprocess
import time
from dataclasses import dataclass

import torch

from common.flags import flag

LOGITS = 2 ** 26    # that many in memory at a time, 256 MB; on a GPU more, see `logits_at_once`
TOKENS_AT_ONCE = 2 ** 15    # an evaluation reads at most so many at a time


@dataclass
class Flags:
    """Of train.py: what it runs on."""
    device: str = flag('auto', 'auto, cpu, cuda, cuda:1, mps')
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)
    dtype: str = flag('auto', 'in matrix products; auto: bfloat16 on a recent GPU; S is always fp32',
                      ['auto', 'float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence; loop: the definition, fastweight.recurrent',
                     ['auto', 'loop', 'chunk', 'fused'])
    compile: bool = flag(False, 'use torch.compile')


def commit():
    """-> the git commit of this code; '' if git cannot tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    git = subprocess.run('git rev-parse HEAD', shell=True, cwd=here, capture_output=True, text=True)
    return git.stdout.strip()


def whole_memory(device):
    """The memory of a device in bytes, as far as it is known; else infinite."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == 'cpu' and hasattr(os, 'sysconf'):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return float('inf')


def logits_at_once(device):
    """How many logits to hold at a time. A GPU needs many rows at once to be busy: up to eight times as many,
    if it has room for eight tensors of them."""
    if device.type == 'cuda':
        return min(8 * LOGITS, torch.cuda.mem_get_info(device)[0] // 32)
    return LOGITS


def tokens_at_once(vocab, device):
    """How many tokens an evaluation reads at a time: as many as have room for their logits."""
    return min(TOKENS_AT_ONCE, logits_at_once(device) // vocab)


def pick_device(name):
    """'auto' or a name -> a torch.device that works. ValueError says why it does not."""
    if name == 'auto':
        name = 'cpu'
        if torch.accelerator.is_available():
            name = torch.accelerator.current_accelerator()
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f'--device={name}: {str(e).splitlines()[0]}') from None


def pick_dtype(name, device):
    """'auto' or a name -> the type of matrix products. auto: bfloat16 on GPUs that multiply it fast"""
    if name != 'auto':
        return getattr(torch, name)
    if device.type == 'cuda' and torch.cuda.get_device_capability(device)[0] >= 8:
        return torch.bfloat16
    return torch.float32


def take_threads(wanted, device, run):
    """Set the number of CPU threads: `wanted` or, if the device is a CPU, of 1, 2, 4, ... and as many as
    torch takes the one with which run() is fastest. A step of a small model is a thousand small parallel
    regions, each as slow as its slowest thread: beside busy programs, 2 threads on 2 cores take 3 to 15 times
    as long as 1."""
    most = wanted or torch.get_num_threads()
    torch.set_num_threads(most)
    if wanted or most == 1 or device.type != 'cpu':
        return
    seconds = {n: [] for n in range(1, most + 1) if n == most or n.bit_count() == 1}
    start = time.perf_counter()
    for rounds in itertools.count(1):
        for n, times in seconds.items():                    # they take turns: others disturb them all alike
            torch.set_num_threads(n)
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        took = time.perf_counter() - start
        if (rounds >= 2 and took >= 2) or (rounds >= 6 and took >= 0.2):
            break
    medians = {n: statistics.median(times[1:]) for n, times in seconds.items()}     # the first makes threads
    torch.set_num_threads(min(medians, key=medians.get))
