"""Beyond the five papers: what later ones ask of such models, and a comparison that none of them has.

- `mqar`: Arora 2023, Zoology (arXiv:2312.04927), figure 2, a picture: a row asks for several keys, and recall
  grows with the bytes of the state.
- `tracking`: Grazzi 2024 (arXiv:2411.12537): a state that only decays cannot tell parity in rows longer than
  those of training; delta can if beta may reach 2. Siems 2025, DeltaProduct (arXiv:2502.10297): for products
  of permutations of three (S3) one layer needs two such writes a token.
- `real`: a converted model beside its teacher with caches of as many bytes, in a text by position, and by how
  many told facts it can answer.
"""
import itertools
import json
import statistics

import numpy as np
import torch

from common import files
from data import chat, rows, vocabulary
from data.sets import find_set
from fastweight import RULES
from papers.harness import a_line, a_row, a_text, softmax_model, ways_of
from papers.suites import DELTA, Panel, Suite, Way, chosen, column, from_nothing, only
from students import judge, rivals


# ---- suites mqar, tracking ---------------------------------------------------------------------------------
def size_of_state(args, result, model, meta):
    """The size of the state for one row, in bytes."""
    return {'state bytes': judge.bytes_after(model, model.config.block_size)}


def over_widths(args, suite):
    """Train every rule in every width, for each number of pairs."""
    cells = itertools.product(ways_of(args, suite).items(), only(args, suite.lines), args.lengths)
    for (pairs, way), form, width in cells:
        wide = way._replace(train=f'{way.train} --n_embd={width}')
        results = [a_line(args, suite, wide, form, seed) for seed in args.seeds]
        yield {'width': width, **a_row(suite, form, results, pairs)}


def products(args, result, model, meta):
    """Accuracy in % on 256 new rows, for products of 1, 2, ... elements, and its mean beyond the lengths of
    training."""
    task = find_set(result['data'])
    rng = np.random.Generator(np.random.Philox(2))              # seeds 0 and 1 made the data set
    x, y = task.make(256, rng, task.vocab, False, length=256)
    x = torch.from_numpy(x).to(args.device)
    with torch.inference_mode():
        logits, _ = model(x)
    right = logits.argmax(-1).cpu() == torch.from_numpy(y)
    right = 100 * right.float().mean(0)
    return {'right': right.tolist(), 'beyond': right[task.length:].mean().item()}


def beyond_training(args, suite):
    """Can a state that was trained on up to 40 steps track 256?"""
    for name, way in ways_of(args, suite).items():
        for form in only(args, suite.lines):
            results = [a_line(args, suite, way, form, seed) for seed in args.seeds]
            yield a_row(suite, form, results, name)
            for i, right in enumerate(zip(*column(results, 'right'))):
                yield {'form': form, 'part': 'curve', 'length': i + 1, name: statistics.median(right)}


# ---- suite real: a converted model beside caches of as many bytes ------------------------------------------
SYLLABLES = [consonant + vowel for consonant in 'bdfgklmnprstvz' for vowel in 'aeiou']
ASKED = 8               # facts that are asked for, of those told in a conversation
CHATS = 1000            # conversations to train on


def told_and_asked(n, draw):
    """A conversation: n facts, "Mara's number is 4172.", then questions for some of them, with answers"""
    names = [(SYLLABLES[i // 70] + SYLLABLES[i % 70]).title() for i in draw.permutation(70 * 70)[:n]]
    numbers = draw.integers(1000, 10_000, n)
    facts = [f"{name}'s number is {number}." for name, number in zip(names, numbers)]
    messages = []
    for i in draw.integers(n, size=ASKED):
        asked = f"What is {names[i]}'s number?"
        messages += [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': facts[i]}]
    messages[0]['content'] = ' '.join(facts + [messages[0]['content']])
    return messages


def recovered_in_a_text(args, path, meta, models, own):
    """What each model recovers of the teacher's perplexity in rows of a text -> rows of the table, one for
    each model, and more by position. own: of each form made from a model of --beside, that model. Such a form
    is also compared with the best of all others, row by row: perplexity over that one's, its interval."""
    x, y, _, _ = a_text(args, path, meta, max(args.lengths), chosen(args, 2, 64), args.data)
    nats = {}
    lines = []
    by_position = []
    for form, model in models.items():
        exact, nats[form], kl = judge.nats_and_kl(models['softmax'], model, x, y, form, args.dtype)
        gain = exact - nats[form]
        size = judge.bytes_after(model, x.shape[1])
        lines.append({'form': form, **judge.recovered(gain), 'KL': kl.mean().item(),
                      'state bytes': size, 'best other': None, 'over it': None, 'from': None, 'to': None})
        for start, end in judge.ranges(x.shape[1], 64):
            share = gain[:, start:end].mean().exp().item()
            by_position.append({'form': form, 'part': 'position', 'position': end, 'ours': 100 * share})
    for row in lines:
        if row['form'] in own:
            others = [form for form in nats if form != 'softmax' and own.get(form) != own[row['form']]]
            over = judge.over_the_best(nats, row['form'], others)
            row |= dict(zip(['best other', 'over it', 'from', 'to'], over))
    return lines, by_position


def accuracy_on_facts(args, data, models):
    """How often each model answers with the right number, all digits, when it was told 4, 16, .. of them
    -> rows of the table, in %. Writes other such conversations, to train on."""
    digits = {i for i in range(data.vocab_size) if vocabulary.decode([i], data).strip().isdecimal()}
    for n in chosen(args, (4, 16), (4, 16, 64, 256)):
        draw = np.random.default_rng(n)
        told = [json.dumps({'messages': told_and_asked(n, draw)}) for _ in range(chosen(args, 10, CHATS))]
        files.write_file(f'{args.out}/facts-{n}.jsonl', ['\n'.join(told).encode()])
        right = {form: [] for form in models}
        for _ in range(chosen(args, 4, 64)):
            ids, targets = chat.answered(told_and_asked(n, draw), data, None)
            x = torch.tensor([ids], device=args.device)
            places = np.array([t for t, target in enumerate(targets) if target in digits])
            numbers = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
            for form, model in models.items():
                logits, _, _ = rows.predict(model, x, x, None, args.dtype)
                guesses = logits.argmax(-1).tolist()
                right[form] += [all(guesses[t] == targets[t] for t in number) for number in numbers]
        for form in models:
            yield {'form': form, 'part': 'facts', 'facts': n, 'accuracy': 100 * statistics.mean(right[form])}


@torch.inference_mode()
def beside_caches(args, suite):
    """The teacher and, for each model of --beside, caches of as many bytes, the model, and the model with
    other policies: in a text and, if the teacher talks, by facts."""
    path, teacher, meta = softmax_model(args)
    if not args.beside:
        raise ValueError(f'--beside= is missing: the models that convert.py made of {path}')
    models = {'softmax': teacher}
    own = {}
    for source, student in rivals.models_beside(args.beside, path, meta['data'], args.device):
        models |= dict(rivals.limited_caches(teacher, student))
        forms = rivals.under_policies(source, student)
        models |= forms
        own |= dict.fromkeys(forms, source)
    lines, by_position = recovered_in_a_text(args, path, meta, models, own)
    facts = []
    if meta['data'].template:
        facts = list(accuracy_on_facts(args, meta['data'], models))
    return lines + by_position + facts


# ---- the suites, and what papers found ---------------------------------------------------------------------
RECALLS = '--n_layer=2 --n_head=2 --batch_size=32 --val_tokens=131072 --lr=1e-2'
TRACKER = '--n_embd=64 --n_head=16 --conv=0 --batch_size=64 --lr=3e-3'

SUITES = {suite.name: suite for suite in [
    Suite(
        'mqar', 'multi-query recall by the bytes of the state', over_widths, 'data lengths seeds steps only',
        {'steps': 300, 'lengths': '32,64', 'only': 'softmax,sum,delta'},
        {'steps': 1000, 'lengths': '16,32,64,128'},
        lines=from_nothing({name: f'--rule={name} {"--cache=16" if rule.bounded else ""}'
                            for name, rule in RULES.items()}),
        ways={'8 pairs': Way('mqar', RECALLS),
              **{f'{n} pairs': Way(f'mqar:{n}', RECALLS, full=True) for n in (16, 32, 64)}},
        figure='accuracy', beside=('state bytes',), from_checkpoint=size_of_state,
        panels=tuple(Panel('state bytes', 'ours', f'MQAR, {n} pairs', f'{n} pairs') for n in (8, 16, 32, 64)),
        note='accuracy in % of 512 new rows',
        source='Arora 2023, figure 2, which is a picture'),
    Suite(
        'tracking', 'parity and products in groups, beyond the training lengths; --full: two layers, A5',
        beyond_training, 'seeds steps only',
        lines=from_nothing({
            'softmax': '--rule=softmax', 'sum': '--rule=sum', 'mamba2': '--rule=mamba2',
            'gated_delta': '--rule=gated_delta --beta_max=1', 'delta beta_max=1': DELTA,
            'delta beta_max=2': '--rule=delta --beta_max=2',
            'delta beta_max=1 writes=2': f'{DELTA} --writes=2',
            'delta beta_max=2 writes=2': '--rule=delta --beta_max=2 --writes=2'}),
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
        'real', 'a converted model beside caches of as many bytes', beside_caches,
        'init data lengths dtype beside', {'lengths': '256,1024'}, {'lengths': '256,512,1024,2048'},
        panels=(Panel('position', 'ours', 'recovered of the teacher, %', 'position'),
                Panel('facts', 'accuracy', 'numbers that are answered right, %', 'facts')),
        note='recovered: perplexity of softmax / of the line; low, high: a 95 % interval over rows; '
             'position: up to here; accuracy: in % of 512 answers, all digits right; to train on: '
             'facts-64.jsonl, .. in --out',
        source='no paper has such a table')]}
