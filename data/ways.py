"""The ways to make a set: what was read or drawn becomes arrays of tokens, for each side.

Each function of WAYS takes (entry, paths, meta, wish). entry: a kinds.Set, whose `make` reads the paths or
draws rows. wish: the tokens and rows of a model, if the set is for one. meta, a Data, gets all that the files
will say of the tokens.

Sets with rows end in `to_rows`. A side is (inputs, targets) then, N lists of tokens and N of targets, which
belong to the last inputs: to all of them, or to the last one (a class).
"""
import math

import numpy as np

from data import chat, tasks, vocabulary
from data.sources import local_text, stdlib


def plain_text(entry, paths, meta, wish):
    """A text is one array of tokens."""
    sides = entry.make(*paths)
    vocabulary.learn_tokens(sides, meta)
    meta.train, meta.val = ({'bytes': len(text)} for text in sides)
    return [vocabulary.tokenize(text, meta) for text in sides]


def generated(entry, paths, meta, wish):
    """Rows that are drawn; facts are put into a text, that of --file or stdlib."""
    texts = ()
    if entry.way == 'facts':
        texts = local_text(*paths) if paths else stdlib()
    return to_rows(tasks.generate_rows(entry, meta, texts), entry, meta)


def pictures(entry, paths, meta, wish):
    """Pictures and their classes."""
    return to_rows(entry.make(*paths), entry, meta)


def labelled(entry, paths, meta, wish):
    """Texts and their classes. They are shuffled, always in the same way, because files may be sorted by
    class."""
    if wish.vocab_size and wish.pad is None:
        raise ValueError('labelled lines are for an encoder, such as bert-base-uncased; this model writes '
                         'texts')
    texts, classes = zip(*entry.make(*paths))
    learn_with_pad(texts, meta, wish)
    meta.classes = number_of_classes(classes)
    tokens, meta.row = fitted(texts, meta, entry.length, wish.row, 32)
    shuffled = []
    for x, y in zip(tokens, classes):
        order = np.random.Generator(np.random.Philox(0)).permutation(len(x))
        shuffled.append(([x[i] for i in order], [y[i] for i in order]))
    return to_rows(shuffled, entry, meta)


def number_of_classes(sides):
    """The number of classes. ValueError for fewer than 2, or if one of them has no line to train on."""
    labels, others = sides
    [highest] = max(labels + others)
    if highest == 0:
        raise ValueError('all lines have label 0: nothing is told apart; give lines of at least 2 classes')
    missing = set(range(1 + highest)) - {label for [label] in labels}
    if missing:
        raise ValueError(f'label {highest} is there, but no line to train on has label {min(missing)}: '
                         'number the classes from 0 and leave none out')
    return 1 + highest


def paired(entry, paths, meta, wish):
    """Sentences and their translations -> rows of tokens, targets, as prepare.py's docstring says."""
    sides = entry.make(*paths)
    sources, texts = zip(*sides)
    learn_with_pad([a + b for a, b in sides], meta, wish)
    source_tokens, meta.source = fitted(sources, meta, entry.length, wish.source, 8)
    text_tokens, length = fitted(texts, meta, entry.length, wish.row - wish.source, 8, more=1)
    meta.row = meta.source + length
    pad = np.full(meta.source + 1, meta.pad)
    rows = []
    for x, y in zip(source_tokens, text_tokens):
        inputs = [np.concatenate([a, pad[len(a):], b]) for a, b in zip(x, y)]
        rows.append((inputs, [np.append(b, pad[0]) for b in y]))
    return to_rows(rows, entry, meta)


def joined_rows(entry, paths, meta, wish):
    """Like `paired`, but for a model that reads both texts as one. A row is a source, a line end, its
    translation (or summary) and a line end. The targets are everything after the first line end. Sources that
    are too long are cut off; translations only where they are longer than half a row."""
    before, _ = vocabulary.frame(meta)
    end = vocabulary.encode('\n', meta)[-1:]
    if not end:
        raise ValueError('the model\'s tokens know no line end to put between a text and its translation; '
                         'take a model of texts, or train one on pairs, without --init or --from')
    meta.pad = end[0]
    most = entry.length
    rows = []
    for sources, texts in entry.make(*paths):
        answers = [vocabulary.continued(text.decode(), end, meta, meta.marks)[:most // 2] for text in texts]
        inputs = []
        for source, text in zip(sources, answers):
            tokens = before + vocabulary.encode(source.decode(), meta, meta.marks)
            inputs.append(tokens[:most - len(text) - 1] + end + text)
        rows.append((inputs, [text + end for text in answers]))
    meta.row = row_length([x for x, _ in rows], most, 8)
    return to_rows(rows, entry, meta)


def chats(entry, paths, meta, wish):
    """Conversations in the model's own template, a row each. The targets are the answers, and what ends them.
    Those that are too long are cut off."""
    none = meta.vocab_size
    meta.pad = min(wish.ends, default=0)
    most = wish.row or entry.length
    sides = []
    for conversations in entry.make(*paths):
        rows = []
        for messages in conversations:
            try:
                rows.append(chat.answered(messages, wish, none))
            except ValueError as e:
                begins = messages[0]['content'][:40]
                raise ValueError(f'{e}; in the conversation that begins {begins!r}') from None
        cut = [(x[:most], y[:most]) for x, y in rows]
        kept = [(x, y) for x, y in cut if any(target != none for target in y)]
        sides.append(tuple(map(list, zip(*kept))) or ([], []))
        print(f'{len(kept):,} of {len(rows):,} conversations have answers in their first {most:,} tokens')
    if not all(x for x, _ in sides):
        raise ValueError('too few answers to learn from: give at least 10 conversations, as every tenth '
                         'validates; the role of who answers is "assistant"')
    meta.row = row_length([x for x, _ in sides], most, 8)
    return to_rows(sides, entry, meta)


WAYS = {'text': plain_text, 'generated': generated, 'facts': generated, 'pictures': pictures,
        'labels': labelled, 'pairs': paired, 'joined': joined_rows, 'chats': chats}


# ---- tokens and rows ---------------------------------------------------------------------------------------

def fitted(sides, meta, most, given, step, more=0):
    """UTF-8 texts per side -> a token array per text, and the row length. The row length is `given` if a
    model sets it. Otherwise the longest text fits in, with `more` tokens. Longer texts are cut off, but keep
    the special tokens behind them."""
    from tqdm import tqdm
    before, behind = vocabulary.frame(meta)
    room = (given or most) - more
    by_side = []
    for texts in sides:
        rows = []
        cut = 0
        for text in tqdm(texts, unit='texts', disable=None):
            tokens = vocabulary.encode(text.decode(), meta, meta.marks)
            kept = tokens[:room - len(before) - len(behind)]
            cut += len(kept) < len(tokens)
            rows.append(np.array(before + kept + behind, np.uint32))
        if cut:
            print(f'{cut:,} of {len(texts):,} texts have more than {room} tokens: the rest is cut off')
        by_side.append(rows)
    return by_side, given or row_length(by_side, most, step, more)


def row_length(sides, most, step, more=0):
    """The row length for these lists of tokens, with `more` tokens: a multiple of step, at most `most`."""
    longest = more + max(len(tokens) for side in sides for tokens in side)
    return min(most, step * math.ceil(longest / step))


def learn_with_pad(sides, meta, wish):
    """Like `learn_tokens` for lists of texts; also sets pad: a new token, or the model's."""
    vocabulary.learn_tokens([b'\n'.join(texts) for texts in sides], meta)
    meta.pad = meta.vocab_size if wish.pad is None else wish.pad
    if meta.pad == meta.vocab_size:
        meta.vocab_size += 1
        if meta.chars:
            meta.chars = [*meta.chars, '<pad>']


def to_rows(sides, entry, meta):
    """Sides of tokens -> arrays (N, 2, meta.row) in the format of the .bin files: inputs, filled up with pad,
    and targets. meta gets what is not yet known of rows."""
    for name, value in entry.meta.items():
        setattr(meta, name, value)
    if not all(len(inputs) for inputs, _ in sides):
        raise ValueError('too few rows: one of the sides has none')
    inputs, _ = sides[0]
    meta.row = meta.row or entry.length or len(inputs[0])
    meta.patch = entry.patch ** 2
    meta.ignore = max(meta.vocab_size, meta.classes)            # beyond all that can be a target
    arrays = []
    for inputs, targets in sides:
        rows = np.full((len(inputs), 2, meta.row), meta.ignore, np.min_scalar_type(meta.ignore))
        if meta.pad is not None:
            rows[:, 0] = meta.pad
        for (x, y), tokens, answers in zip(rows, inputs, targets):
            n = len(tokens)
            x[:n] = tokens
            y[n - len(answers):n] = answers
        if entry.patch:                                         # square by square, in reading order
            across = entry.side // entry.patch
            squares = rows[:, 0].reshape(-1, across, entry.patch, across, entry.patch).swapaxes(2, 3)
            rows[:, 0] = squares.reshape(len(rows), -1)
        arrays.append([rows])
    return arrays
