"""Run measurements on this machine, `decode` if no suite is named. A suite is an entry of SUITES, at the end
of this file. It prints a table and writes out/bench/SUITE.csv and, if there is something to plot,
SUITE.png. Most suites take a few minutes; --full takes hours.

Some suites run train.py and convert.py, and report one figure of each run (`runs`). Some study a trained
softmax model, and some measure time (`timed`). `capacity` and `update` train a single layer. Finished runs
are kept in --out, so a stopped suite continues where it was.
"""
import contextlib
import csv
import dataclasses
import glob
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import convert
import fastweight
import kernels
import train as recipe
from cli import files
from cli.errors import script
from cli.flags import flag, parse
from cli.weights import weights_digest
from data import prepare, vocabulary
from fastweight import RULES, l2
from hub import chat
from model import (GPT, Cache, Config, FastWeights, bytes_after, cached_by, can_become_an_rnn, chosen_texts,
                   kl, load, pick_device, pick_forms, sample, state_bytes)

os.environ.setdefault('KINETO_LOG_LEVEL', '99')     # silences torch.profiler; we ask it for memory
HERE = os.path.dirname(os.path.abspath(__file__))
MB = 10 ** 6


# ---- the parts of an entry of SUITES -----------------------------------------------------------------------
class Panel(NamedTuple):
    """One plot: a line per form over x. If y is `form`, the median and range of each form along x."""
    x: str                          # a column of the table; so is y
    y: str
    title: str = ''                 # may contain flags: {heads}
    part: str = ''                  # which rows of the table

    def shown(self, table):
        """The rows of a table that it shows, without missing values, and without 0 on a log axis."""
        rows = [row for row in table if row.get('part', '') == self.part]
        for name in self.x, self.y:
            rows = [row for row in rows if row.get(name) is not None]
            if name in LOGARITHMIC:
                rows = [row for row in rows if row[name] > 0]
        return rows


class Way(NamedTuple):
    """How a suite of commands runs its lines: the data, the model, the number of steps."""
    data: str                       # '': the text of --data
    train: str = ''                 # flags of train.py
    steps: int = 0                  # if --steps is not given
    times: int = 1                  # multiplies the steps
    how: str = ''                   # flags of lines that start from the trained line `softmax`
    convert: str = ''               # more flags of convert.py; '': no line is a conversion
    more: float = 0.0               # their steps, as a share of the steps of `softmax`
    first: str = ''                 # the way whose softmax model it begins with
    full: bool | None = None        # True: only with --full; False: only without


@dataclass
class Suite:
    """What to measure, the flags, the plots, and what a paper found."""
    name: str
    about: str                      # for --help
    measure: Callable               # (args, suite): yields rows of the table; adds to args.remarks
    flags: str                      # flags that it takes, besides ALWAYS
    quick: dict = field(default_factory=dict)       # their defaults in a quick run; `only` names lines
    full: dict = field(default_factory=dict)        # and in a full run
    lines: dict = field(default_factory=dict)       # form: flags of its command, or what `measure` takes
    always: tuple = ()              # lines that run whatever --only says
    ways: dict = field(default_factory=dict)        # for commands: name: Way
    figure: str = ''                # for commands: the key of their results that becomes `ours`
    beside: tuple = ()              # more keys that become columns
    from_checkpoint: Callable | None = None         # (args, result of a run, its model, meta) -> more results
    one: bool = False               # it takes only one of --lengths
    panels: tuple = ()
    note: str = ''
    source: str = ''                # paper, its table or figure, what it measured
    paper: dict = field(default_factory=dict)       # form: the paper's figure, or a dict by size or part


ALWAYS = 'full out device threads seed'
IN_PERCENT = 'accuracy', 'before', 'recovered'


# ---- measuring ---------------------------------------------------------------------------------------------
def wait_for(device):
    """Wait until the device has finished, since GPU calls return at once."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def timed(cells, device, least=0.3, repeats=5):
    """cells: (row of a table, function) pairs -> (row, function, median seconds) triples, after a warm-up.
    Each function is called at least `repeats` times and for `least` seconds, but a slow one for at most ten
    times that. They take turns, so that a busy moment of the machine affects them all."""
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
                wait_for(device)
                begin = time.perf_counter()
                call()
                wait_for(device)
                taken.append(time.perf_counter() - begin)
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


# ---- flags as lists ----------------------------------------------------------------------------------------
def chosen(args, quick, full):
    """-> the value for a quick run or for a full one."""
    return full if args.full else quick


def numbers(text):
    """--lengths as a sorted list of numbers."""
    if not re.fullmatch('([1-9][0-9]{0,6}(,[1-9][0-9]{0,6})*)?', text):
        raise ValueError(f'--lengths={text}: expected numbers below ten million with commas, as 256,1024')
    return sorted({int(n) for n in re.findall('[0-9]+', text)})


def only(args, table):
    """The lines that --only names; all without --only."""
    names = list(table)
    if args.only:
        names = [name.strip() for name in args.only.split(',')]
    for name in names:
        if name not in table:
            raise ValueError(f'--only={args.only}: no {name!r} here; choose from {", ".join(table)}')
    return {name: table[name] for name in names}


# ---- reporting ---------------------------------------------------------------------------------------------
def column(rows, name):
    """What each row of a table, or each result, has under a name."""
    return [row[name] for row in rows]


FOR_THE_PICTURE = 'curve', 'query'          # parts of a table that are too long to print
LOGARITHMIC = (                             # columns with a log axis
    'T', 'us a token', 'state bytes', 'ms', 'MB', 'cached', 'more than full, %', 'tokens/s',
    'position', 'share', 'step', 'tokens a row', 'KL to teacher', 'weight')


def report_suite(args, suite, rows):
    """Print the table, split where its columns change, write and draw it, and print the remarks."""
    if rows:
        columns = dict.fromkeys(itertools.chain.from_iterable(rows))
        with open(f'{args.out}/{suite.name}.csv', 'w', newline='') as f:
            writer = csv.DictWriter(f, columns)
            writer.writeheader()
            writer.writerows(rows)
        read = [row for row in rows if row.get('part') not in FOR_THE_PICTURE]
        for _, alike in itertools.groupby(read, list):                  # adjacent rows with equal columns
            convert.table(list(alike))
        print(suite.note.format_map(vars(args)))
        print(f'paper: {suite.source}')
        draw(args, suite, rows)
    for name, value in args.remarks.items():
        print(f'{name}: {value}')


def draw(args, suite, table):
    """Draw the suite's picture, if there is something to plot: its panels or, for commands, one per way."""
    panels = suite.panels
    if not panels:
        panels = [Panel('ours', 'form', way, way) for way in suite.ways]
    shown = [(panel, panel.shown(table)) for panel in panels if panel.shown(table)]
    n = len(shown)
    if n == 0:
        return
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.close('all')
    plt.style.use('tableau-colorblind10')
    marked = plt.rcParams['axes.prop_cycle'] + plt.cycler(marker=list('osD^vXP*<>'))   # for grey print
    rounds = plt.cycler(linestyle=['-', '--', ':', '-.'], fillstyle=['full', 'none', 'left', 'right'])
    looks = rounds * marked
    plt.rcParams.update({'font.size': 12, 'axes.prop_cycle': looks, 'axes.formatter.min_exponent': 3})
    figure, [axes] = plt.subplots(1, n, figsize=(7.5 * n, 4.5), squeeze=False, layout='constrained')
    forms = {}                      # in order
    for _, rows in shown:
        forms |= dict.fromkeys(column(rows, 'form'))
    labels = {'ours': args.remarks.get('ours', suite.figure), 'form': '', 'T': 'tokens'}
    if labels['ours'] in IN_PERCENT:
        labels['ours'] += ', %'
    for (panel, rows), ax in zip(shown, axes):
        if panel.y == 'form':
            draw_ranges(ax, rows)
        else:
            draw_lines(ax, panel, rows, forms)
        ax.set(title=panel.title.format_map(vars(args)), xlabel=labels.get(panel.x, panel.x),
               ylabel=labels.get(panel.y, panel.y))
    path = f'{args.out}/{suite.name}.png'
    figure.savefig(path, dpi=110)
    print(f'picture: {path}')


def draw_lines(axes, panel, rows, forms):
    """Plot a line per form, in colours for colour-blind readers. Hollow points are the paper's. forms: those
    of all panels, so that a form looks the same in each panel"""
    if panel.x in LOGARITHMIC:
        axes.set_xscale('log')
    if panel.y in LOGARITHMIC:
        axes.set_yscale('log')
    for form in forms:
        points = [row for row in rows if row['form'] == form]
        x = column(points, panel.x)
        label = form if points else '_'                 # not in the legend
        apart = max(1, len(x) // 16)
        [line] = axes.plot(x, column(points, panel.y), label=label, markersize=5, markevery=apart)
        if panel.x == 'S':
            axes.plot(x, column(points, 'paper'), line.get_marker(), color=line.get_color(), fillstyle='none')
    axes.legend(loc='center left', bbox_to_anchor=(1, 0.5), fontsize=9, frameon=False)
    ticks = sorted(set(column(rows, panel.x)))
    if panel.x in LOGARITHMIC and len(ticks) <= 8:
        shown = [x for x, after in itertools.pairwise([*ticks, math.inf]) if after > 1.2 * x]
        axes.set_xticks(shown, [f'{t:,}' for t in shown])                   # closer labels overlap
        axes.set_xticks([], minor=True)


def draw_ranges(axes, rows):
    """Plot a bar per form: the range over seeds, with a point at the median."""
    forms = column(rows, 'form')
    axes.hlines(forms, column(rows, 'least'), column(rows, 'most'))
    axes.plot(column(rows, 'ours'), forms, 'o')
    axes.tick_params(axis='y', labelsize=9)
    axes.invert_yaxis()


# ---- suites of commands: a line of the table is a run of train.py or convert.py ----------------------------
def code():
    """A digest of the code files as they are now. Do not edit them while a suite runs, or old and new results
    mix."""
    paths = sorted(glob.glob(f'{HERE}/*.py') + glob.glob(f'{HERE}/*/*.py'))
    return files.short_hash(b''.join(map(files.read_file, paths)))


def once(args, suite, form, run, **key):
    """-> the dict that run(out, **key) returns, with its minutes. It is kept in --out and reused as long as
    code and key are the same. out: a folder for this run alone. The key gets the device, too"""
    key['device'] = str(args.device)
    digest = files.short_hash(json.dumps(key).encode())
    out = os.path.join(args.out, suite.name, re.sub('[^a-z0-9]+', '-', f'{form}-{digest}'))
    mark = {'code': code(), **key}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is missing, or made again if broken
        known = json.loads(files.read_file(f'{out}.json'))
        if known.pop('key', None) == mark:
            return known
    began = time.perf_counter()
    result = run(out, **key)
    result['minutes'] = (time.perf_counter() - began) / 60
    files.write_json(f'{out}.json', {'key': mark, **result})
    return result


def command(out, file, flags, seed, reads, device):
    """Run python FILE FLAGS --seed --device --out -> its results and, as `path`, its checkpoint. If it fails,
    ValueError with its last line."""
    typed = f'{flags} --device={device} --seed={seed} --out={shlex.quote(out)}'
    print(f'python {file} {typed}', file=sys.stderr, flush=True)
    words = [sys.executable, os.path.join(HERE, file), *shlex.split(typed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        error = done.stderr.strip() or 'stopped'
        raise ValueError(f'{file} {flags}: {error.splitlines()[-1]}')
    result = {}
    for path in sorted(glob.glob(f'{glob.escape(out)}/*.json'), reverse=True):    # convert.json last: it wins
        result |= json.loads(files.read_file(path))
    for name in IN_PERCENT:
        if result.get(name) is not None:
            result[name] *= 100
    return {**result, 'path': os.path.join(out, 'ckpt.safetensors')}


def a_run(args, suite, form, file, flags, seed):
    """Run one command -> its results, and those of the suite's `from_checkpoint`. The key says which text and
    which model it reads, since their paths may hold others later."""
    reads = []
    for word in shlex.split(flags):
        name, _, value = word.partition('=')
        if name == '--data' and value:
            reads.append(os.path.basename(prepare.place(value)))
        elif name in ('--init', '--from'):
            reads.append(weights_digest(*load(value)))
    key = {'file': file, 'flags': flags, 'seed': seed, 'reads': reads}
    result = once(args, suite, form, command, **key)
    if suite.from_checkpoint:
        def more_results(*_, **same):
            return suite.from_checkpoint(args, result, *load(result['path'], args.device))
        more = once(args, suite, f'{form} seen', more_results, **key, full=args.full)
        result |= {**more, 'minutes': result['minutes']}
    return result


def trained(args, suite, form, flags, steps, seed):
    """Run train.py -> its result.json"""
    return a_run(args, suite, form, 'train.py', f'{flags} --steps={steps} --eval_every={steps}', seed)


def converted(args, suite, form, source, flags, first, steps, seed):
    """Run convert.py on a model file, with `first` steps of stage 1 and `steps` of stage 2 -> its result.json
    and convert.json"""
    flags = (f'--from={shlex.quote(source)} {flags} --distil_steps={first} --steps={steps} '
             f'--eval_every={max(1, first + steps)} --controls=false')
    return a_run(args, suite, form, 'convert.py', flags, seed)


def a_line(args, suite, way, form, seed):
    """Run one line in one way. If the line or the way names a recipe, it converts the line `softmax` of the
    same seed. Maps that are distilled spend a third of the steps on stage 1. A line without flags is the
    control: the softmax model itself is trained on."""
    flags = suite.lines[form]
    steps = way.times * (args.steps or way.steps)
    name = f'{form} {way.data}'
    data = f'--data={shlex.quote(way.data)}'
    if form == 'softmax' or (flags and '--recipe' not in way.convert + flags):
        start = way.train
        if way.first:
            first = a_line(args, suite, suite.ways[way.first], form, seed)
            start += f' --init={shlex.quote(first["path"])}'
        return trained(args, suite, name, f'{data} {start} {flags}', steps, seed)
    teacher = a_line(args, suite, way, 'softmax', seed)
    more = max(1, int(steps * way.more))
    if flags:
        distils = 'hedgehog' in flags or '--distil=ce' in flags         # Zhang 2024 eq. 4
        first = more // 3 if distils else 0
        flags = f'{flags} {data} {way.how} {way.convert}'
        return converted(args, suite, name, teacher['path'], flags, first, more - first, seed)
    again = f'--init={shlex.quote(teacher["path"])} {data} {way.how}'
    result = trained(args, suite, name, again, more, seed)
    return {**result, 'recovered': 100 * result['accuracy'] / teacher['accuracy']}


def set_named(data):
    """The name of the set that --data names: cola of cola:FOLDER, which is cola, read from there."""
    return data.partition(':')[0]


def ways_of(args, suite):
    """The ways to run. --data selects among those that name their data. Data that cannot be prepared are
    skipped, with a message."""
    ways = {name: way for name, way in suite.ways.items() if way.full in (None, args.full)}
    sets = [way.data for way in ways.values()]
    named = set_named(args.data)
    if args.data and all(sets) and named not in sets:
        raise ValueError(f'--data={args.data}: choose from {", ".join(sets)}')
    to_run = {}
    for name, way in ways.items():
        if args.data and way.data and named != way.data:
            continue
        data = args.data or way.data or 'stdlib'
        try:
            _, _, meta = prepare.load_set(data)
        except ValueError as e:
            if not way.data:
                raise
            print(f'{data} is left out ({e})', file=sys.stderr)
            continue
        if 'row' in meta and not way.data:
            raise ValueError(f'--data={data}: a task; this suite wants a text')
        to_run[name] = way._replace(data=data)
    return to_run


def of_seeds(args, suite, way, form):
    """The runs of one line in one way, over all seeds."""
    return [a_line(args, suite, way, form, seed) for seed in args.seeds]


def over_seeds(results, key, *beside):
    """Columns of the table for the runs of a line: median and range of a figure, the minutes, and the medians
    of the keys `beside`, if the runs have them."""
    values = column(results, key)
    row = {'ours': statistics.median(values), 'least': min(values), 'most': max(values),
           'minutes': sum(column(results, 'minutes'))}
    for name in beside:
        known = [result[name] for result in results if result.get(name) is not None]
        row[name] = statistics.median(known) if known else None
    return row


def a_row(suite, form, results, part=''):
    """A line of the table, made from its runs."""
    theirs = suite.paper.get(form)
    if isinstance(theirs, dict):
        theirs = theirs.get(part)
    return {'form': form, 'part': part, **over_seeds(results, suite.figure, *suite.beside), 'paper': theirs}


def runs(args, suite):
    """The table of a suite of commands: each line in each way, with one run per seed."""
    forms = dict.fromkeys(suite.always) | only(args, suite.lines)
    cells = list(itertools.product(ways_of(args, suite).items(), forms))
    for (name, way), form in tqdm(cells, suite.name, disable=None):
        results = of_seeds(args, suite, way, form)
        yield a_row(suite, form, results, name)


def batches(val, data, many, count=None):
    """Where the rows of a task begin, in batches of `many`. count: only the first so many rows"""
    begin = recipe.blocks(len(val), data['row'], data)[:count]
    return np.split(begin, range(many, len(begin), many))


# ---- what suites measure on the checkpoints of their runs --------------------------------------------------
def size_of_state(args, result, model, meta):
    """The size of the state for one row, in bytes."""
    return {'state bytes': bytes_after(model, model.config.block_size)}


def of_classes(args, result, model, meta):
    """On the validation rows, in %: the share of the most frequent class, and Matthews' correlation of
    answers with labels. It is 0 for a model that always says one class. For more than two classes it is R_K,
    Gorodkin 2004."""
    _, val, data = prepare.load_set(result['data'], like=meta['data'])
    predicted = []
    true = []
    for begin in batches(val, data, 32):
        x, y = recipe.rows(val, begin, data['row'], data, args.device)
        with torch.inference_mode():
            logits, y, _ = recipe.predict(model, x, y, None, data)
        predicted += logits.argmax(-1).tolist()
        true += y.tolist()
    both = F.one_hot(torch.tensor([predicted, true]), model.config.classes).double()  # (2, N, classes)
    shares = both.mean(1, keepdim=True)
    matthews = F.cosine_similarity(*(both - shares).flatten(1), 0)
    return {'majority': 100 * shares[1].max().item(), 'matthews': 100 * matthews.item()}


def bits(args, result, model, T, many=None, carried=False):
    """Bits per byte of a model on rows of T tokens of a run's validation text. They are those that train.py
    evaluated, or `many` rows spaced over the whole text."""
    _, val, meta = prepare.load_set(result['data'])
    if many is None:
        val = val[:result['val_tokens']]
    begin = recipe.blocks(len(val), T, meta, many)
    loss, _ = recipe.Rows(None, val, meta, T, args.device).evaluate(model, begin, carried)
    x, y = recipe.rows(val, begin, T, meta, args.device)
    return recipe.bits_a_nat(recipe.of_part(meta, x[y >= 0].tolist())) * loss


WINDOWS = 8, 64, 128        # cached tokens: 1, 8, 16 times the size of the state of delta elu
GRID_ROWS = 256             # rows of the validation text on which the grid is compared


def windows(args, result, model, meta):
    """Bits per byte with windows of WINDOWS cached tokens, carried over the validation text like
    Transformer-XL's memory. As in the paper, the model was trained with a long window."""
    if result.get('rule') != 'window':
        return {}
    found = {}
    for cache in WINDOWS:
        shorter = cached_by(model, model.config.rules, cache=cache)
        found[f'with {cache}'] = bits(args, result, shorter, 512, carried=True)
    return found


def on_grid_rows(args, result, model, meta):
    """Bits per byte on evenly spaced rows, the same that convert.py evaluates."""
    return {'bits per byte': bits(args, result, model, result['block_size'], GRID_ROWS)}


# ---- suites of commands that need more than a table --------------------------------------------------------
def over_widths(args, suite):
    """Train every rule in every width."""
    [way] = ways_of(args, suite).values()
    cells = list(itertools.product(only(args, suite.lines), args.lengths))
    for form, width in tqdm(cells, suite.name, disable=None):
        wide = way._replace(train=f'{way.train} --n_embd={width}')
        results = of_seeds(args, suite, wide, form)
        yield {'width': width, **a_row(suite, form, results)}


def products(args, result, model, meta):
    """Accuracy in % on 256 new rows, for products of 1, 2, ... elements, and its mean beyond the lengths of
    training."""
    row = prepare.find_set(result['data'])
    rng = np.random.Generator(np.random.Philox(2))              # seeds 0 and 1 made the data set
    x, y = row['make'](256, rng, row['vocab'], False, length=256)
    x = torch.from_numpy(x).to(args.device)
    with torch.inference_mode():
        logits, _ = model(x)
    right = logits.argmax(-1).cpu() == torch.from_numpy(y)
    right = 100 * right.float().mean(0)
    return {'right': right.tolist(), 'beyond': right[row['length']:].mean().item()}


def tracking(args, suite):
    """Can a state that was trained on up to 40 steps track 256? Yes, if the median over seeds is 95 % or
    more. No, if it is at most 5 points above the better of `sum` and `mamba2`. Otherwise partly."""
    for name, way in ways_of(args, suite).items():
        rows = []
        for form in tqdm(only(args, suite.lines), name, disable=None):
            results = of_seeds(args, suite, way, form)
            rows.append(a_row(suite, form, results, name))
            for i, right in enumerate(zip(*column(results, 'right'))):
                yield {'form': form, 'part': 'curve', 'length': i + 1, name: statistics.median(right)}
        diagonal = [row['ours'] for row in rows if row['form'] in ('sum', 'mamba2')]
        for row in rows:
            verdict = 'partly'
            if row['ours'] >= 95:
                verdict = 'yes'
            elif diagonal and row['ours'] <= max(diagonal) + 5:
                verdict = 'no'
            yield {**row, 'verdict': verdict}


def glue(args, suite):
    """Like `runs`, in --dtype. --init: fine-tune this pretrained model instead, at a rate for such models.
    CoLA alone is judged by Matthews' correlation, as in GLUE."""
    if set_named(args.data) == 'cola':
        args.remarks['ours'] = 'matthews, %'
        suite = dataclasses.replace(suite, figure='matthews', beside=('accuracy', 'recovered', 'majority'))
    in_type = f'--dtype={str(args.dtype).removeprefix("torch.")}'
    ways = {}
    for name, way in suite.ways.items():
        train, how = way.train, way.how
        if args.init:
            train = f'{CLASSIFIER} --init={shlex.quote(args.init)} --batch_size=16 --lr=5e-5'
            how = '--batch_size=32 --lr=5e-5'
        ways[name] = way._replace(train=f'{train} {in_type}', how=f'{how} {in_type}')
    return runs(args, dataclasses.replace(suite, ways=ways))


# ---- suites capacity, update: how much a matrix of fast weights holds. Schlag 2021 section 6.1 -------------
GOOD = 0.001        # with at most this loss, associations count as held (as in the paper)
OVERFULL = 0.1      # above this loss, a matrix is not tried with more associations


class Associative(nn.Module):
    """Read pairs of keys and values, then answer with the value of each of S keys. d = 64. x = [embed(key);
    one-hot of value], k = W_k x, q = W_q embed(key), and v is the one-hot itself. There is no output layer:
    the answer is what the memory returns."""
    def __init__(self, S, rule, phi, norm, d=64):
        super().__init__()
        e = int(1.1 * 2 * S)
        self.embed = nn.Parameter(torch.randn(S, e))
        self.k = nn.Linear(e + S, d)
        self.q = nn.Linear(e, d)
        bound = d ** -0.5
        for w in self.k.weight, self.q.weight:
            nn.init.uniform_(w, -bound, bound)
        self.memory = FastWeights(rule, e + S, 1, d, phi, norm)
        self.memory.forms = pick_forms()

    def forward(self, keys, values):
        """Write all keys, values (B, L), then read with all keys -> answers (B, L, S)"""
        v = F.one_hot(values, len(self.embed)).to(self.embed.dtype)
        x = torch.cat([self.embed[keys], v], -1)
        q = self.q(self.embed)[keys]
        state = self.memory.write_all(x, self.k(x)[:, None], v[:, None])
        return self.memory.read_all(q[:, None], state)[:, 0]


def associations(S, L, rows, replace, draw, device):
    """-> random keys, values: (rows, L), drawn with replacement, or (rows, S), each of S once, shuffled"""
    if replace:
        x = torch.randint(S, (2, rows, L), generator=draw)
    else:
        x = torch.rand(2, rows, S, generator=draw).argsort(-1)
    return x.to(device)


def miss(model, keys, values, by_key):
    """Mean of 1/2 |v - answer|^2 over keys; v is the last value of a key. by_key: each key counts once; else
    as often as it occurs, since the authors train on a random position"""
    same = keys[:, :, None] == keys[:, None, :]
    weight = (~same.triu(1).any(-1)).float()                    # 0 if the key comes again later
    if not by_key:
        weight = weight * same.sum(-1)
    o = model(keys, values)
    v = F.one_hot(values, o.shape[-1])
    loss = 0.5 * (o - v).square().sum(-1)
    return (loss * weight).sum() / weight.sum()


def associate(_, S, rule, phi, norm, replace, seed, most, device):
    """Train -> the lowest loss 1/2 |v - answer|^2 on new sequences; 0.5 means nothing was learned. As in the
    authors' code: Adam, 1e-3, an evaluation on 20 sequences every 100 steps, a stop at 0.001 or after 11
    evaluations without progress. Unlike theirs, a step has 4 sequences with all their keys as queries, not 32
    with one query each."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = Associative(S, rule, phi, norm).to(device)
    opt = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    looks = []                                                  # (step, loss)
    for step in range(1, most + 1):
        keys, values = associations(S, 2 * S, 4, replace, draw, device)
        miss(model, keys, values, by_key=False).backward()
        opt.step()
        opt.zero_grad()
        if step % 100 != 0 and step != most:
            continue
        model.eval()
        with torch.no_grad():           # always S pairs, even if it trains on 2 S, as in their code
            keys, values = associations(S, S, 20, replace, draw, device)
            looks.append([step, miss(model, keys, values, by_key=True).item()])
        model.train()
        losses = [loss for _, loss in looks]
        vain = len(losses) - 1 - losses.index(min(losses))
        if min(losses) <= GOOD or vain > 10 or not math.isfinite(losses[-1]):
            break
    return {'loss': min(losses), 'curve': looks}


def associative(args, suite):
    """Losses over the number of associations S, and learning curves for the smallest S. These are figure 3 of
    Schlag 2021 and, with `capacity --lengths=600`, figure 4."""
    broken = {}
    args.remarks[f'first S above a loss of {GOOD}, here and in the paper'] = broken
    for form, (rule, phi, norm) in only(args, suite.lines).items():
        key = {'rule': rule, 'phi': phi, 'norm': norm, 'replace': suite.name == 'update', 'most': args.steps}
        theirs = suite.paper.get(form, {})
        fills = rule == 'delta' or suite.name == 'capacity'
        ours = {}
        for S in args.lengths:
            results = [once(args, suite, form, associate, **key, S=S, seed=seed) for seed in args.seeds]
            if not ours:
                yield from curve(form, results)
            row = {'form': form, 'S': S, **over_seeds(results, suite.figure), 'paper': theirs.get(S)}
            yield row
            ours[S] = row['ours']
            if ours[S] > OVERFULL and fills:
                break
        broken[form] = [next((S for S in losses if losses[S] > GOOD), None) for losses in (ours, theirs)]


def curve(form, results):
    """Rows of a learning curve: the median over seeds, up to the shortest run."""
    for points in zip(*column(results, 'curve')):               # the points of one step, per seed
        steps, losses = zip(*points)
        yield {'form': form, 'part': 'curve', 'step': steps[0], 'loss': statistics.median(losses)}


# ---- a trained softmax model, for the suites that need one -------------------------------------------------
def softmax_model(args, tasks=False):
    """The model of --init -> path, model, metadata. tasks: also accept an encoder, and a model of a task"""
    path = args.init or 'out/ckpt.safetensors'
    model, meta = load(path, args.device)
    of_texts = model.config.causal and 'row' not in meta['data']
    if not can_become_an_rnn(model.config.rules) or not (of_texts or tasks):
        raise ValueError(f'--init={path}: no softmax layers in a model of texts; python train.py '
                         '--rule=softmax --n_head=4 --out=out/softmax makes one')
    return path, model, meta


def a_text(args, path, meta, T, count, name):
    """Load a text in a model's tokens; '' is the model's training text -> x, y (count, T) of its validation
    side, its metadata, its name. Labelled sentences are read one after the other."""
    _, val, data, name = prepare.for_model(path, meta, name, T)
    if 'classes' in meta['data'] and 'pad' in data:         # an encoder's
        val = val.reshape(-1, 2, data['row'])[:, 0]
        val = val[val != data['pad']]
        if len(val) <= T:
            raise ValueError(f'--data={name}: too short for rows of {T}')
    elif 'row' in data:
        raise ValueError(f'--data={name}: a task; this suite wants a text')
    begin = torch.linspace(0, len(val) - T - 1, count).long().tolist()
    x, y = recipe.rows(val, begin, T, {}, args.device)
    return x, y, data, name


def row_of(args, config):
    """The tokens in a row: --row or that of training, at most PRETRAINED_ROW. ValueError if the model knows
    fewer positions"""
    if args.row == 1 or args.row > config.block_size:
        raise ValueError(f'--row={args.row}: expected 2 to {config.block_size} tokens, which the model knows')
    return args.row or min(config.block_size, recipe.PRETRAINED_ROW)


def model_and_rows(args, quick, full):
    """A softmax model, and evenly spaced rows of its validation text. quick, full: how many, but at most 16
    of a large model -> model, x (count, T), metadata of the text"""
    path, model, meta = softmax_model(args)
    count = chosen(args, quick, full)
    if recipe.is_large(model):
        count = min(count, 16)
    x, _, data, _ = a_text(args, path, meta, row_of(args, model.config), count, args.data)
    return model, x, data


def with_cache(model, policy, cache, sinks=4, **changes):
    """The same softmax model with at most `cache` cached tokens per layer; `softmax` is the model as it is.
    changes: other flags of `Swap`"""
    rules = [policy if rule == 'softmax' else rule for rule in model.config.rules]
    return cached_by(model, rules, cache=cache, sinks=min(sinks, cache - 1), **changes)


def models_beside(args, path, data):
    """Yield the path and the model of each of --beside. ValueError if its tokens are not those of `data`, the
    tokens of the model in `path`."""
    for source in filter(None, args.beside.split(',')):
        model, meta = load(source, args.device)
        if not vocabulary.same_tokens(meta['data'], data):
            raise ValueError(f'--beside={source}: its tokens ({vocabulary.describe_tokens(meta["data"])}) are '
                             f'not those of {path}; train both on the same data')
        yield source, model


def by_position(form, nats, first):
    """Perplexity by convert.ranges of positions of nats (.., T), as rows of the table"""
    for start, end in convert.ranges(nats.shape[-1], first):
        mean = nats[..., start:end].mean().item()
        yield {'form': form, 'part': 'position', 'position': end, 'nats': mean, 'perplexity': math.exp(mean)}


# ---- suites monotone, transfer: maps that imitate that model's attention -----------------------------------
DRAWN = 'softmax', 'elu', 'exp:2', 'taylor', 'hedgehog, distilled'          # forms whose weights are plotted
FIDELITY = 'order kept', 'entropy', 'KL to teacher'                         # in convert.json, per layer


def monotone(args, suite):
    """Replace softmax in a trained model by other maps. Do weights grow with q.k, and how spiky are they? The
    learned maps are measured before and after distilling."""
    path, model, meta = softmax_model(args, tasks=True)
    length = min(row_of(args, model.config), 256)
    flags = f'--recipe=hedgehog --row={length} --eval_rows=4 --data={shlex.quote(args.data)}'
    weights = {}
    for phi in only(args, suite.lines):
        result = converted(args, suite, phi, path, f'{flags} --phi={phi}', args.steps, 0, args.seed)
        for stage in dict.fromkeys(column(result['layers'], 'model')):
            form = phi if stage == 'swapped' else f'{phi}, {stage}'
            layers = [layer for layer in result['layers'] if layer['model'] == stage]
            yield {'form': form, **{name: statistics.mean(column(layers, name)) for name in FIDELITY}}
            weights[form] = result['query'][stage]
    weights['softmax'] = result['query']['softmax']
    spiky = statistics.mean(column(layers, 'entropy of teacher'))
    x, _, _, _ = a_text(args, path, meta, length, 4, args.data)
    with torch.inference_mode():
        grows = statistics.mean((seen.scores > -1).float().mean().item() for seen in model.through(x))
    yield {'form': 'softmax', 'order kept': 1.0, 'entropy': spiky, 'KL to teacher': 0.0,
           'where Taylor grows': grows}
    for form in DRAWN:
        for score, weight in zip(result['query']['scores'], weights.get(form, [])):
            yield {'form': form, 'part': 'query', 'q.k / sqrt(d)': score, 'weight': max(weight, 1e-7)}


@torch.inference_mode()
def divergence(teacher, student, x):
    """KL(teacher || student) of the attention weights, on the teacher's inputs: the mean over layers, heads
    and queries, in nats. We read x (B, T) row by row."""
    twins = student.mixers()
    divergences = []
    for row in x.split(1):
        for seen in teacher.through(row):
            a = seen.weights(seen.mixer)
            w = seen.weights(twins[seen.name])
            divergences.append(kl(a, w).item())
    return statistics.mean(divergences)


def transfer(args, suite):
    """Does a map that imitates softmax on short rows of one text do so on another, and on longer rows? Lines
    that would learn from labels that the teacher does not know are left out."""
    path, teacher, meta = softmax_model(args, tasks=True)
    sentences = 'row' in meta['data']
    T = meta['data']['row'] if sentences else max(16, row_of(args, teacher.config) // 8)
    row = teacher.config.block_size if sentences else T                 # sentences are not cut
    most = teacher.max_len or math.inf
    times = [n for n in chosen(args, (1, 4, 16), (1, 2, 4, 8, 16)) if n * T <= most]
    longest = max(times) * T
    _, _, own, name = a_text(args, path, meta, longest, 1, '')
    _, _, other, other_name = a_text(args, path, meta, longest, 1, args.data or 'stdlib')
    if own['val'] == other['val']:
        raise ValueError(f'--data={other_name}: what {path} was trained on; give another text')
    names = {'own': name, 'other': other_name}
    args.remarks.update({**names, 'tokens of a row that maps learned on': T})
    models = {}
    for form, (flags, text) in only(args, suite.lines).items():
        if text == 'other' and other.get('classes', 0) > own.get('classes', 0):
            continue                                                    # the teacher knows no such labels
        flags = (f'--recipe=hedgehog {flags} --row={row} --batch_size=32 --eval_rows=4 '
                 f'--data={shlex.quote(names[text])}')
        result = converted(args, suite, form, path, flags, args.steps, 0, args.seed)
        models[form], _ = load(result['path'], args.device)
    for text, n in itertools.product(names, times):
        count = chosen(args, 2, 8) * longest // (n * T)         # equally many tokens at all lengths
        x, _, _, _ = a_text(args, path, meta, n * T, count, names[text])
        for form, model in models.items():
            yield {'form': form, 'part': text, 'tokens a row': n * T,
                   'KL to teacher': divergence(teacher, model, x)}


def read_back(k, rule, phi, norm):
    """Write keys k (B, H, S, d) with one-hot values and beta 1, then read with each -> (B, H, S, S)"""
    v = torch.eye(k.shape[2], device=k.device).expand(*k.shape[:3], -1)
    if rule == 'softmax':
        return F.scaled_dot_product_attention(k, k, v)
    memory = FastWeights(rule, 1, k.shape[1], k.shape[3], phi, norm).to(k.device)   # its gates are not used
    written = memory.normaliser(memory.phi(k, 'k'))
    erase = torch.ones_like(k[..., 0]) if memory.rule.erase else None
    S = fastweight.write_all(written, v, erase=erase, normalise=memory.normalise)
    return memory.read_all(k, {'S': S})


@torch.inference_mode()
def keys(args, suite):
    """Schlag 2021, section 4.1: a matrix cannot tell more keys apart than it has features. Each head of a
    trained model writes the first S keys of a row, or all, and is asked for each. A key is found if its own
    value is the largest in the answer. The error is 1/2 |v - answer|^2, so an answer of zeros has 0.5."""
    teacher, x, _ = model_and_rows(args, 4, 16)
    args.remarks['rows'] = len(x)
    sizes = sorted({min(S, x.shape[1]) for S in args.lengths})
    cells = {}                                      # per line and S: (2, rows) for each layer
    for seen in teacher.through(x):
        for (form, line), S in itertools.product(only(args, suite.lines).items(), sizes):
            answers = read_back(seen.k[:, :, :S].float(), *line)
            found = answers.argmax(-1) == torch.arange(S, device=x.device)
            error = 0.5 * (answers - torch.eye(S, device=x.device)).square().sum(-1)
            both = torch.stack([100 * found.float(), error])
            cells.setdefault((form, S), []).append(both.mean((2, 3)))
    for (form, S), of_layers in cells.items():
        found, error = torch.stack(of_layers).mean(0)
        half = 1.96 * found.std().item() / len(x) ** 0.5
        yield {'form': form, 'keys': S, 'found': found.mean().item(), 'to either side': half,
               'error': error.mean().item()}


# ---- suites cache, far, kept: that model with few cached tokens. Oren 2024 ---------------------------------
POLICIES = 'random', 'window', 'sink', 'h2o', 'tova-head', 'tova'


def cache(args, suite):
    """Perplexity of a softmax model whose layers cache few tokens, without further training. `cut`: rows as
    short as the cache, each from an empty state."""
    teacher, x, data = model_and_rows(args, 16, 64)
    T = x.shape[1]
    args.remarks.update({'rows': len(x), 'tokens in a row': T})
    shares = chosen(args, (32, 16, 8, 4, 1), SHARES)
    sizes = args.lengths or sorted({T // n for n in shares if n <= T})
    cells = [(size, line) for size in sizes for line in only(args, suite.lines).items()]
    first = {}                      # by size: nats of the first line; with all cached, of the model as it is
    for size, (form, (rule, sinks)) in [(T, ('softmax', ('softmax', 0))), *cells]:
        model = with_cache(teacher, rule, size, sinks)
        what = f'{form}, {size} cached'
        piece = size if rule == 'softmax' else T
        pieces = zip(x[:, :-1].split(piece, 1), x[:, 1:].split(piece, 1))
        nats = torch.cat([convert.nats_along(model, *some, what, args.dtype) for some in pieces], 1)
        pair = convert.recovered(nats - first.setdefault(size, nats), data)
        times = convert.recovered(nats - first[T], data)     # of the student's nats less the teacher's
        row = {'form': form, 'cached': size, 'perplexity': nats.mean().exp().item(),
               'of full': times['recovered'], 'low': times['low'], 'high': times['high'],
               'of first': pair['recovered'], 'from': pair['low'], 'to': pair['high'],
               'state bytes': state_bytes(model.read(x[:1, :size]))}
        theirs = suite.paper.get(form, {})
        of_theirs = {T // one_in: figure / theirs[1] for one_in, figure in theirs.items()}
        more = 100 * (times['recovered'] - 1)
        yield {**row, 'more than full, %': more, 'paper, of its full': of_theirs.get(size)}


def far(args, suite):
    """Read one long text from beginning to end, and measure the nats per token by position. The cache holds
    1/8 of the length of a training row. We compare with the models of --beside, and with the model as it is,
    in training rows, each from an empty state. The line `softmax` caches all tokens."""
    path, teacher, meta = softmax_model(args)
    length, = args.lengths
    block = row_of(args, teacher.config)
    if teacher.max_len:
        raise ValueError(f'{path}: it knows {teacher.max_len:,} positions and no more; this suite wants a '
                         'model with rope, as train.py makes without --pos')
    x, y, data, name = a_text(args, path, meta, length, 1, args.data)
    size = max(1, block // 8)
    args.remarks.update({'the validation text of': name, 'cached tokens': size, 'tokens in a row': block})
    models = {}
    for form, (policy, positions) in only(args, suite.lines).items():
        models[form] = with_cache(teacher, policy, size, positions=positions)
    for source, model in models_beside(args, path, data):
        models[f'{",".join(dict.fromkeys(model.config.rules))}: {source}'] = model
    pieces = zip(x.split(block, 1), y.split(block, 1))
    in_rows = torch.cat([convert.nats_along(teacher, *piece, 'in rows', args.dtype) for piece in pieces], 1)
    rows = list(by_position('softmax, in rows', in_rows, block))
    base = {row['position']: row['perplexity'] for row in rows}
    for form, model in models.items():
        rows += by_position(form, convert.nats_along(model, x, y, form, args.dtype), block)
    for row in rows:
        yield {**row, 'more than in rows': row['perplexity'] - base[row['position']]}


def kind_of_token(token, data):
    """The kind of a token, by its first character. For tokens that may be words, we guess the part of speech
    from a list of common words and from the ending."""
    alone = vocabulary.decode([token], data)
    text = vocabulary.decode([token, token], data)[len(alone):]     # some decoders drop the first word's space
    word = text.strip(' ')
    of_words = data['tokenizer'] not in ('byte', 'char')
    begins = word != text or not word[:1].islower()             # otherwise it continues a word
    if of_words and begins and len(text) > 1:
        for kind, words in SPEECH.items():
            if word.lower() in words.split():
                return kind
    for kind, characters in KINDS.items():
        if word and word[0] in characters:
            return kind
    for ending in ENDINGS:
        if of_words and word.endswith(ending):
            return f'-{ending}'
    return 'rest' if begins or not of_words else 'piece of a word'


@torch.inference_mode()
def kept(args, suite):
    """Which tokens TOVA caches: how recent they are, the first token, and how long each kind stays."""
    teacher, x, data = model_and_rows(args, 4, 16)
    T = x.shape[1]
    size, = args.lengths or [max(1, T // 8)]
    if 2 * size >= T:
        raise ValueError(f'--lengths={size}: expected fewer cached tokens than half of the {T} of a row')
    model = with_cache(teacher, 'tova', size)
    came = torch.arange(T, device=args.device)
    full = came.clamp(min=2 * size)                             # steps at which the cache is long full
    recent = first = 0
    steps = {'all': []}
    for row in tqdm(x.split(1), 'kept', disable=None):
        gone = []                                               # per layer, when each token goes
        for seen in model.through(row):
            if seen.mixer.memory.rule.keeps:                    # all heads of TOVA agree
                gone.append(seen.mixer.memory.evicted_at(seen.q, seen.k, seen.v)[0, 0])
        gone = torch.stack(gone)
        recent += (gone.minimum(came + size).clamp(max=T) - full).clamp(min=0).sum().item()
        first += (gone[:, 0] - 2 * size).clamp(min=0).sum().item()
        stayed = (gone - came).float().mean(0)
        middle = slice(1, T - size)     # not the first token, nor those that came too late
        for token, n in zip(row[0, middle].tolist(), stayed[middle].tolist()):
            steps['all'].append(n)
            steps.setdefault(kind_of_token(token, data), []).append(n)
    late = len(x) * len(gone) * (T - 2 * size)                  # steps, of all rows and layers
    args.remarks[f'cached tokens among the last {size} tokens, %'] = round(100 * recent / (late * size), 1)
    args.remarks['steps in which the first token is kept, %'] = round(100 * first / late, 1)
    for kind, n in steps.items():
        yield {'form': kind, 'share of text': len(n) / len(steps['all']), 'steps kept': statistics.mean(n)}


# ---- suite answers: the accuracy of such models on questions about distant tokens --------------------------
ONE_IN = 4          # the cache is 1/4 of a row where we split answers by the fact's distance


def still_cached(state, at):
    """-> (B,): the share of four tokens that is still cached, over layers and heads: the one at position `at`
    (B,) and the next three, into which a convolution mixes it."""
    wanted = at[:, None, None, None] + torch.arange(4, device=at.device)
    shares = []
    for layer in state['layers']:
        pos = layer['mixer']['pos'].unsqueeze(3)                # (B, heads, cached, 1)
        is_cached = (pos == wanted).any(2)                      # (B, heads, 4)
        shares.append(is_cached.float().mean((1, 2)))
    return torch.stack(shares).mean(0)


@torch.inference_mode()
def answered(_, rule, one_in, task, count, path, device):
    """Accuracy of a softmax model on the questions in the first `count` rows, with a cache of 1/one_in of the
    row length. For facts, also per quarter of the row in which the fact is stated, and the share of the
    answer's tokens that is still cached. All in %"""
    _, val, data = prepare.load_set(task)
    T = data['row']
    model, _ = load(path, device)
    model = with_cache(model, rule, T // one_in)
    right = []
    places = []
    left = []
    for begin in batches(val, data, 16, count):
        x, y = recipe.rows(val, begin, T, data, device)
        if data['name'].startswith('facts'):
            places.append(prepare.tasks.asked_fact(x.cpu().numpy()))
        state = None
        for some, wanted in zip(x.split(64, 1), y.split(64, 1)):        # the caches of 64 steps fit in memory
            logits, state = model(some, state, wanted >= 0)
            right.append(logits.argmax(-1) == wanted[wanted >= 0])
        if places and rule != 'softmax':
            answer = torch.from_numpy(places[-1] + prepare.tasks.ANSWER_AT).to(device)
            left.append(still_cached(state, answer))
    right = 100 * torch.cat(right).cpu().numpy()
    result = {'accuracy': right.mean().item()}
    if left:
        result['left'] = 100 * torch.cat(left).mean().item()
    if places:
        quarter = np.concatenate(places) * 4 // T
        for i in range(4):
            result[f'quarter {i}'] = right[quarter == i].mean().item()
    return result


def answers(args, suite):
    """Accuracy of softmax models on questions about distant tokens, by the size of the cache."""
    shares = {'softmax': (1,), **dict.fromkeys(POLICIES, (8, 4, 2))}        # cache: 1 / this of a row
    cells = [(form, one_in) for form, of_row in only(args, shares).items() for one_in in of_row]
    by_distance = []
    for name, way in ways_of(args, suite).items():
        T = prepare.load_set(name)[2]['row']
        paths = column(of_seeds(args, suite, way, 'softmax'), 'path')
        for form, one_in in cells:
            key = {'rule': form, 'one_in': one_in, 'task': name, 'count': chosen(args, 128, 256)}
            results = [once(args, suite, form, answered, **key, path=path) for path in paths]
            yield {'form': form, 'part': name, 'share': 1 / one_in,
                   **over_seeds(results, suite.figure, 'left')}
            if 'quarter 0' in results[0] and one_in in (1, ONE_IN):
                by_distance += [{'form': form, 'part': f'{name}, distance', 'distance': T * (4 - i) // 4,
                                 **over_seeds(results, f'quarter {i}')} for i in range(4)]
    yield from by_distance


# ---- suite real: a converted model beside caches of as many bytes ------------------------------------------
TOPICS = 'the moon', 'rain', 'honey bees', 'a bicycle', 'bread', 'a lighthouse'
REQUESTS = ('What is {}?', 'Write a poem about {}.', 'Tell me a long story about {}.',
            'Explain {} to a child.', 'Write ten sentences about {}.')
NAMES = 'Ada', 'Ben', 'Cora', 'Dan'
COLOURS = 'red', 'blue', 'green', 'black', 'white', 'brown', 'pink', 'yellow'
LONGEST = 512           # tokens of an answer


def question(content, data, device, begun=''):
    """A question by the chat template, and the beginning of an answer -> tokens (1, T)"""
    text = chat.rendered([{'role': 'user', 'content': content}], data)
    return torch.tensor([chat.token_ids(text + begun, data)], device=device)


def answered_by(model, x, data):
    """x (1, T) and the model's greedy answer, up to its end or LONGEST tokens -> (1, T')"""
    for n, (token, _) in enumerate(model.generate(x, temperature=0), 1):
        x = torch.cat([x, token], 1)
        if token.item() in data.get('ends', ()) or n == LONGEST:
            return x


def facts_before(texts, data, device):
    """For each text, tokens (T,): four facts, the text, and a question for one fact -> tokens (1, T') up to
    the answer, the index of the answer in COLOURS"""
    draw = np.random.default_rng(0)
    for text in texts.tolist():
        colours = draw.permutation(COLOURS)[:len(NAMES)]
        which = draw.integers(len(NAMES))
        facts = ' '.join(f"{name}'s hat is {colour}." for name, colour in zip(NAMES, colours))
        content = (f'{facts} Remember that. Here is a text:\n\n{vocabulary.decode(text, data)}\n\n'
                   f"What is the colour of {NAMES[which]}'s hat?")
        x = question(content, data, device, f"{NAMES[which]}'s hat is")
        yield x, COLOURS.index(colours[which])


def beside_caches(args, path, teacher, data):
    """The teacher; for each model of --beside, caches of as many bytes, the model, and the model with other
    policies -> dict by name"""
    forms = {'softmax': teacher}
    for source, student in models_beside(args, path, data):
        forms |= dict(convert.caches(teacher, student))
        forms[source] = student
        forms |= {f'{source}, {policy}': model for policy, model in convert.other_policies(student)}
    return forms


@torch.inference_mode()
def real(args, suite):
    """What a converted model recovers of its teacher in rows of a text, by position. If the teacher talks:
    the nats of the teacher's own answers, and facts that were told --lengths tokens before."""
    path, teacher, meta = softmax_model(args)
    if not args.beside:
        raise ValueError(f'--beside= is missing: the models that convert.py made of {path}')
    data = meta['data']
    x, y, of_text, _ = a_text(args, path, meta, max(args.lengths), chosen(args, 2, 16), args.data)
    models = beside_caches(args, path, teacher, data)
    talks = []
    facts = {}
    if data.get('template'):
        requests = [request.format(topic) for request in REQUESTS for topic in TOPICS]
        for request in requests[::chosen(args, 6, 1)]:
            begin = question(request, data, args.device)
            talks.append((begin.shape[1] - 1, answered_by(teacher, begin, data)))
        for T in args.lengths:
            texts, _, _, _ = a_text(args, path, meta, T, chosen(args, 8, 32), args.data)
            facts[T] = list(facts_before(texts, data, args.device))
    candidates = [vocabulary.encode(f' {colour}', data)[0] for colour in COLOURS]
    lines, positions, told = [], [], []
    nats = {form: convert.nats_along(model, x, y, form, args.dtype) for form, model in models.items()}

    def logits(model, x):
        return recipe.predict(model, x, x, None, {}, args.dtype)[0]
    for form, model in models.items():
        gain = nats['softmax'] - nats[form]
        size = bytes_after(model, x.shape[1])
        row = {'form': form, **convert.recovered(gain, of_text), 'state bytes': size}
        if talks:
            said = [(logits(model, x[:, :-1])[begin:], x[0, begin + 1:]) for begin, x in talks]
            found, wanted = map(torch.cat, zip(*said))
            row['nats of answers'] = F.cross_entropy(found, wanted).item()
        lines.append(row)
        for start, end in convert.ranges(x.shape[1], 64):
            share = gain[:, start:end].mean().exp().item()
            positions.append({'form': form, 'part': 'position', 'position': end, 'ours': 100 * share})
        for T, rows in facts.items():
            known = [logits(model, x)[-1, candidates].argmax().item() == answer for x, answer in rows]
            told.append({'form': form, 'part': 'facts', 'distance': T,
                         'accuracy': 100 * statistics.mean(known)})
    return lines + positions + told


# ---- what the suites train, decode and layer compute -------------------------------------------------------
GATES = {               # the gates of a recurrence, besides q, k, v
    'delta': 'write', 'gated_delta': 'write log_f', 'kda': 'write log_f', 'decay': 'log_f log_z',
    'two-sided delta': 'write log_f log_z'}


def inputs(kind, args, T):
    """Random q, k, v (B, H, T, head_dim), and the gates of GATES by their names in `recurrent`. Features are
    not negative. A decay has one number per channel; for gated_delta, one per head."""
    draw = torch.Generator(args.device).manual_seed(args.seed)

    def random(*channels):
        return torch.rand(args.batch, args.heads, T, *channels, generator=draw, device=args.device)

    q, k, v = (random(args.head_dim).to(args.dtype) for _ in range(3))
    x = {'q': q, 'k': l2(k), 'v': v}
    for name in GATES.get(kind, '').split():
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
    given = inputs(rule, args, T)
    x = torch.randn(args.batch, T, 16, device=args.device, dtype=args.dtype)
    if RULES[rule].matrix:
        memory = FastWeights(rule, 16, args.heads, args.head_dim, phi)
    else:
        memory = Cache(rule, 16, args.heads, args.head_dim)
    memory = memory.to(args.device, args.dtype).eval()
    memory.forms = pick_forms()

    @torch.inference_mode()
    def forward():
        return memory(x, given['q'], given['k'], given['v'])
    return forward


def a_training_step(kind, form, args, T):
    """-> a function that runs one form of a recurrence forward and backward, with the gates of kind."""
    given = inputs(kind, args, T)
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
    one = inputs(rule, args, 1)
    if rule == 'softmax':
        cached = grown(one, T)
        step = partial(F.scaled_dot_product_attention, one['q'], *cached.values())
        return step, sum(x.nbytes for x in cached.values())
    many = inputs(rule, args, 1024)
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
    if T < max(paper):
        raise ValueError(f'--lengths={T}: 1/{max(paper)} of it is no row; take {max(paper)} or more')
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


# ---- suite translate: BLEU of the runs ---------------------------------------------------------------------
def bleu_metric():
    """BLEU of sacrebleu, Post 2018, arXiv:1804.08771. ValueError if it is not installed."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ValueError('BLEU needs a package that is not here: pip install sacrebleu') from None
    metric = BLEU()
    metric.corpus_score([''], [['']])                           # without a call it has no signature
    return metric


@torch.inference_mode()
def bleu(args, result, model, meta):
    """BLEU of a run's model on the first sources of the test side. --full: with a beam of 4"""
    beam, count = chosen(args, (1, 100), (4, 1000))
    metric = bleu_metric()
    test, data = prepare.test_side(result['data'], like=meta['data'])
    T = data['row']
    begin = recipe.blocks(len(test), T, data)[:count]
    x, y = recipe.rows(test, begin, T, data, args.device)
    translations = []
    for sources in x[:, :data['source']].split(64):
        for row in model.translate(sources, beam).tolist():
            translations.append(vocabulary.decode(row, data))
    wanted = [vocabulary.decode(row[row >= 0].tolist(), data) for row in y]
    return {'bleu': metric.corpus_score(translations, [wanted]).score, 'sentences': len(translations)}


def translators(args, suite):
    """BLEU on the test side. As in Kasai 2021, we replace the decoder's self-attention and cross-attention;
    `delta` replaces only self-attention. The encoder keeps softmax, except in the lines with `all`."""
    args.remarks['BLEU'] = str(bleu_metric().get_signature())      # fails now if sacrebleu is missing
    return runs(args, suite)


# ---- the suites, their flags, and what the papers found ----------------------------------------------------
def over(sizes, *figures):
    """{size: figure}, from the first size on."""
    return dict(zip(sizes, figures))


TO_600 = 20, 40, 60, 80, 100, 120, 140, 160, 200, 240, 260, 300, 340, 360, 400, 500, 600
TO_200 = 20, 40, 60, 80, 100, 120, 140, 160, 180, 200
SHARES = 64, 32, 16, 8, 4, 2, 1         # the cache is 1 / this of a row
KINDS = {               # kinds of tokens, by the first character
    'newline': '\n', 'punctuation': string.punctuation, 'capital': string.ascii_uppercase,
    'digit': string.digits}
SPEECH = {              # kinds of whole words and of the possessive ending
    "possessive 's": "'s \u2019s", 'article': 'a an the',
    'preposition': 'about above across after against along among around at before behind below beneath '
                   'beside between beyond by down during for from in into near of off on onto out over past '
                   'since through to toward towards under until up upon with within without',
    'pronoun': 'he her hers him his i it its me mine my our ours she that their theirs them these they this '
               'those us we what which who whom whose you your yours himself herself itself myself '
               'themselves',
    'conjunction': 'although and as because but if nor or so than though unless when where whether while yet',
    'auxiliary verb': 'am are be been being can could did do does had has have is may might must shall '
                      'should was were will would'}
ENDINGS = 'ing', 'ed', 'ly'             # of other words; also tokens that end a split word

OF_SIZES = 'elu', 'favor:32', 'dpfp:1', 'favor:64', 'dpfp:2', 'favor:128'        # d, d, 2d, 2d, 4d, 4d

ASSOCIATIONS = (
    Panel('S', 'ours', '1/2 |v - answer|^2; hollow: the paper'),
    Panel('step', 'loss', 'learning curves of the least S', 'curve'))
NO_CONV = '--n_layer=2 --n_embd=64 --lr=1e-3 --batch_size=32 --conv=0 --pos=learned'
TRACKER = '--n_embd=64 --n_head=16 --conv=0 --batch_size=64 --lr=3e-3'
READER = '--causal=false --n_layer=2 --n_embd=64 --n_head=4 --batch_size=32 --lr=2e-3'
CLASSIFIER = '--causal=false --conv=0'
SMALL = f'{CLASSIFIER} --n_layer=2 --n_embd=64 --n_head=4 --batch_size=32 --lr=1e-3'
WORDED = f'{SMALL} --tokenizer=bpe:4096 --dropout=0.3'         # from bytes it learns almost nothing
GOES_ON = {'how': '--batch_size=32 --lr=1e-3', 'convert': '--eval_rows=100000', 'more': 0.3}
CLASSIFIERS = {
    'flags': 'init data seeds steps only dtype', 'quick': {'steps': 100, 'only': 'hedgehog,t2r-hh,t2r'},
    'lines': {
        'softmax': '--rule=softmax', 'trained on': '', 'hedgehog': '--recipe=hedgehog',
        't2r-hh': '--recipe=t2r --distil=ce', 't2r': '--recipe=t2r',
        **{phi: f'--recipe=t2r --phi={phi}' for phi in ('taylor', 'exp:2', 'exp:1', 'favor', 'relu', 'elu')},
        'cosformer': '--recipe=t2r --phi=cosformer:1024'},
    'always': ('softmax', 'trained on'), 'figure': 'accuracy', 'from_checkpoint': of_classes,
    'beside': ('recovered', 'matthews', 'majority'),
    'note': 'in %, of the validation rows; trained on: the control, softmax with as many steps more; '
            'recovered: of the accuracy of the teacher of the same seed; matthews: correlation of answers '
            'with truth'}
GRID = ('sum elu', 'sum rfa', 'sum dpfp', 'sum t2r', 'sum hedgehog',
        *[f'sum t2r:{m}' for m in (4, 8, 16, 32, 64)],                  # sizes of the map, as in Kasai 2021
        'gated elu', 'gated rfa', 'gated dpfp', 'gated t2r', 'gated hedgehog',
        *[f'{rule} {phi}' for rule in ('delta', 'decay')
          for phi in ('identity', 'elu', 'rfa', 'dpfp', 't2r', 'hedgehog')])
GRID_MODEL = '--n_head=4 --conv=0 --pos=learned --val_tokens=32768'
PLACES = '--conv=0 --pos=learned'
DELTA = '--rule=delta --beta_max=1'             # as in the papers; train.py's default is 2
DELTA_ELU = f'{DELTA} --phi=elu'
TRANSLATOR = ('--encoder=3 --n_layer=3 --n_head=4 --n_embd=128 --dropout=0.1 --batch_size=64 --lr=3e-3 '
              '--encoder_rule=softmax')
ASKED = '--rule=softmax --n_layer=2 --n_head=2 --n_embd=64'
FACTS = f'{ASKED} --batch_size=8 --lr=3e-3'

SUITES = {suite.name: suite for suite in [
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
        {'attention': partial(a_training_step, 'softmax', fastweight.softmax),
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
        paper={'tova': over(SHARES[2:], 8.5, 4.8, 3.1, 1.7, 1)}),
    Suite(
        'capacity', 'how many associations a matrix holds', associative, 'lengths seeds steps only',
        {'steps': 1000, 'lengths': '20,60,100,140', 'only': 'softmax,elu,dpfp:1,favor:64'},
        {'steps': 20000, 'lengths': ','.join(map(str, TO_600))},
        {'softmax': ('softmax', '', ''),            # rule, phi, norm
         **{phi: ('sum', phi, 'attn') for phi in (
             'elu', 'dpfp:1', 'dpfp:2', 'dpfp:3', 'favor:64', 'favor:128', 'favor:512')}},
        figure='loss', panels=ASSOCIATIONS,
        source="Schlag 2021, figure 2: least evaluation loss of one run, from the authors' logs",
        paper={
            'softmax': over(TO_600, .0006, .0003, .0001, 0, 0, 0, 0, 0, 0, .0004, 0, 0, 0, .0045, 0, .0089,
                            .03),
            'elu': over(TO_600, .0009, .0008, .0245, .108, .164, .232, .271, .301, .342, .363, .378, .397,
                        .409, .417, .422, .429, .451),
            'dpfp:1': over(TO_600, .0008, .0003, .0004, .0002, .0002, .0083, .051, .102, .173, .225, .27,
                           .286, .343, .336, .342, .386, .411),
            'dpfp:2': over(TO_600, .0003, .0006, .001, .0006, .0005, .0003, .0005, .0004, .0004, .0005, .0084,
                           .068, .129, .159, .164, .276, .323),
            'dpfp:3': over(TO_600, .0005, .0009, .0005, .0007, .0005, .0005, .0009, .0002, .0009, .0005,
                           .0004, .0003, .0001, .0034, .036, .169, .198),
            'favor:64': over(TO_600, .117, .274, .483, .5, .496, *[.5] * 12),
            'favor:128': over(TO_600, .074, .175, .484, .49, *[.5] * 13),
            'favor:512': over(TO_600, .024, .075, .407, .49, .5, .5, .492, *[.5] * 10)}),
    Suite(
        'update', 'associations whose values change: sum, gated, delta', associative,
        'lengths seeds steps only',
        {'steps': 1000, 'lengths': '20,60', 'only': 'sum,gated,delta,sum sum-norm'},
        {'steps': 20000, 'lengths': '20,40,60,80,100,140,200'},
        {'sum': ('sum', 'dpfp:1', 'attn'), 'gated': ('gated', 'dpfp:1', 'attn'),
         'delta': ('delta', 'dpfp:1', 'sum'), 'delta dpfp:2': ('delta', 'dpfp:2', 'sum'),
         'delta elu': ('delta', 'elu', 'sum'), 'delta l2': ('delta', 'dpfp:1', 'l2'),
         'sum sum-norm': ('sum', 'dpfp:1', 'sum')},
        figure='loss', panels=ASSOCIATIONS,
        source="Schlag 2021, figure 5: least evaluation loss of one run, from the authors' logs",
        paper={
            'sum': over(TO_200, .097, .104, .103, .113, .111, .128, .155, .18, .201, .231),
            'delta': over(TO_200, .0008, .001, .0049, .0063, .0001, .0141, .0475, .104, .133, .171),
            'delta dpfp:2': over(TO_200, .001, .0005, .0005, .0008, .0854, .0007, .0003, .0004, .0004, .0008),
            'delta elu': over(TO_200, .0008, .0007, .0005, .094, .15, .215, .257, .276, .315, .342)}),
    Suite(
        'recall', 'accuracy by feature map, from scratch and converted', runs, 'seeds steps only',
        {'steps': 1000},
        lines={
            'softmax': '--rule=softmax', 'delta': DELTA, 'delta dpfp:2': f'{DELTA} --phi=dpfp:2',
            **{phi: f'--rule=sum --phi={phi}' for phi in (
                'taylor', 'hedgehog', 'exp:2', 'exp:1', 'relu', 'elu', 'favor')},
            'cosformer': '--rule=sum --phi=cosformer:128'},
        ways={                  # a convolution or a first layer must bring keys to values
            'one layer': Way(
                'recall-one', '--n_layer=1 --n_head=1 --n_embd=16 --lr=1e-2 --batch_size=64', 4000),
            'two, no conv': Way('recall-kept', f'{NO_CONV} --n_head=4', 3000, full=True),
            'from softmax': Way(            # converts softmax, then trains all weights
                'recall-kept', f'{NO_CONV} --n_head=1', 3000, how='--batch_size=32 --lr=1e-3',
                convert='--recipe=hedgehog --distil=auto --eval_rows=2000', more=0.1, full=True)},
        figure='accuracy', beside=('before',),
        note='in % of 2,000 new rows; before: learned maps are distilled, the rest is not yet trained',
        source='Zhang 2024, tables 2, 3 and figure 4; in its text exp:2 solves it, exp:1 does not',
        paper={'softmax': 100, 'taylor': 100, 'hedgehog': 100, 'elu': 17, 'favor': 17, 'cosformer': 17}),
    Suite(
        'mqar', 'multi-query recall by the bytes of the state', over_widths, 'lengths seeds steps only',
        {'steps': 300, 'lengths': '32,64', 'only': 'softmax,sum,delta'},
        {'steps': 1000, 'lengths': '16,32,64,128'},
        lines={name: f'--rule={name} {"--cache=16" if rule.bounded else ""}' for name, rule in RULES.items()},
        ways={'': Way('mqar', '--n_layer=2 --n_head=2 --batch_size=32 --val_tokens=131072 --lr=1e-2')},
        figure='accuracy', beside=('state bytes',), from_checkpoint=size_of_state,
        panels=(Panel('state bytes', 'ours', 'MQAR, 8 pairs'),), note='accuracy in % of 512 new rows',
        source='Arora 2023, figure 2, which is a picture'),
    Suite(
        'tracking', 'parity and products in groups, beyond the training lengths; --full: two layers, A5',
        tracking, 'seeds steps only',
        lines={'softmax': '--rule=softmax', 'sum': '--rule=sum', 'mamba2': '--rule=mamba2',
               'gated_delta': '--rule=gated_delta --beta_max=1', 'delta beta_max=1': DELTA,
               'delta beta_max=2': '--rule=delta --beta_max=2',
               'delta beta_max=1 writes=2': f'{DELTA} --writes=2',
               'delta beta_max=2 writes=2': '--rule=delta --beta_max=2 --writes=2'},
        ways={'parity': Way('group:Z2', f'{TRACKER} --n_layer=2', 400),
              'S3': Way('group:S3', f'{TRACKER} --n_layer=1', 800),
              'S3, 2 layers': Way('group:S3', f'{TRACKER} --n_layer=2', 800, full=True),
              'A5': Way('group:A5', f'{TRACKER} --n_layer=1', 800, full=True)},
        figure='beyond', from_checkpoint=products,
        panels=tuple(Panel('length', name, f'accuracy, %: {name}', 'curve')
                     for name in ('parity', 'S3', 'S3, 2 layers', 'A5')),
        note='accuracy in % of products of 41 to 256 elements; trained on 1 to 40',
        source='Grazzi 2024, parity: beta up to 1 fails, up to 2 solves it; Siems 2025, S3 by one layer: '
               'only by beta up to 2 and two writes; by two layers one can in theory',
        paper={'mamba2': {'parity': 'no', 'S3': 'no'}, 'gated_delta': {'parity': 'no', 'S3': 'no'},
               'delta beta_max=1': {'parity': 'no', 'S3': 'no'},
               'delta beta_max=1 writes=2': {'parity': 'no', 'S3': 'no'},
               'delta beta_max=2': {'parity': 'yes', 'S3': 'no'},
               'delta beta_max=2 writes=2': {'parity': 'yes', 'S3': 'yes'}}),
    Suite(
        'lra', 'encoders on tasks of the Long Range Arena (Tay 2021) and stand-ins for them', runs,
        'data seeds steps only', {'steps': 60, 'only': 'softmax,hedgehog,elu'},
        lines={'softmax': '--rule=softmax', 'hedgehog': '--rule=sum --phi=hedgehog', 'elu': '--rule=sum',
               't2r': '--rule=sum --phi=t2r', 'favor': '--rule=sum --phi=favor',
               'gated_delta': '--rule=gated_delta --beta_max=1'},
        ways={'listops': Way('listops', READER, 1500), 'mnist': Way('mnist', READER, 2000)},
        figure='accuracy', beside=('majority',), from_checkpoint=of_classes,
        note='in % of the validation rows; majority: of whoever always says the commonest class',
        source='Zhang 2024, table 6: longer rows, images of CIFAR-10',
        paper={'softmax': {'listops': 36.37}, 'hedgehog': {'listops': 37.15}}),
    Suite(
        'glue', 'sentence classifiers with softmax, converted to each feature map', glue,
        ways={'polarity': Way('polarity', WORDED, 1500, **GOES_ON),
              'trec': Way('trec', SMALL, 1500, **GOES_ON), 'cola': Way('cola', SMALL, 1500, **GOES_ON)},
        source='Zhang 2024, tables 1 and 8, BERT on CoLA by Matthews: 58.8; 1 + ELU 28.1, ReLU 39.5, '
               'Performer 24.7, cosFormer 39.9, exp:1 45.9, exp:2 50.0, Hedgehog 59.2; GLUE 99.3 %',
        **CLASSIFIERS),
    Suite(
        'vit', 'the same for pictures', glue,
        ways={'mnist-patch7': Way('mnist-patch7', SMALL, 1500, **GOES_ON)},
        source='Zhang 2024, table 9, ViT-B/16 on ImageNet: 80.3, Hedgehog 79.5, T2R-HH 77.0', **CLASSIFIERS),
    Suite(
        'grid', 'rules x feature maps, from scratch and converted, and T2R by the size of its map', runs,
        'data seeds steps only',
        {'steps': 40, 'only': 'sum elu,sum t2r,delta elu,delta t2r'}, {'steps': 400},
        lines={'softmax': '--rule=softmax',
               **{form: '--rule={} --phi={}'.format(*form.split()) for form in GRID}}, always=('softmax',),
        ways={'from scratch': Way('', GRID_MODEL),
              'converted': Way('', GRID_MODEL, times=4, more=1 / 16,
                               convert=f'--recipe=t2r --distil=auto --eval_rows={GRID_ROWS}')},
        figure='bits per byte', beside=('recovered',), from_checkpoint=on_grid_rows,
        note='bits per byte on 256 rows, evenly spaced over the validation text; from scratch: {steps} steps '
             'of 4 rows; converted: softmax is trained for four times as many, then converted in a quarter '
             'as many; recovered: perplexity of softmax / of the converted, in %',
        source='Mao 2022 compares rules and maps, Kasai 2021 sizes of a map: figures that are not at hand'),
    Suite(
        'language', 'rules, positions, normalisation, carried states and windows', runs,
        'data seeds steps only',
        {'steps': 100, 'only': 'softmax,sum,delta elu,window carry,delta'}, {'steps': 2000},
        lines={                                     # convolutions only where the name says so
            'softmax': f'--rule=softmax {PLACES}', 'softmax rope': '--rule=softmax --n_head=4 --conv=0',
            'sum': f'--rule=sum {PLACES}', 'sum hedgehog': f'--rule=sum --phi=hedgehog {PLACES}',
            'gated': f'--rule=gated --phi=elu {PLACES}', 'delta elu': f'{DELTA_ELU} --norm=sum {PLACES}',
            'sum favor:8': f'--rule=sum --phi=favor:8 {PLACES}',
            'delta favor:8': f'{DELTA} --phi=favor:8 --norm=sum {PLACES}',
            'sum dpfp:1': f'--rule=sum --phi=dpfp:1 {PLACES}',
            'delta dpfp:1': f'{DELTA} --phi=dpfp:1 --norm=sum {PLACES}',
            'delta elu no-out-norm': f'{DELTA_ELU} --norm=sum --out_norm=false {PLACES}',
            'delta elu attn-norm': f'{DELTA_ELU} --norm=attn {PLACES}',
            'delta favor:8 attn-norm': f'{DELTA} --phi=favor:8 --norm=attn {PLACES}',
            'sum no-positions': '--rule=sum --conv=0',
            'sum no-positions carry': '--rule=sum --conv=0 --carry',
            'delta elu no-positions': f'{DELTA_ELU} --norm=sum --conv=0',
            'delta elu no-positions attn-norm': f'{DELTA_ELU} --norm=attn --conv=0',
            'delta elu no-positions carry': f'{DELTA_ELU} --norm=sum --conv=0 --carry',
            'window carry': '--rule=window --cache=128 --conv=0 --carry', 'delta': f'{DELTA} --conv=0',
            'decay': '--rule=decay --conv=0', 'gated_delta': '--rule=gated_delta --beta_max=1 --conv=0',
            'delta convolutions': f'{DELTA} --conv=4',
            'delta convolutions carry': f'{DELTA} --conv=4 --carry'},
        ways={'quick': Way('', '--val_tokens=16384', full=False),         # all on the same part of the text
              'full': Way('', '--val_tokens=262144', full=True)}, figure='bits per byte',
        beside=('bits per byte carried', *[f'with {cache}' for cache in WINDOWS]), from_checkpoint=windows,
        note='bits per byte after {steps} steps of 4 rows of 128; carried: with the state handed on; with 8, '
             '64, 128: tokens of a window that is carried',
        source='Schlag 2021, tables 2 to 5: test perplexity of WikiText-103, small models (40 M parameters) '
               'and medium ones (90 M); small ones with attn-norm from lines that are not printed; attn-norm '
               "without positions has 32.2 in their log; window: Transformer-XL of 1, 8, 16 times delta's "
               'state; sum with a carried state is above 260; delta without sum normalisation diverges',
        paper={'softmax': 'small 34.1, medium 29.6', 'sum': 'small 38.3, medium 33.0',
               'delta elu': 'small 35.5, medium 31.5', 'sum favor:8': 'small 39.6, medium 33.8',
               'delta favor:8': 'small 37.2, medium 31.8', 'sum dpfp:1': 'small 38.8',
               'delta dpfp:1': 'small 35.0', 'delta elu attn-norm': 'small 37.2, medium 32.1',
               'delta favor:8 attn-norm': 'small 37.5, medium 32.4',
               'delta elu no-positions': 'medium 31.1', 'delta elu no-positions attn-norm': 'medium 31.2',
               'delta elu no-positions carry': 'medium 29.4',
               'window carry': 'medium, with 8: 65.5, 64: 30.1, 128: 27.4'}),
    Suite(
        'translate', 'BLEU of translators, trained and converted', translators, 'data seeds steps only',
        {'steps': 60, 'only': 'softmax,elu,t2r converted'},
        lines={                 # flags of convert.py for `converted`; `all`: the encoder, too
            'softmax': '--rule=softmax', 'elu': '--rule=sum --phi=elu', 'favor': '--rule=sum --phi=favor',
            'rfa': '--rule=sum --phi=rfa', 'rfa-gate': '--rule=gated --phi=rfa --cross=sum',
            'dpfp': '--rule=sum --phi=dpfp', 't2r': '--rule=sum --phi=t2r',
            'hedgehog': '--rule=sum --phi=hedgehog', 'delta': f'{DELTA} --cross=softmax',
            't2r converted': '--recipe=t2r --swap=self,cross',
            'elu converted': '--recipe=t2r --swap=self,cross --phi=elu',
            'rfa converted': '--recipe=t2r --swap=self,cross --phi=rfa',
            't2r kl converted': '--recipe=t2r --swap=self,cross --loss=kl',
            'hedgehog converted': '--recipe=hedgehog --swap=self,cross', 't2r all converted': '--recipe=t2r',
            'softmax converted': ''},
        ways={'multi30k': Way('multi30k', TRANSLATOR, 3000, how='--batch_size=64 --lr=3e-3',
                              convert='--eval_rows=100000', more=0.5)},
        figure='bleu', beside=('accuracy', 'sentences'), from_checkpoint=bleu,
        note='BLEU of the test side, greedy, with --full by a beam of 4; accuracy: of the next token, in % '
             'of the validation rows; softmax converted: the control, only trained on',
        source='BLEU of WMT14 En-De: Schlag 2021, table 1, 64 features a head as here, but DPFP 256; t2r '
               'converted: Kasai 2021, table 2, beside a better softmax',
        paper={'softmax': 27.7, 'elu': 26.8, 'favor': 24.4, 'dpfp': 26.9, 't2r converted': 28.7}),
    Suite(
        'monotone', 'attention weights over q.k for each feature map, also distilled', monotone,
        'init data steps row only', {'steps': 30}, {'steps': 300},
        dict.fromkeys(['elu', 'relu', 'favor', 'exp:1', 'exp:2', 'cosformer', 'taylor', 't2r', 'hedgehog',
                       'hedgehog:listing']),
        panels=(Panel('q.k / sqrt(d)', 'weight', 'one query: weights should grow with q.k', 'query'),
                Panel('entropy', 'order kept', 'spiky and monotone: upper left')),
        note='means over layers; distilled: {steps} steps of 4 rows; entropy in nats; order kept: share of '
             'pairs in the order of q.k; where Taylor grows: share of q.k / sqrt(d) above -1',
        source='Zhang 2024, figures 2, 3 and 7, which are pictures'),
    Suite(
        'transfer', 'distilled maps on another text and on longer rows', transfer, 'init data steps row only',
        {'steps': 40, 'only': 'hedgehog,hedgehog other,hedgehog untrained,elu'}, {'steps': 300},
        {'hedgehog': ('--distil=ce', 'own'),                                # flags, and the text to distil on
         'hedgehog other': ('--distil=ce', 'other'), 'hedgehog untrained': ('--distil=none', 'own'),
         't2r-hh': ('--phi=t2r --distil=ce', 'own'), 't2r-hh other': ('--phi=t2r --distil=ce', 'other'),
         'elu': ('--phi=elu --distil=none', 'own')},
        panels=(Panel('tokens a row', 'KL to teacher', "on the teacher's own text", 'own'),
                Panel('tokens a row', 'KL to teacher', 'on another text', 'other')),
        note='maps are distilled in {steps} steps of 32 rows, on the text of the teacher unless their name '
             'says another; KL to teacher: of attention weights, in nats',
        source='Zhang 2024, tables 4 and 5: KL on three other tasks is lower than that of other linear '
               'attention, and alike from 256 to 4,096 tokens'),
    Suite(
        'keys', 'how many keys of a softmax model a matrix tells apart, no training', keys,
        'init data lengths row only', {'lengths': '16,64,512'}, {'lengths': '16,32,64,128,256,512'},
        {'softmax': ('softmax', '', ''),            # rule, phi, norm
         **{f'sum {phi}': ('sum', phi, 'attn') for phi in OF_SIZES},
         **{f'delta {phi}': ('delta', phi, 'sum') for phi in OF_SIZES},
         **{f'delta {phi} l2': ('delta', phi, 'l2') for phi in ('silu', 'elu', 'dpfp:1', 'dpfp:2')}},
        panels=(Panel('keys', 'found', 'keys found, %'), Panel('keys', 'error', '1/2 |v - answer|^2')),
        note='found: % of the keys whose own value is the largest in the answer, with a 95 % interval over '
             'rows; error: 1/2 |v - answer|^2',
        source='Schlag 2021, section 4.1: at most as many keys as features can be orthogonal'),
    Suite(
        'cache', 'perplexity of a softmax model with few cached tokens, no training', cache,
        'init data lengths row only dtype', {'only': ','.join(POLICIES)},
        lines={**{policy: (policy, 4) for policy in ('tova', *fastweight.POLICIES)},      # rule, sinks
               'sink 1': ('sink', 1), 'tova-sink 1': ('tova-sink', 1), 'cut': ('softmax', 0)},
        panels=(Panel('cached', 'more than full, %', 'perplexity with few cached tokens, no training'),),
        note='of full: perplexity over that with all tokens cached; of first: over that of the first line '
             'with as many cached; low, high and from, to: their 95 % intervals over rows',
        source='Oren 2024, table 3: LLaMA-2-7B on PG-19, at the same share of its 4,096 tokens',
        paper={'cut': over(SHARES, 17.65, 12.97, 10.39, 8.92, 8.04, 7.50, 7.16),
               'sink 1': over(SHARES, 10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
               'tova-sink': over(SHARES, 9.63, 8.33, 7.72, 7.41, 7.25, 7.17, 7.16),
               'tova-sink 1': over(SHARES, 9.53, 8.31, 7.71, 7.41, 7.25, 7.17, 7.16),
               'h2o-layer': over(SHARES, 10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
               'window': over(SHARES, 4812.27, 4025.01, 3275.58, 2184.62, 1001.29, 240.17, 7.16),
               'sink': over(SHARES, 10.28, 8.98, 8.19, 7.73, 7.46, 7.30, 7.16),
               'h2o': over(SHARES, 10.22, 8.97, 8.21, 7.75, 7.49, 7.32, 7.16),
               'tova': over(SHARES, 9.53, 8.32, 7.71, 7.41, 7.25, 7.17, 7.16),
               'tova-head': over(SHARES, 11.13, 9.55, 8.69, 7.90, 7.52, 7.27, 7.16)}),
    Suite(
        'answers', 'accuracy of such models on questions about distant tokens', answers,
        'data seeds steps only', {'steps': 500},
        lines={'softmax': ''}, figure='accuracy',
        ways={'recall-kept': Way('recall-kept', f'{ASKED} --batch_size=32 --lr=3e-3', 1000, full=True),
              'mqar': Way('mqar', f'{ASKED} --batch_size=32 --lr=1e-2', 1000, full=True),
              'facts-256': Way('facts-256', FACTS, 3000),
              'facts': Way('facts', '--batch_size=4 --lr=2e-3', 1000, first='facts-256', full=True),
              'facts-text-256': Way('facts-text-256', '--batch_size=8 --lr=3e-3', 3000, first='facts-256',
                                    full=True)},
        panels=(*[Panel('share', 'ours', name, name)
                  for name in ('recall-kept', 'mqar', 'facts-256', 'facts', 'facts-text-256')],
                *[Panel('distance', 'ours', f'{name}, 1/{ONE_IN} cached', f'{name}, distance')
                  for name in ('facts-256', 'facts', 'facts-text-256')]),
        note='accuracy in % of 128 new rows (--full: 256), exact to 9 (6) points for one seed; distance: at '
             f'most so many tokens since the fact, with 1/{ONE_IN} of the row cached; left: % of the '
             'tokens at the answer that are still cached when it is asked for',
        source='Oren 2024, models of 7B: with TOVA QASPER needs about 1/2 of the cache, SQuALITY 1/4 to 1/8'),
    Suite(
        'kept', 'which tokens TOVA keeps cached, and for how long', kept, 'init data lengths row', one=True,
        panels=(Panel('share of text', 'steps kept', 'how long, by kind of token'),),
        source='Oren 2024, section 5: 73 to 76 % of what is cached is recent, the first token stays '
               'practically always; of 512 cached of 4,096 a token stays 481 steps, a possessive ending '
               '1,393, a quotation mark 1,101, a full stop 645, a plural proper noun 578, a line end 550'),
    Suite(
        'far', 'nats of such models by position, over 4,096 tokens; --full: 70,000', far,
        'init data lengths row only beside dtype',
        {'lengths': '4096', 'only': 'softmax,window,sink,sink compressed,tova,tova compressed'},
        {'lengths': '70000'},
        {'softmax': ('softmax', 'true'), 'window': ('window', 'true'),      # cache policy, positions
         'sink': ('sink', 'true'), 'sink compressed': ('sink', 'compress'),
         'h2o': ('h2o', 'true'), 'h2o compressed': ('h2o', 'compress'), 'tova': ('tova', 'true'),
         'tova compressed': ('tova', 'compress'), 'tova log': ('tova', 'log'), 'tova sqrt': ('tova', 'sqrt'),
         'tova-head': ('tova-head', 'true'),
         'tova-head compressed': ('tova-head', 'compress')}, one=True,
        panels=(Panel('position', 'nats', 'one long text', 'position'),),
        note='position: the range from the line above up to here; in rows: each row from an empty state',
        source='Oren 2024, appendix: up to 70,000 tokens TOVA loses less than 0.5, compressed, 512 cached'),
    Suite(
        'real', 'a converted model beside caches of as many bytes', real, 'init data lengths dtype beside',
        {'lengths': '256,1024'}, {'lengths': '256,512,1024,2048'},
        panels=(Panel('position', 'ours', 'recovered of the teacher, %', 'position'),
                Panel('distance', 'accuracy', 'facts told so many tokens before', 'facts')),
        note='recovered: perplexity of softmax / of the line; low, high: a 95 % interval over rows; '
             "position: up to here; nats of answers: per token of the teacher's own answers to questions; "
             'accuracy: in %, of which a guess knows 12.5',
        source='no paper has such a table')]}


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
    dtype: str = flag('auto', f'{of("dtype")}: number type; auto: bfloat16 on a GPU',
                      ['auto', 'float32', 'bfloat16'])
    init: str = flag('', f'{of("init")}: a softmax model, as train.py --rule=softmax makes; '
                     'default: out/ckpt.safetensors; glue and vit train one', path=True)
    data: str = flag('', f'{of("data")}: a set of the suite, or a text; default: by suite', path=True)
    beside: str = flag('', f'{of("beside")}: models to compare with, in the same tokens, separated by '
                           'commas: out/delta/ckpt.safetensors', path=True)
    row: int = flag(0, f'{of("row")}: tokens in a row; 0: as in training, at most 512', low=0, high=2 ** 24)
    budget: int = flag(74, f'{of("budget")}: memory for all states, in MB', low=1, high=2 ** 20)
    remarks: dict = field(default_factory=dict)     # no flag: what a suite says beside its table


def settings(argv):
    """-> the suite, Args"""
    name = 'decode'
    if argv and not argv[0].startswith('-'):
        name = argv[0]
        argv = argv[1:]
    for late in SUITES.keys() & set(argv):
        raise ValueError(f'{late}: one suite at a time, and it comes first: python bench.py {late}')
    if name not in SUITES:
        raise ValueError(f'{name}: no such suite, --help has a line on each; choose from {", ".join(SUITES)}')
    about = '\n'.join(f'    python bench.py {suite.name:10} {suite.about}' for suite in SUITES.values())
    what, _, how = (__doc__ or '').partition('\n\n')
    [given] = parse(argv, f'{what}\n\n{about}\n\n{how}', Args, first=OFTEN)
    takes = f'{ALWAYS} {SUITES[name].flags}'
    for flag_name in given:
        if flag_name not in takes.split():
            raise ValueError(f'--{flag_name} means nothing for {name}: it takes {takes}')
    args = Args(**given)
    if len(numbers(args.lengths)) > 1 and SUITES[name].one:
        raise ValueError(f'--lengths={args.lengths}: this suite takes one')
    return SUITES[name], args


@script
def main(argv):
    """Run one suite, with its defaults for the flags that were not given."""
    began = time.perf_counter()
    suite, args = settings(argv)
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ['OMP_NUM_THREADS'] = str(args.threads)       # of the trainings that it starts
    dtype = torch.bfloat16 if device.type == 'cuda' else torch.float32
    if args.dtype != 'auto':
        dtype = getattr(torch, args.dtype)
    own = {'seeds': chosen(args, 1, 3), **chosen(args, suite.quick, suite.full)}
    missing = {name: own[name] for name in own if not getattr(args, name)}
    args = dataclasses.replace(args, **missing, device=device, dtype=dtype)
    args.lengths = numbers(args.lengths)
    args.seeds = range(args.seed, args.seed + args.seeds)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    report_suite(args, suite, list(suite.measure(args, suite)))
    minutes = (time.perf_counter() - began) / 60
    print(f'{minutes:.1f} minutes, threads: {torch.get_num_threads()}, torch {torch.__version__}', flush=True)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C: also ends the run it started
    sys.exit(main())
