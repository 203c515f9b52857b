"""What a command runs on: its device, and whether torch.compile works there."""
import torch


def pick_device(name):
    """'auto' or a name -> a torch.device that works. ValueError says why it does not."""
    if name == 'auto':
        name = 'cpu'
        if torch.accelerator.is_available():
            name = torch.accelerator.current_accelerator()
    try:
        x = torch.zeros(1, device=name)
        x.tolist()                                  # --device=meta has no numbers
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f'--device={name}: {str(e).splitlines()[0]}') from None
    return x.device


def try_compiler(device):
    """ValueError if torch.compile does not work here, because a C++ compiler is missing, say."""
    try:
        torch.compile(torch.neg)(torch.zeros(8, device=device))
    except RuntimeError as e:
        raise ValueError(f'--compile: {str(e).strip().splitlines()[0]}; install a compiler, such as g++, or '
                         'leave it out') from None
