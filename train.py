"""Train a fast-weight model, from nothing or from where it stopped. The one recipe, for other scripts, too.

    python train.py --rule=delta                   three to five minutes on two CPU cores, nothing to download
    python train.py --data=recall --rule=sum --steps=1000     recall: sum fails, --rule=delta solves it
    python train.py --resume --steps=8000          goes on from out/ckpt.safetensors, bit for bit on a CPU
    python train.py --init=bert-base-uncased --data=FOLDER --lr=5e-5     its weights; those of classes are new
    torchrun --nproc_per_node=2 train.py --rule=delta         the same training in two processes; with --fsdp
                                                              each of them keeps half of the model

Writes out/ckpt.safetensors (weights, optimiser, step), out/best.safetensors (weights) and out/log.jsonl. All
that is drawn in a step is a function of seed and step, so that a stopped run, resumed, ends in the same bits
(as long as the number of threads stays, which --threads=N pins). More steps at resuming stretch the cosine.
In order: machine, a model in parts, threads, rows of data, evaluation, the optimiser and its loop, a run.
"""
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import clip_grads_with_norm_, get_total_norm, parameters_to_vector, vector_to_parameters

from data import prepare
from model import (GPT, Config, config_of, flag, load, pack, parse, pick_device, pick_forms, read, save, script,
                   unpack)

BAD_STEPS = 10     # so many non-finite steps in a row end the run
MUON = 4.0         # times --lr: a matrix's step has singular values near 1, not entries
WARMUP = 0.05      # of all steps; then a cosine to 0
PART = 65536       # tokens of the validation file that are looked at on the way,
ROWS = 500         # and rows of a task, at the least: some have one answer each
SLOW = 2.0         # times the best milliseconds a step: then the threads are timed again
DEFAULT_THREADS = torch.get_num_threads()      # torch's own choice: all cores, or OMP_NUM_THREADS


@dataclass
class Args:
    data: str = flag('stdlib', f'{", ".join(prepare.DATASETS)}, any text file, labelled lines (mine.tsv), or '
                               'sentences and their translations (a.en:a.de)')
    tokenizer: str = flag('', f'of a text: {prepare.OF_TEXTS}; if not given, its own or the checkpoint\'s')
    out: str = flag('out', 'folder for checkpoints and the log')
    resume: bool = flag(False, 'go on from the checkpoint in --out')
    init: str = flag('', 'start with the weights of a checkpoint or hub model; flags change what may change')
    steps: int = flag(6400, 'optimiser steps', low=1)
    batch_size: int = flag(4, 'rows a step, over all processes', low=1)
    accum: int = flag(1, 'batches a step, for more rows than fit into memory', low=1)
    lr: float = flag(4e-3, 'peak learning rate', low=0)
    weight_decay: float = flag(0.1, 'on matrices only', low=0)
    optimizer: str = flag('adamw', 'muon: for the matrices of the blocks, which pays with 16 rows a step',
                          ['adamw', 'muon'])
    clip: float = flag(1.0, 'largest norm of the gradient; 0: any', low=0)
    carry: bool = flag(False, 'rows follow each other in the text and S is handed on (Schlag 2021, table 4)')
    eval_every: int = flag(500, 'steps between evaluations, which also save', low=1)
    log_every: int = flag(50, 'steps between lines', low=1)
    val_tokens: int = flag(0, 'how much of the validation data the closing figures are over; 0: all', low=0)
    seed: int = flag(0, 'of weights, data order and dropout', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda, cuda:1, mps')
    threads: int = flag(None, 'of the CPU; if not given, as many as are fastest at the start', low=1)
    dtype: str = flag('auto', 'of the matrix products; S is always fp32', ['auto', 'float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence', ['auto', 'loop', 'chunk', 'fused'])
    compile: bool = flag(False, 'torch.compile, where it works')
    fsdp: bool = flag(False, 'with torchrun: each process keeps a part of the model, not all of it')


# ---- the machine -------------------------------------------------------------------------------------------

def machine(args):
    """-> rank, world, device, dtype. Processes are those of torchrun; none is one."""
    check_threads(args.threads)
    rank = int(os.environ.get('RANK', '0'))
    world = int(os.environ.get('WORLD_SIZE', '1'))
    device = pick_device(args.device)
    cuda = device.type == 'cuda'
    if cuda and world > 1:
        device = torch.device(f'cuda:{os.environ.get("LOCAL_RANK", "0")}')
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group('nccl' if cuda else 'gloo')
    dtype = torch.float32
    if args.dtype != 'auto':
        dtype = getattr(torch, args.dtype)
    elif cuda and torch.cuda.get_device_capability(device)[0] >= 8:     # has fast bf16
        dtype = torch.bfloat16
    return rank, world, device, dtype


def memory(device):
    """Peak bytes: of the GPU, or of the process."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == 'win32':
        return 0
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == 'darwin':                            # counts bytes, others kilobytes
        return peak
    return 1024 * peak


def cores():
    """CPU cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def multiplies_bfloat16():
    """Whether the CPU has instructions for it, as far as torch knows."""
    can = getattr(torch.cpu, 'get_capabilities', dict)()
    return bool(can.get('avx512_bf16') or can.get('amx_bf16'))


def check_threads(threads):
    """ValueError for more threads than cores; None, for the fastest, is fine."""
    if threads is not None and threads > cores():
        raise ValueError(f'--threads={threads}: this process may use {cores()} cores; give at most that')


# ---- a model in parts: FSDP2, Zhao 2023, arXiv:2304.11277 --------------------------------------------------

def shard(model, device, world):
    """Each process keeps a part of every parameter and, as the optimiser is made of these, of what that knows
    of it. A block is put together for as long as it is computed; gradients come averaged."""
    from torch.distributed.fsdp import fully_shard          # here, for it takes half a second
    warnings.filterwarnings('ignore', 'FSDP2-wrapped module')       # nothing is changed in place
    mesh = dist.init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_parts(x):
    """Whether each process has a part of tensor x: a DTensor, in torch."""
    return hasattr(x, 'full_tensor')


def whole(x):
    """A tensor from its parts, for which all processes must ask; others are whole."""
    return x.full_tensor() if in_parts(x) else x


def like(x, p):
    """The inverse of `whole`: x in parts, if the parameter p is."""
    if not in_parts(p):
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x, p.device_mesh, p.placements)


# ---- threads -----------------------------------------------------------------------------------------------
# A step of a small model is a thousand small parallel regions, and each ends when its last thread does. Where
# a neighbour keeps a core busy, one thread often waits for its turn, and all the others wait for it: with 2
# threads on 2 cores the default training then takes three times as long as with 1. So it is tried out. The
# last bits of all results depend on the number: it is kept in the checkpoint, and --resume goes on with it.

def fastest_threads(run, tokens, most=DEFAULT_THREADS, limit=2.0):
    """Time run(n), work on n tokens, with 1, 2, 4, ... `most` threads, in about `limit` seconds at most;
    n is `tokens` or, where that would take too long, less. -> {threads: seconds}, n

    The numbers of threads take turns, so that a neighbour who comes and goes disturbs all alike, and the
    median of their turns counts."""
    counts = [n for n in range(1, most + 1) if n == most or n.bit_count() == 1]

    def turn(n):
        took = {}
        for count in counts:
            torch.set_num_threads(count)
            begin = time.perf_counter()
            run(n)
            took[count] = time.perf_counter() - begin
        return took
    end = time.perf_counter() + 0.4 * limit
    torch.set_num_threads(1)
    run(1)                                                  # the first call has to set things up
    n = 1
    turns = [turn(n)]
    while n < tokens and sum(turns[0].values()) < limit / 16:           # four times the work: below limit / 4
        n = min(4 * n, tokens)
        turns = [turn(n)]
    if n == tokens and turns[0][1] < 0.005:                 # too little work to be shared
        return {1: turns[0][1]}, n
    while len(turns) < 5 and time.perf_counter() < end:
        turns.append(turn(n))
    return {count: statistics.median(took[count] for took in turns) for count in counts}, n


# ---- data: row i of step s depends on (seed, s, i) alone: resuming and more processes change nothing -------
# Of pairs it also depends on how many rows a step has.

POOL = 32               # steps that divide what is drawn for them, so that pairs of like length come together


def starts(seed, step, count, data, T, meta, carry=False):
    """Where the `count` rows of a step, of all processes together, begin in data, a flat array -> (count,)
    They are drawn by a generator whose state is a counter, so those of a step need none of the steps before.
    carry: nothing is drawn; every row has a track of the text, and reads on in it from step to step."""
    n = len(data)
    if carry:
        return (np.arange(count) * (n // count) + step * T) % (n - T)
    pool = POOL if 'pad' in meta and 'classes' not in meta else 1       # pairs
    rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step // pool]))
    if 'row' not in meta:
        return rng.integers(n - T, size=count)
    begin = rng.integers(n // (2 * T), size=pool * count) * 2 * T
    if pool > 1:                                            # half the padding, and so half the work
        shortest_first = begin[np.argsort(longer_side(data, begin, T, meta), kind='stable')]
        begin = shortest_first.reshape(pool, count)[rng.permutation(pool)[step % pool]]
    return begin


def longer_side(data, begin, T, meta):
    """Tokens of a pair's source or of its translation, without padding (count,); for a model of texts these
    are one text"""
    there = data.take(np.add.outer(begin, np.arange(T))) != meta['pad']
    n = meta.get('source', 0)
    return np.maximum(there[:, :n].sum(1), there[:, n:].sum(1))


def rows(data, begin, T, meta, device):
    """-> x, y (B, T): inputs, and the token that should follow each; -1 where it does not count.
    data: the flat array of token ids, maybe a map of a file; begin (B,): where in it the rows start."""
    def tokens(at):
        found = data.take(at, mode='clip').astype(np.int64)
        found[at >= len(data)] = -1                         # the text has ended
        return torch.from_numpy(found).to(device)
    at = np.add.outer(begin, np.arange(T))
    x = tokens(at).clamp(min=0)
    y = tokens(at + (T if 'row' in meta else 1))            # a task's targets lie behind the inputs
    return x, y.masked_fill(y == meta.get('ignore', -1), -1)


def up_to_targets(x, y, meta):
    """Rows x, y (B, T) of a task without what is behind the last target of all; patches are read whole."""
    if 'patch' in meta:
        return x, y
    T = 1 + int((y >= 0).any(0).nonzero().max())
    return x[:, :T], y[:, :T]


def part_of(x, y, tokens, meta):
    """Of a batch x, y (B, T) about so many tokens: its first rows, or of a text a part of the first. Rows of a
    task stay whole: a part may have no target."""
    many = -(-tokens // x.shape[1])
    if 'row' not in meta:
        x, y = x[:, :tokens], y[:, :tokens]
    return x[:many], y[:many]


def answers(model, x, y, state, meta):
    """Read x from a state, or None -> logits (N, vocab) in fp32, targets (N,), where these count; the state.
    In a task few places count: only for these are logits computed, and what is behind them is not read."""
    if 'row' in meta:
        x, y = up_to_targets(x, y, meta)
        at = y >= 0
        logits, state = model(x, state, at)
        return logits.float(), y[at], state
    logits, state = model(x, state)                         # in a text all count, but behind its end (-1)
    return logits.flatten(0, 1).float(), y.flatten(), state


# ---- evaluation --------------------------------------------------------------------------------------------

def blocks(n, T, meta):
    """The rule `blocks`: rows of T that make each of n tokens but the first a target once; the last row of a
    text may be shorter. A task has its rows. -> where they begin"""
    if 'row' in meta:
        return np.arange(0, n - 2 * T + 1, 2 * T)           # inputs and targets
    return np.arange(0, n - 1, T)


def spread(n, T, meta, count):
    """So many of `blocks`, evenly spaced, or all where there are fewer. -> where they begin"""
    begin = blocks(n, T, meta)
    some = np.linspace(0, len(begin) - 1, min(count, len(begin)))
    return begin[some.astype(int)]


@torch.no_grad()
def evaluate(model, data, begin, T, meta, device, cast, rank=0, world=1, carry=False):
    """Rows of T tokens that start at `begin`, each read from an empty state; the processes share them.
    carry: one by one, each from the state that the last one left. -> nats a target, share guessed right"""
    training = model.training
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)             # of nats, targets, right guesses
    state = None
    many = 1 if carry else max(1, min(32, 2 ** 28 // (T * meta['vocab_size'])))     # logits: at most 1 GB
    if world > 1:
        for b in model.buffers():                           # random features: everybody's are the first one's
            dist.broadcast(b, 0)
    for i in range(0, len(begin), world * many):
        mine = begin[i + rank * many:][:many]
        idle = len(mine) == 0                               # others may wait for its part of the model
        if idle:
            mine = begin[:1]
        x, y = rows(data, mine, T, meta, device)
        with cast:
            logits, y, state = answers(model, x, y, state, meta)
        if not carry:
            state = None
        loss = F.cross_entropy(logits, y, reduction='sum', ignore_index=-1)
        right = (logits.argmax(-1) == y).sum()
        if not idle:
            total += torch.tensor([loss.item(), (y >= 0).sum().item(), right.item()])
    if world > 1:
        total = total.to(device)
        dist.all_reduce(total)
    model.train(training)
    loss, count, right = total.tolist()
    return loss / count, right / count


def evaluate_carried(model, data, meta, device, cast, segment=4096):
    """The rule `carried`: the state runs along the whole text, read a segment at a time. -> nats a token"""
    begin = blocks(len(data), segment, meta)
    return evaluate(model, data, begin, segment, meta, device, cast, carry=True)[0]


def bits_a_nat(meta):
    """Bits per byte of a validation text, for a nat a token."""
    return meta['val']['tokens'] / meta['val']['bytes'] / math.log(2)


def score(meta, loss, right=0):
    """What to print of nats a target and the share that is right; of a text bits per byte, too."""
    if 'source' in meta:
        return f'perplexity {math.exp(min(loss, 50)):.3f} a token, accuracy {100 * right:.1f} %'
    if 'row' in meta:
        return f'accuracy {100 * right:.1f} %'
    return f'{loss * bits_a_nat(meta):.4f} bits per byte, perplexity {math.exp(min(loss, 50)):.3f} a token'


def table(rows):
    """Print a list of dicts with the same keys; None is a dash."""
    def show(x):
        if x is None:
            return '-'
        if isinstance(x, str):
            return x
        if isinstance(x, int) or abs(x) >= 1e4:
            return f'{x:,.0f}'
        return f'{x:.4g}'
    cells = [list(rows[0])]
    for row in rows:
        cells.append([show(x) for x in row.values()])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for name, *others in cells:
        line = name.ljust(widths[0])
        for x, width in zip(others, widths[1:]):
            line += '  ' + x.rjust(width)
        print(line)


# ---- the optimiser and its loop ----------------------------------------------------------------------------

def adamw(model, lr, weight_decay, device, fast=(), times=1.0, without=()):
    """AdamW over what requires gradients; only matrices decay, no gains, no biases of gates (H, 1, K) and no
    feature maps (H, m, d). Parameters whose names are in `fast` learn `times` as fast as the others; those
    `without` are left out."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad and name not in without:
            groups.setdefault((p.dim() == 2, name in fast), []).append(p)
    settings = []
    for (is_matrix, is_fast), params in groups.items():
        settings.append({'params': params, 'weight_decay': weight_decay if is_matrix else 0.0,
                         'times': times if is_fast else 1.0})
    return torch.optim.AdamW(settings, lr=lr, betas=(0.9, 0.99), fused=device.type in ('cpu', 'cuda'))


class WithMuon:
    """Muon for the matrices of the blocks, AdamW for all else, as one optimiser. Muon's step is the matrix
    with singular vectors of the momentum and all singular values near 1, so that no direction is left behind.
    Jordan 2024; Liu 2025, arXiv:2502.16982. It learns MUON times as fast."""
    def __init__(self, model, lr, weight_decay, device):
        matrices = {}
        for name, module in model.blocks.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith('gates.proj'):
                matrices[f'blocks.{name}.weight'] = module.weight
        group = {'params': list(matrices.values()), 'times': MUON}
        self.muon = torch.optim.Muon([group], lr=lr, weight_decay=weight_decay)
        self.adamw = adamw(model, lr, weight_decay, device, without=matrices)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups
        self.defaults = self.adamw.defaults
        self.state = self.muon.state = self.adamw.state     # by parameter, of which none is in both

    def step(self):
        self.muon.step()
        self.adamw.step()


def pack_optimiser(model, opt):
    """What the optimiser remembers of each parameter, as a flat dict of tensors, for `save`."""
    flat = {}
    for name, p in model.named_parameters():
        for key, x in opt.state.get(p, {}).items():
            flat[f'opt.{name}.{key}'] = whole(x)
    return flat


def unpack_optimiser(model, opt, tensors):
    """The inverse of `pack_optimiser`, into opt."""
    for name, p in model.named_parameters():
        prefix = f'opt.{name}.'
        for key in ('step', 'exp_avg', 'exp_avg_sq', 'momentum_buffer'):
            if prefix + key in tensors:
                x = tensors[prefix + key]
                if key != 'step' or opt.defaults['fused']:  # else the count of steps stays on the CPU
                    x = x.to(p.device)
                if key != 'step':
                    x = like(x, p)
                opt.state[p][key] = x


def lr_at(step, steps, peak):
    """The learning rate of a step, counted from 0: a linear warm-up, then a cosine to 0."""
    warm = (step + 1) / max(1, WARMUP * steps)
    return peak * min(warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def average(model, loss, world):
    """Gradients and loss (1,) become, in place, their means over the processes, which have as many rows.
    Gradients of a model in parts are means already."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [x for x in grads if not in_parts(x)] + [loss]
    flat = parameters_to_vector(parts)                      # one message, not one for each of them
    dist.all_reduce(flat)
    vector_to_parameters(flat / world, parts)


def optimise(model, opt, loss, steps, lr, seed, done=0, clip=1.0, rank=0, world=1):
    """The loop of all training here: steps done + 1 to `steps`, with warm-up and cosine. After each of them
    it yields: steps done, loss (1,), norm of the gradient before clipping, and whether both are finite. Where
    they are not, the step changes no weights; the caller goes on or stops.

    loss(step), counted from 0, goes forward and backward itself and returns its value (1,), detached. What it
    draws, dropout too, is a function of (seed, step, rank), so a run can go on where another one stopped.
    Gradients stay until the next step begins, to be looked at."""
    for step in range(done, steps):
        for group in opt.param_groups:
            group['lr'] = group['times'] * lr_at(step, steps, lr)
        drawn = np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]
        torch.manual_seed(int(drawn))
        value = loss(step)
        if world > 1:
            average(model, value, world)
        norm = whole(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        good = bool(norm.isfinite() and value.isfinite())
        if good:
            if clip:
                clip_grads_with_norm_(model.parameters(), clip, norm)
            opt.step()
        yield step + 1, value, norm, good
        model.zero_grad(set_to_none=True)


def culprit(model, x):
    """What went wrong first in a step that is not finite: the first module, in order of computation, with
    such an output on x (B, T); else, as the backward begins at the end, the last parameter with such a
    gradient."""
    names = {module: name for name, module in model.named_modules()}
    found = []

    def look(module, args, out):
        if isinstance(out, tuple):
            out = out[0]
        if torch.is_tensor(out) and not out.isfinite().all():
            found.append(f'output of {names[module]}')
    hook = register_module_forward_hook(look)
    with torch.no_grad():
        model(x)
    hook.remove()
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is not None and not p.grad.isfinite().all():
            found.append(f'gradient of {name}')
    return (found + ['the loss'])[0]


# ---- a run -------------------------------------------------------------------------------------------------

def settings(argv):
    """Flags, and with --resume the checkpoint's. -> args, config, checkpoint's tensors, its metadata"""
    given, given_model = parse(argv, __doc__, Args, Config)
    args = Args(**given)
    if args.init and args.resume:
        raise ValueError('--init starts a run, --resume goes on with one: give one of them')
    if args.init:
        model, meta = load(args.init, **given_model)
        data = dict(meta['data'])
        if data['tokenizer'] in prepare.FIXED:              # rows may be longer: facts-256, then facts
            data.pop('row', None)
        return args, model.config, model.state_dict(), {'data': data}
    if not args.resume:
        return args, Config(**given_model), {}, {}
    path = os.path.join(args.out, 'ckpt.safetensors')
    tensors, meta = read(path)
    if 'best' not in meta:
        raise ValueError(f'{path}: holds no training run, only a model')
    args = Args(**{**meta['args'], **given, 'out': args.out})       # the run's own, but for those given again
    config = config_of(path, meta)
    for name, value in given_model.items():
        if getattr(config, name) != value:
            raise ValueError(f'--{name}={value}: {path} was made with {getattr(config, name)!r}; '
                             'drop the flag, or start anew with another --out')
    if args.steps <= meta['step']:
        raise ValueError(f'--steps={args.steps}: {path} is at step {meta["step"]} already; give more steps')
    return args, config, tensors, meta


def check(args, config, T, train, val, data, meta, world):
    """What flags, data and checkpoint must agree on, before anything is built."""
    if config.encoder and 'source' not in data:
        raise ValueError(f'--encoder={config.encoder} --data={args.data}: an encoder reads the first part of '
                         'a pair; give data with pairs, such as multi30k')
    if not config.causal and 'classes' not in data:
        raise ValueError(f'--causal=false --data={args.data}: each step would see the token that it should '
                         'say; an encoder needs data with classes, such as listops (pairs: --encoder=3)')
    if args.batch_size % world:
        raise ValueError(f'--batch_size={args.batch_size} does not divide among {world} processes')
    if min(len(train), len(val)) <= T + 1:
        raise ValueError(f'--data={args.data}: {len(train)} training and {len(val)} validation tokens, but a '
                         f'row takes {T + 1}; give a longer text or a smaller --block_size')
    if 'data' in meta:
        check_fit(args, config, T, data)
    if args.fsdp and world == 1:
        raise ValueError('--fsdp: one process has all of the model; start several, as torchrun '
                         '--nproc_per_node=2 train.py --fsdp does')
    if args.fsdp and config.encoder:
        raise ValueError('--fsdp: not with --encoder, whose decoder asks for weights out of turn')
    if args.fsdp and args.optimizer == 'muon':
        raise ValueError('--fsdp --optimizer=muon: its step needs whole matrices; leave one of them out')
    if args.carry and 'row' in data:
        raise ValueError(f'--carry: the rows of {args.data} have nothing to do with each other')
    if args.carry and args.resume and world > 1:
        raise ValueError('--resume --carry: the file has the states of one process; resume without torchrun')


def check_fit(args, config, T, data):
    """Refuse rows that weights of --init or --resume cannot read, or have no output for."""
    classes = data.get('classes', 0)
    patch = data.get('patch', 0)
    if config.classes not in (0, classes):
        raise ValueError(f'--data={args.data}: {classes} classes, the model has {config.classes}; give one '
                         'without classes, and they are new')
    if config.patch != patch:
        raise ValueError(f'--data={args.data}: patches of {patch} numbers, the model reads {config.patch} '
                         '(0: tokens)')
    if config.source != data.get('source', 0):
        raise ValueError(f'--data={args.data}: sources of {data.get("source", 0)} tokens, the model reads '
                         f'{config.source} (0: it knows no pairs)')
    if config.pos == 'learned' and T > config.block_size:
        raise ValueError(f'--data={args.data}: rows of {T} tokens, the model has learned the positions of '
                         f'{config.block_size}; make shorter rows')


def check_carry(model):
    """Refuse models whose state means nothing after the row it comes from."""
    if model.max_len:
        raise ValueError('--carry: learned positions and cosformer end after a row; take other --pos, --phi')
    if any(hasattr(getattr(m, 'phi', None), 'redraw') for m in model.modules()):
        raise ValueError('--carry: random features are redrawn for every batch, and a state in the old ones '
                         'means nothing; take another --phi')


def steps_left(meta):
    """What a run that was stopped still had to do, by the metadata of its checkpoint; 0 of a mere model."""
    if 'best' not in meta:
        return 0
    return meta['args']['steps'] - meta['step']


def restore(args, model, tensors):
    """Weights of --resume or --init. -> the states of --carry, one for each batch of a step"""
    if args.resume:
        weights = {n.removeprefix('model.'): x for n, x in tensors.items() if n.startswith('model.')}
        model.load_state_dict(weights)
    elif args.init:
        new = model.state_dict()
        if 'head.bias' not in tensors and 'head.bias' in new:       # for classes, of which it had none
            tensors = {**tensors, 'head.weight': new['head.weight'], 'head.bias': new['head.bias']}
        model.load_state_dict(tensors)
    return [unpack(tensors, f'carry{i}', model.embed.weight.device) for i in range(args.accum)]


def commit():
    """Of the code that runs, where git can tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        command = ['git', '-C', here, 'rev-parse', 'HEAD']
        git = subprocess.run(command, capture_output=True, text=True, check=False)
        return git.stdout.strip()
    except OSError:
        return ''


class Clock:
    """Milliseconds a step, without the time that other things take between steps."""
    def __init__(self, done):
        self.best = math.inf
        self.seconds = 0.0                                  # of all steps together
        self.restart(done)

    def restart(self, done):
        """Time and steps are counted from here."""
        self.done = done
        self.since = time.perf_counter()

    def lap(self, done):
        """Set ms, milliseconds a step since the last call or restart, and best, the least so far."""
        if done > self.done:
            took = time.perf_counter() - self.since
            self.seconds += took
            self.ms = 1e3 * took / (done - self.done)
            self.best = min(self.best, self.ms)
            self.restart(done)


@dataclass
class Run:
    """What the parts of a run have in common, and the parts. The loop that calls them is in `main`."""
    args: Args
    model: GPT
    train: np.ndarray
    val: np.ndarray
    meta: dict                      # of the data
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype              # of the matrix products
    cast: torch.autocast
    states: list                    # --carry: what each batch of the next step starts from
    new: list                       # ... and what those of the last step ended with

    @property
    def length(self):
        """Tokens in a row: of a task its own, which can be fewer than a pretrained model takes."""
        return self.meta.get('row', self.model.config.block_size)

    def say(self, text):
        """Print, once for all processes."""
        if self.rank == 0:
            print(text, flush=True)

    def note(self, mode='a', **row):
        """Add a line to log.jsonl; mode 'w': its first one."""
        if self.rank == 0:
            with open(os.path.join(self.args.out, 'log.jsonl'), mode) as log:
                print(json.dumps(row), file=log)

    def opening(self, threads):
        """Set the threads: as given, as in the run that is resumed, or the fastest; say what is trained.
        -> what every checkpoint will say of this run"""
        args, config = self.args, self.model.config
        if args.threads or threads:                         # results depend on them in the last bits
            torch.set_num_threads(args.threads or min(threads, cores()))
        elif self.may_time():
            self.take_fastest()
        if self.device.type == 'cpu' and args.dtype == 'auto' and multiplies_bfloat16():
            self.say('this CPU multiplies bfloat16: --dtype=bfloat16 may make steps shorter')
        n_params = sum(p.numel() for p in self.model.parameters())
        self.say(f'{",".join(config.rules())} | {n_params / 1e6:.2f} M parameters | {args.data}: '
                 f'{len(self.train):,} + {len(self.val):,} tokens of {config.vocab_size} | {self.world} x '
                 f'{self.device}, {str(self.dtype)[6:]}, {torch.get_num_threads()} threads')
        self.say(f'recurrence: {self.model.why}')
        about = {'args': dataclasses.asdict(args), 'torch': torch.__version__}
        short = {key: value for key, value in self.meta.items() if key != 'json'}       # of megabytes
        self.note('a' if args.resume else 'w', config=dataclasses.asdict(config), **about, data=short,
                  commit=commit(), device=str(self.device), params=n_params,
                  threads=torch.get_num_threads())
        return {**about, 'data': self.meta}

    def batch(self, step, i):
        """This process's rows of a step's i-th batch -> x, y (B, T)"""
        args = self.args
        T = self.length
        count = args.accum * args.batch_size
        begin = starts(args.seed, step, count, self.train, T, self.meta, args.carry)
        mine = begin.reshape(args.accum, -1)[i, self.rank::self.world]
        return rows(self.train, mine, T, self.meta, self.device)

    def backward(self, model, x, y, state=None):
        """Forward and backward of a batch -> its part of the step's loss, and the state it ends with"""
        with self.cast:
            logits, y, state = answers(model, x, y, state, self.meta)
            loss = F.cross_entropy(logits, y) / self.args.accum
        loss.backward()
        return loss.detach(), state

    def learn(self, model, step):
        """Forward and backward of all batches of a step -> its loss (1,)"""
        total = torch.zeros(1, device=self.device)
        for i, state in enumerate(self.states):
            x, y = self.batch(step, i)
            loss, state = self.backward(model, x, y, state)
            total += loss
            if self.args.carry:                             # S goes on; its gradient ends with the row
                self.new[i] = [{name: x.detach() for name, x in layer.items()} for layer in state]
        return total

    def may_time(self):
        """torchrun sees to the threads of its processes, and a GPU does not wait for them."""
        alone = self.world == 1 and self.device.type == 'cpu'
        return alone and self.args.threads is None and DEFAULT_THREADS > 1

    def take_fastest(self):
        """Set the fastest number of threads, and say so. Neither weights nor anything drawn later change."""
        x, y = self.batch(0, 0)

        def part(tokens):
            self.backward(self.model, *part_of(x, y, tokens, self.meta))
        self.model.eval()                                   # without dropout, nor features drawn anew
        times, tokens = fastest_threads(part, x.numel())
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        best = min(times, key=times.get)
        torch.set_num_threads(best)
        shown = ', '.join(f'{1e3 * took:.0f} ms with {count}' for count, took in times.items())
        self.say(f'threads: {best}, the fastest (a part of {tokens} tokens: {shown})')

    def evaluate(self, start=False):
        """The rule `blocks` on the validation data, or on its start -> nats a target, share right"""
        T = self.length
        begin = blocks(len(self.val), T, self.meta)
        if start:
            at_least = ROWS if 'row' in self.meta else 1
            begin = begin[:max(at_least, np.count_nonzero(begin + T < PART))]
        return evaluate(self.model, self.val, begin, T, self.meta, self.device, self.cast, self.rank,
                        self.world)

    def memories(self, opt):
        """What --resume needs beside the weights, as a flat dict of tensors."""
        flat = pack_optimiser(self.model, opt)
        if self.args.carry:
            for i, state in enumerate(self.states):
                flat.update(pack(state, f'carry{i}'))
        return flat

    def save(self, name, about, extra):
        """Write a checkpoint, from one of the processes."""
        state = {key: whole(x) for key, x in self.model.state_dict().items()}
        if self.rank == 0:
            save(os.path.join(self.args.out, f'{name}.safetensors'), self.model, about, extra, state)

    def translate(self):
        """Say what is made of the first source of the validation data."""
        x, _ = rows(self.val, [0], self.length, self.meta, self.device)
        source = x[:, :self.meta['source']]
        self.model.eval()
        for tokens in source, self.model.translate(source):
            self.say(f'> {prepare.decode(tokens[0].tolist(), self.meta)}')
        self.say(f'next: python sample.py --init={self.args.out}/ckpt.safetensors --source="..."')

    def report(self):
        """The closing lines: the whole validation data by both rules, a sample, the next command."""
        model, data = self.model, self.meta
        loss, right = self.evaluate()
        self.say(f'validation, blocks of {self.length}: {score(data, loss, right)}')
        self.note(rule='blocks', val_loss=loss, accuracy=right)
        if 'source' in data and self.rank == 0:
            self.translate()
        if 'row' in data or self.rank > 0 or self.args.fsdp:        # what follows is done by one process
            return
        if model.max_len is None and model.config.keeps() == {None}:
            loss = evaluate_carried(model, self.val, data, self.device, self.cast)
            self.say(f'validation, carried: {score(data, loss)}')
            self.note(rule='carried', val_loss=loss)
        model.eval()
        prompt = torch.tensor([prepare.begun([], data)], device=self.device)
        draw = torch.Generator(self.device).manual_seed(0)
        many = min(400, (model.max_len or 401) - 1)
        texts = model.generate(prompt, temperature=0.7, generator=draw)     # in fp32, as sample.py writes
        tokens = [token.item() for token, _ in itertools.islice(texts, many)]
        self.say(f'--- a sample ---\n{prepare.decode(tokens, data)}\n---')
        self.say(f'next: python sample.py --init={self.args.out}/ckpt.safetensors --tokens=1000')


def line(steps, step, loss, lr, norm, ms, tok_s, memory):
    """What is printed of a step; the same figures go to the log."""
    eta = (steps - step) * ms / 6e4
    return (f'step {step:5d}/{steps} | loss {loss:.3f} | lr {lr:.1e} | norm {norm:5.2f} | {ms:5.0f} ms | '
            f'{tok_s / 1e3:6.1f}k tok/s | {memory / 1e6:.0f} MB | eta {eta:.1f} min')


@script
def main(argv):
    args, config, tensors, meta = settings(argv)
    rank, world, device, dtype = machine(args)
    train, val, data = prepare.load(args.data, tokenizer=args.tokenizer, like=meta.get('data'))
    if args.val_tokens:
        val = val[:args.val_tokens]
    T = data.get('row', config.block_size)
    check(args, config, T, train, val, data, meta, world)
    known = 'vocab_size', 'classes', 'pad', 'source', 'patch'
    of_data = {name: data[name] for name in known if name in data}
    longest = max(T, config.block_size) if tensors else T   # what has weights keeps the positions it knows
    config = dataclasses.replace(config, block_size=longest, **of_data)
    torch.manual_seed(args.seed)
    model = GPT(config).to(device)
    model.use(pick_forms(args.impl))
    if args.carry:
        check_carry(model)
    states = restore(args, model, tensors)
    if args.fsdp:
        shard(model, device, world)
    make = WithMuon if args.optimizer == 'muon' else adamw
    opt = make(model, args.lr, args.weight_decay, device)
    unpack_optimiser(model, opt, tensors)
    cast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    os.makedirs(args.out, exist_ok=True)
    run = Run(args, model, train, val, data, rank, world, device, dtype, cast, states, list(states))
    about = run.opening(meta.get('threads') if world == 1 else None)

    first = meta.get('step', 0)                             # steps of the run that is resumed
    best = meta.get('best', math.inf)
    bad = 0                                                 # steps in a row that were not finite
    clock = Clock(first)
    learn = functools.partial(run.learn, torch.compile(model) if args.compile else model)
    for done, loss, norm, good in optimise(model, opt, learn, args.steps, args.lr, args.seed, first,
                                           args.clip, rank, world):
        if good:
            run.states[:] = run.new
            bad = 0
        else:
            bad += 1
            where = culprit(model, run.batch(done - 1, -1)[0])
            run.say(f'step {done}: not finite ({where} first), skipped, {bad} in a row')
            run.note(step=done, not_finite=where)
        if bad == BAD_STEPS:
            raise ValueError(f'{bad} steps in a row were not finite, {where} first; stopped before saving. '
                             f'Try a smaller --lr than {args.lr:g}, or another --norm')
        if done % args.log_every == 0 or done in (first + 1, args.steps):
            clock.lap(done)
            tok_s = 1e3 * T * args.batch_size * args.accum / clock.ms
            row = {'step': done, 'loss': loss.item(), 'lr': lr_at(done - 1, args.steps, args.lr),
                   'norm': norm.item(), 'ms': clock.ms, 'tok_s': tok_s, 'memory': memory(device)}
            run.say(line(args.steps, **row))
            run.note(**row)
        if done % args.eval_every == 0 or done == args.steps:
            clock.lap(done)
            if run.may_time() and clock.ms > SLOW * clock.best:
                run.say(f'steps take {clock.ms:.0f} ms, the fastest took {clock.best:.0f}')
                run.take_fastest()
            val_loss, right = run.evaluate(start=True)
            run.say(f'step {done:5d} | start of validation: {score(data, val_loss, right)}')
            run.note(step=done, val_loss=val_loss, accuracy=right)
            about['step'] = done
            if val_loss < best:
                best = val_loss
                run.save('best', about, {})
            threads = torch.get_num_threads() if world == 1 else None
            run.save('ckpt', {**about, 'best': best, 'threads': threads}, run.memories(opt))
            clock.restart(done)
    run.say(f'\n{args.steps - first} steps in {clock.seconds / 60:.1f} minutes')
    run.report()
    if world > 1:
        dist.barrier()                                      # nobody leaves while rank 0 still reports
        dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(main())
