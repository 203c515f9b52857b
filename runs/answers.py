"""What sample.py says with a model that does not write texts: the class of a text, a translation.

    task = task_of(args, model)         # complete, chat, classify or translate
"""
from dataclasses import dataclass

import torch

from common import files
from common.flags import flag, plural
from data import vocabulary

AT_ONCE = 64        # texts in a batch


@dataclass
class Flags:
    """Of sample.py"""
    lines: bool = flag(False, 'of a classifier: each line of --prompt is a text. For each, print its class, '
                              'probability and text, with tabs between; empty lines are left out')
    source: str = flag('', 'for a translator: what to translate; @file: each of its lines')
    beam: int = flag(1, 'with --source: width of the beam; 1: greedy', low=1, high=1024)
    penalty: float = flag(0.6, 'with --beam: above 0, longer translations are preferred', low=0, high=100)


def task_of(args, model):
    """What such a model does with these flags. ValueError if it cannot do that."""
    task = model.task
    if args.source and task != 'translate':
        raise ValueError(f'--source: {args.init} knows no pairs; python train.py --data=multi30k makes a '
                         'model that does')
    if task == 'classify' and not model.config.classes:
        raise ValueError(f'{args.init} is an encoder without classes: python train.py --init={args.init} '
                         '--data=mine.tsv teaches it those of lines 0<TAB>text')
    if task == 'complete' and args.lines:
        raise ValueError(f'--lines is for classifiers, and {args.init} writes a text: leave it out')
    if task == 'complete' and args.chat:
        return 'chat'
    return task


OF_WRITING = {'tokens', 'samples', 'temperature', 'top_k', 'top_p', 'seed', 'save_state',
              'load_state', 'html', 'chat', 'special'}
IGNORED = {         # flags without effect, for each result of `task_of`
    'translate': OF_WRITING | {'prompt', 'lines', 'system'},
    'classify': OF_WRITING | {'system', 'beam', 'penalty'},
    'chat': {'samples', 'save_state', 'load_state', 'special', 'beam', 'penalty'},
    'complete': {'system', 'beam', 'penalty'}}


def useless(task, given, args):
    """For `refuse`: flags that would be ignored."""
    for name in sorted(IGNORED[task] & given.keys()):
        yield True, f'--{name} means nothing when {args.init} is to {task}: leave it out'


def classify(args, model, meta):
    """Print the classes of the prompt or, with --lines, the likeliest class of each of its lines."""
    data = meta['data']
    texts = files.lines_of(args.prompt) if args.lines else [files.text_of(args.prompt)]
    texts = [text.strip() for text in texts if text.strip()]               # as the texts of training were
    if not texts:
        raise ValueError('--prompt: there is no text to classify')
    names = dict(enumerate(data.labels))
    for text in texts:
        row = vocabulary.whole_text(text, data) or vocabulary.with_bos([], data)
        vocabulary.tell_lost(row, data)
        classes = classes_of(model, row, data)
        if args.lines:
            i, share = classes[0]
            print(f'{names.get(i, i)}\t{share:.3f}\t{text}', flush=True)
            continue
        for i, share in classes:
            name = f' ({names[i]})' if i in names else ''
            print(f'class {i}{name}: {share:.1%}', flush=True)


@torch.inference_mode()
def classes_of(model, row, data):
    """A text, a list of tokens -> pairs of a class and its probability, the likeliest first."""
    c = model.config
    tokens = torch.tensor([row], device=model.embed.weight.device)
    T = tokens.shape[1]
    if T > c.block_size:
        raise ValueError(f'--prompt: {T} tokens, but this model knows rows of at most {c.block_size}')
    whole = data.row or T
    if c.pad is None and T != whole:                        # half a picture is none
        raise ValueError(f'--prompt: {plural(T, "token")}, but a row of this model has {whole}')
    logits, _ = model(tokens)
    logits = logits.reshape(-1, c.classes)[-1:]             # the last token's, if there is one for each
    p, order = logits[0].softmax(-1).sort(descending=True)
    return list(zip(order.tolist(), p.tolist()))


def show_translations(args, model, meta):
    """Print a translation of each line of --source, one per line."""
    texts = files.lines_of(args.source)
    sources = torch.from_numpy(vocabulary.source_rows(texts, meta['data'])).long()
    sources = sources.to(model.embed.weight.device)
    for some in sources.split(AT_ONCE):
        for row in model.translate(some, args.beam, args.penalty).tolist():
            print(vocabulary.decode(row, meta['data']).replace('\n', ' '), flush=True)
