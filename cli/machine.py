"""The machine: its memory, and how much of it a process has taken."""
import os
import subprocess
import sys

import torch


def commit():
    """-> the git commit of this code; '' if git cannot tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    git = subprocess.run('git rev-parse HEAD', shell=True, cwd=here, capture_output=True, text=True)
    return git.stdout.strip()


def peak_memory(device):
    """Peak memory in bytes, of the GPU or of the process; 0 on Windows, which does not report it."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == 'win32':
        return 0
    import resource
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def whole_memory(device):
    """The memory of a device in bytes, as far as it is known; else infinite."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == 'cpu' and hasattr(os, 'sysconf'):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return float('inf')
