"""sample.py --save_state, --load_state: a state in a file, to go on from.

The file also keeps the last token, which the next step reads. A state file belongs to one model, by the
digest of its weights, to the flags that changed the model, and to --dtype.
"""
import dataclasses
import os
from dataclasses import dataclass

from common.flags import flag
from common.weights import pack, read_tensors, unpack, weights_digest, write_tensors


@dataclass
class Flags:
    """Of sample.py"""
    save_state: str = flag('', 'file to keep the state in, after prompt and sample', path=True)
    load_state: str = flag('', 'go on from this state', path=True)


def made_with(args, model):
    """The flags that a state belongs to."""
    return {**dataclasses.asdict(model.config), 'dtype': args.dtype}


def read_state(args, model, meta):
    """A file of --save_state -> the last tokens of its texts (B, 1) and the state before them. ValueError if
    another model made it (by its digest), or this one with other flags."""
    path = args.load_state
    tensors, about = read_tensors(path)
    if about.get('model') != weights_digest(model, meta):
        raise ValueError(f'--load_state={path}: not a state of the model in {args.init} with this --dtype')
    for key, here in made_with(args, model).items():
        value = about['made_with'].get(key)
        if here != value:
            raise ValueError(f'--load_state={path}: made with {key}={value}; give that instead of {here}')
    last = tensors['last'].to(model.embed.weight.device)
    return last, unpack(tensors, last.device)


def keep_state(args, model, meta, last, state):
    """Write what `read_state` reads."""
    tensors = {name: x.clone() for name, x in pack(state).items()}          # layers may share some of them
    about = {'model': weights_digest(model, meta), 'made_with': made_with(args, model)}
    write_tensors(args.save_state, {**tensors, 'last': last}, about)


def cannot_be_kept(path):
    """For `refuse`: a state is never written over something else."""
    yield os.path.exists(path) and 'made_with' not in read_tensors(path)[1], (
        f'{path}: a state is never written over something else; give another name')
