"""Measure, on this machine. A suite prints a table, writes out/bench/SUITE.csv and .png; last, a JSON line.

    python bench.py train              a layer forward and backward over T: our forms, and attention
    python bench.py train --full       more lengths, more repeats; --heads=12 --head_dim=64 are GPT-2's
"""
import csv
import importlib
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastweight
import kernels
from fastweight import l2
from model import flag, parse, pick_device, script


@dataclass
class Args:
    full: bool = flag(False, 'all lengths and more repeats, instead of two minutes')
    out: str = flag('out/bench', 'folder for tables and pictures')
    device: str = flag('auto', 'auto, cpu, cuda')
    dtype: str = flag('auto', 'of q, k, v; auto: bfloat16 on a GPU', ['auto', 'float32', 'bfloat16'])
    lengths: str = flag('', 'sequence lengths, if not those of the suite: 256,1024')
    heads: int = flag(4, 'heads', low=1)
    head_dim: int = flag(64, 'features of q, k and v', low=1)
    batch: int = flag(1, 'rows', low=1)
    seed: int = flag(0, 'of the inputs', low=0)


# ---- measuring ---------------------------------------------------------------------------------------------
def seconds(run, device, least=0.3, repeats=5):
    """Median time of run(): at least `repeats` calls and `least` seconds of them, after a warm-up."""
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    for _ in range(2):
        run()
    wait()
    times, begin = [], time.perf_counter()
    while len(times) < repeats or time.perf_counter() - begin < least:
        t = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - t)
    return statistics.median(times)


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
    try:
        return [int(T) for T in args.lengths.split(',')] if args.lengths else default
    except ValueError:
        raise ValueError(f'--lengths={args.lengths}: expected numbers with commas, as 256,1024') from None


def ceiling(device, dtype):
    """FLOP a second of a large matrix product here."""
    n = 8192 if device.type == 'cuda' else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / seconds(lambda: a @ a, device)


def report(args, name, rows, note, draw, **summary):
    """The table on stdout and as CSV, the picture, one JSON line."""
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, name)
    with open(path + '.csv', 'w', newline='') as f:
        table = csv.DictWriter(f, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    show = lambda x: '-' if x is None else f'{x:.3g}' if isinstance(x, float) else str(x)
    cells = [list(rows[0])] + [[show(x) for x in r.values()] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    for c in cells:
        print('  '.join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(c, widths))))
    print(note)
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 12, 'axes.spines.top': False, 'axes.spines.right': False})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    draw(axes, rows)
    figure.savefig(path + '.png', dpi=110, bbox_inches='tight')
    print(json.dumps(dict(suite=name, torch=torch.__version__, threads=torch.get_num_threads(), **summary)))


def lines(axes, rows, x, y, label):
    """One line a label, on logarithmic axes, in colours that colour-blind readers can tell."""
    colours = ['#000000', '#E69F00', '#56B4E9', '#009E73', '#F0E442', '#0072B2', '#D55E00', '#CC79A7']
    for i, name in enumerate(dict.fromkeys(r[label] for r in rows)):
        points = [(r[x], r[y]) for r in rows if r[label] == name and r[y]]
        if points:
            style = dict(marker='o', color=colours[i % 8], linestyle='-' if i < 8 else '--')
            axes.plot(*zip(*points), label=name, **style)
    axes.set(xscale='log', yscale='log')
    ticks = sorted({r[x] for r in rows})
    axes.set_xticks(ticks, [f'{t:,}' for t in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=9, frameon=False)


# ---- suite train: what a layer costs -----------------------------------------------------------------------
def inputs(kind, args, T, device, dtype):
    """Gates as the named rule has them, over random q, k, v (B, H, T, head_dim)."""
    B, H, d = args.batch, args.heads, args.head_dim
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
    cases |= {f'{kind}': (kind, kernels.chunked) for kind in kinds}
    cases |= {f'{kind}, plain torch': (kind, fastweight.chunked) for kind in ('sum', 'delta')}
    cases |= peers(device)
    peak = ceiling(device, dtype)
    for T in Ts:
        base = None
        for name, (kind, f) in cases.items():
            a = inputs(kind, args, T, device, dtype)
            wanted = [x for n, x in a.items() if torch.is_tensor(x) and n != 'erase']
            given = {n: x.detach() if torch.is_tensor(x) else x for n, x in a.items()}
            cotangent = torch.randn_like(a['v'])

            def back():
                o = f(**a)
                o = o[0] if isinstance(o, tuple) else o
                torch.autograd.grad(o, wanted, cotangent)
            try:
                forward = seconds(lambda: f(**given), device, 0.5 if args.full else 0.2)
                both = seconds(back, device, 1.0 if args.full else 0.3)
                kept = kept_bytes(lambda: f(**a))
            except Exception as e:      # a peer may refuse a length, or run out of memory
                print(f'{name} at T = {T} is left out: {type(e).__name__} {str(e)[:100]}', file=sys.stderr)
                continue
            with FlopCounterMode(display=False) as count:
                back() if device.type == 'cpu' else None
            base, flops = base or both, count.get_total_flops()
            rows.append({'form': name, 'T': T, 'forward ms': 1e3 * forward, 'f+b ms': 1e3 * both,
                         'of attention': both / base, 'kept MB': kept / 2 ** 20,
                         'of ceiling': flops / both / peak if flops else None})

    def draw(axes, rows):
        lines(axes, [r for r in rows if 'plain' not in r['form']], 'T', 'f+b ms', 'form')
        axes.set(xlabel='sequence length', ylabel='forward + backward, ms',
                 title=f'one layer, {args.heads} heads of {args.head_dim}, {device.type}')
    note = (f'{peak / 1e9:.0f} GFLOP/s in one large product; "of ceiling" counts the products a form '
            'really does; "kept" is what it keeps for the backward')
    report(args, 'train', rows, note, draw, ceiling_flops=peak,
           ms={f'{r["form"]} {r["T"]}': round(r['f+b ms'], 3) for r in rows})


SUITES = dict(train=train)


@script
def main(argv):
    name = argv.pop(0) if argv and not argv[0].startswith('-') else 'train'
    if name not in SUITES:
        raise ValueError(f'{name}: no such suite; choose from {", ".join(SUITES)}')
    args = Args(**parse(argv, __doc__, Args)[0])
    device = pick_device(args.device)
    auto = torch.bfloat16 if device.type == 'cuda' else torch.float32
    torch.manual_seed(args.seed)
    SUITES[name](args, device, auto if args.dtype == 'auto' else getattr(torch, args.dtype))


if __name__ == '__main__':
    sys.exit(main())
