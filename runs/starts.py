"""What a run begins with: a new model, the model of --init, or the stopped run of --resume. Also what cannot
go together, of flags, data and model.

    args, cls, config, weights, header = begin(args, given, given_model)
    train, val, meta = data_of(args, header.get('data'))
    model = built(args, cls, config, data, weights)

cls is the class of the model, `config` its Config, `header` what its file says, {} without one.
"""
import dataclasses
import functools
import os

import torch

import models
from common import files, machine
from common.checks import idle
from common.flags import refuse, typed
from data import prepare, vocabulary
from data.kinds import TRAVELS
from data.rows import PART
from fastweight import Favor
from memory import pick_forms
from model import load
from models.files import fill
from runs.log import say

SMALL = 2 * 10 ** 7         # a model with fewer parameters is small, see `is_large`
PRETRAINED_LR = .03         # divided by the width, of one from the hub: that of our own would destroy it
PRETRAINED_ROW = 512        # at most, without --block_size: it may know many more positions
OF_DATA = 'vocab_size', 'classes', 'pad', 'source', 'patch'     # what a Config may have from the data
MAY_CHANGE = {'steps', 'lr', 'weight_decay', 'clip', 'eval_every', 'log_every', 'out', 'resume', 'device',
              'threads', 'impl', 'compile'}     # flags that --resume takes


def size_of(model):
    """The number of its parameters."""
    return sum(p.numel() for p in model.parameters())


def is_large(model):
    """Whether it has so many parameters that other recipes suit it."""
    return size_of(model) >= SMALL


# ---- a model: -> args, class, config, weights, metadata ----------------------------------------------------
def begin(args, given, given_model):
    """given, given_model: the flags that were given, of train.py and of the model"""
    if args.published and args.init:
        raise ValueError('--published is for a new model: leave it out with --init')
    if args.init and args.resume:
        raise ValueError('--init starts a run, --resume goes on with one: give one of them')
    if args.resume:
        return resumed(args, given, given_model)
    if args.init:
        return pretrained(args, given, given_model)
    return new_model(args, given_model)


def new_model(args, given):
    """A model of the kind that the flags ask for or, if they do not, the data."""
    cls = models.asked_for(given)
    config = cls.config_class(**given)
    refuse(idle(given, config))
    if args.published:
        from models.pretrained import as_published
        given = as_published(given, config.rules)
        cls = models.asked_for(given, told='--published')
        config = cls.config_class(**given)
    args.row = config.block_size
    return args, cls, config, {}, {}


def pretrained(args, given, given_model):
    """For --init: the model, and defaults that suit it"""
    row = given_model.pop('block_size', 0)
    model, meta = load(args.init, **given_model)
    refuse(idle(given_model, model.config))
    args.data = given.get('data') or prepare.trained_on(meta, args.init)
    data = meta['data']
    if data.tokenizer in vocabulary.FIXED:                  # allow longer rows: facts-256 first, then facts
        data.row = 0
    own = (meta.get('args') or {}).get('data')
    if data.labels and args.data != own:                    # a new task: the same number may mean others
        say(f'--data={args.data}: its classes are not called {", ".join(data.labels[:4])}, as in {args.init}')
        data.labels = []
    data.most = row or (model.config.block_size if model.positions is not None else 0)
    args.row = row or model.config.block_size
    if is_large(model):                                     # one row for each process
        args.batch_size = given.get('batch_size', int(os.environ.get('WORLD_SIZE', 1)))
    if data.from_hub:
        args.row = row or min(args.row, PRETRAINED_ROW)
        args.lr = given.get('lr', PRETRAINED_LR / model.config.n_embd)
        args.val_tokens = given.get('val_tokens', PART)
    return args, type(model), model.config, model.state_dict(), {'data': data}


def resumed(args, given, given_model):
    """For --resume: the flags are those of the run, but for a few that may change."""
    path = f'{args.out}/ckpt.safetensors'
    if not os.path.exists(path):
        raise ValueError(f'--resume: {path}: no such file; give the --out of the run')
    model, meta = load(path)
    if not {'best', 'args'} <= meta.keys():
        raise ValueError(f'{path}: holds no training run, only a model')
    old = typed(type(args), meta['args'], path)
    began = {**dataclasses.asdict(model.config), **dataclasses.asdict(old), 'block_size': old.row}
    for name, value in {**given, **given_model}.items():
        if name not in MAY_CHANGE and value != began[name]:
            raise ValueError(f'--{name}={value}: the run began with {began[name]!r}; leave the flag out, or '
                             f'start anew with --init={path} and another --out')
    args = dataclasses.replace(old, **{**given, 'out': args.out})
    if args.steps <= meta['step']:
        raise ValueError(f'{path}: has done {meta["step"]} steps; --steps={args.steps} is not more')
    return args, type(model), model.config, model.state_dict(), meta


# ---- data and model ----------------------------------------------------------------------------------------
def data_of(args, of_model=None):
    """-> training and validation tokens, their Data. of_model: that of the model's file; None: there is no
    model yet. What it says of conversations and names of classes stays."""
    train, val, meta = prepare.load_set(args.data, tokenizer=args.tokenizer, like=of_model)
    if of_model:
        meta = dataclasses.replace(meta, **{name: getattr(of_model, name) for name in TRAVELS})
    if args.carry:
        meta.bos = None                                     # rows go on, so none begins
    if args.val_tokens:
        val = val[:args.val_tokens]
    return train, val, meta


def built(args, cls, config, data, weights):
    """The model for these data, with the given weights if there are any. A new one of no kind gets the kind
    of the data: pairs are for a translator, classes for an encoder. ValueError if weights, data and flags do
    not fit together"""
    given = dataclasses.asdict(config)
    if not weights:
        cls = models.for_data(cls, data.meta)
    fields = models.fields_of(cls)
    given.update({name: getattr(data.meta, name) for name in OF_DATA if name in fields})
    longest = max(data.T, config.block_size) if weights else data.T     # keep all learned positions
    model = cls(cls.config_class(**{**given, 'block_size': longest})).to(data.device)
    refuse(cannot_go_together(args, data, model))
    forms = pick_forms(args.impl)
    if args.compile:                    # TorchDynamo cannot trace Triton, nor how its kernels are tried
        forms = forms._replace(recurrence=torch.compiler.disable(forms.recurrence))
    model.use(forms)
    if weights:
        put(weights, model, config, args.data, data.T)
    return model


def put(weights, model, config, name, T):
    """Fill the model with weights of a model of this Config, for data of this name, in rows of T tokens."""
    if model.task == 'classify' and not config.classes:                 # then it gets a new head
        weights = {**weights, 'head.weight': model.head.weight, 'head.bias': model.head.bias}
    if 'positions.weight' in weights and T > config.block_size:
        raise ValueError(f'--data={name}: rows of {T} tokens, and the model has learned '
                         f'{config.block_size} positions; take a smaller --block_size, or data of '
                         'shorter rows')
    fill(model, weights, f'--data={name}: classes and patches have to be those the model has')
    if config.has_rope() and T > config.block_size:
        say(f'--block_size={T}: rope was trained on rows of {config.block_size}')


def take_threads(args, header, model, data):
    """Set the number of CPU threads: --threads, that of a resumed run, or the fastest by trial."""
    model.eval()                                            # no dropout, and no new random features
    kept = header.get('threads') if data.world == 1 else None           # the last bits depend on it
    first_layer = functools.partial(model.first_layer, args.batch_size // data.world, data.T)
    machine.take_threads(args.threads or kept, data.device, first_layer)
    model.train()


def bytes_of(model, data):
    """About how much memory a step takes besides torch: a parameter with its gradient and two averages, and
    what the backward needs of a batch. Caches and long rows take more."""
    config = model.config
    mlp = model.blocks[0]
    inner = (mlp.up.out_features + mlp.down.in_features) / 2        # a gated one has two factors
    kept = 24 * config.n_layer * (config.n_embd + inner)    # a token: its layers
    if not data.meta.classes:                               # a class is said once a row
        kept += 12 * config.vocab_size                      # its logits
    tokens = data.T // (data.meta.patch or 1) * data.batch_size // data.world
    return 16 * size_of(model) + kept * tokens


def cannot_go_together(args, data, model):
    """Pairs (is it wrong?, message) for `refuse`: flags, data and model that do not fit together."""
    meta = data.meta
    of = f'--data={args.data}'
    yield from model.cannot_train(meta, args.data, args.steps)
    yield args.batch_size % data.world, (
        f'--batch_size={args.batch_size} does not divide among {data.world} processes')
    least = data.T + 2 if meta.kind == 'text' else meta.step
    yield min(len(data.train), len(data.val)) < least, (
        f'{of} --block_size={data.T}: {len(data.train)} training and {len(data.val)} validation tokens, '
        f'expected at least {least} each; give a longer text, a smaller --block_size, or more --val_tokens')
    needed, there = bytes_of(model, data), machine.whole_memory(data.device)
    yield args.steps and needed > there, (
        f'--batch_size={args.batch_size}: weights, optimiser and a batch take about {needed / 1e9:.0f} GB, '
        f'{data.device} has {there / 1e9:.0f}; take a smaller one (with --accum as many rows a step), or '
        'shorter rows')
    yield args.steps and args.init and files.lies_in(args.init, args.out), (
        f'--out={args.out}: it holds the model of --init; take another folder')
    yield args.carry and meta.kind != 'text', (
        f'--carry: the rows of {args.data} have nothing to do with each other')
    yield args.carry and len(data.train) // (args.accum * args.batch_size) <= data.T, (
        f'--carry {of}: its stretch of the text is shorter than a row; take fewer rows, or a longer text')
    yield args.carry and model.max_len, (
        '--carry: learned positions and cosformer end after a row; take other --pos, --phi')
    yield args.carry and any(isinstance(module, Favor) for module in model.modules()), (
        '--carry: random features are redrawn for every batch, and a state in the old ones means nothing; '
        'take another --phi, or map of --overflow')
