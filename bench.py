"""Measure, on this machine. A suite prints a table, writes out/bench/SUITE.csv and .png; last, a JSON line.

    python bench.py                    decode --quick: what the next token costs
    python bench.py all --quick        every suite below, twenty minutes on two cores; --full takes hours

    python bench.py decode             the next token after 128 .. 65,536: time and state, layer and model
    python bench.py layer              one forward pass over up to 4,096, with --full 32,768, and its memory
    python bench.py capacity           how many associations a matrix holds (Schlag 2021)
    python bench.py update             associations whose values change: sum, gated, delta
    python bench.py recall             accuracy and entropy of attention by feature map (Zhang 2024)
    python bench.py mqar               multi-query recall against the bytes of the state
    python bench.py monotone           attention weights against q.k by feature map, also distilled
    python bench.py language           rules, positions, normalisation, carried state (Schlag 2021)
    python bench.py train              a layer forward and backward over T: our forms, and attention
    python bench.py cache              perplexity of a softmax model as an RNN that keeps few rows (Oren 2024)
    python bench.py kept               which tokens TOVA keeps in it, and for how long
    python bench.py batch              throughput at a memory budget against the rows kept

monotone, cache and kept need a softmax model, as train.py --rule=softmax makes.
"""
import csv
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import statistics
import string
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

os.environ.setdefault('KINETO_LOG_LEVEL', '99')     # torch.profiler, of which memory is asked, is talkative
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import convert
import fastweight
import kernels
import train as trainer
from convert import pretrained
from data import prepare
from fastweight import NORMALISERS, RULES, FastWeights, finish, l2
from model import (GPT, Config, captured, flag, graphed, pack, parse, pick_device, script, state_bytes,
                   swapped, table, unpack)


SUITES = dict(      # a function each; the flags that mean something to it, beside those that always do
    decode='lengths heads head_dim dtype', layer='lengths heads head_dim batch dtype',
    capacity='lengths seeds steps only', update='lengths seeds steps only', recall='seeds steps only',
    mqar='lengths seeds steps only', monotone='init data steps only', language='data seeds steps only',
    train='lengths heads head_dim batch dtype', cache='init data lengths overflow', kept='init data lengths',
    batch='lengths budget dtype', all='seeds init')
ALWAYS = 'quick full out device seed'


def of(name):
    """The suites to which a flag means something, for --help."""
    return ', '.join(s for s, flags in SUITES.items() if name in flags.split())


@dataclass
class Args:
    quick: bool = flag(False, 'the default: about two minutes a suite on two cores')
    full: bool = flag(False, 'all sizes, more steps and repeats')
    out: str = flag('out/bench', 'folder for tables, pictures and what was trained')
    device: str = flag('auto', 'auto, cpu, cuda')
    seed: int = flag(0, 'the first, of inputs and trainings', low=0, high=2 ** 32 - 1)
    seeds: int = flag(0, f'{of("seeds")}: how often to train; 0: once, with --full three times', low=0)
    steps: int = flag(0, f'{of("steps")}: how long, if not as the suite has it', low=0)
    only: str = flag('', f'{of("only")}: lines of the table, as softmax,delta')
    lengths: str = flag('', f'{of("lengths")}: sequence lengths, associations, widths or rows, if not the '
                            'suite\'s: 256,1024')
    heads: int = flag(0, f'{of("heads")}: heads, if not 12, train 4', low=0)
    head_dim: int = flag(64, f'{of("head_dim")}: features of q, k and v', low=1)
    batch: int = flag(1, f'{of("batch")}: rows', low=1)
    dtype: str = flag('auto', f'{of("dtype")}: type; auto: bfloat16 on a GPU',
                      ['auto', 'float32', 'bfloat16'])
    init: str = flag('', f'{of("init")}: a softmax model, if not that in out/ or out/teacher/')
    data: str = flag('', f'{of("data")}: a text, if not what the model was trained on, or stdlib')
    overflow: str = flag('', f'{of("overflow")}: also with fast weights for what goes, at equal bytes, as '
                             'sum:hedgehog')
    budget: int = flag(71, f'{of("budget")}: MB for all states', low=1)


HERE = os.path.dirname(os.path.abspath(__file__))
COLOURS = ['#000000', '#E69F00', '#56B4E9', '#009E73', '#0072B2', '#D55E00', '#CC79A7', '#F0E442']


# ---- measuring ---------------------------------------------------------------------------------------------
def seconds(runs, device, least=0.3, repeats=5):
    """Median time of each function of a list: at least `repeats` calls and `least` seconds of them, after a
    warm-up. They take turns, so that a busy moment of the machine meets them all."""
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    times = [[] for _ in runs]
    for run in runs:
        run()
    while open_ := [i for i, t in enumerate(times) if len(t) <= repeats or sum(t) < least]:
        for i in open_:
            wait()
            t = time.perf_counter()
            runs[i]()
            wait()
            times[i].append(time.perf_counter() - t)
    return [statistics.median(t[1:]) for t in times]


def kept_bytes(run):
    """What the forward of run() keeps for its backward, every storage once."""
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        o = run()
    del o
    return sum(kept.values())


def lengths(args, default):
    """--lengths as numbers."""
    given = args.lengths.split(',') if args.lengths else [str(T) for T in default if T]
    if not all(T.isdecimal() and int(T) for T in given):
        raise ValueError(f'--lengths={args.lengths}: expected numbers with commas, as 256,1024')
    return sorted({int(T) for T in given})


def one_length(args, default):
    """--lengths as one number."""
    T, *more = lengths(args, [default])
    if more:
        raise ValueError(f'--lengths={args.lengths}: this suite takes one')
    return T


def ceiling(device, dtype):
    """FLOP a second of a large matrix product here."""
    n = 8192 if device.type == 'cuda' else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / seconds([lambda: a @ a], device)[0]


def report(args, name, rows, note, *panels, **summary):
    """The table on stdout and as CSV, the picture, one JSON line. A panel draws rows on its axes."""
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, name)
    with open(path + '.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    table(rows)
    print(note)
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 12, 'axes.spines.top': False, 'axes.spines.right': False})
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 4.5), squeeze=False)
    for draw, ax in zip(panels, axes[0]):
        draw(ax, rows)
    figure.savefig(path + '.png', dpi=110, bbox_inches='tight')
    here = dict(torch=torch.__version__, threads=torch.get_num_threads())
    minutes = round((time.perf_counter() - args.began) / 60, 2)
    if 'seeds' in rows[0]:
        here['seeds'] = args.seeds
    print(json.dumps(dict(suite=name, **here, minutes=minutes, **summary)), flush=True)


def lines(axes, rows, x, y, yscale='log', xscale='log', paper=None):
    """One line a form, in colours that colour-blind readers can tell; paper: the column of its figures, drawn
    as hollow points."""
    for i, name in enumerate(dict.fromkeys(r['form'] for r in rows)):
        points = [(r[x], r[y]) for r in rows if r['form'] == name and r[y] is not None]
        if points:
            style = dict(marker='o', color=COLOURS[i % 8], linestyle='-' if i < 8 else '--')
            axes.plot(*zip(*points), label=name, **style)
        theirs = [(r[x], r[paper]) for r in rows if paper and r['form'] == name and r[paper] is not None]
        if theirs:
            axes.plot(*zip(*theirs), linestyle='', marker='o', color=COLOURS[i % 8], markerfacecolor='none')
    axes.set(xscale=xscale, yscale=yscale)
    ticks = sorted({r[x] for r in rows})
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f'{t:,}' for t in ticks])
        axes.minorticks_off()
    if rows:
        axes.legend(fontsize=9, frameon=False)


def panel(title, x, y, xlabel, ylabel, where=lambda r: True, **how):
    """A function that draws `lines` of some rows and says what they are."""
    def draw(axes, rows):
        lines(axes, [r for r in rows if where(r)], x, y, **how)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return draw


def code():
    """A digest of what results depend on."""
    files = ('fastweight', 'kernels', 'model', 'train', 'convert', 'bench', 'data/prepare')
    text = b''.join(prepare.read(os.path.join(HERE, f'{name}.py')) for name in files)
    return hashlib.sha256(text).hexdigest()[:12]


def once(args, name, run, **key):
    """run(**key), a dict, and its minutes; or what the same code gave before, by runs.jsonl in --out: a long
    suite that was stopped goes on."""
    path, mark = os.path.join(args.out, 'runs.jsonl'), {'run': name, 'code': code(), **key}
    for line in prepare.read(path).decode().splitlines() if os.path.exists(path) else ():
        try:
            known = json.loads(line)
        except ValueError:          # cut off in writing
            continue
        if isinstance(known, dict) and known.pop('key', None) == mark:
            return known
    began = time.perf_counter()
    found = run(**key)
    found['minutes'] = (time.perf_counter() - began) / 60
    os.makedirs(args.out, exist_ok=True)
    with open(path, 'a') as f:
        f.write('\n' * (f.tell() > 0) + json.dumps({'key': mark, **found}))
    return found


def for_seeds(args, name, run, **key):
    return [once(args, name, run, **key, seed=seed) for seed in range(args.seed, args.seed + args.seeds)]


def of_seeds(found, key, scale=1.0):
    """Columns of a table: the median over seeds, its range, what it took."""
    values = [scale * f[key] for f in found]
    return {'ours': statistics.median(values), 'least': min(values), 'most': max(values),
            'seeds': len(values), 'minutes': sum(f['minutes'] for f in found)}


def only(args, table):
    """The rows of a table that --only names, or all."""
    names = [n.strip() for n in args.only.split(',')] if args.only else list(table)
    if unknown := [n for n in names if n not in table]:
        raise ValueError(f'--only={args.only}: no {unknown[0]!r} here; choose from {", ".join(table)}')
    return {n: table[n] for n in names}


# ---- suites capacity, update: how much a matrix of fast weights holds. Schlag 2021 section 6.1 -------------
class Associative(nn.Module):
    """Read S keys with their values, then say the value of each. d = 64. x = [embed(key); one-hot of value],
    k = W_k x, q = W_q embed(key), v the one-hot itself; the answer is what is read: no output layer."""
    def __init__(self, S, rule, phi, norm, d=64):
        super().__init__()
        e = int(1.1 * 2 * S)
        self.embed = nn.Parameter(torch.randn(S, e))
        self.k, self.q = nn.Linear(e + S, d), nn.Linear(e, d)
        for w in self.k.weight, self.q.weight:
            nn.init.uniform_(w, -d ** -0.5, d ** -0.5)
        self.memory = FastWeights(rule, e + S, 1, d, phi, norm)

    def forward(self, keys, values):
        """keys, values (B, L), all written, then all keys asked for -> answers (B, L, S)"""
        (S, e), m = self.embed.shape, self.memory
        W_e, W_v = self.k.weight[:, :e], self.k.weight[:, e:]       # W_k x is a sum of two rows of tables
        k = ((self.embed @ W_e.mT + self.k.bias)[keys] + W_v.mT[values])[:, None]
        q, v = self.q(self.embed)[keys][:, None], F.one_hot(values, S).to(k.dtype)[:, None]
        if m.rule.keeps:
            return ((q @ k.mT * k.shape[-1] ** -0.5).softmax(-1) @ v)[:, 0]
        q, k = NORMALISERS[m.norm](m.features(q, k, None, 0)).chunk(2)
        floor = m.norm == 'attn' and m.phi.floor
        if m.rule.erase or m.rule.f or m.rule.write:
            gates = m.gates(torch.cat([self.embed[keys], v[:, 0]], -1))
            _, W = kernels.chunked(k, k, v, **gates, normalise=floor)
            return finish(q @ W.mT, floor, q.dtype)[:, 0]
        weights = q @ k.mT                                          # a sum is attention without softmax
        return (finish(torch.cat([weights @ v, weights.sum(-1, True)], -1), floor, q.dtype) if floor
                else weights @ v)[:, 0]


def associate(S, rule, phi, norm, replace, seed, most, device, rows=4):
    """The least loss 1/2 |v - answer|^2 on new sequences: 0.5 is nothing learned. As the authors' code: Adam,
    1e-3, a look every 100 steps at 20 sequences, the end at 0.001 or after 11 looks in vain. Not as theirs:
    a step has 4 sequences and all their keys as queries, not 32 with one each."""
    torch.manual_seed(seed)
    draw, best, vain = torch.Generator().manual_seed(seed), math.inf, 0
    model = Associative(S, rule, phi, norm).to(device)
    opt = torch.optim.Adam(model.parameters(), 1e-3, fused=True)

    def loss(rows, L, by_key):
        if replace:
            keys, values = (torch.randint(S, (rows, L), generator=draw) for _ in 'kv')
        else:
            keys, values = (torch.rand(rows, S, generator=draw).argsort(1) for _ in 'kv')
        keys, values = keys.to(device), values.to(device)
        same = keys[:, :, None] == keys[:, None, :]
        last = ~same.triu(1).any(-1)                # the others are overwritten
        weight = last * (1 if by_key else same.sum(-1))
        o = model(keys, values)
        far = 0.5 * (o.square().sum(-1) - 2 * o.gather(-1, values[..., None])[..., 0] + 1)
        return (far * weight).sum() / weight.sum()
    for step in range(1, most + 1):
        model.train()
        loss(rows, 2 * S, by_key=False).backward()  # a position is drawn: frequent keys come more often
        opt.step()
        opt.zero_grad()
        if step % 100 == 0 or step == most:
            model.eval()
            with torch.no_grad():                   # S pairs, also where 2 S were trained on, as they do
                found = loss(20, S, by_key=True).item()
            best, vain = (found, 0) if found < best else (best, vain + 1)
            if best <= 0.001 or vain > 10 or not math.isfinite(found):
                break
    return {'loss': best, 'steps': step}


GRIDS = {'capacity': (20, 40, 60, 80, 100, 120, 140, 160, 200, 240, 260, 300, 340, 360, 400, 500, 600),
         'update': (20, 40, 60, 80, 100, 140, 200)}
ASSOCIATIVE = {     # form: rule, phi, norm, the losses logged beside the authors' code
    'capacity': {
        'softmax': ('softmax', None, None, [.0006, .0003, .0001, *[0] * 6, .0004, 0, 0, 0, .0045, 0, .0089,
                                            .03]),
        'elu': ('sum', 'elu', 'attn', [.0009, .0008, .0245, .108, .164, .232, .271, .301, .342, .363, .378,
                                       .397, .409, .417, .422, .429, .451]),
        'dpfp:1': ('sum', 'dpfp:1', 'attn', [.0008, .0003, .0004, .0002, .0002, .0083, .051, .102, .173, .225,
                                             .27, .286, .343, .336, .342, .386, .411]),
        'dpfp:2': ('sum', 'dpfp:2', 'attn', [.0003, .0006, .001, .0006, .0005, .0003, .0005, .0004, .0004,
                                             .0005, .0084, .068, .129, .159, .164, .276, .323]),
        'dpfp:3': ('sum', 'dpfp:3', 'attn', [.0005, .0009, .0005, .0007, .0005, .0005, .0009, .0002, .0009,
                                             .0005, .0004, .0003, .0001, .0034, .036, .169, .198]),
        'favor:64': ('sum', 'favor:64', 'attn', [.117, .274, .483, *[.5] * 14]),
        'favor:128': ('sum', 'favor:128', 'attn', [.074, .175, .484, .49, *[.5] * 13]),
        'favor:512': ('sum', 'favor:512', 'attn', [.024, .075, .407, .49, *[.5] * 13])},
    'update': {
        'sum': ('sum', 'dpfp:1', 'attn', [.097, .104, .103, .113, .111, .155, .231]),
        'gated': ('gated', 'dpfp:1', 'attn', []),
        'delta': ('delta', 'dpfp:1', 'sum', [.0008, .001, .0049, .0063, .0001, .0475, .171]),
        'delta dpfp:2': ('delta', 'dpfp:2', 'sum', [.001, .0005, .0005, .0008, .0854, .0003, .0008]),
        'delta elu': ('delta', 'elu', 'sum', [.0008, .0007, .0005, .094, .15, .257, .342]),
        'delta l2': ('delta', 'dpfp:1', 'l2', []),
        'sum sum-norm': ('sum', 'dpfp:1', 'sum', [])}}


def associative(args, device, name, quick, title):
    """A table of losses against S. A matrix that is overfull (a loss above 0.1) is not tried at greater S."""
    rows, broken, theirs = [], {}, {}
    for form, (rule, phi, norm, logged) in only(args, ASSOCIATIVE[name]).items():
        paper = dict(zip(GRIDS[name], logged))
        theirs[form] = next((S for S, x in paper.items() if x > 0.001), '-')
        for S in lengths(args, GRIDS[name] if args.full else quick.get(form, (20, 60) if args.only else ())):
            found = for_seeds(args, 'associate', associate, S=S, rule=rule, phi=phi, norm=norm,
                              replace=name == 'update', most=args.steps or (20000 if args.full else 1000),
                              device=str(device))
            rows.append({'form': form, 'S': S, 'paper': paper.get(S), **of_seeds(found, 'loss')})
            if rows[-1]['ours'] > 0.001:
                broken.setdefault(form, S)
            if rows[-1]['ours'] > 0.1 and (rule == 'delta' or name == 'capacity'):
                break

    text = ', '.join(f'{form} {S} (paper {theirs[form]})' for form, S in broken.items())
    report(args, name, rows, f'first S above a loss of 0.001: {text}',
           panel(title, 'S', 'ours', 'associations S', 'loss, 1/2 |v - answer|^2', yscale='linear',
                 xscale='linear', paper='paper'), broken=broken)


def capacity(args, device, dtype):
    """How many associations fit: keys come once. Schlag 2021 figure 2."""
    few = {'softmax': (20, 100, 200), 'elu': (20, 40, 60, 80), 'dpfp:1': (40, 100, 140), 'favor:64': (20, 60)}
    associative(args, device, 'capacity', few, 'what a matrix holds (hollow: the paper)')


def update(args, device, dtype):
    """Values that change: keys come again, the last value counts. Schlag 2021 figure 3."""
    few = {'sum': (20, 60), 'gated': (20,), 'delta': (20, 60), 'sum sum-norm': (20,)}
    associative(args, device, 'update', few, 'values that change (hollow: the paper)')


# ---- suites recall, mqar, language: a line of the table is a run of train.py -------------------------------
def run_train(flags, seed, out):
    """python train.py FLAGS --seed --out: accuracy or nats a token of the closing validation."""
    command = [sys.executable, os.path.join(HERE, 'train.py'), *shlex.split(flags)]
    done = subprocess.run([*command, f'--seed={seed}', f'--out={out}'], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f'train.py {flags}: {(done.stderr.strip() or "stopped").splitlines()[-1]}')
    log = [json.loads(line) for line in prepare.read(os.path.join(out, 'log.jsonl')).decode().splitlines()]
    ends = {row['rule']: row for row in log if 'rule' in row}
    return {'accuracy': ends['blocks']['accuracy'], 'loss': ends['blocks']['val_loss'],
            'carried': ends.get('carried', {}).get('val_loss'), 'params': log[0]['params']}


def learned(args, suite, name, flags):
    """The runs of one line, a seed each, and their checkpoints."""
    print(f'{name}: python train.py {flags}', file=sys.stderr, flush=True)
    mark = hashlib.sha256(flags.encode()).hexdigest()[:8]
    folder = os.path.join(args.out, suite, re.sub('[^a-z0-9]+', '-', f'{name}-{mark}'))
    run = lambda flags, seed: run_train(flags, seed, f'{folder}-{seed}')
    found = for_seeds(args, 'train.py', run, flags=flags)
    return found, [f'{folder}-{args.seed + i}/ckpt.safetensors' for i in range(args.seeds)]


@torch.inference_mode()
def entropy(model, meta, device):
    """Mean entropy in nats of the attention weights at the end of 16 validation rows, or None."""
    val, data = prepare.load(meta['args']['data'])[1:]
    T = data['row']
    x, _ = trainer.rows(val, range(0, 32 * T, 2 * T), T, data, device)
    found = []
    for block, _, u, q, k, *_ in convert.through(model.eval(), x):
        if not (block.mixer.memory.rule.keeps or convert.has_weights(block.mixer)):
            return None
        w = convert.weights(block.mixer, u, q, k)[:, :, -1].clamp(min=1e-12)
        found.append(-(w * w.log()).sum(-1).mean().item())
    return sum(found) / len(found)


RECALL = {      # what is trained, and the paper's accuracy in per cent, where the text at hand has it
    'softmax': ('--rule=softmax', 100), 'taylor': ('--rule=sum --phi=taylor', 100),
    'hedgehog': ('--rule=sum --phi=hedgehog', 100), 'exp:2': ('--rule=sum --phi=exp:2', None),
    'exp:1': ('--rule=sum --phi=exp:1', None), 'relu': ('--rule=sum --phi=relu', None),
    'elu': ('--rule=sum --phi=elu', 17), 'favor': ('--rule=sum --phi=favor', 17),
    'cosformer': ('--rule=sum --phi=cosformer:128', 17), 'delta': ('--rule=delta', None),
    'delta dpfp:2': ('--rule=delta --phi=dpfp:2', None)}


def exchange(path, flags, steps, device, seed):
    """The attention of a trained softmax model exchanged for another. Maps that learn are distilled in a
    third of the steps (Zhang 2024 eq. 4), all weights trained in the others.
    ->  accuracy before and after the latter, entropy"""
    teacher, meta = pretrained(path, device=device)
    train, val, data = prepare.load(meta['args']['data'])
    T, draw = data['row'], torch.Generator()
    recipe = convert.Args(seed=seed, batch_size=32, distil_steps=steps // 3, eval_every=steps)

    def batch(step):
        draw.manual_seed(seed * 10 ** 6 + step)
        begin = torch.randint(len(train) // (2 * T), (recipe.batch_size,), generator=draw) * 2 * T
        return trainer.rows(train, begin.tolist(), T, data, device)

    def loss(step):
        logits, y, _ = trainer.said(student, *batch(steps + step), None, data)
        value = F.cross_entropy(logits, y)
        value.backward()
        return value.item()
    accuracy = lambda: trainer.evaluate(student, val, T, data, device, nullcontext())[1]
    torch.manual_seed(seed)
    student, new = convert.swap(teacher, parse(shlex.split(flags), '', convert.Student)[0])
    learns = {n for n, _ in student.named_parameters()} & new
    if learns and convert.has_weights(student.blocks[0].mixer):
        convert.distil(teacher, student, learns, 'ce', lambda step: F.pad(batch(step)[0], (0, 1)),
                       convert.Progress(recipe))
        steps -= recipe.distil_steps
    before = accuracy()
    convert.optimise(student, 1e-3, steps, loss, 'train', convert.Progress(recipe))
    return {'before': before, 'accuracy': accuracy(), 'entropy': entropy(student, meta, device)}


NO_CONV = '--n_layer=2 --n_embd=64 --lr=1e-3 --batch_size=32 --conv=0 --pos=learned'
RECALL_IN = {   # and in which model, for how many steps; each value must be brought its key
    'one layer': (2000, '--n_layer=1 --n_head=1 --n_embd=16 --lr=1e-2 --batch_size=64'),
    'two, no conv': (3000, f'{NO_CONV} --n_head=4'), 'from softmax': (3000, f'{NO_CONV} --n_head=1')}


def recall(args, device, dtype):
    """Associative recall against the entropy of attention. Zhang 2024 figure 4. With convolutions one layer
    and one head of 16 channels are enough for softmax, so that what is lost is lost by the map; --full also
    asks for what it takes without them, a first layer that looks one token back: learned anew, or taken from
    softmax, whose attention is then exchanged, with 300 more steps."""
    rows, models = [], list(RECALL_IN)[:None if args.full else 1]
    for model, (name, (flags, paper)) in itertools.product(models, only(args, RECALL).items()):
        steps, size = RECALL_IN[model]
        steps, before = args.steps or (steps if args.full else 300), None
        swap = model == 'from softmax' and name != 'softmax'
        what, trains = ('softmax', '--rule=softmax') if swap else (name, flags)
        found, paths = learned(args, 'recall', f'{what}, {model}', f'--data=recall-kept {size} '
                               f'--steps={steps} --eval_every={steps} --device={device} {trains}')
        if swap:
            print(f'{name}, {model}: exchanged', file=sys.stderr, flush=True)
            steps, key = args.steps or 300, dict(flags=flags, device=str(device))
            found = [once(args, 'exchange', exchange, path=path, steps=steps, **key, seed=seed)
                     for seed, path in enumerate(paths, args.seed)]
            before, spread = 100 * statistics.median(f['before'] for f in found), found[0]['entropy']
        else:
            spread = entropy(*pretrained(paths[0], device=device), device)
        rows.append({'form': name, 'model': model, 'paper': paper, **of_seeds(found, 'accuracy', 100),
                     'before': before, 'entropy': spread, 'steps': steps})

    def draw(model):
        def on(axes, rows):
            for r in rows:
                if r['model'] == model and r['entropy'] is not None:
                    axes.plot(r['entropy'], r['ours'], 'o', color=COLOURS[4])
                    axes.annotate(r['form'], (r['entropy'], r['ours']), (6, -4), textcoords='offset points')
            axes.set(xlabel='entropy of attention, nats', ylabel='accuracy, %', title=model, ylim=(0, 105))
        return on
    note = ('accuracy in % of 2,000 new rows; before: exchanged, maps that learn distilled, else as it was; '
            'entropy: mean over layers, the first seed')
    report(args, 'recall', rows, note, *map(draw, models),
           accuracy={f'{r["form"]}, {r["model"]}': round(r['ours'], 1) for r in rows})


def mqar(args, device, dtype):
    """Accuracy on multi-query recall against the bytes of the state, with --full for every rule. Arora 2023
    (Zoology)."""
    rows, steps = [], args.steps or (1000 if args.full else 300)
    widths = lengths(args, (16, 32, 64, 128) if args.full else (32, 64))
    rules = RULES if args.full or args.only else ['softmax', 'sum', 'delta']
    for rule, width in itertools.product(only(args, {r: RULES[r] for r in rules}), widths):
        flags = (f'--data=mqar --rule={rule} --n_layer=2 --n_head=2 --n_embd={width} --batch_size=32 '
                 f'--lr=1e-2 --steps={steps} --eval_every={steps} --val_tokens={2 ** 17} --device={device}')
        flags += ' --cache=16' if RULES[rule].keeps not in (None, 'all') else ''
        found, paths = learned(args, 'mqar', f'{rule} {width}', flags)
        model, _ = pretrained(paths[0], device=device)
        state = model.eval().read(torch.zeros(1, model.config.block_size, dtype=torch.long, device=device))
        rows.append({'form': rule, 'width': width, 'state bytes': state_bytes(state),
                     **of_seeds(found, 'accuracy', 100)})

    report(args, 'mqar', rows, f'{steps} steps of 32 rows; accuracy in % of 512 new rows',
           panel('MQAR, 8 pairs', 'state bytes', 'ours', 'bytes of the state after 128 tokens', 'accuracy, %',
                 yscale='linear'))


LANGUAGE = {    # what is trained; perplexity on WikiText-103 (tables 2, 5: 40 M parameters, with positions)
    'softmax': ('--rule=softmax --n_head=4', 34.1), 'sum': ('--rule=sum --pos=learned', 38.3),
    'delta elu': ('--rule=delta --phi=elu --norm=sum --pos=learned', 35.5),
    'sum favor:8': ('--rule=sum --phi=favor:8 --pos=learned', 39.6),
    'delta favor:8': ('--rule=delta --phi=favor:8 --norm=sum --pos=learned', 37.2),
    'sum dpfp:1': ('--rule=sum --phi=dpfp:1 --pos=learned', 38.8),
    'delta dpfp:1': ('--rule=delta --phi=dpfp:1 --norm=sum --pos=learned', 35.0),
    'delta elu attn-norm': ('--rule=delta --phi=elu --norm=attn --pos=learned', 37.2),
    'sum no-positions': ('--rule=sum', None), 'sum no-positions carry': ('--rule=sum --carry', None),
    'delta elu no-positions': ('--rule=delta --phi=elu --norm=sum', None),
    'delta elu no-positions carry': ('--rule=delta --phi=elu --norm=sum --carry', None),
    'delta': ('--rule=delta', None), 'decay': ('--rule=decay', None),
    'gated_delta': ('--rule=gated_delta', None), 'delta convolutions': ('--rule=delta --conv=4', None),
    'delta convolutions carry': ('--rule=delta --conv=4 --carry', None)}


def language(args, device, dtype):
    """Schlag 2021 tables 2 to 5 at a size for two cores: 4 layers of width 128, rows of 128, the same tokens
    for all, convolutions only where the name says so. `carried` reads the validation tokens with one state
    from end to end."""
    rows, steps, tokens = [], args.steps or (2000 if args.full else 150), 2 ** 18 if args.full else 2 ** 15
    data = args.data or 'stdlib'
    meta = prepare.load(data)[2]
    if 'row' in meta:
        raise ValueError(f'--data={data}: a task; this suite wants a text')
    val = meta['val']
    few = ['softmax', 'sum', 'delta elu', 'delta', 'decay', 'gated_delta']
    table = only(args, LANGUAGE if args.full or args.only else {n: LANGUAGE[n] for n in few})
    for name, (flags, paper) in table.items():
        flags += ' --conv=0' * ('--conv' not in flags)
        found, _ = learned(args, 'language', name, f'--data={shlex.quote(data)} --steps={steps} '
                        f'--eval_every={steps} --val_tokens={tokens} --device={device} {flags}')
        bits = val['tokens'] / val['bytes'] / math.log(2)
        carried = [f['carried'] for f in found if f['carried'] is not None]
        rows.append({'form': name, 'paper, perplexity': paper, **of_seeds(found, 'loss', bits),
                     'carried': bits * statistics.median(carried) if carried else None,
                     'parameters': found[0]['params']})

    def draw(axes, rows):
        for i, r in enumerate(reversed(rows)):
            axes.plot([r['least'], r['most']], [i, i], color=COLOURS[4])
            axes.plot(r['ours'], i, 'o', color=COLOURS[4])
        axes.set_yticks(range(len(rows)), [r['form'] for r in reversed(rows)])
        axes.set(xlabel=f'bits per byte of {data}, rows of 128 (points)')
        top = axes.twiny()                              # another unit, but the same order?
        for i, r in enumerate(reversed(rows)):
            if r['paper, perplexity']:
                top.plot(r['paper, perplexity'], i, 'o', color=COLOURS[1], markerfacecolor='none')
        top.set(xlabel="the paper's perplexity of WikiText-103 (circles)")
    note = (f'ours: bits per byte of {data} after {steps} steps of 4 rows of 128; carried: with the state '
            'handed on; paper: WikiText-103')
    report(args, 'language', rows, note, draw)


# ---- suite monotone: what feature maps do to attention. Zhang 2024 figures 2, 3 and 7 ----------------------
def monotone(args, device, dtype):
    """Attention of a trained softmax model by other maps: do weights grow with q.k, how spiky are they; the
    learned maps before and after they are distilled."""
    teacher, data, x, text = chunks(args, device, 8 if args.full else 2)
    steps, T, rows, curves = args.steps or (300 if args.full else 30), x.shape[1], [], {}

    def row(form, student):
        keys = 'order kept', 'entropy', 'entropy of teacher', 'KL to teacher'
        layers = convert.fidelity(teacher, student.eval(), x)
        rows.append({'map': form, **{key: statistics.mean(layer[key] for layer in layers) for key in keys}})
        with torch.no_grad():       # one query, the last of a piece, in the first head of the last layer
            _, _, u, q, k, *_ = list(convert.through(teacher, x[:1]))[-1]
            w = convert.weights(student.blocks[-1].mixer, u, q, k)[0, 0, -1].cpu()
            s, order = ((q[0, 0, -1] @ k[0, 0].mT) * q.shape[-1] ** -0.5).cpu().sort()
            curves['softmax'], curves[form] = ((s, y.clamp(min=1e-7)) for y in (s.softmax(-1), w[order]))
    recipe = convert.Args(distil_steps=steps, seed=args.seed)
    batch = lambda step: convert.rows(text, recipe, min(T, 256), step, device)
    maps = 'elu', 'relu', 'favor', 'exp:1', 'exp:2', 'taylor', 't2r', 'hedgehog'
    for phi in only(args, dict.fromkeys(maps)):
        student, new = convert.swap(teacher, dict(rule='sum', phi=phi))
        row(phi, student)
        if learns := {n for n, _ in student.named_parameters()} & new:
            convert.distil(teacher, student, learns, 'ce', batch, convert.Progress(recipe))
            row(f'{phi}, distilled', student)

    def curve(axes, rows):
        wanted = 'softmax', 'elu', 'exp:2', 'taylor', 'hedgehog, distilled'
        for form, colour in zip((f for f in wanted if f in curves), COLOURS):
            axes.plot(*curves[form], '.', color=colour, label=form, markersize=4)
        axes.set(xlabel='q.k / sqrt(d)', ylabel='attention weight', yscale='log',
                 title='one query: weights should grow with q.k')
        axes.legend(fontsize=9, frameon=False)

    def points(axes, rows):
        for r in rows:
            axes.plot(r['entropy'], 100 * r['order kept'], 'o', color=COLOURS[4])
            axes.annotate(r['map'], (r['entropy'], 100 * r['order kept']), (5, -3), fontsize=9,
                          textcoords='offset points')
        axes.axvline(rows[0]['entropy of teacher'], color='grey', linewidth=1)
        axes.set(xlabel='entropy, nats (line: softmax)', ylabel='pairs in the order of q.k, %',
                 title='spiky and monotone: upper left')
    report(args, 'monotone', rows, f'means over layers; distilled: {steps} steps of 4 rows', curve, points)


# ---- suite layer: forward alone, to long sequences. Zhang 2024 figure 6 ------------------------------------
def peak_bytes(run, device):
    """The most that run() holds at a time beyond what there was."""
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    events = [e for e in p.profiler.kineto_results.events() if e.name() == '[memory]']
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events), default=0)


@torch.inference_mode()
def layer(args, device, dtype):
    """One layer's forward with its feature map, from q, k, v, with --full to 32,768 steps; attention is
    scaled_dot_product_attention."""
    rows, H, d = [], args.heads or 12, args.head_dim
    forms = {'sum elu': ('sum', 'elu'), 'sum hedgehog': ('sum', 'hedgehog'), 'delta': ('delta', None),
             'sum taylor': ('sum', 'taylor')}
    left_out, slow = [], set()
    for T in lengths(args, (256, 1024, 4096, 16384, 32768) if args.full else (256, 1024, 4096)):
        q, k, v = (torch.randn(args.batch, H, T, d, device=device, dtype=dtype) for _ in 'qkv')
        x = torch.randn(args.batch, T, 16, device=device, dtype=dtype)
        runs = {'attention': lambda: softmax(q, k, v)}
        for form, (rule, phi) in forms.items():
            memory = FastWeights(rule, 16, H, d, phi).to(device, dtype).eval()
            need = 12 * args.batch * H * T * memory.phi.feature_dim     # bytes: features of q, k, one copy
            if need > free_bytes(device):
                left_out.append(f'{form} at {T:,} ({need / 1e9:.1f} GB)')
                continue
            if form in slow:
                left_out.append(f'{form} at {T:,} (too slow)')
                continue
            runs[form] = lambda memory=memory: memory(x, q, k, v, form=kernels.chunked)
        times = seconds(list(runs.values()), device, 0.2, 3 if T <= 4096 else 1)
        for (form, run), time in zip(runs.items(), times):
            rows.append({'form': form, 'T': T, 'ms': 1e3 * time, 'MB': peak_bytes(run, device) / 2 ** 20,
                         'of attention': time / times[0]})
            if time > (30 if args.full else 1):
                slow.add(form)

    note = 'the paper: nearly 6 times FlashAttention at 32 K, on a GPU'
    note += f'; left out on this machine: {", ".join(left_out)}' if left_out else ''
    report(args, 'layer', rows, note,
           panel(f'one layer, {H} heads of {d}', 'T', 'ms', 'sequence length', 'forward, ms'),
           panel('and its memory', 'T', 'MB', 'sequence length', 'peak memory, MB'))


# ---- suite train: what a layer costs -----------------------------------------------------------------------
def inputs(kind, args, T, device, dtype, heads=12):
    """Gates as the named rule has them, over random q, k, v (B, H, T, head_dim)."""
    B, H, d = args.batch, args.heads or heads, args.head_dim
    draw = torch.Generator().manual_seed(args.seed)
    randn = lambda n: torch.randn(B, H, T, n, generator=draw).to(device, dtype)
    rand = lambda *n: torch.rand(B, H, T, *n, generator=draw).to(device)
    a = dict(q=randn(d), k=l2(randn(d)), v=randn(d))
    if 'delta' in kind or kind == 'kda':
        a['write'] = a['erase'] = rand()
    if kind in ('kda', 'decay', 'two-sided delta'):
        a['log_f'] = -0.1 * rand(d)
    if kind == 'gated_delta':
        a['log_f'] = -0.1 * rand(1)
    if kind in ('decay', 'two-sided delta'):
        a['log_z'] = -0.1 * rand(d)
    if kind == 'sum / n':
        a['q'], a['k'], a['normalise'] = a['q'].abs(), a['k'].abs(), True
    return {n: x.requires_grad_() if torch.is_tensor(x) else x for n, x in a.items()}


def softmax(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), None


def free_bytes(device):
    """Memory that may be taken here."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    if os.path.exists('/proc/meminfo'):
        return 1024 * int(re.search(rb'MemAvailable: *(\d+)', prepare.read('/proc/meminfo'))[1])
    return 4 * 2 ** 30


def peers(device):
    """flash-linear-attention's forms of some rules, where it is installed: name -> (kind, function)"""
    gpu = device.type == 'cuda'
    table = {'fla sum': ('sum', True, 'linear_attn', 'chunk_linear_attn', 'naive_chunk_linear_attn'),
             'fla delta': ('delta', gpu, 'delta_rule', 'chunk_delta_rule', 'delta_rule_chunkwise'),
             'fla kda': ('kda', True, 'kda', 'chunk_kda', 'naive_chunk_kda')}
    found = {}
    for name, (kind, time_first, module, kernel, naive) in table.items():
        try:
            module = importlib.import_module(f'fla.ops.{module}' + ('' if gpu else '.naive'))
            f = getattr(module, kernel if gpu else naive)
        except (ImportError, AttributeError) as e:
            print(f'{name} is left out ({e})', file=sys.stderr)
            continue

        def call(q, k, v, write=None, erase=None, log_f=None, f=f, time_first=time_first):
            xs = [x for x in (q, k, v, log_f, write) if x is not None]
            o = f(*(x.transpose(1, 2) for x in xs)) if time_first else f(*xs)       # theirs are (B, T, H, d)
            o = o[0] if isinstance(o, tuple) else o
            return o.transpose(1, 2) if time_first else o
        found[name] = kind, call
    return found


def train(args, device, dtype):
    """A layer's recurrence over T, forward and forward + backward, as ratios to attention in the same run."""
    rows, Ts = [], lengths(args, [256, 1024, 4096, 16384] if args.full else [256, 1024, 4096])
    kinds = 'sum', 'sum / n', 'decay', 'delta', 'gated_delta', 'kda', 'two-sided delta'
    cases = {'attention': ('softmax', softmax)}
    cases |= {kind: (kind, kernels.chunked) for kind in kinds}
    cases |= {f'{kind}, plain torch': (kind, fastweight.chunked) for kind in ('sum', 'delta')}
    cases |= peers(device)
    peak, slow = ceiling(device, dtype), set()
    for T in Ts:
        runs = {}
        for name, (kind, f) in cases.items():
            a = inputs(kind, args, T, device, dtype, 4)
            given = {n: x.detach() if torch.is_tensor(x) else x for n, x in a.items()}
            wanted = [x for n, x in a.items() if n not in ('erase', 'normalise')]
            cotangent = torch.randn_like(a['v'])

            def back(f=f, a=a, wanted=wanted, cotangent=cotangent):
                o = f(**a)
                torch.autograd.grad(o[0] if isinstance(o, tuple) else o, wanted, cotangent)
            try:
                if name in slow and name != 'attention':
                    raise TimeoutError('a shorter one took over a second')
                back()
            except Exception as e:      # a peer may refuse a length, or run out of memory
                print(f'{name} at T = {T} is left out: {type(e).__name__} {str(e)[:100]}', file=sys.stderr)
                continue
            runs[name] = lambda f=f, given=given: f(**given), back, lambda f=f, a=a: f(**a)
        least = 1.0 if args.full else 0.3
        forward, both = (seconds([r[i] for r in runs.values()], device, least) for i in (0, 1))
        for (name, (_, back, kept)), t, t_both in zip(runs.items(), forward, both):
            with FlopCounterMode(display=False) as count:
                back() if device.type == 'cpu' else None
            flops = count.get_total_flops()
            rows.append({'form': name, 'T': T, 'forward ms': 1e3 * t, 'f+b ms': 1e3 * t_both,
                         'of attention': t_both / both[0], 'kept MB': kept_bytes(kept) / 2 ** 20,
                         'of ceiling': flops / t_both / peak if flops else None})
            if t_both > 1:
                slow.add(name)

    draw = panel(f'one layer, {args.heads or 4} heads of {args.head_dim}, {device.type}', 'T', 'f+b ms',
                 'sequence length', 'forward + backward, ms', lambda r: 'plain' not in r['form'])
    note = (f'{peak / 1e9:.0f} GFLOP/s in one large product; "of ceiling" counts the products a form '
            'really does; "kept" is what it keeps for the backward')
    report(args, 'train', rows, note, draw, ceiling_flops=peak,
           ms={f'{r["form"]} {r["T"]}': round(r['f+b ms'], 3) for r in rows})


# ---- suite decode: what the next token costs ---------------------------------------------------------------
def crossing(rows, key, base):
    """Where `base` becomes dearer than each other form: T, interpolated on logarithmic scales."""
    of, found = {}, {}
    for r in rows:
        of.setdefault(r['form'], []).append((math.log(r['T']), math.log(r[key])))
    for name in of.keys() - {base}:
        gap = [(t, b - a) for (t, b), (_, a) in zip(of.get(base, []), of[name])]
        if not gap or gap[-1][1] < 0:
            found[name] = None
        elif gap[0][1] >= 0:
            found[name] = min(r['T'] for r in rows)
        else:
            found[name] = next(math.exp(t + (t_2 - t) * -g / (g_2 - g))
                               for (t, g), (t_2, g_2) in zip(gap, gap[1:]) if g_2 >= 0)
    return found


@torch.inference_mode()
def decode(args, device, dtype):
    """The next token after T tokens. Random weights; a cache's contents do not change its time, so it is one
    token's repeated T times, while fast weights have really read T tokens. Mao 2022 figure 1."""
    rows, Ts, left_out = [], lengths(args, [128, 1024, 8192, 65536]), []
    sizes = {'': {}} | ({', GPT-2 size': dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257)}
                        if args.full else {})

    def add(level, form, cases):
        """cases: T, what runs, its state; they take turns."""
        for (T, _, state), time in zip(cases, seconds([run for _, run, _ in cases], device, 0.3, 30)):
            rows.append({'level': level, 'form': form, 'T': T, 'us a token': 1e6 * time,
                         'state bytes': state_bytes(state)})
    def fits(what, T, need):
        if not (room := need <= free_bytes(device)):
            left_out.append(f'{what} after {T:,} ({need / 1e9:.1f} GB)')
        return room
    for rule in 'softmax', 'sum', 'delta', 'decay':
        many, one = (inputs(rule, args, n, device, dtype) for n in (1024, 1))
        cases, S, read = [], None, 0
        for T in Ts:
            if rule == 'softmax':
                if not fits('softmax layer', T, 2 * T * one['k'].nbytes):
                    continue
                k, v = (one[n].repeat(1, 1, T, 1) for n in 'kv')
                run = functools.partial(F.scaled_dot_product_attention, one['q'], k, v)
                cases.append((T, run, [dict(k=k, v=v)]))
                continue
            while read < T:
                n = min(1024, T - read)
                S, read = kernels.chunked(**{m: x[:, :, :n] for m, x in many.items()}, S=S)[1], read + n
            cases.append((T, functools.partial(kernels.step, **one, S=S), [dict(S=S)]))
        add('layer', rule, cases)
    for name, size in sizes.items():
        for rule in 'softmax', 'sum', 'delta', 'decay':
            model = GPT(Config(rule=rule, **size)).to(device, dtype).eval()
            tokens, state, read = torch.randint(256, (1, max(Ts)), device=device), None, 0
            token, cases = tokens[:, :1], []
            for T in Ts:
                if rule == 'softmax':
                    state = model.read(tokens[:, :1])
                    if not fits(f'softmax model{name}', T, 2 * T * state_bytes(state)):     # a step copies it
                        continue
                    for s in state:
                        s.update(S=s['S'].repeat(1, 1, 1, T, 1), t=s['t'] * T)
                else:
                    state, read = model.read(tokens[:, read:T], state), T
                step = (captured if device.type == 'cpu' else graphed)(model, token, state)
                cases.append((T, functools.partial(step, token, state), state))
            add('model' + name, rule, cases)
    cross = {level: crossing([r for r in rows if r['level'] == level], 'us a token', 'softmax')
             for level in dict.fromkeys(r['level'] for r in rows)}

    of_layer = lambda r: r['level'] == 'layer'
    say = lambda x: 'never' if x is None else f'{"<= " if x <= min(Ts) else ""}{x:,.0f}'
    text = '; '.join(f'{level}: ' + ', '.join(f'{n} {say(x)}' for n, x in c.items())
                     for level, c in cross.items())
    note = f'softmax becomes the slower one after so many tokens: {text}'
    note += f'; left out on this machine: {", ".join(left_out)}' if left_out else ''
    report(args, 'decode', rows, note,
           panel(f'one layer, {args.heads or 12} heads of {args.head_dim}', 'T', 'us a token',
                 'tokens so far', 'microseconds a token', of_layer),
           panel('what it keeps', 'T', 'state bytes', 'tokens so far', 'bytes', of_layer), crossing=cross)


# ---- suites cache, kept, batch: transformers as multi-state RNNs. Oren 2024 --------------------------------
PAPER_ROWS = {      # table 3: perplexity of LLaMA-2-7B on PG-19 at 1/64, 1/32, .. 1 of 4,096 rows
    'window': (4812.27, 4025.01, 3275.58, 2184.62, 1001.29, 240.17, 7.16),
    'sink': (10.28, 8.98, 8.19, 7.73, 7.46, 7.30, 7.16), 'h2o': (10.22, 8.97, 8.21, 7.75, 7.49, 7.32, 7.16),
    'tova': (9.53, 8.32, 7.71, 7.41, 7.25, 7.17, 7.16),
    'tova-head': (11.13, 9.55, 8.69, 7.90, 7.52, 7.27, 7.16)}


def chunks(args, device, count):
    """The checkpoint, its tokenizer, `count` pieces of validation text as long as a training row, and text to
    train on."""
    args.init = args.init or convert.a_teacher(make=False)
    model, meta = pretrained(args.init, device=device)
    model.eval()
    T = model.config.block_size
    text, val, *_ = prepare.load_like(args.init, meta, args.data, T)
    begin = torch.linspace(0, len(val) - T - 1, count).long().tolist()
    x = torch.stack([torch.from_numpy(val[i:i + T].astype('int64')) for i in begin]).to(device)
    return model, meta['data'], x, text


@torch.inference_mode()
def cache(args, device, dtype):
    """Perplexity of a softmax model whose layers keep few rows, without training. Oren 2024 table 3."""
    teacher, _, x, _ = chunks(args, device, 64 if args.full else 16)
    T, rows, full = x.shape[1], [], None
    sizes = lengths(args, [T // n for n in ((64, 32, 16, 8, 4, 2, 1) if args.full else (32, 16, 8, 4, 1))])

    def row(form, size, **changes):
        model = swapped(teacher, args.init, **changes).to(device).eval()
        logits, state = model(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten()).item()
        paper = dict(zip((T // n for n in (64, 32, 16, 8, 4, 2, 1)), PAPER_ROWS.get(form, ()))).get(size)
        rows.append({'form': form, 'rows': size, 'perplexity': math.exp(loss),
                     'of full': math.exp(loss) / (full or math.exp(loss)),
                     'paper, of its full': paper and paper / 7.16,
                     'state bytes': state_bytes(state) // len(x)})
        return model
    row('full', T, rule='full')
    full = rows[0]['perplexity']
    for size, form in itertools.product(sizes, ('random', 'window', 'sink', 'h2o', 'tova-head', 'tova')):
        row(form, size, rule=form, cache=size, sinks=min(4, size - 1))
    if args.overflow:
        flags = dict(overflow=args.overflow)
        m = row(args.overflow + ' alone', 0, rule='window', cache=0, **flags).blocks[0].mixer
        K, V, z = m.memory.overflow.phi.feature_dim, m.head_dim, m.memory.overflow.rule.z
        worth = -(-K * (V + (V if z else 1)) // (2 * V + 3))    # rows of equal bytes
        for size, form in itertools.product(sizes, ('window', 'tova')):
            if size > worth:
                row(f'{form} + {args.overflow}', size, rule=form, cache=size - worth, **flags)

    def draw(axes, rows):
        drawn = [r for r in rows if r['rows'] and r['form'] != 'full']
        lines(axes, drawn, 'rows', 'perplexity', 'linear')
        axes.axhline(full, color='grey', linewidth=1)
        axes.set(xlabel='rows kept', ylabel='perplexity', title=f'context {T}, no training')
    note = f'{len(x)} pieces of {T} tokens; "paper": LLaMA-2-7B on PG-19, at the same share of 4,096 rows'
    report(args, 'cache', rows, note, draw, tokens=x.numel(),
           of_full={f'{r["form"]} {r["rows"]}': round(r['of full'], 4) for r in rows})


KINDS = {'newline': '\n', 'punctuation': string.punctuation, 'capital': string.ascii_uppercase,
         'digit': string.digits}


@torch.inference_mode()
def kept(args, device, dtype):
    """What TOVA keeps: how recent, the first token, and how long by kind of token. Oren 2024 section 5."""
    teacher, data, x, _ = chunks(args, device, 16 if args.full else 4)
    (B, T), rows = x.shape, []
    size = one_length(args, T // 8)
    if 2 * size >= T:
        raise ValueError(f'--lengths={size}: rows must be fewer than half of the {T} tokens of a piece')
    model, state = swapped(teacher, args.init, rule='tova', cache=size).eval(), None
    layers = [i for i, b in enumerate(model.blocks) if b.mixer.memory.rule.keeps == 'tova']
    lived = torch.zeros(len(layers), B, T, device=device)       # steps a token stayed
    seen = torch.zeros(len(layers), T, T)                       # of the first piece, for the picture
    recent = first = 0
    for t in range(T):
        state = model(x[:, t:t + 1], state)[1]
        for n, i in enumerate(layers):
            pos = state[i]['S']['pos'][:, 0]                    # the same for all heads
            lived[n].scatter_add_(1, pos.clamp(min=0), (pos >= 0).float())
            seen[n, t, pos[0][pos[0] >= 0].cpu()] = 1
            if t >= 2 * size:
                recent += (pos > t - size).float().mean().item() / (len(layers) * (T - 2 * size))
                first += (pos == 0).any(1).float().mean().item() / (len(layers) * (T - 2 * size))
    texts = [[prepare.decode([t], data).strip(' ')[:1] for t in piece] for piece in x.tolist()]
    kinds = [[next((k for k, chars in KINDS.items() if c and c in chars), 'rest') for c in p] for p in texts]
    for kind in ('all', *KINDS, 'rest'):
        here = torch.tensor([[kind in (k, 'all') for k in p] for p in kinds], device=device)
        here[:, 0] = False                                      # the first token is a case of its own
        here[:, T - size:] = False                              # these had no time to show
        if here.any():
            rows.append({'kind': kind, 'share of text': here.float().mean().item() * T / (T - size - 1),
                         'steps kept': lived[:, here].mean().item(),
                         'longest': int(lived[:, here].max().item())})

    def draw(axes, rows):
        axes.imshow(seen[len(layers) // 2].numpy(), cmap='Greys', interpolation='nearest', aspect='auto')
        layer = layers[len(layers) // 2] + 1
        axes.set(xlabel='position of the token', ylabel='step', title=f'rows kept in layer {layer}')

    def bars(axes, rows):
        axes.bar([r['kind'] for r in rows], [r['steps kept'] for r in rows], color=COLOURS[4])
        axes.set(ylabel='mean steps kept', title=f'{size} rows of {T}')
        axes.tick_params(axis='x', labelsize=9)
    note = (f'{100 * recent:.0f} % of the rows are among the last {size} tokens (paper 73-76), the first '
            f'token is kept in {100 * first:.0f} % of the steps (paper: practically all)')
    report(args, 'kept', rows, note, draw, bars, recent=recent, first=first)


@torch.inference_mode()
def batch(args, device, dtype):
    """The largest batch within a budget for states, and its throughput, after T tokens. Oren table 1."""
    T, rows, base = one_length(args, 4096), [], None
    paper = {1: 1, 2: 1.7, 4: 3.1, 8: 4.8, 16: 8.5}
    if T < max(paper):
        raise ValueError(f'--lengths={T}: 1/{max(paper)} of it is no row; take {max(paper)} or more')
    tokens = torch.randint(256, (1, 1), device=device)
    for share in paper:
        model = GPT(Config(rule='tova', cache=T // share)).to(device, dtype).eval()
        state = model.read(tokens)
        size = state_bytes(state)
        n = args.budget * 2 ** 20 // size
        if not n:
            raise ValueError(f'--budget={args.budget}: one text of {T:,} rows needs {size / 2 ** 20:.1f} MB')
        state = unpack({k: x if k.endswith('.t') else x.repeat(n, *[1] * (x.dim() - 1))
                        for k, x in pack(state).items()})
        for s in state:                     # full, as after T tokens
            pos = s['S']['pos']
            s['S']['pos'], s['t'] = torch.arange(T // share, device=device).expand_as(pos), s['t'] * T
        time, = seconds([lambda: model(tokens.repeat(n, 1), state)], device, 1.0)
        base = base or n / time
        rows.append({'form': 'tova', 'rows': T // share, 'bytes a sequence': size, 'batch': n,
                     'tokens/s': n / time, 'of full': n / time / base, 'paper': paper[share]})

    draw = panel(f'{args.budget} MB of states, context {T:,}', 'rows', 'tokens/s', 'rows kept', 'tokens/s')
    note = f'TOVA, all with {args.budget} MB of states; full is {T:,} rows; "paper": on a V100'
    report(args, 'batch', rows, note, draw, of_full={r['rows']: round(r['of full'], 2) for r in rows})


@script
def main(argv):
    name = argv.pop(0) if argv and not argv[0].startswith('-') else 'decode'
    if name not in SUITES:
        raise ValueError(f'{name}: no such suite, --help has a line on each; choose from {", ".join(SUITES)}')
    given = parse(argv, __doc__, Args)[0]
    for flag_ in given:
        if flag_ not in (takes := f'{ALWAYS} {SUITES[name]}').split():
            raise ValueError(f'--{flag_} means nothing for {name}: it takes {takes}')
    args = Args(**given)
    if args.quick and args.full:
        raise ValueError('--quick and --full contradict each other')
    args.seeds = args.seeds or (3 if args.full else 1)
    device = pick_device(args.device)
    auto = torch.bfloat16 if device.type == 'cuda' else torch.float32
    dtype = auto if args.dtype == 'auto' else getattr(torch, args.dtype)

    def run(suite):
        args.began = time.perf_counter()
        torch.manual_seed(args.seed)
        globals()[suite](args, device, dtype)
    if name != 'all':
        return run(name)
    began, left_out = time.perf_counter(), {}
    for suite in [s for s in SUITES if s != 'all']:
        print(f'--- {suite} ---', flush=True)
        try:
            run(suite)
        except (ValueError, OSError, RuntimeError) as e:
            left_out[suite] = str(e)
            print(f'left out: {e}', flush=True)
    print(json.dumps(dict(suite='all', left_out=left_out, minutes=(time.perf_counter() - began) / 60)))


if __name__ == '__main__':
    sys.exit(main())
