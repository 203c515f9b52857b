"""Train a fast-weight model, from nothing or from where it stopped. The one recipe, for other scripts, too.

    python train.py --rule=delta                   three to five minutes on two CPU cores, nothing to download
    python train.py --data=recall --rule=sum --steps=1000     recall: sum fails, --rule=delta solves it
    python train.py --resume --steps=8000          goes on from out/ckpt.safetensors, bit for bit on a CPU
    python train.py --init=bert-base-uncased --data=FOLDER --lr=5e-5     its weights; those of classes are new
    torchrun --nproc_per_node=2 train.py --rule=delta         the same training in two processes; with --fsdp
                                                              each of them keeps half of the model

Writes out/ckpt.safetensors (weights, optimiser, step), out/best.safetensors (weights), out/log.jsonl and, at
the end, out/result.json with all closing figures. All that is drawn in a step is a function of seed and step:
a stopped run, resumed, ends in the same bits, as long as the number of threads stays (--threads=N pins it).
More steps at resuming stretch the cosine.
In order: machine, threads, a model in parts, rows of data, the optimiser and its loop, a run.
"""
import dataclasses
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
from torch.nn.utils import clip_grads_with_norm_, get_total_norm, parameters_to_vector, vector_to_parameters

from data import prepare
from model import (GPT, Config, config_of, flag, load, pack, parse, pick_device, pick_forms, read, save,
                   script, unpack)

BAD_STEPS = 10      # so many non-finite steps in a row end the run
MUON = 4.0          # times --lr: a matrix's step has singular values near 1, not entries
WARMUP = 0.05       # of all steps; then a cosine to 0
PART = 65536        # tokens of the validation file that are looked at on the way,
ROWS = 500          # and rows of a task, at the least: some have one answer each
CLEARLY = 1.5       # times as fast or as slow as before: then the threads are timed again
DEFAULT_THREADS = torch.get_num_threads()       # torch's own choice: all cores, or OMP_NUM_THREADS
PROMPTS = {'stdlib': 'class '}                  # by data set: with what the sample at the end begins


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
    impl: str = flag('auto', 'form of the recurrence; loop: the definition, fastweight.recurrent',
                     ['auto', 'loop', 'chunk', 'fused'])
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


def multiplies_bfloat16():
    """Whether the CPU has instructions for it, as far as torch knows."""
    can = getattr(torch.cpu, 'get_capabilities', dict)()
    return bool(can.get('avx512_bf16') or can.get('amx_bf16'))


def commit():
    """Of the code that runs, where git can tell."""
    command = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'rev-parse', 'HEAD']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ''


# ---- threads -----------------------------------------------------------------------------------------------
# A step of a small model is a thousand small parallel regions, and each ends when its last thread does. Where
# a neighbour keeps a core busy, one thread often waits for its turn, and all the others wait for it: with 2
# threads on 2 cores the default training then takes three times as long as with 1. So it is tried out. The
# last bits of all results depend on the number: it is kept in the checkpoint, and --resume goes on with it.

def cores():
    """CPU cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def check_threads(threads):
    """ValueError for more threads than cores; None, for the fastest, is fine."""
    if threads is not None and threads > cores():
        raise ValueError(f'--threads={threads}: this process may use {cores()} cores; give at most that')


class Threads:
    """The number of threads: as given, else the one with which run(n), work on n of a step's tokens, is
    fastest of 1, 2, 4, .. `most`. say: prints a line"""
    def __init__(self, run, tokens, say, most=None):
        self.run = run
        self.tokens = tokens
        self.say = say
        most = most or DEFAULT_THREADS
        self.counts = [n for n in range(1, most + 1) if n == most or n.bit_count() == 1]
        self.ms = None                                      # of a step with the number that was chosen

    def choose(self, limit=2.0):
        """Time them, in about `limit` seconds, and set the fastest: a tenth of a step, or all of it if there
        is time. They take turns, so that a neighbour who comes and goes disturbs all alike, and the median of
        their turns counts. The first turn, in which the threads are made, does not."""
        times = {count: [] for count in self.counts}

        def turn(n):
            for count in self.counts:
                torch.set_num_threads(count)
                begin = time.perf_counter()
                self.run(n)
                times[count].append(time.perf_counter() - begin)
            return sum(took[-1] for took in times.values())
        before = torch.get_num_threads()
        n = max(1, self.tokens // 10)
        turn(n)
        end = time.perf_counter() + 0.4 * limit
        if turn(n) < limit / 40:                            # then a whole step takes a quarter of the time
            n = self.tokens
            turn(n)
            times = {count: [] for count in self.counts}
            turn(n)
        while len(times[1]) < 5 and time.perf_counter() < end:
            turn(n)
        medians = {count: statistics.median(took[-5:]) for count, took in times.items()}
        best = min(medians, key=medians.get)
        if n == self.tokens and medians[1] < 0.005:         # too little work to be shared
            best = 1
        torch.set_num_threads(best)
        shown = ', '.join(f'{1e3 * took:.0f} ms with {count}' for count, took in medians.items())
        if best != before or self.ms is None:
            self.say(f'threads: {best}, the fastest (a part of {n} tokens: {shown})')
        self.ms = math.nan                                  # the next steps will tell

    def again(self, ms, seconds):
        """Steps took `ms` on the way, in all so many seconds: time again if they are clearly faster or slower
        than they were, or if some cores are left to a neighbour, who may have gone."""
        if math.isnan(self.ms):
            self.ms = ms
        if max(ms / self.ms, self.ms / ms) > CLEARLY:
            self.say(f'steps take {ms:.0f} ms, and took {self.ms:.0f}')
            self.choose()
        elif torch.get_num_threads() < self.counts[-1]:
            self.choose(limit=0.02 * seconds)


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


def joined(x):
    """A tensor from its parts, for which all processes must ask; others are whole."""
    return x.full_tensor() if in_parts(x) else x


def like(x, p):
    """The inverse of `joined`: x in parts, if the parameter p is."""
    if not in_parts(p):
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x, p.device_mesh, p.placements)


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
    """Of a batch x, y (B, T) about so many tokens: its first rows, or of a text a part of the first. Rows of
    a task stay whole: a part may have no target."""
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


def told_of(items, what):
    """The items; every few seconds a line says how many of them are done. what: '' for silence"""
    begin = last = time.perf_counter()
    for i, item in enumerate(items, 1):
        yield item
        now = time.perf_counter()
        if what and now - last > 4:
            last = now
            left = (now - begin) / i * (len(items) - i)
            print(f'{what}: {i / len(items):.0%} | eta {left / 60:.1f} min', flush=True)


@dataclass
class Rows:
    """What is learned from and judged by: rows of T tokens of a text or a task."""
    train: np.ndarray
    val: np.ndarray
    meta: dict                      # of the data
    T: int
    device: torch.device
    batch_size: int = 1             # rows, over all processes
    seed: int = 0
    accum: int = 1                  # batches of a step
    carry: bool = False
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32      # of the matrix products

    def cast(self):
        """The context in which a model computes."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def batch(self, step, i=0):
        """This process's rows of a step's i-th batch -> x, y (B, T)"""
        count = self.accum * self.batch_size
        begin = starts(self.seed, step, count, self.train, self.T, self.meta, self.carry)
        mine = begin.reshape(self.accum, -1)[i, self.rank::self.world]
        return rows(self.train, mine, self.T, self.meta, self.device)

    def learn_from(self, model, x, y, state=None):
        """Forward and backward of a batch -> its part of the step's loss (1,), and the state it ends with"""
        with self.cast():
            logits, y, state = answers(model, x, y, state, self.meta)
            loss = F.cross_entropy(logits, y) / self.accum
        loss.backward()
        return loss.detach().view(1), state

    @torch.no_grad()
    def evaluate(self, model, begin=None, carried=False, told=''):
        """Rows of the validation data that start at `begin`, if not all by the rule `blocks`, each read from
        an empty state; the processes share them. carried: one by one, each from the state that the last one
        left. told: what lines of progress begin with  ->  nats a target, share guessed right"""
        training = model.training
        model.eval()
        if begin is None:
            begin = blocks(len(self.val), self.T, self.meta)
        total = torch.zeros(3, dtype=torch.float64)         # of nats, targets, right guesses
        many = 1
        if not carried:
            many = max(1, min(32, 2 ** 28 // (self.T * self.meta['vocab_size'])))       # 1 GB of logits
        state = None
        if self.world > 1:
            for b in model.buffers():                       # random features: everybody's are the first one's
                dist.broadcast(b, 0)
        for i in told_of(range(0, len(begin), self.world * many), told):
            mine = begin[i + self.rank * many:][:many]
            idle = len(mine) == 0                           # others may wait for its part of the model
            if idle:
                mine = begin[:1]
            x, y = rows(self.val, mine, self.T, self.meta, self.device)
            with self.cast():
                logits, y, state = answers(model, x, y, state, self.meta)
            if not carried:
                state = None
            loss = F.cross_entropy(logits, y, reduction='sum', ignore_index=-1)
            right = (logits.argmax(-1) == y).sum()
            if not idle:
                total += torch.tensor([loss.item(), (y >= 0).sum().item(), right.item()])
        if self.world > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        model.train(training)
        loss, count, right = total.tolist()
        return loss / count, right / count

    def of_start(self):
        """Where the rows begin that are looked at on the way."""
        begin = blocks(len(self.val), self.T, self.meta)
        at_least = ROWS if 'row' in self.meta else 1
        return begin[:max(at_least, np.count_nonzero(begin + self.T < PART))]


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
            flat[f'opt.{name}.{key}'] = joined(x)
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
        norm = joined(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        good = bool(norm.isfinite() and value.isfinite())
        if good:
            if clip:
                clip_grads_with_norm_(model.parameters(), clip, norm)
            opt.step()
        yield step + 1, value, norm, good
        model.zero_grad(set_to_none=True)


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


def check(args, config, data, begun):
    """ValueError, before anything is built, where flags, data and, where there are weights already (begun),
    the model do not go together."""
    about = data.meta
    of = f'--data={args.data}'
    source = about.get('source', 0)
    classes = about.get('classes', 0)
    patch = about.get('patch', 0)
    if config.encoder and not source:
        raise ValueError(f'--encoder={config.encoder} {of}: an encoder reads the first part of a pair; give '
                         'data with pairs, such as multi30k')
    if not config.causal and not classes:
        raise ValueError(f'--causal=false {of}: each step would see the token that it should say; an encoder '
                         'needs data with classes, such as listops (pairs: --encoder=3)')
    if args.batch_size % data.world:
        raise ValueError(f'--batch_size={args.batch_size} does not divide among {data.world} processes')
    if min(len(data.train), len(data.val)) <= data.T + 1:
        raise ValueError(f'{of}: {len(data.train)} training and {len(data.val)} validation tokens, but a row '
                         f'takes {data.T + 1}; give a longer text or a smaller --block_size')
    if begun and config.classes not in (0, classes):
        raise ValueError(f'{of}: {classes} classes, the model has {config.classes}; give one without '
                         'classes, and they are new')
    if begun and config.patch != patch:
        raise ValueError(f'{of}: patches of {patch} numbers, the model reads {config.patch} (0: tokens)')
    if begun and config.source != source:
        raise ValueError(f'{of}: sources of {source} tokens, the model reads {config.source} (0: it knows no '
                         'pairs)')
    if begun and config.pos == 'learned' and data.T > config.block_size:
        raise ValueError(f'{of}: rows of {data.T} tokens, the model has learned the positions of '
                         f'{config.block_size}; make shorter rows')
    if args.fsdp and data.world == 1:
        raise ValueError('--fsdp: one process has all of the model; start several, as torchrun '
                         '--nproc_per_node=2 train.py --fsdp does')
    if args.fsdp and config.encoder:
        raise ValueError('--fsdp: not with --encoder, whose decoder asks for weights out of turn')
    if args.fsdp and args.optimizer == 'muon':
        raise ValueError('--fsdp --optimizer=muon: its step needs whole matrices; leave one of them out')
    if args.carry and 'row' in about:
        raise ValueError(f'--carry: the rows of {args.data} have nothing to do with each other')
    if args.carry and args.resume and data.world > 1:
        raise ValueError('--resume --carry: the file has the states of one process; resume without torchrun')


def check_carry(model):
    """ValueError for models whose state means nothing after the row it comes from."""
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


def built(config, data, tensors, args):
    """The model for these data, with the weights of --resume or --init."""
    known = 'vocab_size', 'classes', 'pad', 'source', 'patch'
    of_data = {name: data.meta[name] for name in known if name in data.meta}
    longest = max(data.T, config.block_size) if tensors else data.T     # weights keep the positions they know
    model = GPT(dataclasses.replace(config, block_size=longest, **of_data)).to(data.device)
    model.use(pick_forms(args.impl))
    if args.carry:
        check_carry(model)
    if args.resume:
        tensors = {n.removeprefix('model.'): x for n, x in tensors.items() if n.startswith('model.')}
    if tensors:
        new = model.state_dict()
        if 'head.bias' not in tensors and 'head.bias' in new:       # for classes, of which there were none
            tensors = {**tensors, 'head.weight': new['head.weight'], 'head.bias': new['head.bias']}
        model.load_state_dict(tensors)
    return model


class Log:
    """What is printed, and written to log.jsonl and result.json, once for all processes."""
    def __init__(self, out, rank, anew):
        self.out = out
        self.rank = rank
        os.makedirs(out, exist_ok=True)
        self.result = {}                                    # closing figures by name
        if rank == 0 and anew:
            open(os.path.join(out, 'log.jsonl'), 'w').close()

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def note(self, **row):
        """A line of log.jsonl."""
        if self.rank == 0:
            with open(os.path.join(self.out, 'log.jsonl'), 'a') as f:
                print(json.dumps(row), file=f)

    def close(self, **more):
        """result.json: all figures of a finished run, in one flat dict."""
        if self.rank == 0:
            path = os.path.join(self.out, 'result.json')
            with open(f'{path}.new', 'w') as f:
                json.dump({**self.result, **more}, f, indent=1)
            os.replace(f'{path}.new', path)


def keep(path, model, about, extra, rank):
    """Write a checkpoint, from one of the processes."""
    state = {key: joined(x) for key, x in model.state_dict().items()}
    if rank == 0:
        save(path, model, about, extra, state)


def threads_of(args, known, model, data, say):
    """Set the threads: as given, as in the run that is resumed (known), or the fastest. -> Threads, to be
    asked at evaluations; None where they are given, where torchrun sees to them, and with a GPU, which does
    not wait for them"""
    if args.threads or known:                               # results depend on them in the last bits
        torch.set_num_threads(args.threads or min(known, cores()))
    if args.threads or data.world > 1 or data.device.type != 'cpu' or DEFAULT_THREADS == 1:
        return None
    x, y = data.batch(0)

    def part(tokens):
        """Neither weights nor what is drawn later change."""
        model.eval()                                        # without dropout, nor features drawn anew
        data.learn_from(model, *part_of(x, y, tokens, data.meta))
        model.train()
        model.zero_grad(set_to_none=True)
    threads = Threads(part, x.numel(), say)
    if known:
        threads.ms = math.nan
    else:
        threads.choose()
    return threads


def opening(model, data, args):
    """What is trained, in two lines."""
    config = model.config
    n_params = sum(p.numel() for p in model.parameters())
    said = (f'{",".join(config.rules())} | {n_params / 1e6:.2f} M parameters | '
            f'{args.data}: {len(data.train):,} + {len(data.val):,} tokens of {config.vocab_size} | '
            f'{data.world} x {data.device}, {str(data.dtype)[6:]}, {torch.get_num_threads()} threads\n'
            f'recurrence: {model.why}')
    if data.device.type == 'cpu' and args.dtype == 'auto' and multiplies_bfloat16():
        said = f'this CPU multiplies bfloat16: --dtype=bfloat16 may make steps shorter\n{said}'
    return said


def report(model, data, args, log):
    """The closing lines: the whole validation data by both rules, and a sample."""
    meta = data.meta
    loss, right = data.evaluate(model, told='validation')
    log.say(f'validation, blocks of {data.T}: {score(meta, loss, right)}')
    log.note(rule='blocks', val_loss=loss, accuracy=right)
    log.result.update(val_loss=loss, accuracy=right)
    if 'row' not in meta:
        log.result['bits per byte'] = loss * bits_a_nat(meta)
    if data.rank > 0 or args.fsdp:
        return
    next_line = f'next: python sample.py --init={args.out}/ckpt.safetensors'
    model.eval()
    if 'source' in meta:
        x, _ = rows(data.val, [0], data.T, meta, data.device)
        source = x[:, :meta['source']]
        for tokens in source, model.translate(source):
            log.say(f'> {prepare.decode(tokens[0].tolist(), meta)}')
        log.say(f'{next_line} --source="..."')
    if 'row' in meta:
        return
    if model.max_len is None and model.config.keeps() == {None}:
        along = dataclasses.replace(data, T=4096, world=1)      # the rest is done by one process
        loss, _ = along.evaluate(model, carried=True, told='validation, carried')
        log.say(f'validation, carried: {score(meta, loss)}')
        log.note(rule='carried', val_loss=loss)
        log.result.update({'val_loss carried': loss, 'bits per byte carried': loss * bits_a_nat(meta)})
    said = prepare.encode(PROMPTS.get(args.data, ''), meta)
    prompt = torch.tensor([prepare.begun(said, meta)], device=data.device)
    draw = torch.Generator(data.device).manual_seed(0)
    many = min(400, (model.max_len or 401) - prompt.shape[1])
    texts = model.generate(prompt, temperature=0.7, generator=draw)     # in fp32, as sample.py writes
    tokens = [token.item() for token, _ in itertools.islice(texts, many)]
    log.say(f'--- a sample ---\n{prepare.decode(said + tokens, meta)}\n---\n{next_line} --tokens=1000')


def line(steps, step, loss, lr, norm, ms, tok_s, memory):
    """What is printed of a step; the same figures go to the log."""
    eta = (steps - step) * ms / 6e4
    return (f'step {step:5d}/{steps} | loss {loss:.3f} | lr {lr:.1e} | norm {norm:5.2f} | {ms:5.0f} ms | '
            f'{tok_s / 1e3:6.1f}k tok/s | {memory / 1e6:.0f} MB | eta {eta:.1f} min')


def learnt(step, forward, data, states):
    """Forward and backward of all batches of a step. -> its loss (1,), and with --carry the states they end
    with, whose gradients end with the rows"""
    total = torch.zeros(1, device=data.device)
    ends = []
    for i, state in enumerate(states):
        x, y = data.batch(step, i)
        loss, state = data.learn_from(forward, x, y, state)
        total += loss
        if data.carry:
            state = [{name: x.detach() for name, x in layer.items()} for layer in state]
            ends.append(state)
    return total, ends


def looked_at(model, opt, data, states, best, about, out, log):
    """Judge a model after about['step'] steps by the start of the validation data, and keep it. -> the best
    loss so far"""
    loss, right = data.evaluate(model, data.of_start())
    log.say(f'step {about["step"]:5d} | start of validation: {score(data.meta, loss, right)}')
    log.note(step=about['step'], val_loss=loss, accuracy=right)
    if loss < best:
        best = loss
        keep(os.path.join(out, 'best.safetensors'), model, about, {}, data.rank)
    memories = pack_optimiser(model, opt)
    for i, state in enumerate(states):
        memories.update(pack(state or [], f'carry{i}'))
    threads = torch.get_num_threads() if data.world == 1 else None
    last = {**about, 'best': best, 'threads': threads}
    keep(os.path.join(out, 'ckpt.safetensors'), model, last, memories, data.rank)
    return best


@script
def main(argv):
    args, config, tensors, meta = settings(argv)
    rank, world, device, dtype = machine(args)
    train, val, about = prepare.load(args.data, tokenizer=args.tokenizer, like=meta.get('data'))
    if args.val_tokens:
        val = val[:args.val_tokens]
    data = Rows(train, val, about, about.get('row', config.block_size), device, args.batch_size, args.seed,
                args.accum, args.carry, rank, world, dtype)
    check(args, config, data, 'data' in meta)
    torch.manual_seed(args.seed)
    model = built(config, data, tensors, args)
    states = [unpack(tensors, f'carry{i}', device) for i in range(args.accum)]      # of --carry, one a batch
    if args.fsdp:
        shard(model, device, world)
    make = WithMuon if args.optimizer == 'muon' else adamw
    opt = make(model, args.lr, args.weight_decay, device)
    unpack_optimiser(model, opt, tensors)

    log = Log(args.out, rank, anew=not args.resume)
    threads = threads_of(args, meta.get('threads') if world == 1 else None, model, data, log.say)
    log.say(opening(model, data, args))
    short = {key: value for key, value in about.items() if key != 'json'}           # of megabytes
    run = {'args': dataclasses.asdict(args), 'torch': torch.__version__}
    log.note(config=dataclasses.asdict(model.config), **run, data=short, commit=commit(), device=str(device),
             params=sum(p.numel() for p in model.parameters()), threads=torch.get_num_threads())
    forward = torch.compile(model) if args.compile else model
    ends = []                                               # what the batches of the last step ended with

    def learn(step):
        loss, ends[:] = learnt(step, forward, data, states)
        return loss

    first = meta.get('step', 0)                             # steps of the run that is resumed
    best = meta.get('best', math.inf)
    bad = 0                                                 # steps in a row that were not finite
    at = first                                              # the step from which on the next ones are timed
    seconds = 0.0                                           # of all steps together
    since = time.perf_counter()
    steps = optimise(model, opt, learn, args.steps, args.lr, args.seed, first, args.clip, rank, world)
    for done, loss, norm, good in steps:
        if good:
            bad = 0
            states[:len(ends)] = ends
        else:
            bad += 1
            log.say(f'step {done}: not finite, skipped, {bad} in a row')
            log.note(step=done, not_finite=bad)
        if bad == BAD_STEPS:
            raise ValueError(f'{bad} steps in a row were not finite; stopped before saving. Try a smaller '
                             f'--lr than {args.lr:g}, or another --norm')
        evaluates = done % args.eval_every == 0 or done == args.steps
        logs = done % args.log_every == 0 or done in (first + 1, args.steps)
        if not (logs or evaluates):
            continue
        took = time.perf_counter() - since
        ms = 1e3 * took / (done - at)
        seconds += took
        at = done
        if logs:
            lr = lr_at(done - 1, args.steps, args.lr)
            tok_s = 1e3 * data.T * args.batch_size * args.accum / ms
            row = dict(step=done, loss=loss.item(), lr=lr, norm=norm.item(), ms=ms, memory=memory(device),
                       tok_s=tok_s)
            log.say(line(args.steps, **row))
            log.note(**row)
        if evaluates:
            if threads:
                threads.again(ms, 1e-3 * ms * args.eval_every)
            run.update(step=done, data=about)
            best = looked_at(model, opt, data, states, best, run, args.out, log)
        since = time.perf_counter()
    log.say(f'\n{args.steps - first} steps in {seconds / 60:.1f} minutes')
    log.result.update(steps=args.steps, ms=ms, minutes=seconds / 60)
    report(model, data, args, log)
    log.close(commit=commit(), **dataclasses.asdict(args), **dataclasses.asdict(model.config))
    if world > 1:
        dist.barrier()                                      # nobody leaves while rank 0 still reports
        dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(main())
