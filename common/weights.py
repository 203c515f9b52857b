"""Files of weights and states. Our own (a checkpoint, a state, a stage of a conversion) have a digest.

    write_tensors('out/x.safetensors', tensors, meta)
    tensors, meta = read_tensors('out/x.safetensors')
    state = unpack(tensors, 'cpu')              # the state of a model, which `pack` made such tensors of

A safetensors file is a JSON header, then raw numbers. Nothing is pickled, so a file cannot run code. Our
header has two strings: meta, as JSON, and digest, a sha256 over meta and all tensors.
"""
import hashlib
import json
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import files


def write_safetensors(path, tensors, notes):
    """Write a safetensors file, which replaces the old one in one step. notes: strings for its header"""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with files.atomic(path) as temp:
        try:
            save_file(tensors, temp, notes)
        except SafetensorError as e:                        # as on a full disk
            raise OSError(f'{path}: cannot be written ({e})') from None


def digest(meta, tensors):
    """sha256 over the metadata (a string) and each tensor's name, type, shape and bytes."""
    total = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        total.update(f'{name} {x.dtype} {tuple(x.shape)}'.encode())
        if x.numel():
            total.update(x.flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def weights_digest(model, meta):
    """The digest of a loaded model: from its file or, for a folder, computed from its weights."""
    return meta.get('digest') or digest('', model.state_dict())


def write_tensors(path, tensors, meta):
    """Write tensors and a JSON-able dict into a file, with a digest of both. OSError if that fails"""
    text = json.dumps(meta)
    write_safetensors(path, tensors, {'meta': text, 'digest': digest(text, tensors)})


def mapped_tensors(path):
    """-> the tensors of a safetensors file, mapped: what is not used takes no memory; and the strings of its
    header. ValueError if it is broken or not one."""
    try:
        with safe_open(path, 'pt') as f:
            in_file = f.keys()
            return {key: f.get_tensor(key) for key in in_file}, f.metadata() or {}
    except (SafetensorError, RuntimeError) as e:
        raise ValueError(f'{path}: not a whole safetensors file ({e})') from None


def one_tensor(path, name):
    """A tensor of a safetensors file, mapped alone: what was read of it leaves memory with it."""
    with safe_open(path, 'pt') as f:
        return f.get_tensor(name)


def opened(path):
    """-> the tensors of a file of ours, mapped, and its header. ValueError if it is missing, foreign or
    truncated"""
    if not os.path.exists(path):
        raise ValueError(f'{path}: no such file; python train.py --rule=delta makes out/ckpt.safetensors, '
                         '--rule=softmax --n_head=4 --out=out/softmax a teacher for convert.py; of the hub, '
                         'give a folder or OWNER/NAME')
    tensors, header = mapped_tensors(path)
    if not {'meta', 'digest'} <= header.keys():
        raise ValueError(f'{path}: not written by this project; of the hub\'s models give the folder')
    return tensors, header


def read_tensors(path):
    """-> tensors, meta (with digest). ValueError as for `opened`, or if the file was changed"""
    tensors, header = opened(path)
    if digest(header['meta'], tensors) != header['digest']:
        raise ValueError(f'{path}: its contents do not match its digest: the file was damaged or changed')
    tensors, _ = opened(path)                               # anew: the digest has read all of the others
    return tensors, {**json.loads(header['meta']), 'digest': header['digest']}


# ---- states as flat dicts of tensors -----------------------------------------------------------------------
def map_state(f, state, shared=()):
    """The state with f(tensor) in place of each tensor, except in the parts that are named in `shared`."""
    layers = []
    for layer in state['layers']:
        layer = {**layer}
        for part in layer.keys() - set(shared):
            layer[part] = {name: f(x) for name, x in layer[part].items()}
        layers.append(layer)
    return {'t': f(state['t']), 'layers': layers}


def chosen_texts(state, index, shared=()):
    """The state of some texts of a batch. index (N,) may repeat a text. The parts named in `shared` stay."""
    def chosen(x):
        return x[index] if x.dim() else x           # t is that of all texts
    return map_state(chosen, state, shared)


def join(states):
    """The states of texts that were read one by one -> the state of all of them as a batch, which goes on
    token by token. The texts may have unequal lengths, except with softmax, whose caches then differ."""
    layers = []
    for same in zip(*(state['layers'] for state in states)):
        layer = {}
        for part, tensors in same[0].items():
            lengths = {other[part]['k'].shape[2] for other in same if 'k' in tensors}
            if len(lengths) > 1:
                raise ValueError('softmax caches all tokens of a text: join texts of one length, or load the '
                                 'model with rule=window and a cache longer than the texts')
            layer[part] = {name: torch.cat([other[part][name] for other in same]) for name in tensors}
        layers.append(layer)
    first = next(iter(layers[0].values()))
    device = next(iter(first.values())).device
    t = torch.stack([state['t'] for state in states])
    return {'t': t[:, None, None].to(device), 'layers': layers}     # (B, 1, 1) goes with (B, G, tokens)


def pack(state, prefix='state'):
    """A state, or None, as a flat dict of tensors: <prefix>.t and <prefix>.<layer>.<part>.<name>"""
    if state is None:
        return {}
    flat = {f'{prefix}.t': state['t']}
    for i, layer in enumerate(state['layers']):
        for part, tensors in layer.items():
            flat.update({f'{prefix}.{i}.{part}.{name}': x for name, x in tensors.items()})
    return flat


def unpack(tensors, device, prefix='state'):
    """The inverse of `pack`. Other tensors are ignored; t stays on the CPU."""
    layers = {}
    for name, x in tensors.items():
        if name.startswith(f'{prefix}.') and name != f'{prefix}.t':
            _, i, part, key = name.split('.')
            layers.setdefault(int(i), {}).setdefault(part, {})[key] = x.to(device)
    return {'t': tensors[f'{prefix}.t'], 'layers': [layers[i] for i in range(len(layers))]}


def state_bytes(state):
    """The bytes of all tensors of a state; 0 for None."""
    return sum(x.nbytes for x in pack(state).values())
