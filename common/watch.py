"""Watch a model at work: what each attention layer gets and gives, how its weights differ from another's.

    for seen in through(model, tokens):         # a `Seen` per mixer (attention layer), in order
        print(seen.name, seen.q.shape, seen.o.shape)

convert.py trains the layers of a student on what those of its teacher get and give; sample.py --html records
it.
"""
import itertools
from typing import NamedTuple

import torch

import fastweight
from model import Cross, Mixer


class Seen(NamedTuple):
    """A mixer with its inputs and its block's output, as yielded by `through`."""
    name: str                       # name in the model: blocks.0.mixer
    layer: str                      # name of its block: blocks.0
    mixer: Mixer
    x: torch.Tensor                 # the block's input (B, T, n_embd)
    u: torch.Tensor                 # input for keys, values and gates
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor                 # the heads' outputs, before `merge`
    real: torch.Tensor | None       # which steps of x are not padding (B, T); None: all
    encoder_real: torch.Tensor | None   # likewise for the encoder's text
    source: torch.Tensor | None     # in a decoder: the output of the encoder
    y: torch.Tensor                 # output of the block

    @property
    def crosses(self):
        """Whether it is cross attention."""
        return isinstance(self.mixer, Cross)

    @property
    def scores(self):
        """q.k / sqrt(d) of all steps and keys, (B, H, T, T of the keys)"""
        return fastweight.cached_scores(self.q, self.k).flatten(1, 2)

    def outputs(self, mixer):
        """The heads' outputs of another mixer for these inputs (B, H, T, head_dim)"""
        q, k = self.seen_by(mixer)
        return mixer.outputs(self.u, q, k, self.v, self.encoder_real)

    def seen_by(self, mixer):
        """Queries and keys as another mixer takes them: before rope, if that is done in its cache"""
        if mixer.rope == self.mixer.rope:
            return self.q, self.k
        q, k, _ = mixer.heads(self.u)
        return q, k

    def weights(self, mixer):
        """The weight of each value in each output of this or another mixer, (B, H, T, T of the values).
        Outputs are linear in v, so we take v = I. Not for a decay per value channel, nor a limited cache."""
        T = self.k.shape[2]
        eye = torch.eye(T, dtype=self.q.dtype, device=self.q.device).expand(*self.k.shape[:3], T)
        return mixer.outputs(self.u, self.q, self.k, eye, self.encoder_real)


def through(model, tokens):
    """Run the model on tokens (B, T) from a fresh start and yield a `Seen` per mixer, in the order of
    computation, as soon as its block is computed. Only one block's tensors are in memory."""
    real = model.not_padding(tokens)
    source = encoder_real = None
    if model.encoder:
        begin = model.config.source
        encoder_tokens, encoder_real = model.without_padding(tokens[:, :begin])
        tokens, real = model.without_padding(tokens[:, begin:], begins=True)
        x = model.embedded(encoder_tokens)
        for i, block in enumerate(model.encoder):
            x = yield from watched(f'encoder.{i}', block, x, encoder_real, encoder_real)
        source = model.encoder_norm(x)
    elif not model.config.causal:
        encoder_real = real
    x = model.embedded(tokens, model.config.source)
    for i, block in enumerate(model.blocks):
        x = yield from watched(f'blocks.{i}', block, x, real, encoder_real, source)


def watched(layer, block, x, real, encoder_real, source=None):
    """Run the block of this name on x and yield a `Seen` for each of its mixers -> its output. The other
    arguments: as in `Seen`"""
    state = {}
    if source is not None:
        state['cross'] = block.cross.write(source, encoder_real)
    mixer = block.mixer
    padded = None if mixer.memory.causal else encoder_real
    base, u = block.branch(block.norm1, x)
    u = block.convolve(0, u, state, padded)
    q, k, v = mixer.heads(u)
    o, _ = mixer.memory(u, q, k, v, real=padded)
    mixed = base + block.ended(block.norm1, mixer.merge(o, u))
    y = block.after_mixer(mixed, state, 0, padded)
    yield Seen(f'{layer}.mixer', layer, mixer, x, u, q, k, v, o, real, encoder_real, source, y)
    if block.cross is not None:
        _, u = block.branch(block.norm3, mixed)
        q, _, _ = block.cross.heads(u)
        _, k, v = block.cross.heads(source)
        o = block.cross.outputs(source, q, k, v, encoder_real)
        yield Seen(f'{layer}.cross', layer, block.cross, x, source, q, k, v, o, real, encoder_real,
                   source, y)
    return y


# ---- how much alike attention weights are ------------------------------------------------------------------
def has_weights(mixer):
    """Whether outputs are weighted averages of values, whose weights can be compared to softmax's."""
    memory = mixer.memory
    return memory.rule.matrix and memory.norm == 'attn' and not memory.rule.erase


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
