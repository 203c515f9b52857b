"""What the papers' suites share. A suite says what to measure, on which lines, and what its paper found. In
many, each line is a run of train.py or convert.py (`runs`). Others study a trained softmax model on a text
(`model_and_rows`). Results are printed as a table, and drawn beside the paper's.
"""
import contextlib
import csv
import glob
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

import convert
import train
from common import files
from common.terminal import table
from common.weights import weights_digest
from data import prepare
from data.kinds import Data
from fastweight import RULES
from model import Cache, FastWeights, load, pick_forms

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IN_PERCENT = 'accuracy', 'before', 'recovered', 'matthews', 'majority'
DELTA = '--rule=delta --beta_max=1'             # as in the papers; train.py's default is 2


def memory_of(rule, n_embd, n_head, head_dim, phi='', norm=''):
    """What a layer of this rule keeps: a matrix, or keys and values. It computes with the fastest forms."""
    if RULES[rule].matrix:
        memory = FastWeights(rule, n_embd, n_head, head_dim, phi, norm)
    else:
        memory = Cache(rule, n_embd, n_head, head_dim)
    memory.forms = pick_forms()
    return memory


# ---- the parts of a suite ----------------------------------------------------------------------------------
class Panel(NamedTuple):
    """One plot: a line per form over x. If y is `form`, the median and range of each form along x."""
    x: str                          # a column of the table; so is y
    y: str
    title: str = ''                 # may contain flags: {heads}
    part: str = ''                  # which rows of the table

    def shown(self, rows):
        """The rows of a table that it shows."""
        return [row for row in rows if row.get('part', '') == self.part and self.y in row]


class Line(NamedTuple):
    """A line of a suite of commands: how its model is made."""
    flags: str = ''                 # of train.py, or of convert.py
    begins: str = 'from nothing'    # or from the line `softmax`, which is `converted` or only `trained on`
    distils: int = 0                # stage 1 of a conversion gets 1 / this of the steps; 0: there is none


class Way(NamedTuple):
    """How a suite of commands runs its lines: the data, the model, the number of steps."""
    data: str                       # '': the text of --data
    train: str = ''                 # flags of train.py
    steps: int = 0                  # if --steps is not given
    times: int = 1                  # multiplies the steps
    converts: bool = False          # all lines are converted from `softmax`, also those trained from nothing
    how: str = ''                   # more flags of lines that begin from `softmax`
    convert: str = ''               # more flags of convert.py
    more: float = 0.0               # their steps, as a share of the steps of `softmax`
    first: str = ''                 # the way whose softmax model it begins with
    full: bool | None = None        # True: only with --full; False: only without


@dataclass
class Suite:
    """What to measure, the flags, the plots, and what a paper found."""
    name: str
    about: str                      # for --help
    measure: Callable               # (args, suite): yields rows of the table
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


def from_nothing(table):
    """Lines that train.py trains, by their flags."""
    return {form: Line(flags) for form, flags in table.items()}


def conversions(table, distils=0):
    """Lines that convert.py makes of `softmax`, by their flags."""
    return {form: Line(flags, 'converted', distils) for form, flags in table.items()}


def over(sizes, *figures):
    """{size: figure}, from the first size on."""
    return dict(zip(sizes, figures))


def chosen(args, quick, full):
    """-> the value for a quick run or for a full one."""
    return full if args.full else quick


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


def report_suite(args, suite):
    """Measure, print each line of the table as it comes, write and draw it."""
    rows = []

    def to_print():
        for row in suite.measure(args, suite):
            rows.append(row)
            if row.get('part') not in FOR_THE_PICTURE:
                yield row

    table(to_print())
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    with open(f'{args.out}/{suite.name}.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(suite.note.format_map(vars(args)))
    print(f'paper: {suite.source}')
    draw(args, suite, rows)


def draw(args, suite, measured):
    """Draw the suite's picture, if there is something to plot: its panels or, for commands, one per way."""
    panels = suite.panels
    if not panels:
        panels = [Panel('ours', 'form', way, way) for way in suite.ways]
    shown = [(panel, panel.shown(measured)) for panel in panels]
    shown = [(panel, rows) for panel, rows in shown if rows]
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
    labels = {'ours': suite.figure, 'form': '', 'T': 'tokens'}
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
        axes.set_xscale('log', nonpositive='mask')
    if panel.y in LOGARITHMIC:
        axes.set_yscale('log', nonpositive='mask')
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
    paths = sorted(glob.glob(f'{ROOT}/*.py') + glob.glob(f'{ROOT}/*/*.py'))
    return files.short_hash(b''.join(map(files.read_file, paths)))


def once(args, suite, form, run, **key):
    """-> the dict that run(out, **key) returns, with its minutes. It is kept in --out and reused as long as
    code and key are the same. out: a folder for this run alone. The key gets the device, too"""
    key['device'] = str(args.device)
    digest = files.short_hash(json.dumps(key).encode())
    out = os.path.join(args.out, suite.name, re.sub('[^a-z0-9]+', '-', f'{form}-{digest}'))
    mark = {'code': code(), **key}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):       # missing, broken
        kept = json.loads(files.read_file(f'{out}.json'))
        if kept.pop('key', None) == mark:
            return kept
    began = time.perf_counter()
    result = run(out, **key)
    result['minutes'] = (time.perf_counter() - began) / 60
    files.write_json(f'{out}.json', {'key': mark, **result})
    return result


def run_command(out, file, flags, seed, reads, device):
    """Run python FILE FLAGS --seed --device --out -> its results and, as `path`, its checkpoint. If it fails,
    ValueError with its last line."""
    typed = f'{flags} --device={device} --seed={seed} --out={shlex.quote(out)}'
    print(f'python {file} {typed}', file=sys.stderr, flush=True)
    words = [sys.executable, os.path.join(ROOT, file), *shlex.split(typed)]
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
    result = once(args, suite, form, run_command, **key)
    if suite.from_checkpoint:
        def more_results(*_, **same):
            return suite.from_checkpoint(args, result, *load(result['path'], args.device))
        more = once(args, suite, f'{form} seen', more_results, **key, full=args.full)
        result |= {**more, 'minutes': result['minutes']}
    return result


def run_train(args, suite, form, flags, steps, seed):
    """Run train.py -> its result.json"""
    return a_run(args, suite, form, 'train.py', f'{flags} --steps={steps} --eval_every={steps}', seed)


def run_convert(args, suite, form, source, flags, first, steps, seed):
    """Run convert.py on a model file, with `first` steps of stage 1 and `steps` of stage 2 -> its result.json
    and convert.json"""
    flags = (f'--from={shlex.quote(source)} {flags} --distil_steps={first} --steps={steps} '
             f'--eval_every={max(1, first + steps)} --controls=false')
    return a_run(args, suite, form, 'convert.py', flags, seed)


def a_line(args, suite, way, form, seed):
    """Run one line in one way, and the line `softmax` before it if it begins from that."""
    line = suite.lines[form]
    name = f'{form} {way.data}'
    data = f'--data={shlex.quote(way.data)}'
    steps = way.times * (args.steps or way.steps)
    begins = line.begins
    if way.converts and form != 'softmax':
        begins = 'converted'

    if begins == 'from nothing':
        start = way.train
        if way.first:
            shorter = a_line(args, suite, suite.ways[way.first], form, seed)
            start += f' --init={shlex.quote(shorter["path"])}'
        return run_train(args, suite, name, f'{data} {start} {line.flags}', steps, seed)

    softmax = a_line(args, suite, way, 'softmax', seed)
    more = max(1, int(steps * way.more))
    if begins == 'converted':
        flags = f'{line.flags} {data} {way.how} {way.convert}'
        first = more // line.distils if line.distils else 0
        return run_convert(args, suite, name, softmax['path'], flags, first, more - first, seed)
    flags = f'--init={shlex.quote(softmax["path"])} {data} {way.how}'
    result = run_train(args, suite, name, flags, more, seed)
    return {**result, 'recovered': 100 * result['accuracy'] / softmax['accuracy']}


def ways_of(args, suite):
    """The ways to run. --data selects among those that name their data."""
    ways = {name: way for name, way in suite.ways.items() if way.full in (None, args.full)}
    sets = [way.data for way in ways.values()]
    if args.data and all(sets) and args.data not in sets:
        raise ValueError(f'--data={args.data}: choose from {", ".join(sets)}')
    to_run = {}
    for name, way in ways.items():
        if args.data and way.data and args.data != way.data:
            continue
        data = args.data or way.data or 'stdlib'
        _, _, meta = prepare.load_set(data)
        if not way.data and meta.kind != 'text':
            raise ValueError(f'--data={data}: a task; this suite wants a text')
        to_run[name] = way._replace(data=data)
    return to_run


def over_seeds(results, key, *beside):
    """Columns of the table for the runs of a line: median and range of a figure, the minutes, and the medians
    of the keys `beside`, if the runs have them."""
    values = column(results, key)
    row = {'ours': statistics.median(values), 'least': min(values), 'most': max(values),
           'minutes': sum(column(results, 'minutes'))}
    for name in beside:
        found = [result[name] for result in results if result.get(name) is not None]
        row[name] = statistics.median(found) if found else None
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
    for (name, way), form in itertools.product(ways_of(args, suite).items(), forms):
        results = [a_line(args, suite, way, form, seed) for seed in args.seeds]
        yield a_row(suite, form, results, name)


def task_rows(val, data, many, device, count=None):
    """Rows of a task, `many` at a time: x, y as train.rows has them. count: only the first so many rows"""
    begin = train.blocks(len(val), data.row, data)[:count]
    for some in np.split(begin, range(many, len(begin), many)):
        yield train.rows(val, some, data.row, data, device)


def bits(args, result, model, T, many=None, carried=False):
    """Bits per byte of a model on rows of T tokens of a run's validation text. They are those that train.py
    evaluated, or `many` rows spaced over the whole text."""
    _, val, meta = prepare.load_set(result['data'])
    if many is None:
        val = val[:result['val_tokens']]
    begin = train.blocks(len(val), T, meta, many)
    loss, _ = train.Rows(None, val, meta, T, args.device).evaluate(model, begin, carried)
    x, y = train.rows(val, begin, T, meta, args.device)
    return train.of_part(meta, y[y >= 0].tolist()).bits_a_nat() * loss


# ---- a trained softmax model, for the suites that need one -------------------------------------------------
def softmax_model(args, tasks=False):
    """The model of --init -> path, model, metadata. tasks: also accept an encoder, and a model of a task"""
    path = args.init or 'out/ckpt.safetensors'
    model, meta = load(path, args.device)
    of_texts = model.config.causal and meta['data'].kind == 'text'
    if not convert.can_become_an_rnn(model.config.rules) or not (of_texts or tasks):
        raise ValueError(f'--init={path}: no softmax layers in a model of texts; python train.py '
                         '--rule=softmax --n_head=4 --out=out/softmax makes one')
    return path, model, meta


def a_text(args, path, meta, T, count, name):
    """Load a text in a model's tokens; '' is the model's training text -> x, y (count, T) of its validation
    side, its metadata, its name. Labelled sentences are read one after the other."""
    _, val, data, name = prepare.for_model(path, meta, name, T)
    if meta['data'].classes and data.kind == 'labels':
        val = val.reshape(-1, 2, data.row)[:, 0]
        val = val[val != data.pad]
        if len(val) <= T:
            raise ValueError(f'--data={name}: too short for rows of {T}')
    elif data.kind != 'text':
        raise ValueError(f'--data={name}: a task; this suite wants a text')
    begin = torch.linspace(0, len(val) - T - 1, count).long().tolist()
    x, y = train.rows(val, begin, T, Data(bos=meta['data'].bos), args.device)
    return x, y, data, name


def tokens_a_row(args, config):
    """The tokens in a row: --row or that of training, at most PRETRAINED_ROW. ValueError if the model knows
    fewer positions"""
    if args.row == 1 or args.row > config.block_size:
        raise ValueError(f'--row={args.row}: expected 2 to {config.block_size} tokens, which the model knows')
    return args.row or min(config.block_size, train.PRETRAINED_ROW)


def model_and_rows(args, quick, full):
    """A softmax model, and evenly spaced rows of its validation text. quick, full: how many, but at most 16
    of a large model -> model, x (count, T), metadata of the text"""
    path, model, meta = softmax_model(args)
    count = chosen(args, quick, full)
    if train.is_large(model):
        count = min(count, 16)
    x, _, data, _ = a_text(args, path, meta, tokens_a_row(args, model.config), count, args.data)
    return model, x, data
