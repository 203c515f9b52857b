"""Run measurements on this machine. Without a suite: list them all, then run `decode`. A suite prints a table
and writes out/bench/SUITE.csv and, if there is something to plot, SUITE.png. Most suites take a few minutes;
--full takes hours. The suites of a paper, beside its figures, are in papers/, those of time and memory here.

Finished runs are kept in --out, so a stopped suite continues where it was.
"""
import dataclasses
import itertools
import math
import os
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from functools import lru_cache, partial

from common.errors import script      # before torch: common/__init__.py
import torch
import torch.nn.functional as F

import caches
import fastweight
import kernels
from common.flags import flag, hint, parse
from common.machine import pick_device, pick_dtype
from common.weights import state_bytes
from fastweight import l2
from common.weights import chosen_texts
from model import GPT, Config, sample
from papers import beyond, kasai, mao, oren, schlag, zhang
from papers.harness import memory_of
from papers.report import report_suite
from papers.suites import ALWAYS, Panel, Suite, chosen, over

os.environ.setdefault('KINETO_LOG_LEVEL', '99')     # silences torch.profiler; we ask it for memory
MB = 10 ** 6


# ---- measuring ---------------------------------------------------------------------------------------------
def timed(cells, device, least=0.3, repeats=5):
    """cells: (row of a table, function) pairs -> (row, function, median seconds) triples, after a warm-up.
    Each function is called at least `repeats` times and for `least` seconds, but a slow one for at most ten
    times that. They take turns, so that a busy moment of the machine affects them all."""
    def now():
        if device.type != 'cpu':
            torch.accelerator.synchronize(device)               # GPU calls return at once
        return time.perf_counter()

    def is_enough(taken):
        if len(taken) < repeats:
            return sum(taken) > 10 * least
        return sum(taken) > least

    for _, call in cells * 2:
        call()
    times = [[] for _ in cells]
    while not all(map(is_enough, times)):
        for (_, call), taken in zip(cells, times):
            if not is_enough(taken):
                begin = now()
                call()
                taken.append(now() - begin)
    return [(*cell, statistics.median(taken)) for cell, taken in zip(cells, times)]


def peak_bytes(run, device):
    """The peak memory of run(), in bytes, beyond what was in use before."""
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


# ---- what the suites train, decode and layer compute -------------------------------------------------------
OWN_GATES = {           # the gates of a recurrence, besides q, k, v
    'delta': 'write', 'gated_delta': 'write log_f', 'kda': 'write log_f', 'decay': 'log_f log_z',
    'two-sided delta': 'write log_f log_z'}


def random_inputs(kind, args, T):
    """Random q, k, v (B, H, T, head_dim), and OWN_GATES by their names in `recurrent`. Features are not
    negative. A decay has one number per channel; for gated_delta, one per head."""
    draw = torch.Generator(args.device).manual_seed(args.seed)

    def random(*channels):
        return torch.rand(args.batch, args.heads, T, *channels, generator=draw, device=args.device)

    q, k, v = (random(args.head_dim).to(args.dtype) for _ in range(3))
    x = {'q': q, 'k': l2(k), 'v': v}
    for name in OWN_GATES.get(kind, '').split():
        if name == 'write':
            x['write'] = random()
            x['erase'] = x['write']
        elif kind == 'gated_delta':
            x[name] = -0.1 * random(1)
        else:
            x[name] = -0.1 * random(args.head_dim)
    return x


# ---- suites layer, train: the cost of a layer over T -------------------------------------------------------
def a_layer(rule, phi, args, T):
    """-> a function that runs one layer forward, from q, k, v, with its feature map."""
    given = random_inputs(rule, args, T)
    x = torch.randn(args.batch, T, 16, device=args.device, dtype=args.dtype)
    memory = memory_of(rule, 16, args.heads, args.head_dim, phi).to(args.device, args.dtype).eval()

    @torch.inference_mode()
    def forward():
        return memory(x, given['q'], given['k'], given['v'])
    return forward


def a_training_step(kind, form, args, T):
    """-> a function that runs one form of a recurrence forward and backward, with the gates of kind."""
    given = random_inputs(kind, args, T)
    cotangent = torch.randn_like(given['v'])
    wanted = [x.requires_grad_() for name, x in given.items() if name != 'erase']       # which is `write`

    def step():
        return torch.autograd.grad(form(**given)[0], wanted, cotangent)
    return step


def over_lengths(args, suite):
    """Time and memory over T, for attention and every line; a line is (args, T) -> a function. A line that
    fails is reported, and left out from there on."""
    lines = dict(suite.lines)
    for T in args.lengths:
        cells = []
        for form in list(lines):
            try:
                call = lines[form](args, T)
                call()
            except RuntimeError as e:               # memory may end
                del lines[form]
                why = ' '.join(str(e).split())[:160]
                print(f'{form} is left out from T = {T} on: {type(e).__name__}: {why}', file=sys.stderr)
            else:
                cells.append(({'form': form, 'T': T}, call))
        times = timed(cells, args.device, chosen(args, 0.3, 1.0))
        by_form = {row['form']: took for row, _, took in times}
        attention = by_form.get('attention', math.nan)          # which may be left out, too
        for row, call, took in times:
            row |= {'ms': 1e3 * took, 'of attention': took / attention}
            yield {**row, 'MB': peak_bytes(call, args.device) / MB}


# ---- suite decode: what the next token costs ---------------------------------------------------------------
LAYERS = {rule: {'rule': rule} for rule in ('softmax', 'sum', 'delta', 'decay')}        # form: flags
MODELS = {              # t2r:8 has half of elu's features; in GPT-2's size t2r:32 has
    'softmax': {'rule': 'softmax'}, 'elu': {'rule': 'sum', 'phi': 'elu'},
    't2r:8': {'rule': 'sum', 'phi': 't2r:8'}, 't2r:32': {'rule': 'sum', 'phi': 't2r:32'},
    'rfa': {'rule': 'sum', 'phi': 'rfa'}, 'delta': {'rule': 'delta'}, 'decay': {'rule': 'decay'}}


def grown(cached, T):
    """A cache of T tokens: copies of the only one in `cached`."""
    return {name: cached[name].repeat(1, 1, T, 1) for name in ('k', 'v')}


def layer_step(rule, args, T):
    """-> a function for one step of a layer after T tokens, and the bytes of its state. Fast weights have
    really read T tokens or more, 1,024 at a time. A cache holds one token T times."""
    one = random_inputs(rule, args, 1)
    if rule == 'softmax':
        k, v = grown(one, T).values()
        step = partial(F.scaled_dot_product_attention, one['q'], k, v)
        return step, k.nbytes + v.nbytes
    many = random_inputs(rule, args, 1024)
    S = None
    for _ in range(0, T, 1024):
        _, S = kernels.chunked(**many, S=S)
    return partial(kernels.chunked, **one, S=S), S.nbytes


@lru_cache(1)
def random_model(device, dtype, **config):
    """A model with random weights, the same for all lengths. Their steps take turns, so the CPU cache holds
    them."""
    return GPT(Config(**config)).to(device, dtype).eval()


def model_step(rule, args, T, **size):
    """Like `layer_step`, but for a model with random weights."""
    model = random_model(args.device, args.dtype, rule=rule, **size)
    if rule == 'softmax':
        token, state = far_along(model, args.batch, T)
    else:
        tokens = torch.randint(256, (args.batch, T), device=args.device)
        token = tokens[:, -1:]
        state = model.read(tokens)
    return partial(next, greedy_steps(model, token, state)), state_bytes(state)


GPT2 = {'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'vocab_size': 50257}
LEVELS = {'layer': (layer_step, LAYERS), 'model': (model_step, MODELS),
          'model, GPT-2 size': (partial(model_step, **GPT2), MODELS)}               # only with --full


def greedy_steps(model, token, state):
    """Step on from `state`, without end. Every 64 steps it begins again, so a cache hardly grows."""
    while True:
        after = state
        for _ in range(64):
            logits, after = model(token, after)
            yield sample(logits[:, -1], temperature=0)


def far_along(model, batch, T):
    """The last token (B, 1) and the state of a model after T tokens. Values do not change the time, so all
    rows of the batch are equal, and so are all entries of the full cache."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device)
    state = model.read(token)
    state['t'] = state['t'] + T - 1
    for layer in state['layers']:
        cached = layer['mixer']
        if 'pos' in cached:
            places = torch.arange(cached['pos'].shape[-1], device=token.device)
            cached['pos'] = places.expand_as(cached['pos'])
        elif 'k' in cached:
            cached.update(grown(cached, T))
    alike = torch.zeros(batch, dtype=torch.long, device=token.device)
    return token[alike], chosen_texts(state, alike)


@torch.inference_mode()
def next_token(args, suite):
    """The cost of the next token after T tokens, for a layer and a model with random weights, with --batch
    texts in parallel. The contents of a cache do not change its time."""
    for level in list(LEVELS)[:chosen(args, 2, 3)]:
        after, forms = LEVELS[level]
        for form, flags in forms.items():
            cells = []
            for T in args.lengths:
                step, size = after(**flags, args=args, T=T)
                cells.append(({'form': form, 'part': level, 'T': T, 'state bytes': size}, step))
            for row, _, took in timed(cells, args.device, 0.3, 30):         # the lengths take turns
                yield {**row, 'us a token': 1e6 * took}


@torch.inference_mode()
def throughput(args, suite):
    """The largest batch whose states fit a budget, and its throughput after T tokens. Oren 2024, table 1."""
    T, = args.lengths
    paper = suite.paper['tova']
    cells = []
    for form, share in [('softmax', 1)] + [('tova', share) for share in sorted(paper)]:
        model = random_model(args.device, args.dtype, rule=form, cache=T // share)
        size = state_bytes(far_along(model, 1, T)[1])
        n = args.budget * MB // size
        if n == 0:
            raise ValueError(f'--budget={args.budget}: one text of {T:,} tokens needs {size / MB:.1f} MB')
        row = {'form': form, 'cached': T // share, 'batch': n, 'bytes a sequence': size,
               'paper, of full': suite.paper.get(form, {}).get(share)}
        token, state = far_along(model, n, T)
        cells.append((row, partial(next, greedy_steps(model, token, state))))
    times = timed(cells, args.device, 1.0)
    speeds = [row['batch'] / took for row, _, took in times]
    for speed, (row, _, _) in zip(speeds, times):               # full: TOVA with all tokens cached
        yield {**row, 'tokens/s': speed, 'of softmax': speed / speeds[0], 'of full': speed / speeds[1]}


# ---- all suites --------------------------------------------------------------------------------------------
COSTS = {suite.name: suite for suite in [
    Suite(
        'decode', 'time and state of the next token after 128 .. 65,536, for a layer and a model', next_token,
        'lengths heads head_dim batch dtype',
        {'lengths': '128,1024,8192,65536', 'heads': 12}, {'lengths': '128,1024,8192,65536', 'heads': 12},
        panels=(Panel('T', 'us a token', 'one layer, {heads} heads of {head_dim}', 'layer'),
                Panel('T', 'state bytes', 'what it keeps', 'layer'),
                Panel('T', 'us a token', 'a model', 'model')),
        note='of a layer: the step alone, after the feature map; elu, t2r:8, t2r:32, rfa: sum with them',
        source='Mao 2022, figure 1, which is a picture'),
    Suite(
        'layer', 'one forward pass over up to 4,096, with --full 32,768, and its memory', over_lengths,
        'lengths heads head_dim batch dtype',
        {'lengths': '256,1024,4096', 'heads': 12}, {'lengths': '256,1024,4096,16384,32768', 'heads': 12},
        {'attention': partial(a_layer, 'softmax', ''), 'sum elu': partial(a_layer, 'sum', 'elu'),
         'sum hedgehog': partial(a_layer, 'sum', 'hedgehog'), 'delta': partial(a_layer, 'delta', ''),
         'sum taylor': partial(a_layer, 'sum', 'taylor')},
        panels=(Panel('T', 'ms', 'one layer forward, {heads} heads of {head_dim}'),
                Panel('T', 'MB', 'and its memory')),
        source='Zhang 2024, figure 6: nearly 6 times as fast at 32,768, on a GPU, in as little memory'),
    Suite(
        'train', 'a recurrence forward and backward over T: our forms and attention', over_lengths,
        'lengths heads head_dim batch dtype',
        {'lengths': '256,1024,4096', 'heads': 4}, {'lengths': '256,1024,4096,16384', 'heads': 4},
        {'attention': partial(a_training_step, 'softmax', caches.softmax),
         'sum / n': partial(a_training_step, 'sum / n', partial(kernels.chunked, normalise=True)),
         **{rule: partial(a_training_step, rule, kernels.chunked)
            for rule in ('sum', 'decay', 'delta', 'gated_delta', 'kda', 'two-sided delta')},
         **{f'{rule}, plain torch': partial(a_training_step, rule, fastweight.chunked)
            for rule in ('sum', 'delta')}},
        panels=(Panel('T', 'ms', 'forward and backward, {heads} heads of {head_dim}'),),
        source='Schlag 2021, section 6.3: words a second: sum 66,000, delta 63,000, softmax 33,000'),
    Suite(
        'batch', 'throughput at a memory budget, by cached tokens', throughput, 'lengths budget dtype',
        {'lengths': '4096'}, {'lengths': '4096'}, one=True,
        panels=(Panel('cached', 'tokens/s', '{budget} MB of states'),),
        note='all with {budget} MB of states; full: TOVA with all tokens cached',
        source='Oren 2024, table 1: LLaMA-2-7B on a V100 at its largest batch, over all 4,096 cached',
        paper={'tova': over((16, 8, 4, 2, 1), 8.5, 4.8, 3.1, 1.7, 1)})]}

PAPERS = {'time and memory': COSTS, 'Schlag 2021': schlag.SUITES, 'Kasai 2021': kasai.SUITES,
          'Mao 2022': mao.SUITES, 'Oren 2024': oren.SUITES, 'Zhang 2024': zhang.SUITES,
          'beyond the papers': beyond.SUITES}
SUITES = {name: suite for suites in PAPERS.values() for name, suite in suites.items()}


# ---- the command -------------------------------------------------------------------------------------------
OFTEN = 'full init data only steps lengths out'     # first in --help


def of(name):
    """For --help: the suites that take a flag."""
    return ', '.join(suite.name for suite in SUITES.values() if name in suite.flags.split())


@dataclass
class Args:
    full: bool = flag(False, 'all sizes, more steps and more seeds')
    out: str = flag('out/bench', 'folder for tables, pictures and trained models', path=True)
    device: str = flag('auto', 'auto, cpu, cuda')
    threads: int = flag(None, 'CPU threads; if not given, as many as torch takes', low=1, high=1024)
    seed: int = flag(0, 'first seed of inputs and trainings', low=0, high=2 ** 32 - 1)
    seeds: int = flag(0, f'{of("seeds")}: trainings; 0: one, or three with --full', low=0, high=1000)
    steps: int = flag(0, f'{of("steps")}: training steps; 0: the default of the suite', low=0, high=10 ** 9)
    only: str = flag('', f'{of("only")}: only these lines, such as softmax,delta')
    lengths: str = flag('', f'{of("lengths")}: numbers of tokens, associations or widths, such as '
                            '256,1024; default: those of the suite')
    heads: int = flag(0, f'{of("heads")}: heads; default: 12, for train 4', low=0, high=1024)
    head_dim: int = flag(64, f'{of("head_dim")}: features of q, k and v', low=1, high=2 ** 17)
    batch: int = flag(1, f'{of("batch")}: rows per batch', low=1, high=2 ** 20)
    dtype: str = flag('auto', f'{of("dtype")}: number type; auto: bfloat16 on a recent GPU',
                      ['auto', 'float32', 'bfloat16'])
    init: str = flag('', f'{of("init")}: a softmax model, as train.py --rule=softmax makes; '
                     'default: out/ckpt.safetensors; glue and vit train one', path=True)
    data: str = flag('', f'{of("data")}: a set of the suite, or a text; default: by suite', path=True)
    beside: str = flag('', f'{of("beside")}: models to compare with, in the same tokens, separated by '
                           'commas: out/delta/ckpt.safetensors', path=True)
    row: int = flag(0, f'{of("row")}: tokens in a row; 0: as in training, at most 512', low=0, high=2 ** 24)
    budget: int = flag(74, f'{of("budget")}: memory for all states, in MB', low=1, high=2 ** 20)


def numbers(text):
    """--lengths as a sorted list of numbers."""
    if not re.fullmatch('([1-9][0-9]{0,6}(,[1-9][0-9]{0,6})*)?', text):
        raise ValueError(f'--lengths={text}: expected numbers below ten million with commas, as 256,1024')
    return sorted({int(n) for n in re.findall('[0-9]+', text)})


def listed():
    """A line for each suite, by paper."""
    lines = []
    for paper, suites in PAPERS.items():
        lines.append(f'  {paper}')
        lines += [f'    python bench.py {suite.name:10} {suite.about}' for suite in suites.values()]
    return '\n'.join(lines)


def settings(argv):
    """-> the suite, Args"""
    name = 'decode'
    if argv and not argv[0].startswith('-'):
        name = argv[0]
        argv = argv[1:]
    if name not in SUITES:
        raise ValueError(f'{name}: no such suite{hint(name, SUITES)}; choose from {", ".join(SUITES)}')
    what, _, how = (__doc__ or '').partition('\n\n')
    [given] = parse(argv, f'{what}\n\n{listed()}\n\n{how}', Args, first=OFTEN)
    takes = f'{ALWAYS} {SUITES[name].flags}'
    for flag_name in given:
        if flag_name not in takes.split():
            raise ValueError(f'--{flag_name} means nothing for {name}: it takes {takes}')
    args = Args(**given)
    if len(numbers(args.lengths)) > 1 and SUITES[name].one:
        raise ValueError(f'--lengths={args.lengths}: this suite takes one')
    return dataclasses.replace(SUITES[name]), args      # a copy: `classifiers` renames its columns


@script
def main(argv):
    """Run one suite, with its defaults for the flags that were not given."""
    began = time.perf_counter()
    suite, args = settings(argv)
    if suite.name not in argv:
        print(f'{listed()}\n\nNo suite is given: now comes decode, for some minutes; Ctrl-C stops it.\n',
              flush=True)
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ['OMP_NUM_THREADS'] = str(args.threads)       # of the trainings that it starts
    dtype = pick_dtype(args.dtype, device)
    own = {'seeds': chosen(args, 1, 3), **chosen(args, suite.quick, suite.full)}
    missing = {name: own[name] for name in own if not getattr(args, name)}
    args = dataclasses.replace(args, **missing, device=device, dtype=dtype)
    args.lengths = numbers(args.lengths)
    args.seeds = range(args.seed, args.seed + args.seeds)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    report_suite(args, suite)
    minutes = (time.perf_counter() - began) / 60
    print(f'{minutes:.1f} minutes, threads: {torch.get_num_threads()}, torch {torch.__version__}', flush=True)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C: also ends the run it started
    sys.exit(main())
