"""Rows to train on and to be judged by: what differs between the kinds of data. Each kind is a class.

    data = rows_of(train, val, meta, T, device, batch_size=4)       # a Text, Task, Labels, Pictures or Pairs
    begin = data.starts(step)                                       # where the rows of a step begin
    x, y = data.batch(begin, i)                                     # inputs and targets of its i-th batch
    logits, targets, state = data.predict(model, x, y)              # what a model says of them

A new kind overrides what it does in another way. train.py asks for nothing else, and knows no kinds.
"""
import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from common.flags import flag, known
from common.machine import LOGITS
from data import vocabulary
from data.kinds import Data

PART = 65536        # evaluations during training read this many tokens of a validation text,
TASK_ROWS = 500     # and at least this many rows of a task, since a row may have only one target
POOL = 32           # pairs are drawn for this many steps at once, then sorted: similar lengths share a step
PROMPTS = {'stdlib': 'class '}                  # how the sample at the end begins, per data set


@dataclass
class Flags:
    """Of train.py: more about its data."""
    tokenizer: str = flag('', f'for texts: {vocabulary.OF_TEXTS}; default: that of the data or the '
                              'checkpoint')
    carry: bool = flag(False, 'read the text in order and carry S from step to step (Schlag 2021, table 4)')
    val_tokens: int = flag(0, f'evaluate on this many validation tokens; 0: on all; default of a model from '
                           f'the hub: {PART:,}', low=0, high=10 ** 12)
    row: int = known(0, 0, 2 ** 24)         # tokens in a training row; a model may know more positions


@dataclass
class Rows:
    """What all kinds have in common. A side (train or val) is a flat array of tokens, maybe memory-mapped.
    Row i of step s depends only on (seed, s, i), so resuming or using more processes changes nothing. For
    pairs, and with carry, it also depends on the number of rows per step."""
    train: np.ndarray
    val: np.ndarray
    meta: Data
    T: int                          # tokens in a row
    device: torch.device
    batch_size: int = 1             # rows, over all processes
    seed: int = 0
    accum: int = 1                  # batches per step
    carry: bool = False
    rank: int = 0
    world: int = 1
    dtype: torch.dtype = torch.float32      # of the matrix products

    def draw(self, number):
        """Random numbers that depend on the seed and this number alone: it is the generator's counter."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, number]))

    def batch(self, begin, i):
        """This process's rows of the i-th batch of a step -> x, y (B, T). begin: the result of `starts`"""
        mine = begin.reshape(self.accum, -1)[i, self.rank::self.world]
        return self.rows(self.train, mine)

    @property
    def padding(self):
        """The token that fills up rows, in texts of a decoder; None: there is none"""
        return self.meta.pad if self.meta.kind == 'pairs' else None

    def tensors(self, *arrays):
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def judged(self):
        """-> where the rows begin that evaluations during training read, and what these rows are called"""
        begin = self.blocks()
        count = max(self.fewest, np.count_nonzero(begin + self.T < PART))
        return begin[:count], 'validation' if count >= len(begin) else 'start of validation'

    # of an evaluation, beside the loss and the share of right answers
    def no_counts(self, model):
        """What `count` adds to, and `figures` are computed from"""
        return torch.zeros(0)

    def count(self, counts, said, y):
        """Count what was said, in place. said, y (N,): answers and targets"""

    def figures(self, counts):
        return {}


def products_in(dtype, device):
    """A context in which matrix products have this type."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def predict(model, x, y, state=None, dtype=torch.float32):
    """Run the model on the texts x, starting from `state` (None: empty) -> logits (N, vocab), at least in
    fp32, targets (N,), state. dtype: of matrix products"""
    with products_in(dtype, x.device):
        logits, state = model(x, state)
    return at_least_fp32(logits.flatten(0, 1)), y.flatten(), state


def evenly(begin, count):
    """At most so many of these rows, evenly spaced; None: all"""
    if count and count < len(begin):
        return begin[np.linspace(0, len(begin) - 1, count).astype(int)]
    return begin


def perplexity(loss):
    return f'perplexity {math.exp(min(loss, 50)):.3f} a token'


class Text(Rows):
    """A flat array of tokens: each is the target of those before it. A row may begin anywhere."""
    fewest = 1                                      # rows for an evaluation
    unit = 'tokens'

    def starts(self, step):
        """Where the rows of a step begin in the training data, for all its batches and processes. With carry
        nothing is drawn: each row has its own stretch of the text and continues in it at each step."""
        n = len(self.train)
        count = self.accum * self.batch_size
        if self.carry:
            return (np.arange(count) * (n // count) + step * self.T) % (n - self.T)
        return self.draw(step).integers(n - self.T, size=count)

    def rows(self, side, begin):
        """-> x, y (B, T): inputs, and the next token of each; -1 beyond the end of the text. Where BOS begins
        a row, the token at `begin` is its first target, else its first input."""
        bos = self.meta.bos
        at = np.add.outer(begin, np.arange(self.T)) - (bos is not None)
        x = side.take(at, mode='clip').astype(np.int64)
        y = side.take(at + 1, mode='clip').astype(np.int64)
        if bos is not None:
            x[:, 0] = bos
        y[at + 1 >= len(side)] = -1
        return self.tensors(x, y)

    def targets(self, begin):
        """The number of targets in the training rows that begin there."""
        return len(begin) * self.T

    def blocks(self, count=None, n=None):
        """Where the rows of an evaluation begin. The first n tokens (None: all) are cut into rows of T, so
        that each token but the first (with BOS, each) is a target once. The last row may have fewer targets.
        count: take at most this many rows, evenly spaced"""
        n = n or len(self.val)
        return evenly(np.arange(0, n - (self.meta.bos is None), self.T), count)

    def predict(self, model, x, y, state=None):
        return predict(model, x, y, state, self.dtype)

    def in_order(self, T=None):
        """The same text, to be read by one process in rows of T (None: long ones), each of which goes on
        where the last one ended, so that none begins"""
        T = T or min(4096, LOGITS // self.meta.vocab_size + 1)
        return dataclasses.replace(self, meta=dataclasses.replace(self.meta, bos=None), T=T, world=1)

    def goes_on(self, model):
        """Whether the model can also read the text as one, in a state of constant size: see `in_order`."""
        return model.max_len is None and model.config.keeps() == {None}

    def bits(self, loss, begin):
        """Nats per token of the validation rows that begin there, as a figure in bits per byte."""
        part = of_part(self.meta, self.val[:begin[-1] + self.T + 1])
        return {'bits per byte': loss * part.bits_a_nat()}

    def score(self, loss, figures, begin):
        """What to print of an evaluation: its nats per target, and figures, on the rows that begin there"""
        return f'{self.bits(loss, begin)["bits per byte"]:.4f} bits per byte, {perplexity(loss)}'

    def cost(self, loss):
        """What to print of a training loss, in the unit of the validation."""
        return f'{loss * self.meta.bits_a_nat("train"):.4f} bits per byte'

    def sample(self, model, tokens, name):
        """What is shown at the end of a training, lines or nothing: here a text"""
        return f'--- a sample ---\n{self.continued(model, tokens, name)}\n---\n'

    def glimpse(self, model, tokens, name):
        """What is shown after an evaluation, a line or nothing"""
        return f'    it writes: {" ".join(self.continued(model, tokens, name).split())}\n'

    def continued(self, model, tokens, name):
        """A text that the model writes, of up to so many tokens, after a beginning by which one can judge it.
        name: of the data set"""
        meta = self.meta
        beginning = vocabulary.encode(PROMPTS.get(name, ''), meta)
        if meta.from_hub:                                       # an empty text would tell nothing
            beginning = self.val[:16].tolist()
        prompt = torch.tensor([vocabulary.with_bos(beginning, meta)], device=self.device)
        draw = torch.Generator(self.device).manual_seed(0)
        many = max(0, min(tokens, (model.max_len or tokens + 1) - prompt.shape[1]))
        was_training = model.training
        model.eval()
        texts = model.generate(prompt, temperature=0.7, generator=draw)         # in fp32, as in sample.py
        written = [token.item() for token, _ in itertools.islice(texts, many)]
        model.train(was_training)
        written = itertools.takewhile(lambda token: token not in meta.ends, written)
        return vocabulary.decode([*beginning, *written], meta)


def of_part(meta, tokens):
    """meta with the counts of these validation tokens alone. Tokens of another part are longer or shorter."""
    if meta.tokenizer in ('byte', 'ids') or len(tokens) == meta.val['tokens']:
        return meta
    text = vocabulary.decode(tokens, meta)
    part = {'tokens': len(tokens), 'bytes': len(text.encode('utf-8', 'surrogateescape'))}
    return dataclasses.replace(meta, val={**meta.val, **part})


class Task(Rows):
    """Rows of inputs, then their targets, of which only some count."""
    fewest = TASK_ROWS
    unit = 'rows'

    def starts(self, step):
        return self.drawn(step, self.accum * self.batch_size)

    def drawn(self, number, count):
        """Where so many random rows begin in the training data."""
        many = len(self.train) // self.meta.step
        return self.draw(number).integers(many, size=count) * self.meta.step

    def rows(self, side, begin):
        """-> x, y (B, n): inputs, and targets, -1 where none counts, cut behind the last target of all."""
        x, y = self.whole(side, begin)
        end = np.flatnonzero((y >= 0).any(0)).max() + 1
        return self.tensors(x[:, :end], y[:, :end])

    def whole(self, side, begin):
        at = np.add.outer(begin, np.arange(self.T))
        x = side.take(at).astype(np.int64)
        y = side.take(at + self.T).astype(np.int64)
        y[y == self.meta.ignore] = -1
        return x, y

    def targets(self, begin):
        _, y = self.whole(self.train, begin)
        return np.count_nonzero(y >= 0)

    def blocks(self, count=None, n=None):
        n = n or len(self.val)
        return evenly(np.arange(0, n - self.meta.step + 1, self.meta.step), count)

    def predict(self, model, x, y, state=None):
        """As of a text, but logits are computed only at targets, which are few."""
        at = y >= 0
        with products_in(self.dtype, self.device):
            logits, state = model(x, state, at)
        return at_least_fp32(logits), y[at], state

    def goes_on(self, model):
        return False

    def bits(self, loss, begin):
        return {}

    def sample(self, model, tokens, name):
        return ''

    def glimpse(self, model, tokens, name):
        return ''

    def score(self, loss, figures, begin):
        return f'accuracy {figures["accuracy"]:.1%}'

    def cost(self, loss):
        return f'loss {loss:.3f}'


class Labels(Task):
    """Each row has one target, a class."""
    def no_counts(self, model):
        n = model.config.classes
        return torch.zeros(n, n, dtype=torch.float64)           # how often i was said of a row of class j

    def count(self, counts, said, y):
        n = len(counts)
        counts += torch.bincount((n * said + y).cpu(), minlength=n * n).view_as(counts)

    def figures(self, counts):
        """Matthews' correlation of answers with labels, and the share of the commonest class. The first is 0
        for a model that always says one class, and R_K for more than two classes, Gorodkin 2004."""
        said, true, n = counts.sum(1), counts.sum(0), counts.sum()
        together = n * counts.trace() - said @ true
        apart = (n * n - said @ said) * (n * n - true @ true)
        return {'matthews': (together / apart.clamp(min=1).sqrt()).item(),
                'majority': (true.max() / n).item()}

    def score(self, loss, figures, begin):
        return (f'accuracy {figures["accuracy"]:.1%} (always the commonest class: '
                f'{figures["majority"]:.1%}), Matthews {figures["matthews"]:.3f}')


class Pictures(Labels):
    """Patches of numbers, which are read whole, and a class."""
    def rows(self, side, begin):
        return self.tensors(*self.whole(side, begin))


class Pairs(Task):
    """A text and its translation or answer, both shorter than a row. Similar lengths share a step."""
    def starts(self, step):
        count = self.accum * self.batch_size
        pool, place = divmod(step, POOL)
        rng = self.draw(pool)
        begin = rng.integers(len(self.train) // self.meta.step, size=POOL * count) * self.meta.step
        real = self.train.take(np.add.outer(begin, np.arange(self.T))) != self.meta.pad
        source = self.meta.source                   # without a source length, both sides are one text
        longer = np.maximum(real[:, :source].sum(1), real[:, source:].sum(1))
        by_length = begin[np.argsort(longer, kind='stable')].reshape(POOL, count)
        return by_length[rng.permutation(POOL)[place]]

    def score(self, loss, figures, begin):
        return f'{perplexity(loss)}, accuracy {figures["accuracy"]:.1%}'

    def sample(self, model, tokens, name):
        """The first validation pair: the source, and what the model makes of it"""
        if not self.meta.source:
            return ''
        x, _ = self.rows(self.val, [0])
        source = x[:, :self.meta.source]
        both = source, model.translate(source)
        return ''.join(f'> {vocabulary.decode(tokens[0].tolist(), self.meta)}\n' for tokens in both)


KINDS = {'text': Text, 'task': Task, 'labels': Labels, 'picture': Pictures, 'pairs': Pairs}


def rows_of(train, val, meta, T, device, *more, **how):
    """The rows of a set: of the class of its kind"""
    return KINDS[meta.kind](train, val, meta, T, device, *more, **how)
