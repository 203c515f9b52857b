"""Zhang 2024, The Hedgehog & the Porcupine (arXiv:2402.04347): Hedgehog.

Linear attention falls behind softmax since its weights are neither spiky nor monotone in q.k. Hedgehog learns
a map for each head, phi(x) = [exp(W x), exp(-W x)], that imitates a model's softmax weights (eq. 4: it is
distilled) before all weights are trained. T2R-HH is T2R's map, distilled like that.
- Figures 2, 3, 7 (`monotone`): weights over q.k. Tables 2, 3, figure 4 (`recall`): associative recall.
- Tables 1 and 8 (`glue`): BERT on CoLA and GLUE, of which 99.3 % is recovered; table 9 (`vit`): ViT.
- Tables 4 and 5 (`transfer`): the maps also imitate on other texts and longer rows.
- Table 6 (`lra`): trained from nothing on the Long Range Arena, a little ahead of softmax.
- Figure 6 (`layer` in bench.py): nearly 6 times as fast at 32,768 tokens. Tables 10, 11, GPT-2 and Llama-2:
  convert.py on a pretrained folder.
"""
import dataclasses
import itertools
import shlex
import statistics

import torch

from look.watch import kl, through
from model import load
from papers.harness import a_text, run_convert, runs, softmax_model, tokens_a_row
from papers.suites import DELTA, Line, Panel, Suite, Way, chosen, column, conversions, from_nothing, only


# ---- suites monotone, transfer: maps that imitate the attention of a trained model -------------------------
DRAWN = 'softmax', 'elu', 'exp:2', 'taylor', 'hedgehog, distilled'          # forms whose weights are plotted
FIDELITY = 'order kept', 'entropy', 'KL to teacher'                         # in convert.json, per layer


def weights_over_scores(args, suite):
    """Replace softmax in a trained model by other maps. Do weights grow with q.k, and how spiky are they? The
    learned maps are measured before and after distilling."""
    path, model, meta = softmax_model(args, tasks=True)
    length = min(tokens_a_row(args, model.config), 256)
    flags = f'--recipe=hedgehog --row={length} --eval_rows=4 --data={shlex.quote(args.data)}'
    x, _, _, _ = a_text(args, path, meta, length, 4, args.data)         # refuses other data at once
    weights = {}
    for phi in only(args, suite.lines):
        result = run_convert(args, suite, phi, path, f'{flags} --phi={phi}', args.steps, 0, args.seed)
        for stage in dict.fromkeys(column(result['layers'], 'model')):
            form = f'{phi}, {stage}'
            if stage == 'swapped':
                form = phi
            layers = [layer for layer in result['layers'] if layer['model'] == stage]
            yield {'form': form, **{name: statistics.mean(column(layers, name)) for name in FIDELITY}}
            weights[form] = result['query'][stage]
    weights['softmax'] = result['query']['softmax']
    spiky = statistics.mean(column(layers, 'entropy of teacher'))
    with torch.inference_mode():
        grow = [(seen.scores > -1).float().mean().item() for seen in through(model, x)]
    yield {'form': 'softmax', 'order kept': 1.0, 'entropy': spiky, 'KL to teacher': 0.0,
           'where Taylor grows': statistics.mean(grow)}
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
        for seen in through(teacher, row):
            a = seen.weights(seen.mixer)
            w = seen.weights(twins[seen.name])
            divergences.append(kl(a, w).item())
    return statistics.mean(divergences)


def on_other_rows(args, suite):
    """Does a map that imitates softmax on short rows of one text do so on another, and on longer rows? Lines
    that would learn from labels that the teacher does not know are left out."""
    path, teacher, meta = softmax_model(args, tasks=True)
    if meta['data'].kind == 'text':
        T = max(16, tokens_a_row(args, teacher.config) // 8)
        row = T
    else:                                                               # sentences are not cut
        T = meta['data'].row
        row = teacher.config.block_size
    times = chosen(args, (1, 4, 16), (1, 2, 4, 8, 16))
    if teacher.max_len:
        times = [n for n in times if n * T <= teacher.max_len]
    longest = max(times) * T
    _, _, own, name = a_text(args, path, meta, longest, 1, '')
    _, _, other, other_name = a_text(args, path, meta, longest, 1, args.data or 'stdlib')
    if own.val == other.val:
        raise ValueError(f'--data={other_name}: what {path} was trained on; give another text')
    names = {'own': name, 'other': other_name}
    print(f'own: {name}; other: {other_name}; tokens of a row that maps learned on: {T}')
    models = {}
    for form, (flags, text) in only(args, suite.lines).items():
        if text == 'other' and other.classes > own.classes:
            continue                                                    # the teacher knows no such labels
        flags = (f'--recipe=hedgehog {flags} --row={row} --batch_size=32 --eval_rows=4 '
                 f'--data={shlex.quote(names[text])}')
        result = run_convert(args, suite, form, path, flags, args.steps, 0, args.seed)
        models[form], _ = load(result['path'], args.device)
    for text, n in itertools.product(names, times):
        count = chosen(args, 2, 8) * longest // (n * T)         # equally many tokens at all lengths
        x, _, _, _ = a_text(args, path, meta, n * T, count, names[text])
        for form, model in models.items():
            row = {'form': form, 'part': text, 'tokens a row': n * T}
            yield row | {'KL to teacher': divergence(teacher, model, x)}


# ---- suites lra, glue, vit: classes ------------------------------------------------------------------------
def classifiers(args, suite):
    """Like `runs`, in --dtype. --init: fine-tune this pretrained model instead, at a rate for such models.
    CoLA alone is judged by Matthews' correlation, as in GLUE."""
    if args.data == 'cola':
        suite.figure = 'matthews'
        suite.beside = 'accuracy', 'recovered', 'majority'
    in_type = f'--dtype={str(args.dtype).removeprefix("torch.")}'
    ways = {}
    for name, way in suite.ways.items():
        begins = way.train
        how = way.how
        if args.init:
            begins = f'{CLASSIFIER} --init={shlex.quote(args.init)} --batch_size=16 --lr=5e-5'
            how = '--batch_size=32 --lr=5e-5'
        ways[name] = way._replace(train=f'{begins} {in_type}', how=f'{how} {in_type}')
    return runs(args, dataclasses.replace(suite, ways=ways))


# ---- the suites, and what the paper found ------------------------------------------------------------------
NO_CONV = '--n_layer=2 --n_embd=64 --lr=1e-3 --batch_size=32 --conv=0 --pos=learned'
READER = '--causal=false --n_layer=2 --n_embd=64 --n_head=4 --batch_size=32 --lr=2e-3'
CLASSIFIER = '--causal=false --conv=0'
SMALL_ONE = f'{CLASSIFIER} --n_layer=2 --n_embd=64 --n_head=4 --batch_size=32 --lr=1e-3'
WORDED = f'{SMALL_ONE} --tokenizer=bpe:4096 --dropout=0.3'         # from bytes it learns almost nothing
GOES_ON = {'how': '--batch_size=32 --lr=1e-3', 'convert': '--eval_rows=100000', 'more': 0.3}
CLASSIFIERS = {
    'flags': 'init data seeds steps only dtype', 'quick': {'steps': 100, 'only': 'hedgehog,t2r-hh,t2r'},
    'lines': {
        'softmax': Line('--rule=softmax'), 'trained on': Line(begins='trained on'),
        **conversions({'hedgehog': '--recipe=hedgehog', 't2r-hh': '--recipe=t2r --distil=ce'}, distils=3),
        't2r': Line('--recipe=t2r', 'converted'),
        **conversions({phi: f'--recipe=t2r --phi={phi}'
                       for phi in ('taylor', 'exp:2', 'exp:1', 'favor', 'relu', 'elu')}),
        'cosformer': Line('--recipe=t2r --phi=cosformer:1024', 'converted')},
    'always': ('softmax', 'trained on'), 'figure': 'accuracy',
    'beside': ('recovered', 'matthews', 'majority'),
    'note': 'in %, of the validation rows; trained on: the control, softmax with as many steps more; '
            'recovered: of the accuracy of the teacher of the same seed; matthews: correlation of answers '
            'with truth'}

SUITES = {suite.name: suite for suite in [
    Suite(
        'recall', 'accuracy by feature map, from scratch and converted', runs, 'seeds steps only',
        {'steps': 1000},
        lines={
            **from_nothing({
                'softmax': '--rule=softmax', 'delta': DELTA, 'delta dpfp:2': f'{DELTA} --phi=dpfp:2',
                'taylor': '--rule=sum --phi=taylor'}),
            'hedgehog': Line('--rule=sum --phi=hedgehog', distils=3),
            **from_nothing({
                phi: f'--rule=sum --phi={phi}' for phi in ('exp:2', 'exp:1', 'relu', 'elu', 'favor')}),
            'cosformer': Line('--rule=sum --phi=cosformer:128')},
        ways={                  # a convolution or a first layer must bring keys to values
            'one layer': Way(
                'recall-one', '--n_layer=1 --n_head=1 --n_embd=16 --lr=1e-2 --batch_size=64', 4000),
            'two, no conv': Way('recall-kept', f'{NO_CONV} --n_head=4', 3000, full=True),
            'from softmax': Way(            # converts softmax, then trains all weights
                'recall-kept', f'{NO_CONV} --n_head=1', 3000, converts=True, how='--batch_size=32 --lr=1e-3',
                convert='--recipe=hedgehog --distil=auto --eval_rows=2000', more=0.1, full=True)},
        figure='accuracy', beside=('before',),
        note='in % of 2,000 new rows; before: learned maps are distilled, the rest is not yet trained',
        source='Zhang 2024, tables 2, 3 and figure 4; in its text exp:2 solves it, exp:1 does not',
        paper={'softmax': 100, 'taylor': 100, 'hedgehog': 100, 'elu': 17, 'favor': 17, 'cosformer': 17}),
    Suite(
        'monotone', 'attention weights over q.k for each feature map, also distilled', weights_over_scores,
        'init data steps row only', {'steps': 30}, {'steps': 300},
        dict.fromkeys(['elu', 'relu', 'favor', 'exp:1', 'exp:2', 'cosformer', 'taylor', 't2r', 'hedgehog',
                       'hedgehog:listing']),
        panels=(Panel('q.k / sqrt(d)', 'weight', 'one query: weights should grow with q.k', 'query'),
                Panel('entropy', 'order kept', 'spiky and monotone: upper left')),
        note='means over layers; distilled: {steps} steps of 4 rows; entropy in nats; order kept: share of '
             'pairs in the order of q.k; where Taylor grows: share of q.k / sqrt(d) above -1',
        source='Zhang 2024, figures 2, 3 and 7, which are pictures'),
    Suite(
        'transfer', 'distilled maps on another text and on longer rows', on_other_rows,
        'init data steps row only',
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
        'lra', 'encoders on tasks of the Long Range Arena (Tay 2021) and stand-ins for them', runs,
        'data seeds steps only', {'steps': 60, 'only': 'softmax,hedgehog,elu'},
        lines=from_nothing({
            'softmax': '--rule=softmax', 'hedgehog': '--rule=sum --phi=hedgehog', 'elu': '--rule=sum',
            't2r': '--rule=sum --phi=t2r', 'favor': '--rule=sum --phi=favor',
            'gated_delta': '--rule=gated_delta --beta_max=1'}),
        ways={'listops': Way('listops', READER, 1500), 'mnist': Way('mnist', READER, 2000)},
        figure='accuracy', beside=('majority',),
        note='in % of the validation rows; majority: of whoever always says the commonest class',
        source='Zhang 2024, table 6: longer rows, images of CIFAR-10',
        paper={'softmax': {'listops': 36.37}, 'hedgehog': {'listops': 37.15}}),
    Suite(
        'glue', 'sentence classifiers with softmax, converted to each feature map', classifiers,
        ways={'polarity': Way('polarity', WORDED, 1500, **GOES_ON),
              'trec': Way('trec', SMALL_ONE, 1500, **GOES_ON),
              'cola': Way('cola', SMALL_ONE, 1500, **GOES_ON)},
        source='Zhang 2024, tables 1 and 8, BERT on CoLA by Matthews: 58.8; 1 + ELU 28.1, ReLU 39.5, '
               'Performer 24.7, cosFormer 39.9, exp:1 45.9, exp:2 50.0, Hedgehog 59.2; GLUE 99.3 %',
        **CLASSIFIERS),
    Suite(
        'vit', 'the same for pictures', classifiers,
        ways={'mnist-patch7': Way('mnist-patch7', SMALL_ONE, 1500, **GOES_ON)},
        source='Zhang 2024, table 9, ViT-B/16 on ImageNet: 80.3, Hedgehog 79.5, T2R-HH 77.0', **CLASSIFIERS)]}
