"""Train a fast-weight model from scratch, fine-tune a pretrained one, or resume a run.

    python train.py --rule=delta                   5 to 10 minutes on two CPU cores, no download
    python train.py --data=recall --rule=sum --steps=1000     sum fails at recall; --rule=delta solves it
    python train.py --resume --steps=8000          resumes out/ckpt.safetensors, bit for bit on a CPU
    python train.py --init=FOLDER --data=my.txt --steps=50 --out=out/tuned     fine-tune a pretrained model
    python train.py --init=bert-base-uncased --data=cola --lr=5e-5             with a new head, for classes
    python train.py --init=FOLDER --data=my.txt --steps=0 --rule=h2o           only evaluate, with a cache
    torchrun --nproc_per_node=2 train.py --rule=delta         the same steps by two processes

Each evaluation writes out/ckpt.safetensors (weights, optimiser, step) and, if the validation loss is the
lowest so far, out/best.safetensors. Ctrl-C ends and saves the step that it meets, unless there are several
processes. out/log.jsonl has the losses, out/result.json the final figures. All random numbers depend only on
the seed, the step and the process. So a resumed run ends in the same bits if the number of threads stays the
same (--threads=N pins it). Several processes, or batches (--accum), compute parts of one larger batch; only
dropout and redrawn features differ. If you resume with more --steps, the cosine is stretched over them.
"""
import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from common import files
from common.errors import Stop, script
from common.flags import flag, known, parse, plural, refuse, typed
from common.machine import commit, pick_device, pick_dtype, take_threads, whole_memory
from common.terminal import progress
from common.weights import map_state, pack, unpack
from data import prepare, vocabulary
from data.kinds import TRAVELS, Data
from fastweight import Favor
from model import (GPT, OF_DATA, Config, as_published, cannot_train, fill, idle, load, pick_forms, save,
                   wide)

WARMUP = 0.05       # share of the steps; after the warm-up, a cosine to 0
PART = 65536        # evaluations during training read this many tokens of a validation text,
TASK_ROWS = 500     # and at least this many rows of a task, since a row may have only one target
SLOW = 20           # seconds: at least one line is printed in so many
SMALL = 2 * 10 ** 7         # a model with fewer parameters is small, see `is_large`
LR = 4e-3           # of our own models
PRETRAINED_LR = .03         # divided by the width, of one from the hub: LR would destroy it
PRETRAINED_ROW = 512        # at most, without --block_size: it may know many more positions
OFTEN = 'data rule phi init steps batch_size lr n_layer n_head n_embd block_size out resume'  # in --help
LOGITS = 2 ** 26    # that many in memory at a time, 256 MB; on a GPU more, see `logits_at_once`
TOKENS_AT_ONCE = 2 ** 15    # an evaluation reads at most so many at a time
POOL = 32           # pairs are drawn for this many steps at once, then sorted: similar lengths share a step
SAMPLE = 400        # tokens in the sample at the end
GLIMPSE = 80        # and in that after an evaluation
PROMPTS = {'stdlib': 'class '}                  # how the sample at the end begins, per data set
MAY_CHANGE = {'steps', 'lr', 'weight_decay', 'clip', 'eval_every', 'log_every', 'out', 'resume', 'device',
              'threads', 'impl', 'compile'}     # flags that --resume takes
say = functools.partial(print, flush=True)


@dataclass
class Args:
    data: str = flag('stdlib', f'{", ".join(prepare.DATASETS)}, any text file, labelled lines (mine.tsv), '
                               'conversations (mine.jsonl), sentences and translations (a.en:a.de); '
                               'default with --init: that of the checkpoint', path=True)
    tokenizer: str = flag('', f'for texts: {vocabulary.OF_TEXTS}; default: that of the data or the '
                              'checkpoint')
    out: str = flag('out', 'folder for checkpoints and the log', path=True)
    resume: bool = flag(False, 'continue the run whose checkpoint is in --out, from its last save on')
    init: str = flag('', 'start from the weights of a checkpoint or hub model; flags may adapt it', path=True)
    steps: int = flag(6400, 'optimiser steps; 0: only evaluate, and save nothing', low=0, high=10 ** 9)
    batch_size: int = flag(4, 'rows per batch, over all processes; default of a large model: one for each',
                           low=1, high=2 ** 20)
    accum: int = flag(1, 'batches per step, for more rows than fit into memory', low=1, high=2 ** 12)
    lr: float = flag(LR, f'peak learning rate; default of a model from the hub: {PRETRAINED_LR:g} / width',
                     low=0, high=100)
    weight_decay: float = flag(0.1, 'applies to parameters with two axes', low=0, high=100)
    clip: float = flag(1.0, 'gradient clipping: largest norm; 0: no clipping', low=0, high=1e9)
    carry: bool = flag(False, 'read the text in order and carry S from step to step (Schlag 2021, table 4)')
    eval_every: int = flag(500, 'steps between evaluations; each one also saves', low=1, high=10 ** 9)
    log_every: int = flag(50, 'steps between printed lines; at least one every 20 seconds', low=1,
                          high=10 ** 9)
    val_tokens: int = flag(0, f'evaluate on this many validation tokens; 0: on all; default of a model from '
                           f'the hub: {PART:,}', low=0, high=10 ** 12)
    seed: int = flag(0, 'seed of the weights, the data order and dropout', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda, cuda:1, mps')
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)
    dtype: str = flag('auto', 'in matrix products; auto: bfloat16 on a recent GPU; S is always fp32',
                      ['auto', 'float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence; loop: the definition, fastweight.recurrent',
                     ['auto', 'loop', 'chunk', 'fused'])
    compile: bool = flag(False, 'use torch.compile')
    published: bool = flag(False, 'a new model with the convolutions, gates and norms of its rule\'s paper '
                                  '(delta, gated_delta, kda, gla, mamba2, retention)', later=True)
    row: int = known(0, 0, 2 ** 24)         # tokens in a training row; a model may know more positions


# ---- the machine -------------------------------------------------------------------------------------------
def machine(args):
    """-> rank, world, device, dtype. torchrun starts several processes; without it there is one."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = pick_device(args.device)
    if device.type == 'cuda' and world > 1:
        device = torch.device(f'cuda:{os.environ.get("LOCAL_RANK", "0")}')
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group()                           # gloo for CPU tensors, nccl for GPU tensors
    if rank > 0:                                            # only the first process prints
        sys.stdout = open(os.devnull, 'w')                  # noqa: SIM115
    return rank, world, device, pick_dtype(args.dtype, device)


# ---- data --------------------------------------------------------------------------------------------------
def rows(data, begin, T, meta, device):
    """-> x, y (B, T): inputs, and the target of each: the next token, or -1 where no target counts. Rows of a
    task are cut behind the last target of the batch; pictures (patches) are read whole. Where BOS begins a
    row of a text, the token at `begin` is its first target, else its first input.
    data: the flat array of token ids, possibly memory-mapped; begin (B,): where the rows start in it."""
    opens = meta.kind == 'text' and meta.bos is not None
    at = np.add.outer(begin, np.arange(T)) - opens
    ahead = at + (meta.row or 1)                            # in a row, the targets follow the inputs
    x = data.take(at, mode='clip').astype(np.int64)
    y = data.take(ahead, mode='clip').astype(np.int64)
    if opens:
        x[:, 0] = meta.bos
    y[y == meta.ignore] = -1
    y[ahead >= len(data)] = -1                              # beyond the end of the text
    if meta.kind not in ('text', 'picture'):
        end = np.flatnonzero((y >= 0).any(0)).max() + 1
        x = x[:, :end]
        y = y[:, :end]
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


def products_in(dtype, device):
    """A context in which matrix products have this type."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def predict(model, x, y, state, meta, dtype=torch.float32):
    """Run the model on x, starting from `state` (None: empty) -> logits (N, vocab), at least in fp32, targets
    (N,), state. In a task, logits are computed only at targets, which are few. dtype: of matrix products"""
    with products_in(dtype, x.device):
        if meta.kind != 'text':
            at = y >= 0
            logits, state = model(x, state, at)
            return wide(logits), y[at], state
        logits, state = model(x, state)                     # a text has targets everywhere, up to its end
        return wide(logits.flatten(0, 1)), y.flatten(), state


def blocks(n, T, meta, count=None):
    """Where the rows of the evaluation `blocks` begin. A text of n tokens is cut into rows of T, so that
    each token but the first (with BOS, each) is a target once. The last row may have fewer targets. A task
    has its own rows. count: take at most this many rows, evenly spaced"""
    begin = np.arange(0, n - (meta.bos is None), T)
    if meta.row:
        begin = np.arange(0, n - meta.step + 1, meta.step)
    if count and count < len(begin):
        begin = begin[np.linspace(0, len(begin) - 1, count).astype(int)]
    return begin


@dataclass
class Rows:
    """Training and validation data, as rows of T tokens of a text or a task. Row i of step s depends only on
    (seed, s, i), so resuming or using more processes changes nothing. For pairs, and with carry, it also
    depends on the number of rows per step."""
    train: np.ndarray
    val: np.ndarray
    meta: Data
    T: int
    device: torch.device
    batch_size: int = 1             # rows, over all processes
    seed: int = 0
    accum: int = 1                  # batches per step
    carry: bool = False
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32      # of the matrix products

    def starts(self, step):
        """Where the rows of a step begin in the training data, for all its batches and processes. The random
        generator starts from the step as its counter, so it needs no earlier steps. With carry nothing is
        drawn: each row has its own stretch of the text and continues in it at each step."""
        T = self.T
        n = len(self.train)
        count = self.accum * self.batch_size
        if self.carry:
            return (np.arange(count) * (n // count) + step * T) % (n - T)
        pairs = self.meta.kind == 'pairs'
        pool = POOL if pairs else 1
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step // pool]))
        if self.meta.kind == 'text':
            return rng.integers(n - T, size=count)
        begin = rng.integers(n // self.meta.step, size=pool * count) * self.meta.step
        if pairs:                                           # similar lengths together: half the padding
            real = self.train.take(np.add.outer(begin, np.arange(T))) != self.meta.pad
            source = self.meta.source                       # without a source length, both sides are one text
            longer = np.maximum(real[:, :source].sum(1), real[:, source:].sum(1))
            by_length = begin[np.argsort(longer, kind='stable')].reshape(pool, count)
            begin = by_length[rng.permutation(pool)[step % pool]]
        return begin

    def batch(self, begin, i):
        """This process's rows of the i-th batch of a step -> x, y (B, T). begin: the result of `starts`"""
        mine = begin.reshape(self.accum, -1)[i, self.rank::self.world]
        return rows(self.train, mine, self.T, self.meta, self.device)

    def targets(self, begin):
        """The number of targets in the training rows that begin there."""
        if self.meta.kind == 'text':
            return len(begin) * self.T
        targets = self.train.take(np.add.outer(begin, np.arange(self.T, 2 * self.T)))
        return np.count_nonzero(targets != self.meta.ignore)

    def losses(self, model, states, step, teacher=None):
        """Yield the loss of each batch of a step: cross entropy or, with a teacher, KL(teacher || model)
        where there are targets. states: one initial state per batch, each None without carry. With carry,
        each is replaced by its final state.

        The loss of a step is the mean over the targets of all its batches and processes. Rows differ in their
        number of targets, so a mean of the batches' means would be another loss. The processes' losses and
        gradients are averaged later, so each divides by its share of the targets."""
        begin = self.starts(step)
        share = self.targets(begin) / self.world
        for i, state in enumerate(states):
            x, y = self.batch(begin, i)
            logits, targets, end = predict(model, x, y, state, self.meta, self.dtype)
            if teacher is None:
                yield F.cross_entropy(logits, targets, reduction='sum') / share
            else:
                with torch.no_grad():
                    wanted, _, _ = predict(teacher, x, y, None, self.meta, self.dtype)
                    wanted = wanted.log_softmax(-1)
                yield F.kl_div(logits.log_softmax(-1), wanted, reduction='sum', log_target=True) / share
            if self.carry:                                  # gradients do not flow into earlier steps
                states[i] = map_state(torch.Tensor.detach, end)

    @torch.no_grad()
    def evaluate(self, model, begin=None, carried=False, label=''):
        """-> nats per target, and figures of right answers: `accuracy` (0 to 1) and, of classes, those of
        `agreement`, on the validation rows that start at `begin`; None: all rows of the evaluation `blocks`.
        Each row starts from an empty state, and the processes share the rows.
        carried: read row by row, each from the final state of the last. label: begins the progress bar"""
        if begin is None:
            begin = blocks(len(self.val), self.T, self.meta)
        tokens = tokens_at_once(self.meta.vocab_size, self.device)
        many = 1 if carried else max(1, min(32, tokens // self.T))              # rows at a time
        if self.world > 1:
            for b in model.buffers():                       # all use the first process's random features
                dist.broadcast(b, 0)
        was_training = model.training
        model.eval()
        meta = dataclasses.replace(self.meta, bos=None) if carried else self.meta       # rows that go on
        state = None
        classes = self.meta.classes and model.config.classes
        total = torch.zeros(3, dtype=torch.float64)         # nats, targets, right guesses
        counts = torch.zeros(classes, classes, dtype=torch.float64)
        mine = range(self.rank * many, len(begin), self.world * many)
        for i in progress(mine, label):
            x, y = rows(self.val, begin[i:i + many], self.T, meta, self.device)
            logits, y, end = predict(model, x, y, state, meta, self.dtype)
            if carried:
                state = end
            loss = F.cross_entropy(logits, y, reduction='sum', ignore_index=-1)
            said = logits.argmax(-1)
            right = (said == y).sum()
            total += torch.tensor([loss.item(), (y >= 0).sum().item(), right.item()])
            if classes:
                pairs = (classes * said + y).cpu()
                counts += torch.bincount(pairs, minlength=classes ** 2).view_as(counts)
        if self.world > 1:
            dist.all_reduce(total)
            dist.all_reduce(counts)
        model.train(was_training)
        loss, count, right = total.tolist()
        figures = {'accuracy': right / count}
        if classes:
            figures.update(agreement(counts))
        return loss / count, figures

    def judged(self):
        """-> where the rows begin that evaluations during training read, and what these rows are called"""
        begin = blocks(len(self.val), self.T, self.meta)
        at_least = 1 if self.meta.kind == 'text' else TASK_ROWS
        count = max(at_least, np.count_nonzero(begin + self.T < PART))
        return begin[:count], 'validation' if count >= len(begin) else 'start of validation'


def agreement(counts):
    """Matthews' correlation of answers with labels, and the share of the commonest class. The first is 0 for
    a model that always says one class, and R_K for more than two classes, Gorodkin 2004. counts (n, n): how
    often class i was said of a row of class j"""
    said, true, n = counts.sum(1), counts.sum(0), counts.sum()
    together = n * counts.trace() - said @ true
    apart = (n * n - said @ said) * (n * n - true @ true)
    return {'matthews': (together / apart.clamp(min=1).sqrt()).item(), 'majority': (true.max() / n).item()}


def size_of(model):
    """The number of its parameters."""
    return sum(p.numel() for p in model.parameters())


def is_large(model):
    """Whether it has so many parameters that other recipes suit it."""
    return size_of(model) >= SMALL


def logits_at_once(device):
    """How many logits to hold at a time. A GPU needs many rows at once to be busy: up to eight times as many,
    if it has room for eight tensors of them."""
    if device.type == 'cuda':
        return min(8 * LOGITS, torch.cuda.mem_get_info(device)[0] // 32)
    return LOGITS


def tokens_at_once(vocab, device):
    """How many tokens an evaluation reads at a time: as many as have room for their logits."""
    return min(TOKENS_AT_ONCE, logits_at_once(device) // vocab)


def of_part(meta, tokens):
    """meta with the counts of these validation tokens alone. Tokens of another part are longer or shorter."""
    if meta.kind != 'text' or meta.tokenizer in ('byte', 'ids') or len(tokens) == meta.val['tokens']:
        return meta
    text = vocabulary.decode(tokens, meta)
    part = {'tokens': len(tokens), 'bytes': len(text.encode('utf-8', 'surrogateescape'))}
    return dataclasses.replace(meta, val={**meta.val, **part})


def score(meta, loss, figures):
    """The text to print for a loss (nats per target) and the figures of `Rows.evaluate`; for a text, also
    bits per byte."""
    perplexity = f'perplexity {math.exp(min(loss, 50)):.3f} a token'
    accuracy = f'accuracy {figures["accuracy"]:.1%}'
    if 'matthews' in figures:
        accuracy += (f' (always the commonest class: {figures["majority"]:.1%}), '
                     f'Matthews {figures["matthews"]:.3f}')
    if meta.kind == 'pairs':
        return f'{perplexity}, {accuracy}'
    if meta.kind != 'text':
        return accuracy
    return f'{loss * meta.bits_a_nat():.4f} bits per byte, {perplexity}'


# ---- the optimiser -----------------------------------------------------------------------------------------
def adamw(model, lr, weight_decay, fast=(), times=1.0):
    """AdamW over all parameters that require gradients, with `times` the rate for those named in `fast`.
    Weight decay is for parameters with two axes: not gains, gate biases (H, 1, K), feature maps (H, m, d)."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decay = weight_decay if p.dim() == 2 else 0.0
            speed = times if name in fast else 1.0
            group = {'params': [], 'weight_decay': decay, 'times': speed}
            groups.setdefault((decay, speed), group)['params'].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=lr, betas=(0.9, 0.99), fused=True)


def pack_optimiser(model, opt):
    """What the optimiser remembers of each parameter, as a flat dict of tensors, for `save`."""
    flat = {}
    for name, p in model.named_parameters():
        flat.update({f'opt.{name}.{key}': x for key, x in opt.state.get(p, {}).items()})
    return flat


def unpack_optimiser(model, opt, tensors):
    """The inverse of `pack_optimiser`. A parameter that has never had a step has no memory."""
    for name, p in model.named_parameters():
        own = f'opt.{name}.'
        memory = {key.removeprefix(own): x for key, x in tensors.items() if key.startswith(own)}
        for key, x in memory.items():
            opt.state[p][key] = x.to(p.device)


def lr_at(step, steps, peak):
    """The learning rate of a step (the first is 0): the smaller of a linear warm-up and a cosine to 0."""
    warm = (step + 1) / max(1, WARMUP * steps)
    return peak * min(warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def average(model, loss, world):
    """Average the gradients and the loss (1,) over the processes, in place (see Rows.losses)."""
    parts = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    flat = parameters_to_vector(parts)                      # one message for all of them
    dist.all_reduce(flat)
    vector_to_parameters(flat / world, parts)


def begin_step(opt, step, steps, lr, seed, rank=0):
    """Set the learning rate of a step (the first is 0; lr is the peak) and the seed of its random numbers,
    dropout included. Both depend on nothing else, so a stopped run can be resumed exactly."""
    for group in opt.param_groups:
        group['lr'] = group['times'] * lr_at(step, steps, lr)
    drawn = np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]
    torch.manual_seed(int(drawn))


# ---- what a run begins with --------------------------------------------------------------------------------
def settings(argv):
    """-> args, config, weights, metadata. The last two come from the model of --init or the checkpoint of
    --resume; without one they are {}, {}."""
    given, given_model = parse(argv, __doc__, Args, Config, first=OFTEN)
    args = Args(**given)
    if args.published and args.init:
        raise ValueError('--published is for a new model: leave it out with --init')
    if args.init and args.resume:
        raise ValueError('--init starts a run, --resume goes on with one: give one of them')
    if args.resume:
        return resumed(args.out, given, given_model)
    if args.init:
        return pretrained(args, given, given_model)
    config = Config(**given_model)
    refuse(idle(given_model, config))
    if args.published:
        config = Config(**as_published(given_model))
    args.row = config.block_size
    return args, config, {}, {}


def pretrained(args, given, given_model):
    """`settings` for --init"""
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
    return args, model.config, model.state_dict(), {'data': data}


def resumed(out, given, given_model):
    """`settings` for --resume: the flags are those of the run, but for a few that may change."""
    path = f'{out}/ckpt.safetensors'
    if not os.path.exists(path):
        raise ValueError(f'--resume: {path}: no such file; give the --out of the run')
    model, meta = load(path)
    if not {'best', 'args'} <= meta.keys():
        raise ValueError(f'{path}: holds no training run, only a model')
    args = typed(Args, meta['args'], path)
    began = {**dataclasses.asdict(model.config), **dataclasses.asdict(args), 'block_size': args.row}
    for name, value in {**given, **given_model}.items():
        if name not in MAY_CHANGE and value != began[name]:
            raise ValueError(f'--{name}={value}: the run began with {began[name]!r}; leave the flag out, or '
                             f'start anew with --init={path} and another --out')
    args = dataclasses.replace(args, **{**given, 'out': out})
    if args.steps <= meta['step']:
        raise ValueError(f'{path}: has done {meta["step"]} steps; --steps={args.steps} is not more')
    return args, model.config, model.state_dict(), meta


def data_of_run(args, of_model):
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


def cannot_go_together(args, config, data, model):
    """Pairs (is it wrong?, message) for `refuse`: flags, data and model that do not fit together."""
    meta = data.meta
    of = f'--data={args.data}'
    yield not (config.causal or meta.classes), (
        f'--causal=false {of}: each step would see the token that it should say; an encoder needs '
        'classes: lines 0<TAB>text in a .tsv (not .csv), or a set such as listops (pairs: --encoder=3)')
    if args.steps:                                              # without, nothing is trained
        yield from cannot_train(config)
    yield args.batch_size % data.world, (
        f'--batch_size={args.batch_size} does not divide among {data.world} processes')
    least = data.T + 2 if meta.kind == 'text' else meta.step
    yield min(len(data.train), len(data.val)) < least, (
        f'{of} --block_size={data.T}: {len(data.train)} training and {len(data.val)} validation tokens, '
        f'expected at least {least} each; give a longer text, a smaller --block_size, or more --val_tokens')
    needed, there = bytes_of(model, data), whole_memory(data.device)
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


def bytes_of(model, data):
    """About how much memory a step takes besides torch: a parameter with its gradient and two averages, and
    what the backward needs of a batch. Caches and long rows take more."""
    config = model.config
    inner = config.n_inner or 4 * config.n_embd
    if config.act == 'swiglu':                              # has two factors
        inner *= 1.5
    kept = 24 * config.n_layer * (config.n_embd + inner)    # a token: its layers
    if not config.classes:                                  # a class is said once a row
        kept += 12 * config.vocab_size                      # its logits
    tokens = data.T // (config.patch or 1) * data.batch_size // data.world
    return 16 * size_of(model) + kept * tokens


def built(args, config, data, weights):
    """The model for these data, with the given weights if there are any. ValueError if weights, data and
    flags do not fit together"""
    of_data = {name: getattr(data.meta, name) for name in OF_DATA}
    longest = max(data.T, config.block_size) if weights else data.T     # keep all learned positions
    model = GPT(dataclasses.replace(config, block_size=longest, **of_data)).to(data.device)
    refuse(cannot_go_together(args, config, data, model))
    forms = pick_forms(args.impl)
    if args.compile:                    # TorchDynamo cannot trace Triton, nor how its kernels are tried
        forms = forms._replace(recurrence=torch.compiler.disable(forms.recurrence))
    model.use(forms)
    if weights:
        if model.config.classes and not config.classes:                 # then it gets a new head
            weights = {**weights, 'head.weight': model.head.weight, 'head.bias': model.head.bias}
        if 'positions.weight' in weights and data.T > config.block_size:
            raise ValueError(f'--data={args.data}: rows of {data.T} tokens, and the model has learned '
                             f'{config.block_size} positions; take a smaller --block_size, or data of '
                             'shorter rows')
        fill(model, weights, f'--data={args.data}: classes and patches have to be those the model has')
        if config.turns() and data.T > config.block_size:
            say(f'--block_size={data.T}: rope was trained on rows of {config.block_size}')
    return model


def restore(args, header, data, model, opt):
    """Restore the optimiser of a stopped run -> the states of --carry, one per batch."""
    tensors = header.pop('tensors')                         # as large as three models
    for side in prepare.SIDES:
        if getattr(header['data'], side) != getattr(data.meta, side):
            raise ValueError(f'--resume --data={args.data}: {side}.bin is not what the run began with; bring '
                             f'it back, or begin anew with --init={args.out}/ckpt.safetensors')
    unpack_optimiser(model, opt, tensors)
    if 'carry0.t' not in tensors:
        return [None] * args.accum
    return [unpack(tensors, data.device, f'carry{i}') for i in range(args.accum)]


# ---- what a run says and leaves ----------------------------------------------------------------------------
def log_of(args, writes=True):
    """Make the run's folder and open its log, which locks it; remove what a killed save left there.
    ValueError if another run is at work there. writes: whether this process writes anything at all"""
    if not writes:
        return open(os.devnull, 'w')
    os.makedirs(args.out, exist_ok=True)
    log = open(f'{args.out}/log.jsonl', 'a')                # noqa: SIM115
    with contextlib.suppress(ImportError, OSError):         # Windows; a file system without locks
        import fcntl
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'--out={args.out}: another run is at work there; take another folder') from None
        for name in 'ckpt', 'best', 'stage-*':
            for part in glob.glob(f'{glob.escape(args.out)}/{name}.safetensors.*.part'):
                shutil.rmtree(part)
    if not args.resume:
        log.truncate(0)
    return log


def cut_log(log, step, stage=None):
    """Drop from log.jsonl what was told of steps behind `step` in a stage: a run that was killed goes on from
    there. A line that was only begun goes, too."""
    kept = []
    for line in files.read_file(log.name).splitlines():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if told.get('step', 0) <= step or told.get('stage') != stage:
                kept.append(line.decode() + '\n')
    log.truncate(0)
    log.writelines(kept)
    log.flush()


def tell(log, text='', **figures):
    """Print a text, if there is one, and write its figures as one line of log.jsonl."""
    if text:
        say(text)
    print(json.dumps(figures), file=log, flush=True)


def tell_step(log, data, steps, peak, step, loss, norm, ms, **stage):
    """Print and log a step: its loss (1,), its gradient's norm, and its time in ms. steps: of the whole run;
    peak: the peak learning rate; stage=: that of a conversion, begins the line"""
    loss = loss.item()
    norm = norm.item()
    lr = lr_at(step - 1, steps, peak)
    tok_s = 1e3 * data.T * data.batch_size * data.accum / ms
    cost = f'loss {loss:.3f}'
    if not stage and data.meta.kind == 'text':              # in the unit of the validation
        cost = f'{loss * data.meta.bits_a_nat("train"):.4f} bits per byte'
    begins = ''.join(f'{name} | ' for name in stage.values())
    text = (f'{begins}step {step:5d}/{steps} | {cost} | lr {lr:.1e} | norm {norm:5.2f} | '
            f'{ms:5.0f} ms | {tok_s:,.0f} tok/s | eta {(steps - step) * ms / 6e4:.1f} min')
    tell(log, text, step=step, loss=loss, lr=lr, norm=norm, ms=ms, tok_s=tok_s, **stage)


def opening(model, data, args, run, log):
    """Print what is trained, and begin the log with it."""
    config = model.config
    size = size_of(model)
    threads = torch.get_num_threads()
    about = {key: value for key, value in data.meta.as_dict().items() if key not in ('json', *TRAVELS)}
    what = 'tokens' if data.meta.kind == 'text' else 'rows'
    train, val = (len(side) // data.meta.step for side in (data.train, data.val))
    text = (f'{config.summary()} | {size / 1e6:.2f} M parameters | '
            f'{args.data}: {train:,} + {val:,} {what}, a vocabulary of {config.vocab_size} | '
            f'{data.world} x {data.device}, {str(data.dtype)[6:]}, {plural(threads, "thread")}')
    if args.steps:
        text += (f'\n{plural(args.batch_size * args.accum, "row")} of {data.T} a step, about '
                 f'{bytes_of(model, data) / 1e9:.2g} GB besides torch; lr {args.lr:.2g}; saved every '
                 f'{plural(args.eval_every, "step")}; recurrence: {model.why}')
        if not args.resume and os.path.exists(f'{args.out}/ckpt.safetensors'):
            text += f'\nthe run in {args.out} is replaced'
    tell(log, text, config=dataclasses.asdict(config), **run, data=about, commit=commit(),
         device=str(data.device), params=size)


def keep_run(args, data, model, opt, states, run):
    """Write all that --resume needs. run: what the file says of it; states: those of --carry, which only a
    run of one process keeps"""
    extra = pack_optimiser(model, opt)
    if data.world == 1:
        for i, state in enumerate(states):
            extra.update(pack(state, f'carry{i}'))
    save(f'{args.out}/ckpt.safetensors', model, run, extra)


def report(model, data, args, log, **figures):
    """Compute the final figures on the validation data, read as `blocks` and `carried`. They are added
    to `figures`, and all go to result.json as one flat dict."""
    loss, right = data.evaluate(model, label='validation')
    if data.world > 1:                                      # one process does the rest. It may take longer
        dist.barrier()                                      # than the others would wait for it
        dist.destroy_process_group()
    if data.rank > 0:
        return
    meta = of_part(data.meta, data.val)
    text = f'validation, blocks of {data.T}: {score(meta, loss, right)}'
    tell(log, text, read='blocks', val_loss=loss, **right)
    figures.update({'val_loss': loss, **right, 'validation tokens': len(data.val)})
    if meta.kind == 'text':
        figures['bits per byte'] = loss * meta.bits_a_nat()
        if model.max_len is None and model.config.keeps() == {None}:
            along = dataclasses.replace(data, T=min(4096, LOGITS // meta.vocab_size + 1), world=1)
            loss, right = along.evaluate(model, carried=True, label='validation, carried')
            tell(log, f'validation, carried: {score(meta, loss, right)}', read='carried', val_loss=loss)
            figures.update({'val_loss carried': loss, 'bits per byte carried': loss * meta.bits_a_nat()})
    if args.steps:
        files.write_json(f'{args.out}/result.json', {
            **figures, 'commit': commit(), **dataclasses.asdict(args), **dataclasses.asdict(model.config)})
        show(model.eval(), data, args)


def next_command(out, meta):
    """The command that runs the model in the folder `out`. meta: of its data"""
    command = f'python sample.py --init={shlex.quote(out)}/ckpt.safetensors'
    if meta.source:
        command += ' --source="..."'
    if meta.classes:
        command += ' --prompt="..."'
    if meta.template:
        command += ' --chat'
    return command


def continued(model, data, args, tokens):
    """A text that the model writes, of up to so many tokens, after a beginning by which one can judge it"""
    meta = data.meta
    beginning = vocabulary.encode(PROMPTS.get(args.data, ''), meta)
    if meta.from_hub:                                       # an empty text would tell nothing
        beginning = data.val[:16].tolist()
    prompt = torch.tensor([vocabulary.with_bos(beginning, meta)], device=data.device)
    draw = torch.Generator(data.device).manual_seed(0)
    many = max(0, min(tokens, (model.max_len or tokens + 1) - prompt.shape[1]))
    was_training = model.training
    model.eval()
    texts = model.generate(prompt, temperature=0.7, generator=draw)         # in fp32, as in sample.py
    written = [token.item() for token, _ in itertools.islice(texts, many)]
    model.train(was_training)
    written = itertools.takewhile(lambda token: token not in meta.ends, written)
    return vocabulary.decode([*beginning, *written], meta)


def show(model, data, args):
    """Print a sample: the translation of the first pair, or a continuation of a text."""
    meta = data.meta
    if meta.source:
        x, _ = rows(data.val, [0], data.T, meta, data.device)
        source = x[:, :meta.source]
        for tokens in source, model.translate(source):
            say(f'> {vocabulary.decode(tokens[0].tolist(), meta)}')
    if meta.kind == 'text':
        say(f'--- a sample ---\n{continued(model, data, args, SAMPLE)}\n---')
    say(f'next: {next_command(args.out, meta)}')


# ---- the loop ----------------------------------------------------------------------------------------------
def training(model, opt, losses, first, steps, lr, clip, seed, rank=0, world=1):
    """The training loop, from step `first` on. Yield after each step: the steps that are done, the loss (1,),
    the norm of the gradient, the seconds it took, and whether Ctrl-C or SIGTERM asked to stop. If so, the
    caller saves what it has, and the next turn raises KeyboardInterrupt.
    losses(step): yields the loss of each batch"""
    with Stop() if world == 1 else contextlib.nullcontext() as stop:        # several would stop apart
        for step in range(first, steps):
            began = time.perf_counter()
            begin_step(opt, step, steps, lr, seed, rank)
            total = torch.zeros(1, device=next(model.parameters()).device)
            for loss in losses(step):                           # forward
                loss.backward()                                 # the gradients of batches add up
                total += loss.detach()
            if world > 1:
                average(model, total, world)
            norm = clip_grad_norm_(model.parameters(), clip or math.inf)
            if not (norm.isfinite() and total.isfinite()):
                raise ValueError(f'step {step + 1}: loss or gradient is not finite; try a smaller rate than '
                                 f'{lr:g}, or another --norm')
            opt.step()
            model.zero_grad(set_to_none=True)
            stops = bool(stop and stop.asked)
            yield step + 1, total, norm, time.perf_counter() - began, stops
            if stops or (stop and stop.asked and step + 1 == steps):        # the last is saved in any case
                raise KeyboardInterrupt(f'after step {step + 1}, which is saved: --resume with this --out '
                                        'goes on')


@script
def main(argv):
    args, config, weights, header = settings(argv)
    rank, world, device, dtype = machine(args)
    train, val, meta = data_of_run(args, header.get('data'))
    data = Rows(train, val, meta, meta.row or args.row, device, args.batch_size, args.seed,
                args.accum, args.carry, rank, world, dtype)
    torch.manual_seed(args.seed)
    model = built(args, config, data, weights)
    del weights                                             # the model has a copy
    opt = adamw(model, args.lr, args.weight_decay)
    states = [None] * args.accum                            # of --carry, one per batch
    if args.resume:
        states = restore(args, header, data, model, opt)
    kept = header.get('threads') if world == 1 else None     # the last bits depend on it
    model.eval()                                            # no dropout, and no new random features
    take_threads(args.threads or kept, device,
                 functools.partial(model.first_layer, args.batch_size // world, data.T))
    model.train()
    log = log_of(args, rank == 0 and args.steps > 0)
    if args.resume and rank == 0:
        cut_log(log, header['step'])
    run = {'args': dataclasses.asdict(args), 'torch': torch.__version__, 'threads': torch.get_num_threads()}
    opening(model, data, args, run, log)
    if args.steps == 0:
        report(model, data, args, log)
        return
    forward = torch.compile(model) if args.compile else model

    first = header.get('step', 0)                           # steps done before resuming
    best = header.get('best', math.inf)
    times = []                                              # seconds of each step since the last line
    seconds = 0.0                                           # of all steps together
    start, label = data.judged()
    part = of_part(meta, val[:start[-1] + data.T + 1])
    losses = functools.partial(data.losses, forward, states)
    steps = training(model, opt, losses, first, args.steps, args.lr, args.clip, args.seed, rank, world)
    for done, loss, norm, took, stops in steps:
        times.append(took)
        evaluates = done % args.eval_every == 0 or done == args.steps
        logs = done % args.log_every == 0 or done in (first + 1, args.steps) or sum(times) > SLOW
        if logs or evaluates:
            ms = 1e3 * statistics.mean(times)
            seconds += sum(times)
            times.clear()
        if logs:
            tell_step(log, data, args.steps, args.lr, done, loss, norm, ms)
        if evaluates:
            judged, right = data.evaluate(model, start)
            tell(log, f'step {done:5d} | {label}: {score(part, judged, right)}', step=done, val_loss=judged,
                 **right)
            if rank == 0 and meta.kind == 'text' and done < args.steps:     # something to read meanwhile
                say(f'    it writes: {" ".join(continued(model, data, args, GLIMPSE).split())}')
            improved = judged < best
            best = min(best, judged)
        if (evaluates or stops) and rank == 0:
            run.update(step=done, data=meta, best=best)
            if evaluates and improved:
                save(f'{args.out}/best.safetensors', model, run)
            keep_run(args, data, model, opt, states, run)
    say(f'\n{plural(args.steps - first, "step")} in {seconds / 60:.1f} minutes; now all validation data')
    report(model, data, args, log, steps=args.steps, ms=ms, minutes=seconds / 60)
    if best < judged:
        say(f'{args.out}/best.safetensors, an earlier step, has a lower validation loss')


if __name__ == '__main__':
    sys.exit(main())
