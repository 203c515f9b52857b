"""Oren 2024, Transformers are Multi-State RNNs (arXiv:2401.06104): TOVA.

A transformer is an RNN whose state, the keys and values of all tokens, grows. To bound it a policy evicts a
token at each step, without further training. TOVA evicts the token that the last query weighs least, on
average over the heads of a layer; no token is protected.
- Table 3 (`cache`): perplexity of LLaMA-2-7B on PG-19. With 1/8 of 4,096 tokens cached TOVA has 7.41, H2O
  7.75, a window 2,185; all cached have 7.16. Table 1 (`batch` in bench.py): larger batches, more throughput.
- Questions about long texts (`answers`): QASPER needs 1/2 of the cache, SQuALITY 1/8 to 1/4.
- Section 5, table 2 (`kept`): most of what is kept is recent; the first token and punctuation stay.
- An appendix (`far`): it reads 70,000 tokens if large gaps between positions are compressed.
"""
import itertools
import math
import statistics
import string

import numpy as np
import torch

from caches import POLICIES
from common.terminal import progress
from look.watch import through
from common.weights import state_bytes
from data import prepare, tasks, vocabulary
from model import load
from papers.harness import (a_line, a_text, model_and_rows, once, over_seeds, softmax_model, task_rows,
                            tokens_a_row, ways_of)
from papers.suites import Panel, Suite, Way, chosen, from_nothing, only, over
from students import judge, rivals

SHARES = 64, 32, 16, 8, 4, 2, 1         # the cache is 1 / this of a row
EVICTING = 'random', 'window', 'sink', 'h2o', 'tova-head', 'tova'


def with_cache(model, policy, cache, sinks=4, **changes):
    """The same softmax model with at most `cache` cached tokens per layer; `softmax` is the model as it is.
    changes: other `a Config`"""
    rules = [policy if rule == 'softmax' else rule for rule in model.config.rules]
    return rivals.cached_by(model, rules, cache=cache, sinks=min(sinks, cache - 1), **changes)


def nats_in_pieces(args, model, x, y, size, what):
    """Nats (B, T) of the targets y where x is read in pieces of `size`, each from an empty state."""
    nats = []
    for piece, targets in zip(x.split(size, 1), y.split(size, 1)):
        nats.append(judge.nats_along(model, piece, targets, what, args.dtype))
    return torch.cat(nats, 1)


def over_perplexity(nats, base, names):
    """Perplexity over that of `base`, both from nats (rows, T), and its 95 % interval, as columns `names`"""
    found = judge.recovered(nats - base)
    return dict(zip(names, [found['recovered'], found['low'], found['high']]))


def with_few_cached(args, suite):
    """Perplexity of a softmax model whose layers cache few tokens, without further training. `cut`: rows as
    short as the cache, each from an empty state."""
    teacher, x, _ = model_and_rows(args, 16, 64)
    T = x.shape[1]
    print(f'rows: {len(x)}, tokens in a row: {T}')
    shares = chosen(args, (32, 16, 8, 4, 1), SHARES)
    sizes = args.lengths or sorted({T // n for n in shares if n <= T})
    lines = only(args, suite.lines)
    cells = [(T, 'softmax'), *itertools.product(sizes, lines)]
    lines['softmax'] = 'softmax', 0
    first = {}                      # by size: nats of the first line; with all cached, of the model as it is
    for size, form in cells:
        rule, sinks = lines[form]
        model = with_cache(teacher, rule, size, sinks)
        piece = size if rule == 'softmax' else T
        nats = nats_in_pieces(args, model, x[:, :-1], x[:, 1:], piece, f'{form}, {size} cached')
        first.setdefault(size, nats)
        row = {'form': form, 'cached': size, 'perplexity': nats.mean().exp().item()}
        row |= over_perplexity(nats, first[T], ['of full', 'low', 'high'])
        row |= over_perplexity(nats, first[size], ['of first', 'from', 'to'])
        row['state bytes'] = state_bytes(model.read(x[:1, :size]))
        row['more than full, %'] = 100 * (row['of full'] - 1)
        row['paper, of its full'] = None
        for one_in, figure in suite.paper.get(form, {}).items():
            if T // one_in == size:
                row['paper, of its full'] = figure / suite.paper[form][1]
        yield row


def nats_by_position(form, nats, first):
    """Perplexity by judge.ranges of positions of nats (.., T), as rows of the table"""
    for start, end in judge.ranges(nats.shape[-1], first):
        mean = nats[..., start:end].mean().item()
        yield {'form': form, 'part': 'position', 'position': end, 'nats': mean, 'perplexity': math.exp(mean)}


def far_along_a_text(args, suite):
    """Read one long text from beginning to end, and measure the nats per token by position. The cache holds
    1/8 of the length of a training row. We compare with the models of --beside, and with the model as it is,
    in training rows, each from an empty state. The line `softmax` caches all tokens."""
    path, teacher, meta = softmax_model(args)
    length, = args.lengths
    block = tokens_a_row(args, teacher.config)
    if teacher.max_len:
        raise ValueError(f'{path}: it knows {teacher.max_len:,} positions and no more; this suite wants a '
                         'model with rope, as train.py makes without --pos')
    x, y, data, name = a_text(args, path, meta, length, 1, args.data)
    size = max(1, block // 8)
    print(f'the validation text of {name}; cached tokens: {size}; tokens in a row: {block}')
    models = {}
    for form, (policy, positions) in only(args, suite.lines).items():
        models[form] = with_cache(teacher, policy, size, positions=positions)
    for source, model in rivals.models_beside(args.beside, path, data, args.device):
        models |= rivals.under_policies(f'{",".join(dict.fromkeys(model.config.rules))}: {source}', model)
    in_rows = nats_in_pieces(args, teacher, x, y, block, 'in rows')
    rows = list(nats_by_position('softmax, in rows', in_rows, block))
    base = {row['position']: row['perplexity'] for row in rows}
    for form, model in models.items():
        nats = judge.nats_along(model, x, y, form, args.dtype)
        rows += nats_by_position(form, nats, block)
    for row in rows:
        row['more than in rows'] = row['perplexity'] - base[row['position']]
        row['over in rows'] = row['perplexity'] / base[row['position']]
    return rows


# ---- suite kept --------------------------------------------------------------------------------------------
FIRST_CHARACTERS = {    # kinds of tokens, by the first character
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


def kind_of_token(token, data):
    """The kind of a token, by its first character. For tokens that may be words, we guess the part of speech
    from a list of common words and from the ending."""
    alone = vocabulary.decode([token], data)
    text = vocabulary.decode([token, token], data)[len(alone):]    # some decoders drop the first word's space
    word = text.strip(' ')
    of_words = data.tokenizer not in ('byte', 'char')
    begins = word != text or not word[:1].islower()             # otherwise it continues a word
    if of_words and begins and len(text) > 1:
        for kind, words in SPEECH.items():
            if word.lower() in words.split():
                return kind
    for kind, characters in FIRST_CHARACTERS.items():
        if word and word[0] in characters:
            return kind
    for ending in ENDINGS:
        if of_words and word.endswith(ending):
            return f'-{ending}'
    return 'rest' if begins or not of_words else 'piece of a word'


@torch.inference_mode()
def what_is_kept(args, suite):
    """Which tokens TOVA caches: how recent they are, the first token, and how long each kind stays."""
    teacher, x, data = model_and_rows(args, 4, 16)
    T = x.shape[1]
    size, = args.lengths or [max(1, T // 8)]
    if 2 * size >= T:
        raise ValueError(f'--lengths={size}: expected fewer cached tokens than half of the {T} of a row')
    model = with_cache(teacher, 'tova', size)
    came = torch.arange(T, device=args.device)
    full = came.clamp(min=2 * size)                             # steps at which the cache is long full
    recent = 0
    first = 0
    steps = {'all': []}
    for row in progress(x.split(1), 'kept'):
        gone = []                                               # per layer, when each token goes
        for seen in through(model, row):
            if seen.mixer.memory.rule.keeps:                    # all heads of TOVA agree
                gone.append(seen.evicted_at()[0, 0])
        gone = torch.stack(gone)
        until = gone.minimum(came + size).clamp(max=T)          # it is recent
        recent += (until - full).clamp(min=0).sum().item()
        first += (gone[:, 0] - 2 * size).clamp(min=0).sum().item()
        stayed = (gone - came).float().mean(0)
        middle = slice(1, T - size)     # not the first token, nor those that came too late
        for token, n in zip(row[0, middle].tolist(), stayed[middle].tolist()):
            steps['all'].append(n)
            steps.setdefault(kind_of_token(token, data), []).append(n)
    late = len(x) * len(gone) * (T - 2 * size)                  # steps, of all rows and layers
    print(f'cached tokens among the last {size} tokens: {recent / (late * size):.1%}')
    print(f'steps in which the first token is kept: {first / late:.1%}')
    for kind, n in steps.items():
        yield {'form': kind, 'share of text': len(n) / len(steps['all']), 'steps kept': statistics.mean(n)}


# ---- suite answers: the accuracy of such models on questions about distant tokens --------------------------
ONE_IN = 4          # the cache is 1/4 of a row where we split answers by the fact's distance


@torch.inference_mode()
def right_answers_of(_, rule, one_in, task, count, path, device):
    """Accuracy of a softmax model on the questions in the first `count` rows, with a cache of 1/one_in of the
    row length. For facts, also per quarter of the row in which the fact is stated. All in %"""
    _, val, data = prepare.load_set(task)
    T = data.row
    model, _ = load(path, device)
    model = with_cache(model, rule, T // one_in)
    right = []
    places = []
    for x, y in task_rows(val, data, 16, device, count):
        if data.name.startswith('facts'):
            places.append(tasks.asked_fact(x.cpu().numpy()))
        state = None
        for some, wanted in zip(x.split(64, 1), y.split(64, 1)):        # the caches of 64 steps fit in memory
            logits, state = model(some, state, wanted >= 0)
            right.append(logits.argmax(-1) == wanted[wanted >= 0])
    right = 100 * torch.cat(right).cpu().numpy()
    result = {'accuracy': right.mean().item()}
    if places:
        quarter = np.concatenate(places) * 4 // T
        for i in range(4):
            result[f'quarter {i}'] = right[quarter == i].mean().item()
    return result


def right_answers(args, suite):
    """Accuracy of softmax models on questions about distant tokens, by the size of the cache."""
    shares = {'softmax': (1,), **dict.fromkeys(EVICTING, (8, 4, 2))}        # cache: 1 / this of a row
    cells = [(form, one_in) for form, of_row in only(args, shares).items() for one_in in of_row]
    by_distance = []
    for name, way in ways_of(args, suite).items():
        T = prepare.load_set(way.data)[2].row
        paths = [a_line(args, suite, way, 'softmax', seed)['path'] for seed in args.seeds]
        for form, one_in in cells:
            key = {'rule': form, 'one_in': one_in, 'task': way.data, 'count': chosen(args, 128, 256)}
            results = [once(args, suite, form, right_answers_of, **key, path=path) for path in paths]
            row = {'form': form, 'part': name, 'share': 1 / one_in}
            yield row | over_seeds(results, suite.figure)
            if 'quarter 0' in results[0] and one_in in (1, ONE_IN):
                for i in range(4):
                    row = {'form': form, 'part': f'{name}, distance', 'distance': T * (4 - i) // 4}
                    by_distance.append(row | over_seeds(results, f'quarter {i}'))
    yield from by_distance


# ---- the suites, and what the paper found ------------------------------------------------------------------
ASKED = '--rule=softmax --n_layer=2 --n_head=2 --n_embd=64'
FACTS_MODEL = f'{ASKED} --batch_size=8 --lr=3e-3'

SUITES = {suite.name: suite for suite in [
    Suite(
        'cache', 'perplexity of a softmax model with few cached tokens, no training', with_few_cached,
        'init data lengths row only dtype', {'only': ','.join(EVICTING)},
        lines={**{policy: (policy, 4) for policy in ('tova', *POLICIES)},      # rule, sinks
               'sink 1': ('sink', 1), 'tova-sink 1': ('tova-sink', 1), 'cut': ('softmax', 0)},
        panels=(Panel('cached', 'more than full, %', 'perplexity with few cached tokens, no training'),),
        note='of full: perplexity over that with all tokens cached; of first: over that of the first line '
             'with as many cached; low, high and from, to: their 95 % intervals over rows',
        source='Oren 2024, table 3: LLaMA-2-7B on PG-19, at the same share of its 4,096 tokens',
        paper={'cut': over(SHARES, 17.65, 12.97, 10.39, 8.92, 8.04, 7.50, 7.16),
               'sink 1': over(SHARES, 10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
               'tova-sink': over(SHARES, 9.63, 8.33, 7.72, 7.41, 7.25, 7.17, 7.16),
               'tova-sink 1': over(SHARES, 9.53, 8.31, 7.71, 7.41, 7.25, 7.17, 7.16),
               # as printed: the figures of Window+1 in each cell, perhaps a copy error
               'h2o-layer': over(SHARES, 10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
               'window': over(SHARES, 4812.27, 4025.01, 3275.58, 2184.62, 1001.29, 240.17, 7.16),
               'sink': over(SHARES, 10.28, 8.98, 8.19, 7.73, 7.46, 7.30, 7.16),
               'h2o': over(SHARES, 10.22, 8.97, 8.21, 7.75, 7.49, 7.32, 7.16),
               'tova': over(SHARES, 9.53, 8.32, 7.71, 7.41, 7.25, 7.17, 7.16),
               'tova-head': over(SHARES, 11.13, 9.55, 8.69, 7.90, 7.52, 7.27, 7.16)}),
    Suite(
        'answers', 'accuracy of such models on questions about distant tokens', right_answers,
        'data seeds steps only', {'steps': 500},
        lines=from_nothing({'softmax': ''}), figure='accuracy',
        ways={'recall-kept': Way('recall-kept', f'{ASKED} --batch_size=32 --lr=3e-3', 1000, full=True),
              'mqar': Way('mqar', f'{ASKED} --batch_size=32 --lr=1e-2', 1000, full=True),
              'facts-256': Way('facts-256', FACTS_MODEL, 3000),
              'facts': Way('facts', '--batch_size=4 --lr=2e-3', 1000, first='facts-256', full=True),
              'facts-text-256': Way('facts-text-256', '--batch_size=8 --lr=3e-3', 3000, first='facts-256',
                                    full=True)},
        panels=(*[Panel('share', 'ours', name, name)
                  for name in ('recall-kept', 'mqar', 'facts-256', 'facts', 'facts-text-256')],
                *[Panel('distance', 'ours', f'{name}, 1/{ONE_IN} cached', f'{name}, distance')
                  for name in ('facts-256', 'facts', 'facts-text-256')]),
        note='accuracy in % of 128 new rows (--full: 256), exact to 9 (6) points for one seed; distance: at '
             f'most so many tokens since the fact, with 1/{ONE_IN} of the row cached',
        source='Oren 2024, models of 7B: with TOVA QASPER needs about 1/2 of the cache, SQuALITY 1/4 to 1/8'),
    Suite(
        'kept', 'which tokens TOVA keeps cached, and for how long', what_is_kept,
        'init data lengths row', one=True,
        panels=(Panel('share of text', 'steps kept', 'how long, by kind of token'),),
        source='Oren 2024, section 5: 73 to 76 % of what is cached is recent, the first token stays '
               'practically always; of 512 cached of 4,096 a token stays 481 steps, a possessive ending '
               '1,393, a quotation mark 1,101, a full stop 645, a plural proper noun 578, a line end 550'),
    Suite(
        'far', 'nats of such models by position, over 4,096 tokens; --full: 70,000', far_along_a_text,
        'init data lengths row only beside dtype',
        {'lengths': '4096', 'only': 'softmax,window,sink,sink compressed,tova,tova compressed'},
        {'lengths': '70000'},
        {'softmax': ('softmax', 'true'), 'window': ('window', 'true'),      # cache policy, positions
         'sink': ('sink', 'true'), 'sink compressed': ('sink', 'compress'),
         'h2o': ('h2o', 'true'), 'h2o compressed': ('h2o', 'compress'), 'tova': ('tova', 'true'),
         'tova compressed': ('tova', 'compress'), 'tova log': ('tova', 'log'), 'tova sqrt': ('tova', 'sqrt'),
         'tova-head': ('tova-head', 'true'),
         'tova-head compressed': ('tova-head', 'compress')}, one=True,
        panels=(Panel('position', 'over in rows', 'one text, over softmax in rows', 'position'),),
        note='position: the range from the line above up to here; in rows: each row from an empty state',
        source='Oren 2024, appendix: up to 70,000 tokens TOVA loses less than 0.5, compressed, 512 cached')]}
