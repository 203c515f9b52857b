"""Generated tasks: recall, products in a group, facts in a running text, ListOps.

Of each, `make(rows, rng, vocab, training)` returns at most `rows` rows of a side, inputs (N, T) and targets
(N, n) of the last n inputs. `generate_rows` calls it until there are enough. A target of `vocab` does not
count. facts also gets the text around them. After a change of `make`, run prepare.py again: rows that are
there are not made anew.
"""
import collections
import itertools
import re
import statistics

import numpy as np

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
        same = keys[:, i + 1:] == keys[:, i, None]
        later[same] = i

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
        gaps = np.diff(np.sort(drawn, 1), axis=1)
        repeats = (gaps == 0).any(1)
        if not repeats.any():
            return drawn
        drawn[repeats] = rng.integers(low, high, (repeats.sum(), shape[1]))


# ---- groups ------------------------------------------------------------------------------------------------

def even(permutation):
    """Whether an even number of pairs are out of order."""
    swapped = sum(a > b for a, b in itertools.combinations(permutation, 2))
    return swapped % 2 == 0


GROUPS = {'Z2': [(0, 1), (1, 0)], 'S3': list(itertools.permutations(range(3))),
          'A5': list(filter(even, itertools.permutations(range(5))))}


def group(rows, rng, vocab, training, length, elements):
    """State tracking (Grazzi et al. 2024, arXiv:2411.12537): inputs are random elements of a group, targets
    are the products so far. For Z2, that is parity. The state is only one element, but every input may change
    it. Training rows have products of 1 to 40 elements. The rows of group:S3-256 test whether a model
    generalises to longer ones."""
    place = {p: i for i, p in enumerate(elements)}
    product = np.empty((len(elements), len(elements)), int)
    for p in elements:
        for q in elements:
            both = tuple(p[i] for i in q)
            product[place[p], place[q]] = place[both]
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
    which = np.concatenate([np.tile(np.arange(n), (rows, 1)), again], axis=1)
    which = which[each, order]
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
        at = (room * share[i]).astype(int)
        at = np.repeat(at, len(SENTENCE))
        around = text[begin[i]:begin[i] + room]
        inputs = np.insert(around, at, stated[i].ravel())
        targets = np.insert(nothing, at, wanted[i].ravel())
        x[i] = inputs[:length]
        y[i] = targets[:length]
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
    vocabulary = list(dict.fromkeys(OWN + likely + common))      # no duplicates, in this order
    meta.chars = vocabulary[:most]
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
    ends = np.cumsum(size[good])
    *inputs, _ = np.split(spelled(kept), ends)
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
            is_nested = rng.random(len(drawn)) < 1 / 4
            nested = np.flatnonzero(is_nested)
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


# ---- rows --------------------------------------------------------------------------------------------------

def generate_rows(entry, meta, texts=()):
    """Draw the rows of a task, always the same ones -> both sides. texts: the bytes of both sides, if rows
    are made from a text. meta gets the vocabulary."""
    from tqdm import tqdm
    meta.vocab_size = entry.vocab
    given = {}
    if entry.length:
        given['length'] = entry.length
    if texts:
        texts = in_words(texts, meta, entry.vocab)
        meta.vocab_size = len(meta.chars)
    sides = []
    for seed, rows in enumerate(entry.rows):
        rng = np.random.Generator(np.random.Philox(seed))
        training = seed == 0
        if texts:
            given['text'] = texts[seed]
        inputs = []
        targets = []
        with tqdm(total=rows, disable=None) as bar:             # None: show a bar only on a terminal
            while len(inputs) < rows:
                more = rows - len(inputs)
                x, y = entry.make(more, rng, meta.vocab_size, training, **given)
                inputs.extend(x)
                targets.extend(y)
                bar.update(len(x))
        sides.append((inputs, targets))
    return sides
