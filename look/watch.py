"""Watch a model at work: what each attention layer gets and gives, how its weights differ from another's.

    for seen in through(model, tokens):         # a `Seen` per mixer (attention layer), in order
        print(seen.name, seen.q.shape, seen.o.shape)

convert.py trains the layers of a student on what those of its teacher get and give; sample.py --html records
it.
"""
import contextlib
import itertools
import threading
from typing import NamedTuple

import torch

import caches
from model import Mixer


class Seen(NamedTuple):
    """A mixer with its inputs and its block's output, as yielded by `through`."""
    name: str                       # name in the model: blocks.0.mixer
    layer: str                      # name of its block: blocks.0
    mixer: Mixer
    x: torch.Tensor                 # the block's input (B, T, n_embd)
    rest: tuple                     # what the block was given beside x
    u: torch.Tensor                 # input for keys, values and gates
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor                 # the heads' outputs, before `merge`
    y: torch.Tensor                 # output of the block
    real: torch.Tensor | None       # which steps of x are not padding (B, T); None: all
    encoder_real: torch.Tensor | None   # likewise for the encoder's text
    source: torch.Tensor | None     # in a decoder: the output of the encoder

    @property
    def crosses(self):
        """Whether it is cross attention."""
        return self.name.endswith('.cross')

    @property
    def scores(self):
        """q.k / sqrt(d) of all steps and keys, (B, H, T, T of the keys)"""
        return caches.cached_scores(self.q, self.k).flatten(1, 2)

    def result_of(self, block):
        """The output of another block for these inputs (B, T, n_embd)"""
        rest = self.rest
        if self.source is not None:
            rest = {'cross': block.cross.write(self.source, self.encoder_real)},
        return first(block(self.x, *rest))

    def outputs(self, mixer):
        """The heads' outputs of another mixer for these inputs (B, H, T, head_dim)"""
        q, k = self.seen_by(mixer)
        return self.computed(mixer, q, k, self.v)

    def computed(self, mixer, q, k, v):
        """The heads' outputs of a mixer for these q, k and v, from a fresh start"""
        if self.crosses:
            return mixer.memory.read_all(q, mixer.memory.write_all(self.u, k, v, self.encoder_real))
        whole = () if self.encoder_real is None or self.source is not None else (self.encoder_real,)
        return first(mixer.memory(self.u, q, k, v, *whole))

    def seen_by(self, mixer):
        """Queries and keys as another mixer takes them: before rope, if that is done in its cache"""
        if mixer.rope == self.mixer.rope:
            return self.q, self.k
        q, k, _ = mixer.project(self.u)
        return q, k

    def weights(self, mixer):
        """The weight of each value in each output of this or another mixer, (B, H, T, T of the values).
        Outputs are linear in v, so we take v = I. Not for a decay per value channel, nor a limited cache."""
        T = self.k.shape[2]
        eye = torch.eye(T, dtype=self.q.dtype, device=self.q.device).expand(*self.k.shape[:3], T)
        return self.computed(mixer, self.q, self.k, eye)

    def evicted_at(self):
        """For each token of a text the step after which its layer has it no longer cached, T if it stays to
        the end (B, G, T)"""
        T = self.k.shape[2]
        gone = torch.full((*self.k.shape[:2], 1 + T), T, device=self.k.device)  # first: steps that evict none
        if self.mixer.memory.rule.bounded:
            _, _, went, _ = self.mixer.memory.attend_and_evict(self.q, self.k, self.v)
            steps = torch.arange(T, device=self.k.device).expand(self.k.shape[:3])
            gone.scatter_(2, went['pos'] + 1, steps)
        return gone[:, :, 1:]


def first(result):
    """The first of several results, or the only one"""
    return result[0] if isinstance(result, tuple) else result


def through(model, tokens, pad=None):
    """Run the model on tokens (B, T) from a fresh start and yield a `Seen` per mixer, in the order of
    computation, as soon as its block is computed. Only one block's tensors are in memory. pad: the token that
    is padding in texts of a decoder; models with classes or pairs know theirs"""
    if model.task == 'translate':
        yield from through_pairs(model, tokens)
        return
    x = model.embedded(tokens)
    if hasattr(model, 'not_padding'):               # an encoder
        real = encoder_real = model.not_padding(tokens)
        rest = (real,)
    else:
        pad = getattr(model.config, 'pad', pad)
        real = None if pad is None else tokens != pad
        encoder_real = None
        rest = ()
    for i, block in enumerate(model.blocks):
        x = yield from watched(f'blocks.{i}', block, x, rest, real, encoder_real)


def through_pairs(model, tokens):
    """`through` for a translator, whose rows begin with the source"""
    n = model.config.source
    text, encoder_real = model.without_padding(tokens[:, :n])
    x = model.embedded(text)
    for i, block in enumerate(model.encoder):
        x = yield from watched(f'encoder.{i}', block, x, (encoder_real,), encoder_real, encoder_real)
    source = model.encoder_norm(x)
    text, real = model.without_padding(tokens[:, n:], begins=True)
    x = model.embedded(text, n)
    for i, block in enumerate(model.blocks):
        state = {'cross': block.cross.write(source, encoder_real)}
        x = yield from watched(f'blocks.{i}', block, x, (state,), real, encoder_real, source)


@contextlib.contextmanager
def recorded(module):
    """A list that gets what this module is called with, and what it returns: calls of this thread alone."""
    calls = []
    here = threading.get_ident()

    def record(module, given, result):
        if threading.get_ident() == here:
            calls.extend([given, result])
    hook = module.register_forward_hook(record)
    try:
        yield calls
    finally:
        hook.remove()


def watched(layer, block, x, rest, real, encoder_real, source=None):
    """Run the block of this name on x and the rest of its arguments, and yield a `Seen` for each of its
    mixers -> its output. The other arguments: as in `Seen`"""
    cross = getattr(block, 'cross', None)
    if not isinstance(block.mixer, Mixer):          # of your own: it has no q, k and v
        return first(block(x, *rest))
    with recorded(block.mixer.memory) as calls, recorded(cross or block) as of_cross:
        y = first(block(x, *rest))
    (u, q, k, v, *_), o = calls
    about = real, encoder_real, source
    yield Seen(f'{layer}.mixer', layer, block.mixer, x, rest, u, q, k, v, first(o), y, *about)
    if cross is not None:
        (asks, state, *_), _ = of_cross
        q, _, _ = cross.project(asks)
        _, k, v = cross.project(source)
        o = cross.memory.read_all(q, state)
        yield Seen(f'{layer}.cross', layer, cross, x, rest, source, q, k, v, o, y, *about)
    return y


# ---- how much alike attention weights are ------------------------------------------------------------------
def has_weights(mixer):
    """Whether outputs are weighted averages of values, whose weights can be compared to softmax's."""
    memory = mixer.memory
    return memory.rule.matrix and memory.norm == 'attn' and not memory.rule.erases


def kl(a, w):
    """The divergence of attention weights w from a, both (B, H, T, T): sum_s a log(a / w), averaged over
    queries, in nats."""
    return (a * (a.clamp(min=1e-12).log() - w.clamp(min=1e-12).log())).sum(-1).mean()


def order_kept(scores, w):
    """How often the weights w order two keys as q.k does, as a share. One random pair of keys is drawn per
    query but the first. Softmax keeps every order, and so should a map (Zhang 2024, sec. 3).
    scores, w (B, H, T, T)"""
    draw = torch.Generator().manual_seed(0)
    queries = scores.shape[-1] - 1
    t = torch.arange(1, queries + 1)
    i = (torch.rand(queries, generator=draw) * (t + 1)).long()
    j = (i + 1 + (torch.rand(queries, generator=draw) * t).long()) % (t + 1)        # different from i
    by_scores = (scores[:, :, t, i] - scores[:, :, t, j]).sign()
    by_weights = (w[:, :, t, i] - w[:, :, t, j]).sign()
    return (by_scores == by_weights).float().mean().item()


def entropy(w):
    """Mean of -sum_s w log w over queries, in nats. 0: each query looks at one key."""
    return -(w * w.clamp(min=1e-12).log()).sum(-1).mean().item()


@torch.no_grad()
def compared(name, teacher, student, texts):
    """Compare the attention of the swapped layers with the teacher's, on the teacher's inputs; texts: tensors
    (1, T).
    ->  a line per layer that has attention weights, means over the texts: divergence, entropies, share of
        order kept;
        one query: the last one of the last such layer's first head, with keys sorted by q.k / sqrt(d): these
        scores, their softmax, and the student's weights under `name`. {} if there is no such layer"""
    found = {}                                              # per layer, a row for each text
    query = {}
    for seen in itertools.chain.from_iterable(through(teacher, text) for text in texts):
        twin = student.get_submodule(seen.name)
        if not has_weights(twin) or seen.crosses or seen.q.shape[2] < 2:
            continue
        a = seen.weights(seen.mixer)
        w = seen.weights(twin)
        scores = seen.scores
        found.setdefault(seen.layer, []).append({
            'KL to teacher': kl(a, w).item(), 'entropy of teacher': entropy(a), 'entropy': entropy(w),
            'order kept': order_kept(scores, w)})
        ordered, order = scores[0, 0, -1].sort()
        query = {'scores': ordered.tolist(), 'softmax': a[0, 0, -1, order].tolist(),
                 name: w[0, 0, -1, order].tolist()}
    lines = []
    for layer, seen in found.items():
        means = {key: sum(row[key] for row in seen) / len(seen) for key in seen[0]}
        lines.append({'model': name, 'layer': layer, **means})
    return lines, query
