"""Models in files: ours (a checkpoint), and those of the hub (a folder).

    save('x.safetensors', model, {'data': Data('byte', 256)})
    model, meta = load('x.safetensors')         # meta: what was saved beside the weights

A checkpoint names the class of its model, so `load` builds the GPT or one of the others in models/.
"""
import dataclasses
import os

import torch
from torch.overrides import TorchFunctionMode

import models
from common.errors import of_package
from common.flags import briefly, typed
from common.weights import one_tensor, read_tensors, write_tensors
from data import vocabulary
from data.kinds import Data
from fastweight import RULES
from memory import FastWeights

# What a kind of model has in its Config and another lacks, with the value that means: no such part. Files of
# older versions have all of these, and folders some. A new field needs no entry.
ABSENT = {
    'overflow': '', 'positions': 'true', 'writes': 1,
    'causal': True, 'pool': 'mean', 'classes': 0, 'pad': None, 'patch': 0, 'cls': False, 'pooler': False,
    'post_norm': False, 'encoder': 0, 'encoder_rule': '', 'cross': '', 'source': 0,
    'qkv_conv': 0, 'out_gate': '', 'qk_norm': False, 'head_dim': 0, 'rms': False, 'eps': 1e-5, 'theta': 1e4,
    'rope_scaling': [], 'rope_share': 1.0, 'n_kv_head': 0, 'value_dim': 0, 'value_heads': 0, 'key_heads': 0,
    'skip': False, 'out_eps': 0.0, 'cache_gate': '', 'norm_after': False, 'qk_norm_all': False,
    'qkv_bias': False, 'n_inner': 0, 'tied': True}


def save(path, model, meta, extra=None, own=None):
    """Write a model, metadata (data: its tokenizer, step, ...) and extra tensors into one file for `load`.
    own: the model's tensors by name, if not those of its state_dict (only what learns). What
    `load` returned can be saved again: then the extra tensors are those in the metadata."""
    data = meta.get('data') or Data('ids', model.config.vocab_size)
    meta = {**meta, 'model': type(model).__name__, 'config': dataclasses.asdict(model.config),
            'data': data.as_dict()}
    others = meta.pop('tensors', {}) | (extra or {})
    meta.pop('digest', None)                        # of the file that was loaded
    tensors = {f'model.{name}': x for name, x in (own or model.state_dict()).items()}
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise ValueError(f'{name} is not finite any more, so nothing was saved; try a smaller --lr')
    write_tensors(path, tensors | others, meta)


class Undrawn(TorchFunctionMode):
    """Inside this context torch.nn.init does nothing. A file will overwrite the parameters anyway, and memory
    that is never written costs nothing."""
    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(f, '__module__', '') == 'torch.nn.init':
            return kwargs['tensor']
        return f(*args, **kwargs)


def load(source, device='cpu', dtype=torch.float32, **changes):
    """Load a checkpoint, a folder in the hub's layout, or a model on the hub, by name -> model, meta. The
    model is in eval mode, and several threads may use it.
    meta: data (name, tokenizer, ...), step, config, and tensors, which `save` got as extra. changes: flags of
    Config, see models.cache_flags. dtype: bfloat16 rounds the weights, see `round_weights`; those of a folder
    then never take the memory of fp32.
    ValueError, with the source, if something is missing, damaged or of another kind."""
    source = str(source)
    folder = None
    if os.path.isfile(source) or source.endswith('.safetensors'):
        weights, meta = checkpoint(source)
    else:
        from hub import folders
        folder = folders.Folder(folders.folder_of(source), source)
        meta = {'config': folder.config, 'data': folder.data.as_dict(), 'step': 0, 'tensors': {}}
    if not {'config', 'data'} <= meta.keys():
        raise ValueError(f'{source}: holds no model (a state saved by sample.py?)')
    saved = class_and_config(meta, f'{source}: cannot be built here, maybe of another version')
    meta['config'] = dataclasses.asdict(saved[1])
    cls, config = with_other_cache(*saved, source, **changes)
    with of_package(f'{source}: no tokens'):
        data = meta['data'] = Data(**meta['data'])
        if data.json:
            vocabulary.subwords(data.json)
    if data.is_joined:
        data.row = 0                    # the rows were those of the pairs: the model reads any text
    if folder:
        with Undrawn():                 # all of the folder's, whatever the flags say
            weights = folder.tensors(saved[0](saved[1]).state_dict(), dtype)
    model = unfilled(cls, config, saved[1])
    put_weights(model, weights, saved, source, changes)
    if dtype == torch.bfloat16:
        round_weights(model)
    return model.to(device).eval(), meta


def checkpoint(path):
    """A file of `save` -> the model's tensors by name; its meta, with all other tensors in `tensors`"""
    tensors, meta = read_tensors(path)
    weights = {}
    for name in [*tensors]:
        if name.startswith('model.'):   # copied: a file's memory is not aligned, and then products round
            del tensors[name]                                                       # otherwise
            weights[name.removeprefix('model.')] = one_tensor(path, name).clone()
    return weights, {'step': 0, **meta, 'tensors': tensors}


def class_and_config(meta, why):
    """-> the class and the Config of a model, by the meta of its file. ValueError, beginning with `why`.
    Older files, and folders, have fields of all kinds and do not name the class: it is the first that has
    those which are not absent."""
    raw = meta['config']
    if 'model' in meta:
        cls = models.named(meta['model'])
        return cls, typed(cls.config_class, raw, why)
    given = {name: x for name, x in raw.items() if name not in ABSENT or x != ABSENT[name]}
    if raw.get('causal', True) and not raw.get('encoder'):
        if raw.get('classes'):
            given['causal'] = True
        else:                                               # a decoder needs nothing of its data
            of_data = 'pad', 'source', 'patch'
            given = {name: x for name, x in given.items() if name not in of_data}
    try:
        cls = models.asked_for(given)
        return cls, cls.config_class(**given)
    except ValueError as e:
        raise ValueError(f'{why}: {e}') from None


def whole_config(config):
    """The fields of a Config and, as absent, those of all other kinds: a dict"""
    return {**ABSENT, **dataclasses.asdict(config)}


def with_other_cache(cls, config, source, rule='', **changes):
    """-> class and Config of a model with other flags (models.cache_flags). A new rule replaces softmax and
    every rule with a cache. ValueError, with the source, if it has neither."""
    if rule and rule not in RULES:
        raise ValueError(f'--rule={rule}: choose from {", ".join(RULES)}')
    old = dataclasses.asdict(config)
    if rule:
        if config.keeps() == {None}:
            raise ValueError(f'--rule={rule}: {source} has no softmax layers, only {briefly(config.rules)}')
        layers = [rule if RULES[name].keeps else name for name in config.rules]
        changes.update(rule=rule, layers=','.join(layers))
        if RULES[rule].keeps == 'all' and 'overflow' in old:
            changes = {'overflow': '', 'positions': 'true', **changes}
    new = {**old, **changes}
    cls = models.asked_for(new, cls)
    if new.get('overflow') and old.get('overflow') and new['positions'] != old['positions']:
        raise ValueError(f'--positions={new["positions"]}: the matrix of {source} learned with --positions='
                         f'{old["positions"]}; leave the flag out, or give --overflow= for the cache alone')
    new = cls.config_class(**new)
    if any(RULES[then].matrix and RULES[was].keeps for then, was in zip(new.rules, config.rules)):
        given = f'--rule={rule}' if rule else f'--layers={new.layers}'
        raise ValueError(f'{given}: what softmax learned does not suit a matrix without training; '
                         f'python convert.py --from={source} {given} --data=TEXT trains it')
    return cls, new


def overflow_of(config):
    """The matrix beside the cache; '' if there is none."""
    return getattr(config, 'overflow', '')


def unfilled(cls, config, saved):
    """A model of this Config for weights of the Config `saved`. What these do not have, another --overflow,
    is drawn, always alike."""
    if overflow_of(config) == overflow_of(saved):
        with Undrawn():
            return cls(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config)


def put_weights(model, weights, saved, source, changes):
    """Fill a model with weights of the class and Config `saved`. ValueError, with the changes to it, if they
    are for another model; only those of --overflow may be missing or too many."""
    cls, config = saved
    why = f'{source}: holds the weights of another model'
    other = [f'--{name}={value}' for name, value in changes.items() if getattr(config, name, None) != value]
    if other:
        why = f'{" ".join(other)}: not what the weights of {source} are for'
    same = type(model) is cls and model.config == config
    others = fill(model, weights, why, strict=same, assign=True)
    for name in others.missing_keys + others.unexpected_keys:
        if '.overflow.' not in name and '.log_mass.' not in name:
            raise ValueError(f'{why}, see {name}')


def fill(model, tensors, why, **how):
    """load_state_dict. ValueError, beginning with `why`, for tensors with other names or shapes."""
    try:
        return model.load_state_dict(tensors, **how)
    except RuntimeError as e:
        raise ValueError(f'{why} ({" ".join(str(e).split())[:200]})') from None


def round_weights(model):
    """Round the weights to bfloat16, to read and write but not to train: half the memory, and faster where
    the machine multiplies it. Gates, feature maps and S are computed in fp32."""
    model.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, FastWeights):
            module.float()
            if hasattr(module.gates, 'proj'):
                module.gates.proj.to(torch.bfloat16)
