"""Train a fast-weight model, from scratch or from where it stopped. Other scripts use this recipe, too.

    python train.py --rule=delta                   five to seven minutes on two CPU cores, nothing to download
    python train.py --data=recall --rule=sum --steps=1000     recall: sum fails, --rule=delta solves it
    python train.py --resume --steps=8000          goes on from out/ckpt.safetensors, bit for bit on a CPU
    python train.py --init=bert-base-uncased --data=FOLDER --lr=5e-5     pretrained weights, new output
    torchrun --nproc_per_node=2 train.py --rule=delta         the same training in two processes; with --fsdp
                                                              each of them keeps half of the model

Writes out/ckpt.safetensors (weights, optimiser, step), out/best.safetensors (weights), out/log.jsonl and, at
the end, out/result.json with all closing figures. Everything random in a step is a function of seed and step,
so a run that was stopped and resumed ends in the same bits if the number of threads stays the same
(--threads=N fixes it). More steps at resuming stretch the cosine.
This file, in order: machine, threads, sharding, rows of data, optimisers and the loop, a run.
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
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from data import prepare
from model import (GPT, OF_DATA, Config, beyond_memory, fill, flag, idle, known, load, number, pack, parse,
                   pick_device, pick_forms, picked, refuse, refuse_target, save, script, state_for, typed)

BAD_STEPS = 10      # so many non-finite steps in a row end the run
MUON = 4.0          # times --lr: a matrix's step has singular values near 1, not entries
WARMUP = 0.05       # of all steps; then a cosine to 0
PART = 65536        # tokens of the validation file that are looked at on the way,
TASK_ROWS = 500     # and rows of a task, at the least: some have one answer each
QUIET = 4           # seconds after which what takes long says how far it is
POOL = 32           # steps that divide what is drawn for them, so that pairs of like length come together
SAMPLE = 400        # tokens of the sample at the end
CLEARLY = 1.5       # times as fast or as slow as before: then the threads are timed again
DEFAULT_THREADS = torch.get_num_threads()       # torch's own choice: all cores, or OMP_NUM_THREADS
PROMPTS = {'stdlib': 'class '}                  # by data set: with what the sample at the end begins
say = functools.partial(print, flush=True)


@dataclass
class Args:
    data: str = flag('stdlib', f'{", ".join(prepare.DATASETS)}, any text file, labelled lines (mine.tsv), or '
                               'sentences and their translations (a.en:a.de)')
    tokenizer: str = flag('', f'of a text: {prepare.OF_TEXTS}; if not given, its own or the checkpoint\'s')
    out: str = flag('out', 'folder for checkpoints and the log')
    resume: bool = flag(False, 'go on from the checkpoint in --out')
    init: str = flag('', 'start with the weights of a checkpoint or a model of the hub')
    steps: int = flag(6400, 'optimiser steps', low=1, high=10 ** 9)
    batch_size: int = flag(4, 'rows per step, over all processes', low=1, high=2 ** 20)
    accum: int = flag(1, 'batches per step, for more rows than fit into memory', low=1, high=2 ** 12)
    lr: float = flag(4e-3, 'peak learning rate', low=0, high=100)
    weight_decay: float = flag(0.1, 'weight decay, of matrices only', low=0, high=100)
    optimizer: str = flag('adamw', 'muon: for the matrices of the blocks; it pays with 16 rows per step',
                          ['adamw', 'muon'])
    clip: float = flag(1.0, 'gradients are clipped to this norm; 0: never', low=0, high=1e9)
    carry: bool = flag(False, 'rows follow each other in the text, and the state is carried on (Schlag 2021)')
    eval_every: int = flag(500, 'steps between evaluations, which also save', low=1, high=10 ** 9)
    log_every: int = flag(50, 'steps between lines', low=1, high=10 ** 9)
    val_tokens: int = flag(0, 'how many validation tokens are used; 0: all', low=0,
                           high=10 ** 12)
    seed: int = flag(0, 'seed of weights, data order and dropout', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda, cuda:1, mps')
    threads: int = flag(None, 'CPU threads; if not given, as many as are fastest at the start', low=1,
                        high=1024)
    dtype: str = flag('auto', 'type of matrix products; S is always fp32', ['auto', 'float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence; loop: the definition, fastweight.recurrent',
                     ['auto', 'loop', 'chunk', 'fused'])
    compile: bool = flag(False, 'torch.compile, where it works')
    fsdp: bool = flag(False, 'with torchrun: each process keeps a part of the model, not all of it')


@dataclass
class Stopped:
    """What a checkpoint says about the run that --resume continues."""
    args: dict
    step: int = known(0, 0, 10 ** 9)
    best: float = known(0.0, 0, 1e300)
    threads: int = known(None, 1, 1024)


# ---- the machine -------------------------------------------------------------------------------------------

def machine(args):
    """-> rank, world, device, dtype. torchrun says which processes there are; without it there is one."""
    check_threads(args.threads)
    given = [os.environ.get('RANK', '0'), os.environ.get('WORLD_SIZE', '1')]
    if not all(text.isdecimal() for text in given) or not int(given[0]) < int(given[1]) <= 4096:
        raise ValueError(f'RANK={given[0]} WORLD_SIZE={given[1]}: torchrun sets these two, 0 <= RANK < '
                         'WORLD_SIZE; without it, unset them')
    rank, world = map(int, given)
    device = pick_device(args.device)
    cuda = device.type == 'cuda'
    if cuda and world > 1:
        device = torch.device(f'cuda:{os.environ.get("LOCAL_RANK", "0")}')
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group()                           # gloo for what is on a CPU, nccl on a GPU
    if rank > 0:                                            # all that is printed is printed once
        sys.stdout = open(os.devnull, 'w')                  # noqa: SIM115
    dtype = torch.float32
    if args.dtype != 'auto':
        dtype = getattr(torch, args.dtype)
    elif cuda and torch.cuda.get_device_capability(device)[0] >= 8:
        dtype = torch.bfloat16                              # which these multiply fast
    return rank, world, device, dtype


def memory(device):
    """Peak bytes of the GPU or of the process; 0 on Windows, which does not tell."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == 'win32':
        return 0
    import resource
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def commit():
    """The git commit of the code that runs; '' if git cannot tell."""
    here = os.path.dirname(os.path.abspath(__file__))
    found = subprocess.run('git rev-parse HEAD', shell=True, cwd=here, capture_output=True, text=True)
    return found.stdout.strip()


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
    """ValueError for more threads than cores. None is allowed: the fastest number is then found."""
    if threads is not None and threads > cores():
        raise ValueError(f'--threads={threads}: this process may use {cores()} cores; give at most that')


class Threads:
    """Finds the number of threads (1, 2, 4, ..., `most`) with which run(n) is fastest, where n is a part of a
    step's `tokens`. say: prints a line"""
    def __init__(self, run, tokens, say, most=None):
        self.run = run
        self.tokens = tokens
        self.say = say
        most = most or DEFAULT_THREADS
        self.counts = [n for n in range(1, most + 1) if n == most or n.bit_count() == 1]
        self.ms = math.nan                                  # of a step since they were chosen

    def turn(self, n):
        """-> seconds of run(n) by number of threads"""
        seconds = {}
        for count in self.counts:
            torch.set_num_threads(count)
            began = time.perf_counter()
            self.run(n)
            seconds[count] = time.perf_counter() - began
        return seconds

    def choose(self, limit=2.0):
        """Time all numbers of threads, in about `limit` seconds, and set the fastest. A tenth of a step is
        timed, or a whole step if there is time. The numbers take turns, so a neighbour who comes and goes
        disturbs all of them alike, and the median of the turns counts. The first turn, in which threads are
        created, does not."""
        if len(self.counts) == 1:
            return
        before = torch.get_num_threads()
        for n in (max(1, self.tokens // 10), self.tokens):
            self.turn(n)
            end = time.perf_counter() + 0.4 * limit
            turns = [self.turn(n)]
            if sum(turns[0].values()) > limit / 40:         # a whole step takes a quarter of it, or more
                break
        while len(turns) < 5 and time.perf_counter() < end:
            turns.append(self.turn(n))
        medians = {count: statistics.median(turn[count] for turn in turns) for count in self.counts}
        best = min(medians, key=medians.get)
        if n == self.tokens and medians[1] < 0.005:         # too little work to be shared
            best = 1
        torch.set_num_threads(best)
        if best != before or math.isnan(self.ms):
            shown = ', '.join(f'{1e3 * took:.0f} ms with {count}' for count, took in medians.items())
            self.say(f'threads: {best}, the fastest (a part of {n} tokens: {shown})')
        self.ms = math.nan                                  # the next steps will tell

    def again(self, ms, seconds):
        """Steps took `ms` milliseconds since the last call, `seconds` in all. Time again if they have become
        clearly faster or slower, or if some cores are left to a neighbour who may have gone."""
        if math.isnan(self.ms):
            self.ms = ms
        if max(ms / self.ms, self.ms / ms) > CLEARLY:
            self.say(f'steps take {ms:.0f} ms, and took {self.ms:.0f}')
            self.choose()
        elif torch.get_num_threads() < self.counts[-1]:
            self.choose(limit=0.02 * seconds)


def threads_of(args, meta, model, data):
    """Set the number of threads: as given, as in the run that is resumed (meta), or the fastest. -> Threads,
    to be asked again at evaluations. None if the number is given, under torchrun, and with a GPU, which does
    not wait for threads"""
    known = meta.get('threads') if data.world == 1 else None
    if args.threads or known:                               # results depend on them in the last bits
        torch.set_num_threads(args.threads or min(known, cores()))
    if args.threads or data.world > 1 or data.device.type != 'cpu' or DEFAULT_THREADS == 1:
        return None
    threads = Threads(functools.partial(data.rehearse, model), data.batch_size * data.T, say)
    if not known:
        threads.choose()
    return threads


# ---- a model in parts: FSDP2, Zhao 2023, arXiv:2304.11277 --------------------------------------------------

def shard(model, device, world):
    """Each process keeps a part of every parameter, and so of what the optimiser remembers about it. A block
    is gathered for as long as it is computed. Gradients arrive averaged."""
    from torch.distributed.fsdp import fully_shard          # here, for it takes half a second
    warnings.filterwarnings('ignore', 'FSDP2-wrapped module')       # nothing is changed in place
    mesh = dist.init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_parts(x):
    """Whether tensor x is sharded over the processes: a DTensor."""
    return hasattr(x, 'full_tensor')


def gathered(x):
    """The whole tensor, from its shards; all processes must call this together. Other tensors are whole
    already."""
    return x.full_tensor() if in_parts(x) else x


# ---- data --------------------------------------------------------------------------------------------------

def rows(data, begin, T, meta, device):
    """-> x, y (B, T): inputs, and the token that should follow each; -1 where it does not count. For a task,
    what lies behind the last target is cut off, but patches are read whole. data: the flat array of token
    ids, maybe memory-mapped   begin (B,): where in it the rows start"""
    at = np.add.outer(begin, np.arange(T))
    ahead = at + (T if 'row' in meta else 1)                # a task's targets lie behind the inputs
    x = data.take(at, mode='clip').astype(np.int64)
    y = data.take(ahead, mode='clip').astype(np.int64)
    y[y == meta.get('ignore', -1)] = -1
    y[ahead >= len(data)] = -1                              # the text has ended
    if 'row' in meta and 'patch' not in meta:
        end = np.flatnonzero((y >= 0).any(0)).max() + 1
        x = x[:, :end]
        y = y[:, :end]
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


def answers(model, x, y, state, meta, dtype=torch.float32):
    """Read x from a state, or None -> logits (N, vocab) in fp32 and targets (N,), where these count; the
    state. In a task few positions count, so logits are computed for these only. dtype: of the matrix
    products"""
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        if 'row' in meta:
            at = y >= 0
            logits, state = model(x, state, at)
            return logits.float(), y[at], state
        logits, state = model(x, state)                     # in a text all count, but behind its end (-1)
        return logits.flatten(0, 1).float(), y.flatten(), state


def blocks(n, T, meta, count=None):
    """The rule `blocks`: rows of T in which each of n tokens but the first is a target once. The last row of
    a text may be shorter. A task has its own rows. count: at most so many of them, evenly spaced. -> where
    they begin"""
    begin = np.arange(0, n - 1, T)
    if 'row' in meta:
        begin = np.arange(0, n - 2 * T + 1, 2 * T)          # inputs and targets
    if count and count < len(begin):
        begin = begin[np.linspace(0, len(begin) - 1, count).astype(int)]
    return begin


def told_of(items, what):
    """The items. Every QUIET seconds a line says how many of them are done. what: '' for silence"""
    begin = last = time.perf_counter()
    for i, item in enumerate(items, 1):
        yield item
        now = time.perf_counter()
        if what and now - last > QUIET:
            last = now
            left = (now - begin) / i * (len(items) - i)
            say(f'{what}: {i / len(items):.0%} | eta {left / 60:.1f} min')


@dataclass
class Rows:
    """The data for training and for evaluation: rows of T tokens of a text or a task. Row i of step s depends
    on (seed, s, i) only, so resuming and more processes change nothing. For pairs, and with carry, it also
    depends on the number of rows per step."""
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

    @property
    def is_pairs(self):
        """Whether a row consists of two texts."""
        return 'pad' in self.meta and 'classes' not in self.meta

    def starts(self, step):
        """Where the rows of a step, of all its batches and processes, begin in the training data. The
        generator's state is a counter, so no earlier step is needed. carry: nothing is drawn; every row has
        its own track through the text and reads on from step to step."""
        T = self.T
        n = len(self.train)
        count = self.accum * self.batch_size
        if self.carry:
            return (np.arange(count) * (n // count) + step * T) % (n - T)
        pool = POOL if self.is_pairs else 1
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step // pool]))
        if 'row' not in self.meta:
            return rng.integers(n - T, size=count)
        begin = rng.integers(n // (2 * T), size=pool * count) * 2 * T
        if self.is_pairs:                                   # half the padding, and so half the work
            there = self.train.take(np.add.outer(begin, np.arange(T))) != self.meta['pad']
            source = self.meta.get('source', 0)             # a model of texts reads both sides as one
            longer = np.maximum(there[:, :source].sum(1), there[:, source:].sum(1))
            by_length = begin[np.argsort(longer, kind='stable')].reshape(pool, count)
            begin = by_length[rng.permutation(pool)[step % pool]]
        return begin

    def batch(self, step, i=0):
        """This process's rows of a step's i-th batch -> x, y (B, T)"""
        begin = self.starts(step).reshape(self.accum, -1)[i, self.rank::self.world]
        return rows(self.train, begin, self.T, self.meta, self.device)

    def learn(self, model, states, step):
        """Forward and backward of all batches of a step -> its loss (1,). states: what each batch begins with
        (None without carry). What it ends with is put in its place."""
        total = torch.zeros(1, device=self.device)
        for i, state in enumerate(states):
            x, y = self.batch(step, i)
            logits, y, end = answers(model, x, y, state, self.meta, self.dtype)
            loss = F.cross_entropy(logits, y) / self.accum
            loss.backward()
            total += loss.detach()
            if self.carry:                                  # but gradients end with the row
                states[i] = [{name: x.detach() for name, x in layer.items()} for layer in end]
        return total

    def rehearse(self, model, tokens):
        """Forward and backward of a part of a batch: as many rows as have so many tokens, or a part of one
        row of a text. Rows of a task stay whole, since a part may have no target. Nothing that is learned or
        drawn later changes."""
        x, y = self.batch(0)
        many = -(-tokens // self.T)
        most = self.T if 'row' in self.meta else tokens
        training = model.training
        model.eval()                                        # without dropout, nor features drawn anew
        logits, y, _ = answers(model, x[:many, :most], y[:many, :most], None, self.meta, self.dtype)
        F.cross_entropy(logits, y).backward()
        model.train(training)
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, model, begin=None, carried=False, told=''):
        """Evaluate on rows of the validation data that start at `begin` (None: all of them, by the rule
        `blocks`), each from an empty state. The processes share the rows. carried: one by one, each from the
        state that the last one left. told: how lines of progress begin  ->  nats per target, share that was
        right"""
        if begin is None:
            begin = blocks(len(self.val), self.T, self.meta)
        many = min(32, 2 ** 28 // (self.T * self.meta['vocab_size']))           # 1 GB of logits
        if carried or many == 0:
            many = 1
        if self.world > 1:
            for b in model.buffers():                       # random features: everybody's are the first one's
                dist.broadcast(b, 0)
        training = model.training
        model.eval()
        state = None
        total = torch.zeros(3, dtype=torch.float64)         # of nats, targets, right guesses
        for i in told_of(range(0, len(begin), self.world * many), told):
            mine = begin[i + self.rank * many:][:many]
            idle = len(mine) == 0                           # others may wait for its part of the model
            if idle:
                mine = begin[:1]
            x, y = rows(self.val, mine, self.T, self.meta, self.device)
            logits, y, end = answers(model, x, y, state, self.meta, self.dtype)
            if carried:
                state = end
            loss = F.cross_entropy(logits, y, reduction='sum', ignore_index=-1)
            right = (logits.argmax(-1) == y).sum()
            if not idle:
                total += torch.tensor([loss.item(), (y >= 0).sum().item(), right.item()])
        if self.world > 1:
            dist.all_reduce(total)
        model.train(training)
        loss, count, right = total.tolist()
        return loss / count, right / count

    def of_start(self):
        """Where the rows begin that are evaluated during training."""
        begin = blocks(len(self.val), self.T, self.meta)
        at_least = TASK_ROWS if 'row' in self.meta else 1
        return begin[:max(at_least, np.count_nonzero(begin + self.T < PART))]


def bits_a_nat(meta):
    """Bits per byte of a validation text for one nat per token."""
    return meta['val']['tokens'] / meta['val']['bytes'] / math.log(2)


def score(meta, loss, right=0):
    """How to print nats per target and the share that was right; for a text, bits per byte, too."""
    perplexity = f'perplexity {math.exp(min(loss, 50)):.3f} a token'
    accuracy = f'accuracy {100 * right:.1f} %'
    if 'source' in meta:
        return f'{perplexity}, {accuracy}'
    if 'row' in meta:
        return accuracy
    return f'{loss * bits_a_nat(meta):.4f} bits per byte, {perplexity}'


def table(rows):
    """Print a list of dicts with the same keys as a table. None is a dash."""
    def show(x):
        if x is None:
            return '-'
        if isinstance(x, str):
            return x
        if isinstance(x, int) or abs(x) >= 1e4:
            return f'{x:,.0f}'
        return f'{x:.4g}'
    columns = []
    for name in rows[0]:
        cells = [name] + [show(row[name]) for row in rows]
        width = max(map(len, cells))
        side = '>' if columns else '<'
        columns.append([f'{cell:{side}{width}}' for cell in cells])
    for cells in zip(*columns):
        print('  '.join(cells))


# ---- the optimiser and its loop ----------------------------------------------------------------------------

def adamw(model, lr, weight_decay, device, fast=(), times=1.0, without=()):
    """AdamW over all parameters that require gradients. Only matrices have weight decay: no gains, no biases
    of gates (H, 1, K), no feature maps (H, m, d). Parameters named in `fast` learn `times` as fast as the
    others. Those in `without` are left out."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad and name not in without:
            decay = weight_decay if p.dim() == 2 else 0.0
            speed = times if name in fast else 1.0
            group = {'params': [], 'weight_decay': decay, 'times': speed}
            groups.setdefault((decay, speed), group)['params'].append(p)
    fused = device.type in ('cpu', 'cuda')
    return torch.optim.AdamW(list(groups.values()), lr=lr, betas=(0.9, 0.99), fused=fused)


def orthogonal(G):
    """The matrix that has the singular vectors of G (m, n) and singular values near 1: five steps of a
    polynomial in X X^T. G is first scaled so that no singular value is above 1. Jordan 2024."""
    X = G / G.norm().clamp(min=1e-7)
    rows, columns = G.shape
    tall = rows > columns
    if tall:                                                # then X^T X is the smaller product
        X = X.mT
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (2.0315 * A @ A - 4.7750 * A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """The step of a matrix is its momentum, made orthogonal, so that no direction is left behind. Jordan
    2024; Liu 2025, arXiv:2502.16982. torch.optim.Muon does the same in bfloat16; here it is fp32, because a
    CPU without instructions for bfloat16 takes 15 times as long."""
    def __init__(self, groups, lr, weight_decay, momentum=0.95):
        super().__init__(groups, {'lr': lr, 'weight_decay': weight_decay, 'momentum': momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            keeps = group['momentum']
            for p in group['params']:
                average = self.state[p].setdefault('momentum_buffer', torch.zeros_like(p))
                average.lerp_(p.grad, 1 - keeps)
                ahead = p.grad.lerp(average, keeps)         # Nesterov's
                rows, columns = p.shape
                longer = max(1, rows / columns) ** 0.5
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(orthogonal(ahead), alpha=-group['lr'] * longer)


class WithMuon:
    """One optimiser out of two: Muon for the matrices of the blocks, which learn MUON times as fast, and
    AdamW for everything else."""
    def __init__(self, model, lr, weight_decay, device):
        matrices = {}
        for name, module in model.blocks.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith('gates.proj'):
                matrices[f'blocks.{name}.weight'] = module.weight
        self.muon = Muon([{'params': list(matrices.values()), 'times': MUON}], lr, weight_decay)
        self.adamw = adamw(model, lr, weight_decay, device, without=matrices)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups
        self.defaults = self.adamw.defaults
        self.state = self.muon.state = self.adamw.state     # by parameter, of which none is in both

    def step(self):
        self.muon.step()
        self.adamw.step()


OPTIMISERS = {'adamw': adamw, 'muon': WithMuon}


def pack_optimiser(model, opt):
    """What the optimiser remembers about each parameter, as a flat dict of tensors, for `save`."""
    flat = {}
    for name, p in model.named_parameters():
        for key, x in opt.state.get(p, {}).items():
            flat[f'opt.{name}.{key}'] = gathered(x)
    return flat


MEMORIES = ({'momentum_buffer'}, {'step', 'exp_avg', 'exp_avg_sq'})      # of a parameter, by Muon; by AdamW
SIGNED = 'momentum_buffer', 'exp_avg'


def unpack_optimiser(model, opt, tensors, whole=True):
    """The inverse of `pack_optimiser`, into opt. ValueError for a tensor that is missing or does not fit its
    parameter. whole: every parameter has been trained, so none may be missing"""
    parameters = dict(model.named_parameters())
    memories = {name: {} for name in parameters}
    for key, x in tensors.items():
        if key.startswith('opt.'):
            name, _, memory = key.removeprefix('opt.').rpartition('.')
            if name not in memories:
                raise ValueError(f'the optimiser has {key}, but the model no {name}; start anew')
            memories[name][memory] = x
    for name, found in memories.items():
        p = parameters[name]
        if found.keys() not in MEMORIES and (found or whole):
            raise ValueError(f'the optimiser has {sorted(found)} of {name}, expected one of {MEMORIES}; '
                             'start anew')
        for key, x in found.items():
            shape = () if key == 'step' else p.shape
            if x.shape != shape or x.dtype != torch.float32:
                raise ValueError(f'the optimiser\'s {key} of {name} is {x.dtype} of shape {tuple(x.shape)}, '
                                 f'expected float32 of {tuple(shape)}; start anew')
            if not x.isfinite().all() or key not in SIGNED and x.min() < 0:
                raise ValueError(f'the optimiser\'s {key} of {name} is no memory of a run; start anew')
            if key != 'step' or opt.defaults['fused']:      # else the count of steps stays on the CPU
                x = x.to(p.device)
            if key != 'step' and in_parts(p):
                from torch.distributed.tensor import distribute_tensor
                x = distribute_tensor(x, p.device_mesh, p.placements)
            opt.state[p][key] = x


def lr_at(step, steps, peak):
    """The learning rate of a step, counted from 0: a linear warm-up, then a cosine to 0."""
    warm = (step + 1) / max(1, WARMUP * steps)
    return peak * min(warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def average(model, loss, world):
    """Gradients and loss (1,) become, in place, their averages over the processes, all of which have the same
    number of rows. Gradients of a sharded model are averages already."""
    parts = [loss]
    for p in model.parameters():
        if p.grad is not None and not in_parts(p):
            parts.append(p.grad)
    flat = parameters_to_vector(parts)                      # one message, not one for each of them
    dist.all_reduce(flat)
    vector_to_parameters(flat / world, parts)


def optimise(model, opt, loss, steps, lr, seed, done=0, clip=1.0, rank=0, world=1):
    """The loop of all training here: steps done + 1 to `steps`, with warm-up and cosine. After each step it
    yields: steps done, loss (1,), norm of the gradient before clipping, and whether both are finite. If they
    are not, the step changes no weights, and the caller decides whether to go on.

    loss(step), counted from 0, runs forward and backward itself and returns its value (1,), detached.
    Everything random, including dropout, is a function of (seed, step, rank), so a run can continue where
    another one stopped. Clipped gradients stay until the next step begins."""
    for step in range(done, steps):
        for group in opt.param_groups:
            group['lr'] = group['times'] * lr_at(step, steps, lr)
        drawn = np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]
        torch.manual_seed(int(drawn))
        value = loss(step)
        if world > 1:
            average(model, value, world)
        norm = gathered(clip_grad_norm_(model.parameters(), clip or math.inf))
        good = bool(norm.isfinite() and value.isfinite())
        if good:
            opt.step()
        yield step + 1, value, norm, good
        model.zero_grad(set_to_none=True)


# ---- a run -------------------------------------------------------------------------------------------------

def settings(argv):
    """-> args, config, and the weights and metadata of the file that --init or --resume names; {}, {} without
    one"""
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
        config = Config(**given_model)
        if config.layers:
            refuse(idle(given_model, config))
        return args, config, {}, {}
    path = f'{args.out}/ckpt.safetensors'
    model, meta = load(path)
    if 'best' not in meta:
        raise ValueError(f'{path}: holds no training run, only a model')
    for name, value in given_model.items():
        was = getattr(model.config, name)
        if was != value:
            raise ValueError(f'--{name}={value}: {path} was made with {was!r}; drop the flag, or start anew '
                             'with another --out')
    args = Args(**{**run_of(meta, path).args, **given, 'out': args.out})        # the run's, but for these
    if args.steps <= meta['step']:
        raise ValueError(f'{path}: at step {meta["step"]} of {args.steps} already; give more steps')
    return args, model.config, model.state_dict(), meta


def mistakes(args, config, data, model):
    """For `refuse`: flags, data and model that do not go together."""
    meta = data.meta
    of = f'--data={args.data}'
    yield config.encoder and 'source' not in meta, (
        f'--encoder={config.encoder} {of}: an encoder reads the first part of a pair; give data with pairs, '
        'such as multi30k')
    yield not config.causal and 'classes' not in meta, (
        f'--causal=false {of}: each step would see the token that it should say; an encoder needs data with '
        'classes, such as listops (pairs: --encoder=3)')
    yield args.batch_size % data.world, (
        f'--batch_size={args.batch_size} does not divide among {data.world} processes')
    least = data.T + 2
    if 'row' in meta:
        least = 2 * data.T                                      # a task's row has its targets behind it
    yield min(len(data.train), len(data.val)) < least, (
        f'{of} --val_tokens={args.val_tokens}: {len(data.train)} training and {len(data.val)} validation '
        f'tokens, but a row takes {least}; give a longer text, a smaller --block_size or more --val_tokens')
    yield args.init and lies_in(args.init, args.out), (
        f'--out={args.out}: there lies the model that --init names; take another folder')
    yield args.fsdp and data.world == 1, (
        '--fsdp: one process has all of the model; start several, as torchrun --nproc_per_node=2 train.py '
        '--fsdp does')
    yield args.fsdp and config.encoder, (
        '--fsdp: not with --encoder, whose decoder asks for weights out of turn')
    yield args.fsdp and args.optimizer == 'muon', (
        '--fsdp --optimizer=muon: its step needs whole matrices; leave one of them out')
    yield too_many_rows(data, config)
    yield args.carry and 'row' in meta, (
        f'--carry: the rows of {args.data} have nothing to do with each other')
    yield args.carry and args.resume and data.world > 1, (
        '--resume --carry: the file has the states of one process; resume without torchrun')
    yield args.carry and model.max_len, (
        '--carry: learned positions and cosformer end after a row; take other --pos, --phi')
    redrawn = any(hasattr(mixer.memory.phi, 'redraw') for mixer in model.mixers().values())
    yield args.carry and redrawn, (
        '--carry: random features are redrawn for every batch, and a state in the old ones means nothing; '
        'take another --phi')


def lies_in(path, folder):
    """Whether a file or folder lies in a folder, or is that folder."""
    if os.path.isfile(path):
        path = os.path.dirname(os.path.realpath(path))
    return os.path.realpath(path) == os.path.realpath(folder)


def too_many_rows(data, config):
    """For `refuse`: whether the rows of a step take more memory than there is."""
    rows = data.batch_size // data.world
    a_token = 4 * config.n_layer * 8 * config.n_embd + 8 * data.meta['vocab_size']      # bytes, at the least
    drawn = 9 * data.T * POOL if data.is_pairs else 8       # for a row, of all batches and processes
    need = rows * data.T * a_token + data.accum * data.batch_size * drawn
    flags = f'--batch_size={data.batch_size} --accum={data.accum}'
    return beyond_memory(need, f'{flags}: so many rows of {data.T} tokens')


def taken_up(args, header, data, model, opt):
    """Restore the optimiser of a stopped run -> the states of --carry, one per batch. ValueError if the data
    have changed since."""
    tensors = header['tensors']
    for side in prepare.SIDES:
        if header['data'].get(side) != data.meta[side] and args.data == header['args']['data']:
            raise ValueError(
                f'--resume --data={args.data}: {side}.bin is not what the run began with, by its sha256; '
                f'bring it back, or begin anew with --init={args.out}/ckpt.safetensors and another --out')
    unpack_optimiser(model, opt, tensors)
    if not args.carry:
        return [None] * args.accum
    last = torch.zeros(args.batch_size, 1, dtype=torch.long, device=data.device)
    why = f'--resume --carry: the file has no states for --batch_size={args.batch_size} --accum={args.accum}'
    return [state_for(model, tensors, last, why, f'carry{i}') for i in range(args.accum)]


def log_of(args):
    """Create the folder of a run and open its log. As long as the log is open, the folder belongs to this
    run. ValueError if another run is at work there, or if a file lies there that could not be written over at
    the end."""
    os.makedirs(args.out, exist_ok=True)
    for name in 'ckpt', 'best':
        refuse_target(f'{args.out}/{name}.safetensors', 'a model')
    for name in 'log.jsonl', 'result.json', 'convert.json':
        prepare.refuse_irregular(f'{args.out}/{name}')
    log = open(f'{args.out}/log.jsonl', 'a')                # noqa: SIM115
    try:
        import fcntl
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f'--out={args.out}: another run is at work there; take another folder') from None
    except (ImportError, OSError):                          # Windows; a file system without locks
        pass
    if not args.resume:
        log.truncate(0)
    return log


def run_of(meta, where):
    """What the metadata of a checkpoint say about its run, as `Stopped`. ValueError if something is
    missing."""
    run = picked(Stopped, meta, where)
    typed(Args, run.args, where)
    return run


def steps_left(meta):
    """How many steps a stopped run still had to do, by the metadata of its checkpoint; 0 for a mere model."""
    if 'best' not in meta:
        return 0
    run = run_of(meta, 'its header')
    return run.args['steps'] - run.step


def built(args, config, data, weights):
    """The model for these data, with weights if there are any. ValueError if weights, data and flags do not
    go together"""
    of_data = {name: data.meta.get(name, absent) for name, absent in OF_DATA.items()}
    longest = max(data.T, config.block_size) if weights else data.T     # weights keep the positions they know
    model = GPT(dataclasses.replace(config, block_size=longest, **of_data)).to(data.device)
    refuse(mistakes(args, config, data, model))
    model.use(pick_forms(args.impl))
    if weights and model.config.classes and not config.classes:         # then their head is new
        new = model.state_dict()
        weights = {**weights, 'head.weight': new['head.weight'], 'head.bias': new['head.bias']}
    if weights:
        fill(model, weights, f'--data={args.data}: classes and patches have to be those the model has, and '
             'rows no longer than the positions it has learned')
    if args.fsdp:
        shard(model, data.device, data.world)
    return model


def tell(log, text, **figures):
    """Print a line, and write its figures as a line of log.jsonl."""
    say(text)
    print(json.dumps(figures), file=log, flush=True)


def line(steps, step, loss, lr, norm, ms, memory, tok_s):
    """What is printed of a step."""
    return (f'step {step:5d}/{steps} | loss {loss:.3f} | lr {lr:.1e} | norm {norm:5.2f} | {ms:5.0f} ms | '
            f'{tok_s / 1e3:6.1f}k tok/s | {memory / 1e6:.0f} MB | eta {(steps - step) * ms / 6e4:.1f} min')


def tell_step(log, data, steps, peak, step, loss, norm, ms, stage=''):
    """Print and log one of `steps` steps, which took about `ms`, with its loss (1,) and the norm of its
    gradient. peak: learning rate   stage: how the line begins"""
    tok_s = 1e3 * data.T * data.batch_size * data.accum / ms
    row = dict(step=step, loss=loss.item(), lr=lr_at(step - 1, steps, peak), norm=norm.item(), ms=ms,
               memory=memory(data.device), tok_s=tok_s)
    tell(log, f'{stage}{line(steps, **row)}', **row)


def opening(model, data, args, run, log):
    """Say what is trained, and begin the log with it."""
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    threads = torch.get_num_threads()
    can = getattr(torch.cpu, 'get_capabilities', dict)()    # as far as this torch knows
    fast = any(can.get(name) for name in ('avx512_bf16', 'amx_bf16'))
    if fast and data.device.type == 'cpu' and args.dtype == 'auto':
        say('this CPU multiplies bfloat16: --dtype=bfloat16 may make steps shorter')
    about = {key: value for key, value in data.meta.items() if key != 'json'}       # of megabytes
    said = (f'{",".join(config.rules())} | {size / 1e6:.2f} M parameters | '
            f'{args.data}: {len(data.train):,} + {len(data.val):,} tokens of {config.vocab_size} | '
            f'{data.world} x {data.device}, {str(data.dtype)[6:]}, {number(threads, "thread")}\n'
            f'recurrence: {model.why}')
    tell(log, said, config=dataclasses.asdict(config), **run, data=about, commit=commit(),
         device=str(data.device), params=size, threads=threads)


def keep(path, model, header, extra, rank):
    """Write a checkpoint. Only one of the processes does."""
    whole = {key: gathered(x) for key, x in model.state_dict().items()}
    if rank == 0:
        save(path, model, header, extra, whole)


def report(model, data, args, log, **found):
    """The closing figures, over the whole validation data by both rules. Together with those in `found` they
    go to result.json, as one flat dict."""
    meta = data.meta
    loss, right = data.evaluate(model, told='validation')
    tell(log, f'validation, blocks of {data.T}: {score(meta, loss, right)}', rule='blocks', val_loss=loss,
         accuracy=right)
    found.update(val_loss=loss, accuracy=right)
    if data.rank > 0:                                       # the rest is done by one process
        return
    if 'row' not in meta:
        found['bits per byte'] = loss * bits_a_nat(meta)
        if not args.fsdp and model.max_len is None and model.config.keeps() == {None}:
            along = dataclasses.replace(data, T=4096, world=1)
            loss, _ = along.evaluate(model, carried=True, told='validation, carried')
            tell(log, f'validation, carried: {score(meta, loss)}', rule='carried', val_loss=loss)
            found.update({'val_loss carried': loss, 'bits per byte carried': loss * bits_a_nat(meta)})
    found.update(commit=commit(), **dataclasses.asdict(args), **dataclasses.asdict(model.config))
    prepare.write_json(f'{args.out}/result.json', found)
    if not args.fsdp:
        show(model, data, args)


def show(model, data, args):
    """Print what the model says: for pairs, the translation of the first one; for a text, how it may
    continue."""
    meta = data.meta
    more = f'next: python sample.py --init={args.out}/ckpt.safetensors'
    model.eval()
    if 'source' in meta:
        x, _ = rows(data.val, [0], data.T, meta, data.device)
        source = x[:, :meta['source']]
        for tokens in source, model.translate(source):
            say(f'> {prepare.decode(tokens[0].tolist(), meta)}')
        say(f'{more} --source="..."')
    if 'row' in meta:
        return
    said = prepare.encode(PROMPTS.get(args.data, ''), meta)
    prompt = torch.tensor([prepare.begun(said, meta)], device=data.device)
    draw = torch.Generator(data.device).manual_seed(0)
    many = min(SAMPLE, (model.max_len or SAMPLE + 1) - prompt.shape[1])
    texts = model.generate(prompt, temperature=0.7, generator=draw)     # in fp32, as sample.py writes
    tokens = [token.item() for token, _ in itertools.islice(texts, many)]
    say(f'--- a sample ---\n{prepare.decode(said + tokens, meta)}\n---\n{more} --tokens=1000')


@script
def main(argv):
    args, config, weights, header = settings(argv)
    rank, world, device, dtype = machine(args)
    train, val, meta = prepare.load(args.data, tokenizer=args.tokenizer, like=header.get('data'))
    if args.val_tokens:
        val = val[:args.val_tokens]
    data = Rows(train, val, meta, meta.get('row', config.block_size), device, args.batch_size, args.seed,
                args.accum, args.carry, rank, world, dtype)
    torch.manual_seed(args.seed)
    model = built(args, config, data, weights)
    opt = OPTIMISERS[args.optimizer](model, args.lr, args.weight_decay, device)
    states = [None] * args.accum                            # of --carry, one a batch
    if args.resume:
        states = taken_up(args, header, data, model, opt)
    log = open(os.devnull, 'w') if rank > 0 else log_of(args)           # noqa: SIM115
    threads = threads_of(args, header, model, data)
    run = {'args': dataclasses.asdict(args), 'torch': torch.__version__}
    opening(model, data, args, run, log)
    forward = torch.compile(model) if args.compile else model
    learn = functools.partial(data.learn, forward, states)

    first = header.get('step', 0)                           # steps of the run that is resumed
    best = header.get('best', math.inf)
    bad = 0                                                 # steps in a row that were not finite
    good_states = [*states]                                 # those that the last finite step ended with
    times = []                                              # seconds of the steps since the last line
    seconds = 0.0                                           # of all steps
    since = time.perf_counter()
    # forward and backward are data.learn, clip and step are in optimise; here one logs, evaluates, saves
    steps = optimise(model, opt, learn, args.steps, args.lr, args.seed, first, args.clip, rank, world)
    for done, loss, norm, good in steps:
        times.append(time.perf_counter() - since)
        if good:
            bad = 0
            good_states = [*states]
        else:
            bad += 1
            states[:] = good_states
            tell(log, f'step {done}: not finite, skipped, {bad} in a row', step=done, not_finite=bad)
        if bad == BAD_STEPS:
            raise ValueError(f'{bad} steps in a row were not finite; stopped before saving. Try a smaller '
                             f'--lr than {args.lr:g}, or another --norm')
        evaluates = done % args.eval_every == 0 or done == args.steps
        logs = done % args.log_every == 0 or done in (first + 1, args.steps)
        if logs or evaluates:
            ms = 1e3 * statistics.mean(times)
            seconds += sum(times)
            times.clear()
        if logs:
            tell_step(log, data, args.steps, args.lr, done, loss, norm, ms)
        if evaluates:
            if threads and done < args.steps:
                threads.again(ms, 1e-3 * ms * args.eval_every)
            judged, right = data.evaluate(model, data.of_start(), told='start of validation')
            tell(log, f'step {done:5d} | start of validation: {score(meta, judged, right)}', step=done,
                 val_loss=judged, accuracy=right)
            run.update(step=done, data=meta)
            if judged < best:
                best = judged
                keep(f'{args.out}/best.safetensors', model, run, {}, rank)
            memories = pack_optimiser(model, opt)
            for i, state in enumerate(states):
                memories.update(pack(state, f'carry{i}'))
            last = {**run, 'best': best, 'threads': torch.get_num_threads() if world == 1 else None}
            keep(f'{args.out}/ckpt.safetensors', model, last, memories, rank)
        since = time.perf_counter()
    say(f'\n{args.steps - first} steps in {seconds / 60:.1f} minutes')
    report(model, data, args, log, steps=args.steps, ms=ms, minutes=seconds / 60)
    if world > 1:
        dist.barrier()                                      # nobody leaves while the first one still writes
        dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(main())
