"""Measure, on this machine. A suite prints a table, writes out/bench/SUITE.csv and .png; last, a JSON line.

    python bench.py decode             the next token after 128 .. 65,536: time and state, layer and model
    python bench.py cache              perplexity of a softmax model in out/ as an RNN that keeps few rows
    python bench.py kept               which tokens TOVA keeps in it, and for how long
    python bench.py batch              throughput at a memory budget against the rows kept
    python bench.py train              a layer forward and backward over T: our forms, and attention
    python bench.py train --full       more lengths, more repeats; --heads=12 are GPT-2's
"""
import csv
import importlib
import itertools
import json
import math
import os
import statistics
import string
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastweight
import kernels
from convert import pretrained
from data import prepare
from fastweight import RULES, l2
from model import (GPT, Config, captured, flag, graphed, pack, parse, pick_device, script, state_bytes,
                   swapped, table, unpack)


@dataclass
class Args:
    full: bool = flag(False, 'all lengths and more repeats, instead of two minutes')
    out: str = flag('out/bench', 'folder for tables and pictures')
    init: str = flag('out/ckpt.safetensors', 'cache, kept: a checkpoint with softmax layers')
    data: str = flag('', 'cache, kept: a data set or text, if not the one the checkpoint was trained on')
    overflow: str = flag('', 'cache: also with fast weights for what goes, at equal bytes: sum:hedgehog')
    budget: int = flag(71, 'batch: MB for all states', low=1)
    device: str = flag('auto', 'auto, cpu, cuda')
    dtype: str = flag('auto', 'of q, k, v; auto: bfloat16 on a GPU', ['auto', 'float32', 'bfloat16'])
    lengths: str = flag('', 'sequence lengths, if not those of the suite: 256,1024')
    heads: int = flag(0, 'heads, if not those of the suite: 12 as in GPT-2, train: 4', low=0)
    head_dim: int = flag(64, 'features of q, k and v', low=1)
    batch: int = flag(1, 'rows', low=1)
    seed: int = flag(0, 'of the inputs', low=0)


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
    return [int(T) for T in given]


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
    print(json.dumps(dict(suite=name, torch=torch.__version__, threads=torch.get_num_threads(), **summary)))


def lines(axes, rows, x, y, label, yscale='log'):
    """One line a label, on logarithmic axes, in colours that colour-blind readers can tell."""
    colours = ['#000000', '#E69F00', '#56B4E9', '#009E73', '#F0E442', '#0072B2', '#D55E00', '#CC79A7']
    for i, name in enumerate(dict.fromkeys(r[label] for r in rows)):
        points = [(r[x], r[y]) for r in rows if r[label] == name and r[y]]
        if points:
            style = dict(marker='o', color=colours[i % 8], linestyle='-' if i < 8 else '--')
            axes.plot(*zip(*points), label=name, **style)
    axes.set(xscale='log', yscale=yscale)
    ticks = sorted({r[x] for r in rows})
    axes.set_xticks(ticks, [f'{t:,}' for t in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=9, frameon=False)


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
                if name in slow:
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

    def draw(axes, rows):
        lines(axes, [r for r in rows if 'plain' not in r['form']], 'T', 'f+b ms', 'form')
        axes.set(xlabel='sequence length', ylabel='forward + backward, ms',
                 title=f'one layer, {args.heads or 4} heads of {args.head_dim}, {device.type}')
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
        gap = [(t, b - a) for (t, b), (_, a) in zip(of[base], of[name])]
        found[name] = None if gap[-1][1] < 0 else min(r['T'] for r in rows) if gap[0][1] >= 0 else next(
            math.exp(t + (t_2 - t) * -g / (g_2 - g)) for (t, g), (t_2, g_2) in zip(gap, gap[1:]) if g_2 >= 0)
    return found


@torch.inference_mode()
def decode(args, device, dtype):
    """The next token after T tokens. Random weights; a cache's contents do not change its time, so it is one
    token's repeated T times, while fast weights have really read T tokens. Mao 2022 figure 1."""
    rows, Ts = [], lengths(args, [128, 1024, 8192, 65536])
    sizes = {'': {}} | ({', GPT-2 size': dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50257)}
                        if args.full else {})

    def row(level, form, T, run, state):
        time, = seconds([run], device, 0.3, 30)
        rows.append({'level': level, 'form': form, 'T': T, 'us a token': 1e6 * time,
                     'state bytes': state_bytes(state)})
    for rule in 'softmax', 'sum', 'delta', 'decay':
        many, one = (inputs(rule, args, n, device, dtype) for n in (1024, 1))
        S, read = None, 0
        for T in Ts:
            if rule == 'softmax':
                k, v = (one[n].repeat(1, 1, T, 1) for n in 'kv')
                attend = lambda: F.scaled_dot_product_attention(one['q'], k, v)
                row('layer', rule, T, attend, [dict(k=k, v=v)])
                continue
            while read < T:
                n = min(1024, T - read)
                S, read = kernels.chunked(**{m: x[:, :, :n] for m, x in many.items()}, S=S)[1], read + n
            row('layer', rule, T, lambda: kernels.step(**one, S=S), [dict(S=S)])
    for name, size in sizes.items():
        for rule in 'softmax', 'sum', 'delta', 'decay':
            model = GPT(Config(rule=rule, **size)).to(device, dtype).eval()
            tokens, state, read = torch.randint(256, (1, max(Ts)), device=device), None, 0
            token = tokens[:, :1]
            for T in Ts:
                if rule == 'softmax':
                    state = model.read(tokens[:, :1])
                    for s in state:
                        s.update(S=s['S'].repeat(1, 1, 1, T, 1), t=s['t'] * T)
                else:
                    state, read = model.read(tokens[:, read:T], state), T
                step = (captured if device.type == 'cpu' else graphed)(model, token, state)
                row('model' + name, rule, T, lambda: step(token, state), state)
    cross = {level: crossing([r for r in rows if r['level'] == level], 'us a token', 'softmax')
             for level in dict.fromkeys(r['level'] for r in rows)}

    def panel(key, level, title):
        def draw(axes, rows):
            lines(axes, [r for r in rows if r['level'] == level], 'T', key, 'form')
            axes.set(xlabel='tokens so far', ylabel=key, title=title)
        return draw
    say = lambda x: 'never' if x is None else f'{"<= " if x <= min(Ts) else ""}{x:,.0f}'
    text = '; '.join(f'{level}: ' + ', '.join(f'{n} {say(x)}' for n, x in c.items())
                     for level, c in cross.items())
    report(args, 'decode', rows, f'softmax becomes the slower one after so many tokens: {text}',
           panel('us a token', 'layer', f'one layer, {args.heads or 12} heads of {args.head_dim}'),
           panel('state bytes', 'layer', 'what it keeps'), crossing=cross)


# ---- suites cache, kept, batch: transformers as multi-state RNNs. Oren 2024 --------------------------------
PAPER_ROWS = {      # table 3: perplexity of LLaMA-2-7B on PG-19 at 1/64, 1/32, .. 1 of 4,096 rows
    'window': (4812.27, 4025.01, 3275.58, 2184.62, 1001.29, 240.17, 7.16),
    'sink': (10.28, 8.98, 8.19, 7.73, 7.46, 7.30, 7.16), 'h2o': (10.22, 8.97, 8.21, 7.75, 7.49, 7.32, 7.16),
    'tova': (9.53, 8.32, 7.71, 7.41, 7.25, 7.17, 7.16),
    'tova-head': (11.13, 9.55, 8.69, 7.90, 7.52, 7.27, 7.16)}


def chunks(args, device, count):
    """The checkpoint, its tokenizer, and `count` pieces of validation text as long as a training row."""
    model, meta = pretrained(args.init, device=device)
    T = model.config.block_size
    val = prepare.load_like(args.init, meta, args.data, T)[1]
    begin = torch.linspace(0, len(val) - T - 1, count).long().tolist()
    x = torch.stack([torch.from_numpy(val[i:i + T].astype('int64')) for i in begin]).to(device)
    return model, meta['data'], x


@torch.inference_mode()
def cache(args, device, dtype):
    """Perplexity of a softmax model whose layers keep few rows, without training. Oren 2024 table 3."""
    teacher, _, x = chunks(args, device, 64 if args.full else 16)
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
        lines(axes, drawn, 'rows', 'perplexity', 'form', 'linear')
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
    teacher, data, x = chunks(args, device, 16 if args.full else 4)
    (B, T), rows = x.shape, []
    size, = lengths(args, [T // 8])[:1]
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
        axes.bar([r['kind'] for r in rows], [r['steps kept'] for r in rows], color='#0072B2')
        axes.set(ylabel='mean steps kept', title=f'{size} rows of {T}')
        axes.tick_params(axis='x', labelsize=9)
    note = (f'{100 * recent:.0f} % of the rows are among the last {size} tokens (paper 73-76), the first '
            f'token is kept in {100 * first:.0f} % of the steps (paper: practically all)')
    report(args, 'kept', rows, note, draw, bars, recent=recent, first=first)


@torch.inference_mode()
def batch(args, device, dtype):
    """The largest batch within a budget for states, and its throughput, after T tokens. Oren table 1."""
    T, = lengths(args, [4096])[:1]
    rows, base = [], None
    paper = {1: 1, 2: 1.7, 4: 3.1, 8: 4.8, 16: 8.5}
    tokens = torch.randint(256, (1, 1), device=device)
    for share in paper:
        model = GPT(Config(rule='tova', cache=T // share)).to(device, dtype).eval()
        state = model.read(tokens)
        size = state_bytes(state)
        n = max(1, args.budget * 2 ** 20 // size)
        state = unpack({k: x if k.endswith('.t') else x.repeat(n, *[1] * (x.dim() - 1))
                        for k, x in pack(state).items()})
        for s in state:                     # full, as after T tokens
            pos = s['S']['pos']
            s['S']['pos'], s['t'] = torch.arange(T // share, device=device).expand_as(pos), s['t'] * T
        time, = seconds([lambda: model(tokens.repeat(n, 1), state)], device, 1.0)
        base = base or n / time
        rows.append({'form': 'tova', 'rows': T // share, 'bytes a sequence': size, 'batch': n,
                     'tokens/s': n / time, 'of full': n / time / base, 'paper': paper[share]})

    def draw(axes, rows):
        lines(axes, rows, 'rows', 'tokens/s', 'form')
        axes.set(xlabel='rows kept', ylabel='tokens/s', title=f'{args.budget} MB of states, context {T:,}')
    note = f'TOVA, all with {args.budget} MB of states; full is {T:,} rows; "paper": on a V100'
    report(args, 'batch', rows, note, draw, of_full={r['rows']: round(r['of full'], 2) for r in rows})


SUITES = dict(decode=decode, train=train, cache=cache, kept=kept, batch=batch)


@script
def main(argv):
    name = argv.pop(0) if argv and not argv[0].startswith('-') else 'decode'
    if name not in SUITES:
        raise ValueError(f'{name}: no such suite; choose from {", ".join(SUITES)}')
    args = Args(**parse(argv, __doc__, Args)[0])
    device = pick_device(args.device)
    auto = torch.bfloat16 if device.type == 'cuda' else torch.float32
    torch.manual_seed(args.seed)
    SUITES[name](args, device, auto if args.dtype == 'auto' else getattr(torch, args.dtype))


if __name__ == '__main__':
    sys.exit(main())
