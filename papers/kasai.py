"""Kasai 2021, Finetuning Pretrained Transformers into RNNs (arXiv:2103.13076): T2R.

A transformer is trained with softmax, then its attention is swapped for a linear one, and all weights are
trained on. The feature map is learned: phi(x) = relu(W x + b), one per head, less than 2 % more parameters,
and W folds into the projections of q and k. It needs fewer features than ELU + 1 or RFA, so it generates
faster. From nothing it is the weakest of the three, converted the best (table 1, WikiText-103; table 2,
translation). `translate` has table 2, and table 1 of Schlag 2021, with a small model of captions. The digits
of table 1 and of the figures are not at hand: `grid` in mao.py has sizes of the map, `decode` in bench.py the
time for the next token, convert.py with --recipe=t2r what a real model recovers.
"""
import torch

from data import prepare, vocabulary
from papers.harness import runs, task_rows
from papers.suites import DELTA, Line, Suite, Way, chosen, conversions, from_nothing


@torch.inference_mode()
def bleu(args, result, model, meta):
    """BLEU of a run's model on the first sources of the test side. By sacrebleu, Post 2018, arXiv:1804.08771.
    --full: with a beam of 4"""
    from sacrebleu import corpus_bleu
    beam, count = chosen(args, (1, 100), (4, 1000))
    test, data = prepare.test_side(result['data'], like=meta['data'])
    translations = []
    wanted = []
    for x, y in task_rows(test, data, 64, args.device, count):
        for row in model.translate(x[:, :data.source], beam).tolist():
            translations.append(vocabulary.decode(row, data))
        for row in y:
            wanted.append(vocabulary.decode(row[row >= 0].tolist(), data))
    return {'bleu': corpus_bleu(translations, [wanted]).score, 'sentences': len(translations)}


# As in Kasai 2021, we replace the decoder's self-attention and cross-attention; `delta` replaces only
# self-attention. The encoder keeps softmax, except in the lines with `all`.
TRANSLATOR = ('--encoder=3 --n_layer=3 --n_head=4 --n_embd=128 --dropout=0.1 --batch_size=64 --lr=3e-3 '
              '--encoder_rule=softmax')

SUITES = {suite.name: suite for suite in [
    Suite(
        'translate', 'BLEU of translators, trained and converted', runs, 'data seeds steps only',
        {'steps': 60, 'only': 'softmax,elu,t2r converted'},
        lines={                 # `all`: the encoder, too
            **from_nothing({
                'softmax': '--rule=softmax', 'elu': '--rule=sum --phi=elu', 'favor': '--rule=sum --phi=favor',
                'rfa': '--rule=sum --phi=rfa', 'rfa-gate': '--rule=gated --phi=rfa --cross=sum',
                'dpfp': '--rule=sum --phi=dpfp', 't2r': '--rule=sum --phi=t2r',
                'hedgehog': '--rule=sum --phi=hedgehog', 'delta': f'{DELTA} --cross=softmax'}),
            **conversions({
                't2r converted': '--recipe=t2r --swap=self,cross',
                'elu converted': '--recipe=t2r --swap=self,cross --phi=elu',
                'rfa converted': '--recipe=t2r --swap=self,cross --phi=rfa',
                't2r kl converted': '--recipe=t2r --swap=self,cross --loss=kl'}),
            **conversions({'hedgehog converted': '--recipe=hedgehog --swap=self,cross'}, distils=3),
            't2r all converted': Line('--recipe=t2r', 'converted'),
            'softmax converted': Line(begins='trained on')},
        ways={'multi30k': Way('multi30k', TRANSLATOR, 3000, how='--batch_size=64 --lr=3e-3',
                              convert='--eval_rows=100000', more=0.5)},
        figure='bleu', beside=('accuracy', 'sentences'), from_checkpoint=bleu,
        note='BLEU of the test side, greedy, with --full by a beam of 4; accuracy: of the next token, in % '
             'of the validation rows; softmax converted: the control, only trained on',
        source='BLEU of WMT14 En-De: Schlag 2021, table 1, 64 features a head as here, but DPFP 256; t2r '
               'converted: Kasai 2021, table 2, beside a better softmax',
        paper={'softmax': 27.7, 'elu': 26.8, 'favor': 24.4, 'dpfp': 26.9, 't2r converted': 28.7})]}
