"""How good a model is beside its teacher, and the table of a conversion.

    exact, nats, kl = nats_and_kl(teacher, model, x, y, 'a label')      # at each position of rows (B, T)
    recovered(exact - nats)                             # of the teacher's perplexity, with an interval
    judge = Judge(teacher, data, count, log)            # of one conversion:
    judge.add_line('fine-tuned', model, steps)          # a line of its table, printed and logged

Texts are judged by perplexity, tasks by accuracy. papers/ measures with the same functions.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F

from common.machine import tokens_at_once
from common.terminal import progress
from common.weights import state_bytes
from data.rows import predict
from runs.log import say, tell
from train import evaluate

FIRST = 256             # tokens of the first range where a text is judged by position
LONGER = 4              # rows of the text in which a student is judged beyond them
LOOK = 1024             # tokens whose attention weights are compared


# ---- nats at each position ---------------------------------------------------------------------------------
def logits_along(model, x, y, what, dtype):
    """Read rows x (B, T), each from an empty state, in pieces, so that memory hardly grows with B and T.
    Yield the piece as an index, its logits (n, vocab), its targets of y (n,)"""
    B, T = x.shape
    tokens = tokens_at_once(model.config.vocab_size, x.device)
    segment = max(1, min(T, 512, tokens))
    at_once = max(1, tokens // segment)
    pieces = [(i, t) for i in range(0, B, at_once) for t in range(0, T, segment)]
    for i, t in progress(pieces, what):
        if t == 0:
            state = None
        piece = slice(i, i + at_once), slice(t, t + segment)
        logits, targets, state = predict(model, x[piece], y[piece], state, dtype)
        yield piece, logits, targets


@torch.inference_mode()
def nats_along(model, x, y, what, dtype=torch.float32):
    """Nats (B, T) of the targets y (B, T) of rows x (B, T), each from an empty state. what: begins the
    progress bar; dtype: of the matrix products"""
    nats = torch.empty(x.shape)
    for piece, logits, targets in logits_along(model, x, y, what, dtype):
        nats[piece] = F.cross_entropy(logits, targets, reduction='none').view_as(nats[piece])
    return nats


@torch.inference_mode()
def nats_and_kl(teacher, model, x, y, what, dtype=torch.float32):
    """As `nats_along`, of both, and KL(teacher || model) at each position -> nats of the teacher, of the
    model, KL (B, T)"""
    exact, nats, kl = torch.empty(3, *x.shape)
    of_teacher = logits_along(teacher, x, y, '', dtype)
    of_model = logits_along(model, x, y, what, dtype)
    for (_, wanted, _), (piece, logits, targets) in zip(of_teacher, of_model):
        log_p = logits.log_softmax(-1)
        log_wanted = wanted.log_softmax(-1)
        exact[piece] = F.nll_loss(log_wanted, targets, reduction='none').view_as(exact[piece])
        nats[piece] = F.nll_loss(log_p, targets, reduction='none').view_as(nats[piece])
        far = F.kl_div(log_p, log_wanted, log_target=True, reduction='none').sum(-1)
        kl[piece] = far.view_as(kl[piece])
    return exact, nats, kl


# ---- figures -----------------------------------------------------------------------------------------------
def ranges(T, first):
    """Yield (start, end) of ranges of positions: up to `first`, from there to twice that, and so on to T."""
    start = 0
    end = first
    while start < T:
        yield start, min(end, T)
        start = end
        end *= 2


def recovered(gain):
    """What a model has recovered of the teacher's perplexity per token -> columns of the table. gain (rows,
    T): nats of the teacher less those of the model. `low` and `high` are a 95 % interval over rows. Then come
    the shares among the first 256 tokens, from there to 512, to 1,024, ..."""
    by_row = gain.mean(1)
    mean = by_row.mean()
    half = math.inf
    if len(by_row) > 1:
        half = 1.96 * by_row.std() / len(by_row) ** 0.5
    row = {'recovered': mean.exp().item(), 'low': (mean - half).exp().item(),
           'high': (mean + half).exp().item()}
    T = gain.shape[1]
    for start, end in ranges(T, FIRST) if T > FIRST else ():
        row[f'to {end:,}'] = gain[:, start:end].mean().exp().item()
    return row


def part_recovered(row, base):
    """The share of a teacher that a model has recovered; row, base: their lines of the table. For a text it
    is the teacher's perplexity per token / the model's; else the model's accuracy / the teacher's. None if
    the teacher's accuracy is 0."""
    if 'accuracy' not in row:
        return base['perplexity'] / row['perplexity']
    if base['accuracy'] == 0:
        return None
    return row['accuracy'] / base['accuracy']


def over_the_best(nats, name, others):
    """The perplexity of a model over that of the best of others, row by row -> the name of the best, the
    ratio, its 95 % interval over rows. nats (rows, T) by name"""
    best = min(others, key=lambda other: nats[other].mean())
    over = recovered(nats[name] - nats[best])
    return best, over['recovered'], over['low'], over['high']


def bytes_after(model, T):
    """The bytes of a model's state after T tokens; None for an encoder or a translator. A cache without a
    limit grows by as much with every token."""
    if model.task != 'complete':
        return None
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.embed.weight.device)
    one = state_bytes(model.read(tokens[:, :1]))
    two = state_bytes(model.read(tokens))
    return one + (T - 1) * (two - one)


# ---- the table of a conversion -----------------------------------------------------------------------------
class Judge:
    """Judges models beside their teacher, all on the same validation rows. count: of these rows, evenly
    spaced; log: log.jsonl of the conversion"""
    def __init__(self, teacher, data, count, log):
        self.teacher = teacher
        self.data = data
        self.log = log
        self.lines = []                                     # of the table
        self.by_row = {}                                    # of a text: each model's nats by row
        self.tokens = data.T * data.batch_size * data.accum         # in a step
        self.of_text = data.meta.kind == 'text'
        n = len(data.val)
        if self.of_text:
            n -= (n - (data.meta.bos is None)) % data.T     # whole rows
        self.begin = data.blocks(count, n)
        self.x, self.y = data.rows(data.val, self.begin)

    def columns_of(self, model, what):
        """Evaluate a model beside the teacher, each row from an empty state -> columns of the table. what:
        its name"""
        label = f'{what}, validation'
        if not self.of_text:
            loss, right = evaluate(model, self.data, self.begin, label=label)
            row = {'perplexity': math.exp(min(loss, 80)), **right}
            return {**row, 'recovered': part_recovered(row, self.lines[0] if self.lines else row)}
        was_training = model.training
        model.eval()
        exact, nats, kl = nats_and_kl(self.teacher, model, self.x, self.y, label, self.data.dtype)
        model.train(was_training)
        self.by_row[what] = nats.mean(1, keepdim=True)
        perplexity = math.exp(min(nats.mean().item(), 80))
        return {'perplexity': perplexity, **recovered(exact - nats), 'KL': kl.mean().item()}

    def add_line(self, name, model, steps=0):
        """Add a line to the table, print and log it: how good a model is after so many steps."""
        row = self.columns_of(model, name)
        self.lines.append({'model': name, **row, 'tokens': steps * self.tokens,
                           'state bytes': bytes_after(model, self.data.T)})
        if 'accuracy' in row:
            text = self.data.score(math.log(row['perplexity']), row, self.begin)
        else:
            text = (f'perplexity {row["perplexity"]:.4g}, recovered {row["recovered"]:.1%} a token '
                    f'({row["low"]:.1%} to {row["high"]:.1%})')
        tell(self.log, f'{name}: {text}', model=name, **row)

    def texts(self):
        """The first validation rows one by one, of LOOK tokens together, as tensors (1, T)"""
        some = self.begin[:max(1, LOOK // self.data.T)]
        return [self.data.rows(self.data.val, [begin])[0] for begin in some]

    def beside_the_best(self, others):
        """Print how the last model compares with the best of others, of these names -> what `over_the_best`
        says; None if there are no others"""
        if not others:
            return None
        over = over_the_best(self.by_row, self.lines[-1]['model'], others)
        say('row by row, perplexity over that of the best of the others, '
            '{}: {:.3f} ({:.3f} to {:.3f})'.format(*over))
        return over

    def in_one_text(self, name, student):
        """Does the student hold beyond the rows that it was trained on? -> its perplexity in one text of
        LONGER rows over the teacher's, which reads them one by one: a figure for each. Empty if that cannot
        be told"""
        data = self.data
        T = data.T
        n = LONGER * T
        if not self.of_text or len(data.val) <= n or (student.max_len or n) < n:
            return []
        whole = dataclasses.replace(data, T=n).rows(data.val, [0])
        rows = data.rows(data.val, [*range(0, n, T)])
        student_nats = nats_along(student, *whole, 'one text', data.dtype)
        teacher_nats = nats_along(self.teacher, *rows, 'one text', data.dtype)
        over = (student_nats.view(LONGER, T) - teacher_nats).mean(1).exp().tolist()
        say(f'{name} in one text of {n:,} tokens: perplexity over the teacher\'s in rows of {T}, row by row: '
            f'{", ".join(f"{x:.2f}" for x in over)}')
        return over
