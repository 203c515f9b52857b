"""What measures in the papers' suites. In many, each line is a run of train.py or convert.py (`runs`). Others
study a trained softmax model on a text (`model_and_rows`).
"""
import contextlib
import glob
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

import train
from common import files
from common.weights import weights_digest
from data import prepare
from data.kinds import Data
from data.rows import of_part, rows_of
from fastweight import RULES
from students.rivals import can_become_an_rnn
from memory import Cache, FastWeights, pick_forms
from model import load
from papers.suites import IN_PERCENT, chosen, column, only
from runs.starts import PRETRAINED_ROW, is_large

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def memory_of(rule, n_embd, n_head, head_dim, phi='', norm=''):
    """What a layer of this rule keeps: a matrix, or keys and values. It computes with the fastest forms."""
    if RULES[rule].matrix:
        memory = FastWeights(rule, n_embd, n_head, head_dim, phi, norm)
    else:
        memory = Cache(rule)
    memory.forms = pick_forms()
    return memory


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
            model, meta = load(value)
            reads.append(weights_digest(model, meta))
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
        first = 0
        if line.distils:
            first = more // line.distils
        rest = more - first
        return run_convert(args, suite, name, softmax['path'], flags, first, rest, seed)
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
    row = {'ours': statistics.median(values), 'least': min(values), 'most': max(values)}
    row['minutes'] = sum(column(results, 'minutes'))
    for name in beside:
        found = [result[name] for result in results if result.get(name) is not None]
        row[name] = None
        if found:
            row[name] = statistics.median(found)
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
    """Rows of a task, `many` at a time: x, y as `Task.rows` has them. count: only the first so many rows"""
    task = rows_of(None, val, data, data.row, device)
    begin = task.blocks()[:count]
    for some in np.split(begin, range(many, len(begin), many)):
        yield task.rows(val, some)


def bits(args, result, model, T, many=None, carried=False):
    """Bits per byte of a model on rows of T tokens of a run's validation text. They are those that train.py
    evaluated, or `many` rows spaced over the whole text."""
    _, val, meta = prepare.load_set(result['data'])
    if many is None:
        val = val[:result['val_tokens']]
    data = rows_of(None, val, meta, T, args.device)
    begin = data.blocks(many)
    if carried:
        data = data.in_order(T)
    loss, _ = train.evaluate(model, data, begin, carried)
    x, y = data.rows(val, begin)
    return of_part(meta, y[y >= 0].tolist()).bits_a_nat() * loss


# ---- a trained softmax model, for the suites that need one -------------------------------------------------
def softmax_model(args, tasks=False):
    """The model of --init -> path, model, metadata. tasks: also accept an encoder, and a model of a task"""
    path = args.init or 'out/ckpt.safetensors'
    model, meta = load(path, args.device)
    of_texts = model.task == 'complete' and meta['data'].kind == 'text'
    if not can_become_an_rnn(model.config.rules) or not (of_texts or tasks):
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
    x, y = rows_of(None, val, Data(bos=meta['data'].bos), T, args.device).rows(val, begin)
    return x, y, data, name


def tokens_a_row(args, config):
    """The tokens in a row: --row or that of training, at most PRETRAINED_ROW. ValueError if the model knows
    fewer positions"""
    if args.row == 1 or args.row > config.block_size:
        raise ValueError(f'--row={args.row}: expected 2 to {config.block_size} tokens, which the model knows')
    return args.row or min(config.block_size, PRETRAINED_ROW)


def model_and_rows(args, quick, full):
    """A softmax model, and evenly spaced rows of its validation text. quick, full: how many, but at most 16
    of a large model -> model, x (count, T), metadata of the text"""
    path, model, meta = softmax_model(args)
    count = chosen(args, quick, full)
    if is_large(model):
        count = min(count, 16)
    x, _, data, _ = a_text(args, path, meta, tokens_a_row(args, model.config), count, args.data)
    return model, x, data
