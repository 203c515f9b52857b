"""The model around the rules: its config, its layers, the GPT, and how it writes.

    model = GPT(Config(rule='delta', vocab_size=256))
    logits, state = model(tokens)               # (B, T) -> logits (B, T, vocab), state: what it keeps
    logits, state = model(more_tokens, state)   # continues where the first call stopped, with any T
    save('x.safetensors', model, {'note': 'untrained'})
    model, meta = load('x.safetensors')         # meta: what was saved beside the weights

memory.py has what a layer remembers, fastweight.py what it computes. This file makes the keys, values, gates
and queries for it. Models with more parts (encoders, translators, those of the hub) are built on these
classes, a file each in models/.
"""
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common.checks import contradictions
from common.flags import briefly, by_layer, check_fields, flag, known, refuse
from common.terminal import progress
from fastweight import FEATURE_MAPS, NORMALISERS, RULES, FeatureMap, rules_that
from memory import PLAIN, Cache, FastWeights, pick_forms


# ---- what a model is ---------------------------------------------------------------------------------------
@dataclass
class Config:
    """Everything that defines a model. ValueError, with the names of the flags, for what is impossible."""
    rule: str = flag('delta', 'update rule of every layer', RULES)
    layers: str = flag('', 'one rule per layer instead, repeated over the depth: delta,delta,softmax')
    phi: str = flag('', f'feature map, if not the rule\'s; with option: dpfp:3 [{", ".join(FEATURE_MAPS)}]',
                    of='matrix')
    norm: str = flag('', 'normaliser, if not the rule\'s', NORMALISERS, of='matrix')
    beta_max: float = flag(2.0, 'delta rules: beta lies in (0, beta_max); 1 in Schlag 2021', low=0, high=2,
                           of='erases')
    gate_rank: int = flag(0, 'gates: rank of their W; 0: full', low=0, high=2 ** 17, of='gated')
    key_dim: int = known(0, 0, 2 ** 17, of='matrix')        # channels of q and k per head; 0: as many as v
    out_norm: bool = flag(True, 'LayerNorm after each matrix, except with --norm=attn; Schlag has none')
    conv: int = flag(4, 'width of the convolution before mixer and MLP (causal, except in encoders); 0: none',
                     low=0, high=64)
    cache: int = flag(256, 'rules with a limited cache: number of cached tokens', low=0, high=2 ** 20,
                      of='bounded')
    sinks: int = flag(4, f'{", ".join(rules_that("keeps_first"))}: how many first tokens are never evicted',
                      low=0, high=2 ** 24, of='keeps_first')
    pos: str = flag('auto', 'auto: rope in layers with a cache; learned if there is an encoder',
                    ['auto', 'none', 'learned', 'rope'])
    n_layer: int = flag(4, 'layers', low=1, high=1024)
    n_head: int = flag(8, 'heads', low=1, high=1024)
    n_embd: int = flag(128, 'width', low=1, high=2 ** 17)
    block_size: int = flag(128, 'tokens in a training row of a text (a task has its own); with --init, at '
                           'most so many of labelled lines and chats; default with --init: those of the '
                           'model, if from the hub at most 512', low=1, high=2 ** 24)
    dropout: float = flag(0.0, 'dropout', low=0, high=0.99)
    vocab_size: int = known(256, 1, 2 ** 32)                # set by the data
    act: str = flag('relu2', '', ['relu2', 'gelu'])         # gelu and biases: GPT-2
    bias: bool = False

    def __post_init__(self):
        check_fields(self)
        self.rules = by_layer(self.layers, self.rule, self.n_layer)
        refuse(self.contradictions())

    def contradictions(self):
        """For `refuse`: what would fail far from its cause, be ignored, or be silently wrong."""
        return contradictions(self)

    # What a room says otherwise (models/): a translator has more rules; pretrained heads and MLPs have any
    # width, and other norms; beside a matrix a cache may be empty. A layer without a rule has no entry here.
    def every_rule(self):
        """The rules of all layers."""
        return self.rules

    def width_of_head(self):
        if self.n_embd % self.n_head:
            raise ValueError(f'--n_embd={self.n_embd} is not a multiple of --n_head={self.n_head}')
        return self.n_embd // self.n_head

    def channels(self, rule):
        """-> the channels of q and k, and of v, in a head of a layer with this rule"""
        d = self.width_of_head()
        if RULES[rule].matrix and self.key_dim:
            return self.key_dim, d
        return d, d

    def uses_rope(self, rule):
        """Whether a layer with this rule rotates its keys by rope."""
        return self.pos == 'rope' or (self.pos == 'auto' and not RULES[rule].matrix)

    def layer_norm(self):
        return nn.LayerNorm(self.n_embd, bias=self.bias)

    def has_qkv_bias(self):
        return self.bias

    def width_of_mlp(self):
        return 4 * self.n_embd

    def fewest_cached(self):
        return 1

    def users(self, field):
        """The rules whose layers use this field; all, if it is of the whole model"""
        of = field.metadata.get('of')
        return rules_that(of) if of else [*RULES]

    def uses(self, field):
        """Whether the model uses this field, or any of its layers."""
        return not field.metadata.get('of') or not set(self.every_rule()).isdisjoint(self.users(field))

    def sees_near_alone(self):
        """Whether no query meets a key from far away, whatever the text."""
        return self.keeps() == {'window'}

    def has_rope(self):
        return any(map(self.uses_rope, self.rules))

    def keeps(self):
        """What layers keep, as a set: 'all' for softmax, a policy for a limited cache, None for a matrix."""
        return {RULES[rule].keeps for rule in self.rules}

    def summary(self):
        """For messages: the rules"""
        return briefly(self.every_rule())


# ---- layers ------------------------------------------------------------------------------------------------
def rope(x, pos, theta=1e4):
    """Rotate the pairs (x_i, x_{i+d/2}) by the angle pos theta^(-2i/d). Su 2021, arXiv:2104.09864. What q
    finds at k then depends only on the distance of their positions.
    x (B, H, T, d), d even   pos (.., T)  ->  like x"""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    return rotated(x, pos, speed)


def rotated(x, pos, speed):
    """x (B, H, T, d) with its first pairs rotated by pos (.., T) times speed (n,), n <= d/2. Whole turns are
    taken off in fp64: in fp32, the angle at position 10^7 is wrong by up to one radian."""
    half = len(speed)
    exact = torch.float32 if pos.device.type == 'mps' else torch.float64    # which has no fp64
    angle = pos[..., None].to(exact) * speed.to(exact)
    angle = angle.remainder(2 * math.pi).float()
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class Conv(nn.Module):
    """y_t = sum_j w_j x_{t-n+j}, j = 0..n, per channel. Its state is the last n inputs, n = width - 1.
    Weights start random, so each channel sees the last tokens in its own way; starting as the identity learns
    slower."""
    forms = PLAIN

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        nn.init.uniform_(self.weight, -width ** -0.5, width ** -0.5)

    def forward(self, x, last=None):
        """x (B, T, D), last None or the n inputs before x (B, n, D) -> y (B, T, D), the last n inputs"""
        T = x.shape[1]
        n = len(self.weight) - 1
        if last is None:                            # a negative pad removes steps
            return self.forms.shift(x, self.weight), F.pad(x, (0, 0, n - T, 0))
        x = torch.cat([last, x], 1)
        if T == 1:
            return (x * self.weight).sum(1, keepdim=True), x[:, 1:]
        return self.forms.shift(x, self.weight)[:, n:], x[:, T:]


def by_head(x, size):
    """Channels side by side (B, T, heads * size) -> (B, heads, T, size)"""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


class Mixer(nn.Module):
    """What attention is in a transformer: projections, positions, and fast weights or a cache."""
    def __init__(self, c, rule):
        super().__init__()
        self.key_dim, self.head_dim = c.channels(rule)
        self.sizes = self.widths(c, rule)
        self.qkv = nn.Linear(c.n_embd, sum(self.sizes), bias=c.has_qkv_bias())
        self.rope = c.uses_rope(rule)
        self.add_memory(c, rule)
        self.proj = nn.Linear(self.width, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def widths(self, c, rule):
        """The widths of q, k and v, all heads side by side. Other numbers of heads: models/pretrained.py"""
        return [c.n_head * self.key_dim, c.n_head * self.key_dim, c.n_head * self.head_dim]

    def add_memory(self, c, rule):
        """Make the memory and, behind a matrix, a norm. Rooms that add parts between qkv and proj override
        this: their weights are drawn in the order in which they are made."""
        self.memory = self.memory_of(c, rule)
        self.width = self.sizes[-1]
        self.out_norm = None
        if c.out_norm and RULES[rule].matrix and not self.memory.normalise:     # else it is normalised
            self.out_norm = nn.LayerNorm(self.head_dim, bias=False)

    def memory_of(self, c, rule):
        """The memory of a layer with this rule. Each room with a memory of its own overrides this."""
        if RULES[rule].matrix:
            return FastWeights(rule, c.n_embd, c.n_head, self.head_dim, c.phi, c.norm, c.beta_max,
                               c.gate_rank, self.key_dim)
        return Cache(rule, c.cache, c.sinks)

    def project(self, x, t=0):
        """x (B, T, n_embd), t the position of the first step -> q, k (B, H, T, key_dim), v (.., head_dim)"""
        q, k, v = self.qkv(x).split(self.sizes, -1)
        q, k = self.placed(by_head(q, self.key_dim), by_head(k, self.key_dim), t)
        return q, k, by_head(v, self.head_dim)

    def placed(self, q, k, t):
        """q and k with their positions, if the layer uses rope"""
        if not self.rope:
            return q, k
        steps = t + torch.arange(q.shape[2], device=q.device)
        both = self.rotate(torch.cat([q, k], 1), steps)
        return both.split([q.shape[1], k.shape[1]], 1)

    def rotate(self, x, pos):           # other speeds: models/pretrained.py
        return rope(x, pos)

    def merge(self, o):
        """The heads' outputs o (B, H, T, head_dim) -> side by side, each normalised, (B, T, H head_dim)"""
        if self.out_norm is not None:
            o = self.out_norm(o)
        return o.transpose(1, 2).flatten(2)

    def forward(self, x, state=None, t=0):
        """x (B, T, n_embd), state, t as for its memory -> like x, the new state of its memory"""
        q, k, v = self.project(x, t)                        # where to read, where and what to write
        o, state = self.memory(x, q, k, v, state, t)        # each head writes and reads
        return self.dropout(self.proj(self.merge(o))), state


def relu_squared(x):
    """max(x, 0)^2 per entry. The backward keeps only the relu. So 2021 (Primer), arXiv:2109.08668, sec. 3"""
    r = x.relu()
    return r * r


ACTS = {'relu2': relu_squared, 'gelu': partial(F.gelu, approximate='tanh')}


class Block(nn.Module):
    """x + mixer(norm(x)), then x + MLP(norm(x)). Each of these two branches begins with a short convolution
    (--conv=0: none)."""
    # models/ have others. A mixer is called with x, its state, t, and returns y and a dict of tensors, batch
    # first. What watches layers (convert.py, --html) passes over mixers that have no `memory`.
    mixer_class = Mixer
    conv_class = Conv

    def __init__(self, c, rule):
        super().__init__()
        self.norm1 = c.layer_norm()
        self.norm2 = c.layer_norm()
        self.convs = nn.ModuleList()
        if c.conv:
            self.convs.extend(self.conv_class(c.n_embd, c.conv) for _ in range(2))
        self.mixer = self.mixer_class(c, rule)
        self.add_mlp(c)
        self.dropout = nn.Dropout(c.dropout)

    def add_mlp(self, c):
        """Make the MLP. Overridden for a gated one, and for what stands between mixer and MLP."""
        self.act = ACTS[c.act]
        self.up = nn.Linear(c.n_embd, c.width_of_mlp(), bias=c.bias)
        self.down = nn.Linear(c.width_of_mlp(), c.n_embd, bias=c.bias)

    def convolve(self, i, x, state):
        """x (B, T, n_embd) -> its convolution, if the model has any. Its part of `state` is replaced. i is 0
        before the mixer, 1 before the MLP. An encoder, which has no state, overrides this."""
        if self.convs:
            part = state.get(f'conv{i}', {})
            x, last = self.convs[i](x, part.get('last'))
            state[f'conv{i}'] = {'last': last}
        return x

    def mix(self, x, state, t):
        x = self.convolve(0, x, state)
        y, state['mixer'] = self.mixer(x, state.get('mixer'), t)
        return y

    def mlp(self, x, state):
        x = self.convolve(1, x, state)
        return self.dropout(self.down(self.act(self.up(x))))

    def forward(self, x, state=None, t=0):
        """x (B, T, n_embd); state: None at first, or what the last call returned, a dict per part that has
        one: mixer, conv0, conv1; t as for Mixer  ->  x, state"""
        state = {**(state or {})}                   # each part replaces its own; that of the caller stays
        x = x + self.mix(self.norm1(x), state, t)
        x = x + self.mlp(self.norm2(x), state)
        return x, state


# ---- the model ---------------------------------------------------------------------------------------------
def check_tokens(tokens):
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f'tokens {tuple(tokens.shape)}: expected (B, T), at least one text of one token')


class GPT(nn.Module):
    """Embedding, blocks, norm, output. It computes with the fastest forms available, until `use` sets others.

    A state has t, the next position (on the CPU), and layers, a list. Each layer is a dict of parts, each
    part a dict of tensors: mixer has S, or a cache (k, v; if it is limited pos, total); conv0 and conv1 have
    last. None is a fresh start."""
    config_class = Config       # the files of models/ have others of these three
    block_class = Block
    task = 'complete'           # what sample.py does with it

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.add_input(config)
        self.blocks = nn.ModuleList(self.block_class(config, rule) for rule in config.rules)
        self.add_output(config)
        self.use(pick_forms())
        for name, p in self.named_parameters():
            std = self.first_std(name, p.shape[-1])
            if std:
                nn.init.normal_(p, std=std)

    def add_input(self, c):
        """Make what stands before the blocks. An encoder and a translator have more."""
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.positions = nn.Embedding(c.block_size, c.n_embd) if c.pos == 'learned' else None
        self.dropout = nn.Dropout(c.dropout)

    def add_output(self, c):
        """Make what stands behind the blocks. The output layer is the embedding (weight tying, Press 2016,
        arXiv:1608.05859); a room with an output layer of its own overrides this, and `logits`."""
        self.norm = c.layer_norm()
        # logits near 0: a loss near ln(vocab_size), that of guessing. A gain of 1 gives 14 at width 128
        nn.init.constant_(self.norm.weight, 0.1)

    def first_std(self, name, n):
        """The standard deviation with which a parameter of this name, a sum over n inputs, begins; None: it
        stays as its module drew it. Rooms add their own."""
        if name.endswith(('qkv.weight', 'up.weight', 'gates.proj.weight')):
            return n ** -0.5                        # a sum over so many inputs keeps their size
        if name.endswith(('mixer.proj.weight', 'down.weight')):
            # and so does the sum over the layers: GPT-2, sec. 2.3
            return n ** -0.5 / (2 * self.config.n_layer) ** 0.5
        if name in ('embed.weight', 'positions.weight'):
            return 0.3

    def use(self, forms):
        """Compute with these Forms from now on, in all modules. self.why is one line about them to print."""
        self.why = forms.why
        if set(self.config.every_rule()) == {'softmax'}:
            self.why = 'none (softmax is PyTorch\'s)'
        for module in self.modules():
            if hasattr(module, 'forms'):                # FastWeights, Cache, Conv
                module.forms = forms

    def embedded(self, tokens, t=0):
        """tokens (B, T), t the position of the first -> the input of the first layer (B, T, n_embd)"""
        x = self.embed(tokens)
        if self.positions is not None:              # beyond block_size, the last position is repeated
            at = t + torch.arange(x.shape[1], device=x.device)
            x = x + self.positions(at.view(-1, x.shape[1]).clamp(max=len(self.positions.weight) - 1))
        return self.dropout(x)

    def hidden(self, tokens, state=None):
        """tokens (B, T) -> the hidden state of the last layer (B, T, n_embd), state"""
        check_tokens(tokens)
        # a fresh start: position 0, and each layer has read nothing
        if state is None:
            state = {'t': torch.zeros((), dtype=torch.long), 'layers': [{} for _ in self.blocks]}
        t = state['t']
        if t.dim() and tokens.shape[1] > 1:
            raise ValueError('joined texts go on one token at a time')
        # each block takes its part of the state and returns a new one
        x = self.embedded(tokens, t)
        layers = []
        for block, layer in zip(self.blocks, state['layers']):
            x, layer = block(x, layer, t)
            layers.append(layer)
        return self.norm(x), {'t': t + tokens.shape[1], 'layers': layers}

    def forward(self, tokens, state=None, at=None):
        """tokens (B, T) -> logits (B, T, vocab), state. A given state is continued.
        at (B, T): return logits only where it is true, (N, vocab)"""
        x, state = self.hidden(tokens, state)
        if at is not None:
            x = x[at]
        return self.logits(x), state

    def logits(self, x):
        """x (.., n_embd) -> (.., vocab)"""
        return F.linear(x, self.embed.weight)

    def cannot_train(self, data, name, steps):
        """For `refuse`: why it cannot be trained on data of this name, a data.kinds.Data, in so many steps"""
        yield data.classes or data.source, (
            f'--data={name}: it has classes or translations, and a {type(self).__name__} predicts the next '
            'token; leave out the flags that ask for one')

    def mixers(self):
        """All mixers by name: blocks.0.mixer, ..."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Mixer)}

    @property
    def max_len(self):
        """How many tokens the model has learned positions for, or cosformer takes; None: any number."""
        ends = [phi.max_len for phi in self.modules() if isinstance(phi, FeatureMap)]
        if self.positions is not None:
            ends.append(self.config.block_size)
        return min((end for end in ends if end), default=None)

    @torch.no_grad()                                # not inference_mode: training may go on from the state
    def read(self, tokens, state=None, segment=2048, label=''):
        """Prefill: the state after tokens (B, T), for any T. It reads a `segment` at a time, so only the
        cache of softmax grows with T. label: begins a progress bar, see `progress`"""
        for i in progress(range(0, tokens.shape[1], segment), label, delay=4):
            _, state = self.hidden(tokens[:, i:i + segment], state)
        return state

    @torch.no_grad()
    def first_layer(self, B, T):
        """Compute the first layer on zeros (B, T, n_embd), as any model can, to see how long it takes."""
        self.blocks[0](self.embed.weight.new_zeros(B, T, self.config.n_embd))

    @torch.inference_mode()
    def generate(self, tokens, state=None, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Yield (token (B, 1), state) without end. First the prompt, tokens (B, T), T >= 1, is read in
        chunks, then there is one step per token. The state does not yet include the token it comes with.
        temperature 0 is greedy. No state is changed in place: you may keep those that are yielded."""
        state = self.read(tokens[:, :-1], state)
        token = tokens[:, -1:]
        while True:
            logits, state = self(token, state)
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)
            yield token, state


# ---- sampling ----------------------------------------------------------------------------------------------
def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token per text from logits (B, vocab) -> (B, 1). top_k keeps the k likeliest tokens, top_p the
    likeliest with a mass of p.

    With r_i ~ Exp(1), r_i / p_i is a waiting time with rate p_i. The shortest is that of i with probability
    p_i, so we return the argmax of p_i / r_i. torch.multinomial does the same but first
    checks p, which would make us wait for a GPU."""
    if temperature < 1e-4 or top_k == 1:                                # 0 / 0 would be NaN
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature      # all <= 0: exp cannot overflow
    if 0 < top_k < logits.shape[-1]:
        top = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
    p = logits.softmax(-1)
    if top_p < 1:
        p_sorted, order = p.sort(descending=True)
        beyond = p_sorted.cumsum(-1) - p_sorted >= top_p                 # keep the token that crosses top_p
        p = torch.zeros_like(p).scatter(-1, order, p_sorted.masked_fill(beyond, 0))
    r = torch.empty_like(p).exponential_(generator=generator).clamp(min=1e-30)       # some devices draw 0
    return (p / r).argmax(-1, keepdim=True)


from models.files import load, save     # noqa: F401  here, as models/ builds on the classes above
