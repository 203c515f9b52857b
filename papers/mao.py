"""Mao 2022, Fine-Tuning Pre-trained Transformers into Decaying Fast Weights (arXiv:2210.04243).

Update rules (sum, RFA's gate, delta) and feature maps are compared where a pretrained model is fine-tuned
into a recurrent one. They turn out more complex than they need be: a decay per entry of the matrix, a product
of two gates, needs no feature map and no denominator. It beats the others and keeps 99 % of what attention
reaches, for GPT-2 (abstract). Figure 1, a picture: time and memory of the next token are flat in the length
for all rules, and grow for attention; `decode` in bench.py has it. The table of rules and maps is not at
hand. `grid` fills one of our own, from scratch and converted, with sizes of T2R's map beside them (Kasai
2021).
"""
from papers.harness import bits, runs
from papers.suites import Line, Suite, Way

GRID_ROWS = 256             # rows of the validation text on which the grid is compared


def on_grid_rows(args, result, model, meta):
    """Bits per byte on evenly spaced rows, the same that convert.py evaluates."""
    return {'bits per byte': bits(args, result, model, result['block_size'], GRID_ROWS)}


PHIS = 'elu', 'rfa', 'dpfp', 't2r', 'hedgehog'
DISTILLED = {'hedgehog': 3}     # a map that first imitates softmax: in 1 / this of a conversion's steps
GRID = {'sum': (*PHIS, 't2r:4', 't2r:8', 't2r:16', 't2r:32', 't2r:64'),     # sizes as in Kasai 2021
        'gated': PHIS, 'delta': ('identity', *PHIS), 'decay': ('identity', *PHIS)}
GRID_MODEL = '--n_head=4 --conv=0 --pos=learned --val_tokens=32768'

SUITES = {suite.name: suite for suite in [
    Suite(
        'grid', 'rules x feature maps, from scratch and converted, and T2R by the size of its map', runs,
        'data seeds steps only',
        {'steps': 40, 'only': 'sum elu,sum t2r,delta elu,delta t2r'}, {'steps': 400},
        lines={'softmax': Line('--rule=softmax'),
               **{f'{rule} {phi}': Line(f'--rule={rule} --phi={phi}', distils=DISTILLED.get(phi, 0))
                  for rule, phis in GRID.items() for phi in phis}},
        always=('softmax',),
        ways={'from scratch': Way('', GRID_MODEL),
              'converted': Way('', GRID_MODEL, times=4, converts=True, more=1 / 16,
                               convert=f'--recipe=t2r --distil=auto --eval_rows={GRID_ROWS}')},
        figure='bits per byte', beside=('recovered',), from_checkpoint=on_grid_rows,
        note='bits per byte on 256 rows, evenly spaced over the validation text; from scratch: {steps} steps '
             'of 4 rows; converted: softmax is trained for four times as many, then converted in a quarter '
             'as many; recovered: perplexity of softmax / of the converted, in %',
        source='Mao 2022 compares rules and maps, Kasai 2021 sizes of a map: figures that are not at hand')]}
