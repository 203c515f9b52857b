"""The model around the rules: its config, layers, the GPT, sampling, files of models.

    model = GPT(Config(rule='delta', vocab_size=256))
    logits, state = model(tokens)               # (B, T) -> logits (B, T, vocab), state: what it keeps
    logits, state = model(more_tokens, state)   # continues where the first call stopped, with any T
    save('x.safetensors', model, {'data': Data('byte', 256)})
    model, meta = load('x.safetensors')         # meta: what was saved beside the weights

The scripts import this file; it has no command of its own. fastweight.py defines what a layer computes. This
file makes the keys, values, gates and queries for it.
"""
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import fastweight
from common.errors import of_package
from common.flags import briefly, by_layer, expected, fits, flag, known, refuse, subset, typed
from common.terminal import progress
from common.weights import map_state, one_tensor, read_tensors, write_tensors
from data import vocabulary
from data.kinds import Data
from fastweight import (FEATURE_MAPS, FLOOR, GAPS, LOG_MIN, NORMALISERS, RULES, feature_map, for_heads,
                        without_autocast)

# ---- what a model is ---------------------------------------------------------------------------------------
OF_DATA = {'vocab_size': 256, 'classes': 0, 'pad': None, 'source': 0, 'patch': 0}     # fields set by the data


class RulesThat:
    """The names of those rules of which `has` is true, whenever one asks: you may enter more into RULES."""
    def __init__(self, has):
        self.has = has

    def __iter__(self):
        return (name for name, rule in RULES.items() if self.has(rule))


MATRIX = RulesThat(lambda rule: rule.matrix)
ERASING = RulesThat(lambda rule: rule.erase)
GATED = RulesThat(lambda rule: rule.f not in (None, 'fixed') or rule.write)
BOUNDED = RulesThat(lambda rule: rule.bounded)
SINKS = RulesThat(lambda rule: rule.bounded and 'sink' in rule.keeps)   # these keep the first tokens
SOURCE_RULES = RulesThat(lambda rule: not rule.bounded)                 # these see a whole text
OUT_GATES = {'silu': F.silu, 'sigmoid': torch.sigmoid}


@dataclass
class Config:
    """Everything that defines a model. ValueError, with the names of the flags, for what is impossible."""
    rule: str = flag('delta', 'update rule of every layer', RULES)
    layers: str = flag('', 'one rule per layer instead, repeated over the depth: delta,delta,softmax')
    phi: str = flag('', f'feature map, if not the rule\'s; with option: dpfp:3 [{", ".join(FEATURE_MAPS)}]',
                    of=MATRIX)
    norm: str = flag('', 'normaliser, if not the rule\'s', NORMALISERS, of=MATRIX)
    beta_max: float = flag(2.0, 'delta rules: beta lies in (0, beta_max); 1 in Schlag 2021', low=0, high=2,
                           of=ERASING)
    writes: int = flag(1, 'delta rules: writes per token (DeltaProduct)', low=1, high=16, of=ERASING)
    out_norm: bool = flag(True, 'LayerNorm after each matrix, except with --norm=attn; Schlag has none')
    gate_rank: int = flag(0, 'gates: rank of their W; 0: full', low=0, high=2 ** 17, of=GATED)
    conv: int = flag(4, 'width of the convolution before mixer and MLP (causal, except in encoders); 0: none',
                     low=0, high=64)
    qkv_conv: int = flag(0, 'width of a convolution with silu over q, k and v, after their projection; 0: '
                            'none', low=0, high=64, of=MATRIX, later=True)
    out_gate: str = flag('', 'what a matrix returns is multiplied by this function of x W, after out_norm',
                         ['', *OUT_GATES], of=MATRIX, later=True)
    qk_norm: bool = flag(False, 'RMSNorm of q and of k, of each head', later=True)
    cache: int = flag(256, 'rules with a limited cache: number of cached tokens', low=0, high=2 ** 20,
                      of=BOUNDED)
    sinks: int = flag(4, f'{", ".join(SINKS)}: how many first tokens are never evicted', low=0, high=2 ** 24,
                      of=SINKS)
    overflow: str = flag('', 'evicted tokens go into a matrix of this rule and map: sum:slots, delta:taylor; '
                             'train it with window or sink, then any policy runs', of=BOUNDED)
    positions: str = flag('true', 'of cached tokens; true: as they are; compress: long gaps are shortened, '
                                  'for texts longer than the model knows; log, sqrt: less so',
                          ['true', *GAPS], of=BOUNDED)
    pos: str = flag('auto', 'auto: rope in layers with a cache; learned if there is an encoder',
                    ['auto', 'none', 'learned', 'rope'])
    causal: bool = flag(True, 'false: an encoder, each step sees all of the text; needs data with classes')
    pool: str = flag('mean', 'encoder: read the class from the mean of all positions, or the first',
                     ['mean', 'first'])
    n_layer: int = flag(4, 'layers', low=1, high=1024)
    encoder: int = flag(0, 'layers of an encoder for the source (data of pairs); n_layer then counts '
                           'those of the decoder; 0: none', low=0, high=1024)
    encoder_rule: str = flag('', 'rule of the encoder, if not --rule; for caches softmax', SOURCE_RULES)
    cross: str = flag('', 'rule of the cross attention to the source, if not --rule; for caches softmax',
                     SOURCE_RULES)
    n_head: int = flag(8, 'heads', low=1, high=1024)
    n_embd: int = flag(128, 'width', low=1, high=2 ** 17)
    head_dim: int = flag(0, 'channels of a head; 0: n_embd / n_head', low=0, high=2 ** 17, later=True)
    block_size: int = flag(128, 'tokens in a training row of a text (a task has its own); with --init, at '
                           'most so many of labelled lines and chats; default with --init: those of the '
                           'model, if from the hub at most 512', low=1, high=2 ** 24)
    dropout: float = flag(0.0, 'dropout', low=0, high=0.99)
    vocab_size: int = known(256, 1, 2 ** 32)        # from here on: set by the data
    classes: int = known(0, 0, 2 ** 32)     # number of classes; 0: the model predicts tokens
    pad: int = known(None, 0, 2 ** 32)      # the token that marks padding
    source: int = known(0, 0, 2 ** 24)      # length of the source, which begins each row; 0: no source
    patch: int = known(0, 0, 2 ** 24)       # numbers 0..255 per input, a patch; 0: inputs are tokens
    # from here on, no flags: set by pretrained models; bias and key_dim also by convert.py --fold
    cls: bool = False           # the encoder gets one more position, first, with a learned input (ViT)
    pooler: bool = False        # read classes from tanh(W x + b) of the pooled x (BERT)
    post_norm: bool = False     # the residual starts after the norm, not before it (BERT), see `Block`
    act: str = flag('relu2', '', ['relu2', 'gelu', 'gelu-erf', 'swiglu'])
    bias: bool = False
    rms: bool = False           # RMSNorm instead of LayerNorm
    eps: float = known(1e-5, 0, 1)
    theta: float = known(1e4, 1, 1e12)      # base of rope
    rope_scaling: list = ()     # for a scaled rope, see `speeds`
    n_kv_head: int = known(0, 0, 1024)      # fewer heads for k and v than for q; 0: as many
    key_dim: int = known(0, 0, 2 ** 17, MATRIX)     # channels of q and k per head; 0: as many as v
    value_dim: int = known(0, 0, 2 ** 17, later=True)       # of v per head of a matrix; 0: head_dim
    value_heads: int = known(0, 0, 1024, later=True)        # see `apart`; 0: as in layers of softmax
    key_heads: int = known(0, 0, 1024, later=True)          # of q and k of a matrix; 0: as many as of v
    skip: bool = known(False, of=MATRIX, later=True)        # D v is added to what a matrix returns (Mamba-2)
    out_eps: float = known(0.0, 0, 1, later=True)   # out_norm is RMSNorm with this eps; 0: LayerNorm
    cache_gate: str = flag('', '', ['', *OUT_GATES], later=True)        # as out_gate, where keys are kept
    rope_share: float = known(1.0, 0, 1, later=True)        # of the channels of a head, which rope turns
    norm_after: bool = known(False, later=True)     # where keys are kept, norms end a branch, see `Block`
    qk_norm_all: bool = known(False, later=True)    # qk_norm is over the channels of all heads together
    qkv_bias: bool = known(False, later=True)       # biases of q, k and v, if there are no others
    n_inner: int = known(0, 0, 2 ** 20)     # width of the MLP; 0: 4 n_embd
    tied: bool = True           # weight tying: the output layer is the embedding

    def __post_init__(self):
        self.rope_scaling = [float(x) for x in self.rope_scaling]       # a list, as JSON has it
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not fits(field, value):
                raise ValueError(f'--{field.name}={value}: {expected(field)}')
        if self.pos == 'auto' and (self.encoder or not self.causal):
            self.pos = 'learned'                    # an encoder reads all steps at once: mark their order
        self.rules = by_layer(self.layers, self.rule, self.n_layer)
        self.source_rules = []                      # of a translator's encoder, and of its cross attention
        if self.encoder:
            first = 'softmax' if self.rules[0] in BOUNDED else self.rules[0]        # a source is read whole
            self.source_rules = [self.encoder_rule or first, self.cross or first]
        self.all_rules = self.rules + self.source_rules
        refuse(self.contradictions())

    def contradictions(self):
        """For `refuse`: what would fail far from its cause, be ignored, or be silently wrong."""
        for rule in self.all_rules:
            yield rule not in RULES, (
                f'--layers={self.layers}: {rule!r} is no rule; choose from {", ".join(RULES)}')
        for name in 'encoder_rule', 'cross':
            rule = getattr(self, name)
            yield rule and not self.encoder, f'--{name}={rule} reads a source: it needs --encoder=3, say'
        kept = self.keeps() - {'all', None}
        over = self.overflow.partition(':')[0]
        head_dim = self.head_dim or self.n_embd // self.n_head
        yield not self.head_dim and self.n_embd % self.n_head, (
            f'--n_embd={self.n_embd} is not a multiple of --n_head={self.n_head}')
        turned = head_dim * self.rope_share
        yield self.turns() and turned % 2, (
            f'--n_embd={self.n_embd} --n_head={self.n_head} --head_dim={self.head_dim}: rope turns pairs, so '
            f'it takes an even number of channels of a head, not {turned:g}; or --pos=none')
        for name, without in ('qkv_conv', 0), ('writes', 1):
            yield getattr(self, name) > without and (self.encoder or not self.causal), (
                f'--{name}={getattr(self, name)} with --encoder={self.encoder} --causal={self.causal}: it is '
                'for a text that is read step by step; leave it out')
        scaling = self.rope_scaling
        yield scaling and (len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]), (
            f'rope_scaling={scaling}: expected factor, low, high, n, all above 0, low below high')
        norms = {self.norm or RULES[rule].norm for rule in self.all_rules if RULES[rule].matrix}
        yield self.out_norm and head_dim == 1 and norms - {'attn'}, (
            f'--n_embd={self.n_embd} --n_head={self.n_head}: LayerNorm makes the one channel of a head 0; '
            'take fewer heads, or --out_norm=false')
        yield self.layers.count(',') >= self.n_layer, (
            f'--layers={self.layers}: more rules than --n_layer={self.n_layer} layers')
        yield self.writes > 1 and self.pos == 'rope', (
            f'--writes={self.writes} with --pos=rope: a place has several keys; take another --pos')
        yield kept and not self.cache and not over, '--cache=0: give at least 1, or --overflow takes them all'
        yield kept & {*SINKS} and self.sinks >= max(1, self.cache), (
            f'--sinks={self.sinks}: at most {max(0, self.cache - 1)} with --cache={self.cache}, or no new '
            'token is kept')
        yield self.overflow and over not in MATRIX, (
            f'--overflow={self.overflow}: choose from {", ".join(MATRIX)}')
        yield self.positions != 'true' and (not kept or self.pos not in ('auto', 'rope')), (
            f'--positions={self.positions} needs a bounded cache with rope')
        yield self.source and not self.encoder, (
            '--encoder=0: in data of pairs an encoder reads the source; give --encoder=3, say')
        yield self.encoder and (not self.causal or self.classes), (
            f'--encoder={self.encoder} has a decoder, which writes a text: leave out --causal=false, and '
            'give data without classes')
        for name in self.source_rules if self.causal else self.rules:       # those that see all steps at once
            yield RULES[name].bounded, (
                f'--causal=false --rule={name}: it evicts step by step, but an encoder sees all at once; '
                'take softmax, or fast weights')
            yield RULES[name].erase and self.norm == 'attn', (
                f'--rule={name} --norm=attn divides by the keys so far, but an encoder sees all at once; '
                'take --norm=sum or l2')
        yield self.causal and self.pool != 'mean', (
            f'--pool={self.pool} says how the class of a row is read: it goes with --causal=false')

    def keeps(self):
        """What layers keep, as a set: 'all' for softmax, a policy for a limited cache, None for a matrix."""
        return {RULES[rule].keeps for rule in self.rules}

    def apart(self, rule):
        """Whether layers with this rule have heads of their own number (Qwen3.5). They then have neither rope
        nor a norm of q and k, which are for the layers of softmax."""
        return RULES[rule].matrix and self.value_heads > 0

    def heads(self, rule):
        """The sizes of a layer with this rule: heads of q, of k, of v; channels of q and k, of v in each"""
        d = self.head_dim or self.n_embd // self.n_head
        n_kv = self.n_kv_head or self.n_head
        if not RULES[rule].matrix:
            return self.n_head, n_kv, n_kv, d, d
        V = self.value_dim or d
        K = self.key_dim or V
        if self.value_heads or self.key_heads:
            n_value = self.value_heads or self.n_head
            n_key = self.key_heads or n_value
            return n_key, n_key, n_value, K, V
        return self.n_head, n_kv, n_kv, K, V

    def summary(self):
        """For messages: the rules, and the matrix beside the caches."""
        return briefly(self.all_rules) + f' + {self.overflow}' * bool(self.overflow)

    def uses_rope(self, rule):
        """Whether a layer with this rule rotates its keys by rope."""
        if self.apart(rule):
            return False
        return self.pos == 'rope' or (self.pos == 'auto' and not RULES[rule].matrix)

    def turns(self):
        """Whether any layer uses rope."""
        return any(map(self.uses_rope, self.rules))

    def n_inputs(self):
        """The number of inputs for block_size tokens: one per token or patch, and cls."""
        return self.block_size // (self.patch or 1) + self.cls


def cannot_train(config):
    """For `refuse`: with --overflow, which token a policy evicts depends on weights, and no gradient says
    which it should."""
    chooses = config.keeps() - {'all', None, 'window', 'sink'}
    yield config.overflow and chooses, (
        f'--rule={", ".join(chooses)} --overflow={config.overflow}: train with --rule=sink; the trained '
        'model runs with any policy, as sample.py --rule=tova')


PUBLISHED = {       # what the layers of a paper have beside the rule: fields of Config
    'delta': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0},
    'retention': {'out_gate': 'silu', 'pos': 'rope'},
    'gla': {'out_gate': 'silu', 'gate_rank': 16},
    'mamba2': {'qkv_conv': 4, 'phi': 'identity', 'out_gate': 'silu', 'key_heads': 1, 'skip': True},
    'gated_delta': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0, 'out_gate': 'silu'},
    'kda': {'qkv_conv': 4, 'phi': 'identity', 'beta_max': 1.0, 'out_gate': 'sigmoid', 'gate_rank': 16}}


def as_published(given):
    """The flags of a Config and, where it does not give them, those of its rule's paper, with RMSNorm for
    each norm. ValueError if no paper is known, or several are."""
    rules = {rule for rule in Config(**given).rules if RULES[rule].matrix}
    if len(rules) != 1 or not rules <= PUBLISHED.keys():
        raise ValueError(f'--published with {", ".join(rules)}: take one of {", ".join(PUBLISHED)}, maybe '
                         'with softmax')
    return {'conv': 0, 'rms': True, 'out_eps': 1e-5, **PUBLISHED[rules.pop()], **given}


# A trained model can change these: softmax keeps its weights with any cache policy (--overflow adds some).
CacheFlags = subset(Config, 'cache', 'sinks', 'overflow', 'positions',
              rule=flag('', 'what softmax layers become: h2o, tova, sink, window keep --cache tokens; a '
                        'matrix needs convert.py', RULES))


def idle(given, config):
    """For `refuse`: flags that were given but have no effect on this model. What a file says is ignored."""
    yield given.get('layers') and 'rule' in given, (
        f'--rule={given.get("rule")} --layers={given.get("layers")}: give one of them')
    rules = dict.fromkeys(config.all_rules)
    for field in dataclasses.fields(config):
        of = field.metadata.get('of', ())
        value = given.get(field.name, '')           # an empty text takes back what a model or recipe has
        using = set(rules)
        if field.name == 'gate_rank':               # --overflow names its map itself, but its gates have this
            using.add(config.overflow.partition(':')[0])
        yield of and value != '' and using.isdisjoint(of), (
            f'--{field.name}={value}: no layer of {",".join(rules)} uses it; leave it out, or take '
            f'{", ".join(of)}')


# ---- which form of the recurrence runs ---------------------------------------------------------------------
def shifted_sum(x, w):
    """y_t = sum_j w_j x_{t-n+j}, j = 0..n, per channel, with zeros before x. x (B, T, D), w (n + 1, D) -> y
    (B, T, D). kernels.shifted_sum computes the same with a hand-written backward."""
    padded = F.pad(x, (0, 0, len(w) - 1, 0))
    return (padded.unfold(1, len(w), 1) * w.T).sum(-1)


class Forms(NamedTuple):
    """The functions that a model computes with; the defaults are plain torch, kernels.py has faster ones."""
    recurrence: Callable = fastweight.chunked
    bounded: Callable = fastweight.bounded
    longer: Callable = fastweight.longer
    shift: Callable = shifted_sum
    why: str = 'chunk (plain torch and autograd)'       # one line to print: which forms are used, and why


PLAIN = Forms()         # for a module on its own; GPT.use sets others


def pick_forms(impl='auto'):
    """'loop', 'chunk', 'fused' or 'auto' -> Forms: plain ones or, if they are there, those of kernels.py,
    which then picks Triton or not, and of the room fast/. Without kernels.py or without fast/ all are plain:
    you may delete either, or both. Besides bench.py and the tests only this function imports them."""
    if impl == 'loop':
        return Forms(fastweight.recurrent, why='loop (fastweight.recurrent, the definition, slow)')
    if impl == 'chunk':
        return PLAIN
    try:
        import fast.caches
        import fast.convolution
        import kernels
    except ModuleNotFoundError:
        return PLAIN
    return Forms(kernels.chunked, fast.caches.bounded, fast.caches.longer, fast.convolution.shifted_sum,
                 'fused (kernels.py: batched products, on a GPU Triton)')


# ---- a layer's memory: gates from x, a map and a normaliser on q and k, then the recurrence ----------------
def speeds(half, theta, scaling, device):
    """The angle by which rope rotates pair i per step: w_i = theta^(-i / half) -> (half,), fp32. Llama 3.1
    scales it, so that a model trained on n positions can read more. scaling is (factor, low, high, n): a pair
    with more than `high` turns in n steps keeps its w, one with fewer than `low` gets w / factor. The pairs
    between get a weighted mean of both."""
    w = theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    if scaling:
        factor, low, high, n = scaling
        turns = n * w / (2 * math.pi)
        s = ((turns - low) / (high - low)).clamp(0, 1)
        w = (1 - s) * w / factor + s * w
    return w


def rope(x, pos, theta=1e4, scaling=(), share=1.0):
    """Rotate the pairs (x_i, x_{i+r/2}) by the angle pos theta^(-2i/r), r = share d; channels from r on stay
    as they are. Su 2021, arXiv:2104.09864. What q finds at k then depends only on the distance of their
    positions. Whole turns are taken off in fp64: in fp32, the angle at position 10^7 is wrong by up to one
    radian.
    x (B, H, T, d), r even   pos (.., T)   theta, scaling: as in `speeds`  ->  like x"""
    half = int(share * x.shape[-1]) // 2
    exact = torch.float32 if pos.device.type == 'mps' else torch.float64    # which has no fp64
    angle = pos[..., None].to(exact) * speeds(half, theta, scaling, pos.device).to(exact)
    angle = angle.remainder(2 * math.pi).float()
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def start_bias(n_head, n, rate):
    """Biases b (n_head, 1, n) with exp(-rate softplus(b)) = 1 - 1/tau, for memory lengths tau of 4 to 512
    steps. We do not know which distances matter, so we cover them all: tau is spaced evenly in log over the n
    channels or, if n = 1, over the heads."""
    count = n if n > 1 else n_head
    tau = torch.tensor([45.0])                      # a single one gets the middle
    if count > 1:
        tau = torch.logspace(math.log10(4), math.log10(512), count)
    return bias_of(tau, rate).view(-1, 1, n).expand(n_head, 1, n).clone()


def bias_of(tau, rate):
    """The bias b for a memory of tau > 1 steps: exp(-rate softplus(b)) = 1 - 1/tau."""
    softplus_b = -(1 - 1 / tau).log() / rate
    return softplus_b.expm1().log()                 # softplus(b) = log(1 + e^b)


class Gates(nn.Module):
    """x (B, T, n_embd) -> dict of the gates that the rule has, for `recurrent` and its other forms. In fp32:
    write (B, G, n T, V|1)   erase, log_f (B, G, n T, K|1)   log_z (B, G, n T, V)
    n_head: G, the heads of keys   n: writes per token; only the first of them forgets

    beta = beta_max sigmoid(x W)   log f = -rate softplus(x W + b)   log z likewise

    A log-decay per channel is at least LOG_MIN: the chunked forms need that bound, and all forms of a layer
    must agree. One per head has no bound. b starts so that f is 1 - 1/tau where x W = 0: a memory of about
    tau steps, see `start_bias`. Delta multiplies S by I - beta k k^T. With beta up to 2 it can have the
    eigenvalue -1, so a state can alternate (Grazzi 2024, arXiv:2411.12537). W is full, as in Mao 2022, or a
    product of two matrices of a given rank, as in GLA and KDA."""
    def __init__(self, rule, n_embd, n_head, K, V, beta_max, n, rank=0):
        super().__init__()
        self.rule = rule
        self.n_head = n_head
        self.beta_max = beta_max
        self.n = n
        n_w = {None: 0, '1-f': 0, 'dt': 0, 'beta': n, 'channel': n * V}[rule.write]
        n_e = {None: 0, 'write': 0, 'channel': n * K}[rule.erase]
        n_f = {None: 0, 'fixed': 0, 'head': 1, 'channel': K}[rule.f]
        n_z = {None: 0, 'channel': V}[rule.z]
        self.sizes = [n_w, n_e, n_f, n_z]
        self.narrow = nn.Linear(n_embd, rank, bias=False) if rank and any(self.sizes) else None
        if any(self.sizes):
            self.proj = nn.Linear(rank or n_embd, n_head * sum(self.sizes), bias=False)
        rate = rule.rate or 1.0
        if rule.rate is None:       # Mamba-2's A = exp(log_rate), at first 1
            self.log_rate = nn.Parameter(torch.zeros(n_head, 1, 1))
        if rule.f == 'fixed':       # RetNet: 1 - 2^-5, 1 - 2^-6, ...
            fixed = torch.log1p(-2.0 ** (-5 - torch.arange(n_head)))
            self.register_buffer('log_fixed', fixed[:, None, None], persistent=False)
        if n_f:
            self.bias_f = nn.Parameter(start_bias(n_head, n_f, rate))
        if n_z:
            self.bias_z = nn.Parameter(start_bias(n_head, n_z, rate))

    def forward(self, x):
        B, T, _ = x.shape
        rule = self.rule
        gates = {}
        if any(self.sizes):
            if self.narrow is not None:
                x = self.narrow(x)
            y = self.proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
            w, e, f, z = wide(y).split(self.sizes, -1)
        rate = rule.rate
        if rate is None:
            rate = self.log_rate.exp()
        if rule.f == 'fixed':
            gates['log_f'] = self.log_fixed.expand(B, -1, T, 1)
        elif rule.f:
            gates['log_f'] = -rate * F.softplus(f + self.bias_f)
        if rule.z:
            gates['log_z'] = (-rate * F.softplus(z + self.bias_z)).clamp(min=LOG_MIN)
        if rule.f == 'channel':
            gates['log_f'] = gates['log_f'].clamp(min=LOG_MIN)
        if rule.write == '1-f':
            gates['write'] = -torch.expm1(gates['log_f'])
        elif rule.write == 'dt':
            gates['write'] = -gates['log_f'] / rate
        elif rule.write:
            gates['write'] = self.beta(w)
        if rule.erase == 'write':
            gates['erase'] = gates['write']
        elif rule.erase:
            gates['erase'] = self.beta(e)
        for name in ('log_f', 'log_z'):
            if name in gates:
                gates[name] = spread(gates[name], self.n, 0)
        return gates

    def beta(self, y):
        """y (B, H, T, n d) -> the beta of each write (B, H, n T, d)"""
        return self.beta_max * each_write(y, self.n).sigmoid()


def each_write(x, n):
    """The n writes of a token, side by side (B, H, T, n d), become steps (B, H, n T, d). DeltaProduct, Siems
    2025 (arXiv:2502.10297): n writes, one forget, one read per token: `recurrent` with n steps per token."""
    if n == 1:
        return x
    return x.unflatten(-1, (n, -1)).flatten(2, 3)


def spread(x, n, i):
    """x (B, H, T, d) has one entry per token. Put it at step i of the token's n steps (B, H, n T, d), with
    zeros at the others."""
    if n == 1:
        return x
    return F.pad(x[:, :, :, None], (0, 0, i, n - 1 - i)).flatten(2, 3)


def wide(x):
    """x in fp32; fp64 stays. Made contiguous: the gradient of silu is slow for transposed heads."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def mistakes_together(name, phi, norm, n):
    """For `refuse`: a rule, map (a module), normaliser and number of writes that do not go together."""
    rule = RULES[name]
    mean = norm == 'attn'
    yield not rule.matrix, f'--rule={name} keeps keys and values, no matrix: that is model.Cache'
    yield n > 1 and (mean or phi.max_len), (
        f'--writes={n}: leave out --norm=attn and --phi=cosformer, which count one key a token')
    yield phi.moves and (not mean or rule.erase), (
        f'--phi=slots with --rule={name} --norm={norm}: slots hold means; take --rule=sum or gla-beta, or '
        'another that does not erase, with --norm=attn')
    yield rule.f == 'channel' and rule.write in ('1-f', 'dt'), (
        f'--rule={name}: f is along the keys, w along the values: write={rule.write} needs f=head')
    yield mean and (rule.z or rule.write == 'channel'), (
        f'--norm=attn with --rule={name}: each value channel is apart and needs a denominator of its own')
    yield mean and rule.erase and rule.f, (
        f'--norm=attn with --rule={name}: erasing makes weights negative, so their sum n.q may be 0 or '
        'below; what delta divides by instead, the sum of keys, has no decay; use --norm=l2')
    yield mean and not phi.mean, (
        '--norm=attn divides by n.q, which this map can make zero or negative: use a map >= 0, as --phi=elu, '
        'or --norm=l2')
    yield (norm == 'sum' or mean and rule.erase) and not phi.positive, (
        f'--norm={norm} divides by the sum of the features, here maybe zero or negative: use --norm=l2')
    yield norm == 'none' and rule.erase, (
        f'--rule={name} with --norm=none diverges: the delta rule needs normalised keys, --norm=l2 or sum')


def seen_by_k(k, n):
    """n_{t-1}.k_t (B, H, T, 1), from keys k and the sums n of the keys up to t (B, H, T, K)"""
    return (k * (n - k)).sum(-1, keepdim=True)


SEGMENT = 512       # steps whose features are in memory at a time, without gradients


class FastWeights(nn.Module):
    """The heart of a layer with a matrix: what is written (`writes`), what is asked (`asked`, `reads`), and a
    form of the recurrence between them.

    forward(x, q, k, v, state, t, real):
    x (B, T, n_embd)   q (B, H, T, key_dim)   k (B, G, T, n key_dim)   v (B, G, T, n head_dim)
    state   None at a fresh start, or the dict that the last call returned
    t       position of the first step, an int or a tensor (only cosformer needs it)
    real    (B, T), in an encoder: which steps are not padding; None: all
    ->  o (B, H, T, head_dim), dict: S (B, G, V, K), with n as last row for norm 'attn'; with slots also M

    Heads that share keys and values share a matrix, its map and its gates: H / G queries read each S.
    n_head: G   phi, norm, beta_max, writes, gate_rank: flags of Config (whose beta_max is 2); phi, norm '':
    the rule's own   key_dim: 0 is head_dim   causal: if false, each step reads what all steps write. With n
    writes per token, k and v hold those of n writes side by side. skip: D v is added to o, D a number per
    head, at first 1. ValueError for what does not go together.
    """
    forms = PLAIN
    overflow = None         # only a Cache has fast weights beside it

    def __init__(self, rule, n_embd, n_head, head_dim, phi='', norm='', beta_max=1.0, writes=1, gate_rank=0,
                 key_dim=0, causal=True, skip=False):
        super().__init__()
        self.rule = RULES[rule]
        self.n = writes
        self.skip = nn.Parameter(torch.ones(n_head, 1, 1)) if skip else None
        self.causal = causal
        self.norm = norm or self.rule.norm
        self.map = phi or self.rule.phi
        self.phi = feature_map(self.map, n_head, key_dim or head_dim)
        refuse(mistakes_together(rule, self.phi, self.norm, writes))
        if self.phi.moves and not causal:
            raise ValueError('--phi=slots: it is for a text that is read step by step')
        self.gates = Gates(self.rule, n_embd, n_head, self.phi.feature_dim, head_dim, beta_max, writes,
                           gate_rank)
        self.normalise = self.norm == 'attn'
        self.by_keys = self.normalise and self.rule.erase               # divide by the plain sum of keys
        self.normaliser = NORMALISERS['sum' if self.by_keys else self.norm]

    def writes(self, x, k, v, t=0):
        """The writer: what the recurrence needs of the text that is written. x (B, T, n_embd), k, v
        (B, G, T, n head_dim) -> dict of k (B, G, n T, K), v (B, G, n T, V), and the rule's gates"""
        features = self.phi(each_write(wide(k), self.n), 'k', t)
        return {'k': self.normaliser(features), 'v': each_write(v, self.n), **self.gates(x)}

    def reads(self, q, t=0):
        """The reader: q (B, H, T, head_dim) -> the queries that read S, (B, H, T, K)"""
        features = self.phi(wide(q), 'q', t)
        return self.normaliser(features)

    def asked(self, q, k, written, state, t=0):
        """The features of q (B, H, T, head_dim), not yet normalised, (B, H, T, K), and their part of the new
        state. written: phi(k) as `k`, and the gates. With the map `slots` it is e^(q.c / sqrt(d)) for each
        slot: c, the mean of the keys k (B, G, T, head_dim) that have been written there, is read from fast
        weights M, whose keys are k and whose values are phi(k)."""
        q = wide(q)
        if not self.phi.moves:
            return self.phi(q, 'q', t), {}
        k = wide(k)
        features = written['k']
        decays = {'write': written.get('write'), 'log_z': written.get('log_f')}
        ones = torch.ones_like(k[..., :1])
        n = state['S'][:, :, -1:].mT if 'S' in state else None
        count, _ = self.recurrence(ones, ones, features, **decays, S=n)
        total, M = self.recurrence(q, k, features, **decays, S=state.get('M'))      # count times q.c
        scores = total / for_heads(count, q.shape[1]).clamp(min=FLOOR) / math.sqrt(q.shape[-1])
        at_most_e40 = scores.clamp(max=40)      # sums of products of e^40 stay far below fp32's e^88
        return at_most_e40.exp(), {'M': M}

    def redraw(self, state=()):
        """Draw new random features for each training batch (Peng 2021, Choromanski 2021)."""
        if self.training and 'S' not in state and hasattr(self.phi, 'redraw'):
            self.phi.redraw()

    def write_all(self, x, k, v, real=None):
        """Write a source that any number of queries can then read. x (B, T, n_embd), k, v (B, G, T,
        head_dim), real as for an encoder -> dict: S (B, G, V, K)"""
        with without_autocast(x):
            self.redraw()
            written = self.writes(x, k, v)
            if real is not None:
                gates = {name: written.get(name) for name in ('write', 'erase', 'log_f', 'log_z')}
                written.update(fastweight.where_real(real, written['v'], gates))
            S = fastweight.write_all(**written, normalise=self.normalise, form=self.forms.recurrence)
        return {'S': S}

    def read_all(self, q, state, t=0):
        """Read what `write_all` returned. q (B, H, T, head_dim), t position of the first step -> like q"""
        with without_autocast(q):
            S = for_heads(state['S'], q.shape[1])
            o = fastweight.read_all(self.reads(q, t), S, self.normalise, self.phi.floor)
        return o.to(q.dtype)

    def recurrence(self, q, k, v, real=None, normalise=False, floor=FLOOR, **gates):
        """Compute the equation. Arguments as for fastweight.recurrent, and `real` for an encoder. q has H
        heads, all others G. The forms know no groups, so we repeat what a group shares."""
        form = self.forms.recurrence
        H = q.shape[1]
        group = H // k.shape[1]
        k, v = for_heads(k, H), for_heads(v, H)
        gates = {name: x if x is None else for_heads(x, H) for name, x in gates.items()}
        gates |= {'normalise': normalise, 'floor': floor}
        if not self.causal:
            o, S = fastweight.encoded(q, k, v, **gates, real=real, form=form)
            return o, S[:, ::group]
        last = self.n - 1                   # a token reads after its last write
        o, S = form(spread(q, self.n, last), k, v, **gates)
        return o[:, :, last::self.n], S[:, ::group]

    def forward(self, x, q, k, v, state=None, t=0, real=None):
        state = state or {}
        with without_autocast(x):
            if self.causal and x.shape[1] > SEGMENT and not torch.is_grad_enabled():
                return self.by_segments(x, q, k, v, state, t)
            self.redraw(state)
            written = self.writes(x, k, v, t)
            S = state.get('S')
            q, more = self.asked(q, k, written, state, t)
            q = self.normaliser(q)
            if self.by_keys:
                return self.divided_by_keys(q, S=S, **written)
            o, S = self.recurrence(q, **written, real=real, S=S, normalise=self.normalise,
                                   floor=self.phi.floor)
            if self.skip is not None:
                o = o + (self.skip * v).to(o.dtype)
            return o, {'S': S, **more}

    def by_segments(self, x, q, k, v, state, t):
        """`forward` for a long text without gradients, SEGMENT steps at a time. The features of the whole
        text would take several times the memory of the outputs."""
        o = v.new_empty(*q.shape[:3], v.shape[3] // self.n)
        for i in range(0, x.shape[1], SEGMENT):
            steps = slice(i, i + SEGMENT)
            q_i, k_i, v_i = (vectors[:, :, steps] for vectors in (q, k, v))
            o[:, :, steps], state = self.forward(x[:, steps], q_i, k_i, v_i, state, t + i)
        return o, state

    def divided_by_keys(self, q, k, v, write, erase, S):
        """The delta rule with attention normalisation, an ablation of Schlag 2021. What k_t finds is divided
        by n_{t-1}.k_t, what q_t finds by n_t.q_t. n is the plain sum of the keys, each normalised to sum 1.
        The state is S with n as its last row."""
        n = k.cumsum(2)                                         # (B, G, T, K): the keys up to t
        if S is not None:
            n = n + S[:, :, -1:]
            S = S[:, :, :-1]
        seen_by_q = (q * for_heads(n, q.shape[1])).sum(-1, keepdim=True)
        o, S = self.recurrence(q, k, v, write=write, erase=erase / seen_by_k(k, n).clamp(min=FLOOR), S=S)
        o = o / seen_by_q.clamp(min=FLOOR)
        return o.to(v.dtype), {'S': torch.cat([S, n[:, :, -1:]], 2)}

    def taken(self, q, went, state):
        """What `take` computes with, one evicted token per step: features of q, features of its key, whether
        there is one (1 or 0), gates; the features' part of the new state"""
        k = went['k']
        if self.phi.moves:                                  # the same content has one slot at any position
            k = went.get('bare', k)
        k = self.phi(wide(k), 'k')
        x = wide(went['v']).transpose(1, 2).flatten(2)          # the channels of all heads, like an input
        real = (went['pos'] >= 0).to(x.dtype)[..., None]
        gates = self.gates(x)
        gates['write'] = real * gates.get('write', 1)
        q, more = self.asked(q, went['k'], {'k': k, **gates}, state)
        return q, k, real, gates, more

    def take(self, q, went, state):
        """Write the tokens that the cache beside this matrix evicts (see fastweight.bounded), and read. The
        mass of the keys is what would be read if all values were 1.
        -> o (B, H, T, d), mass of the keys (B, H, T, 1), or per value channel; dict: S and n, or S with n as
        its last rows, with slots M"""
        self.redraw(state)
        v = went['v']
        q, k, real, gates, more = self.taken(q, went, state)
        if self.rule.erase:
            o, mass, new = self.as_it_is(q, k, v, real, gates, state)
        else:
            o, mass, new = self.as_mean(q, k, v, gates, state)
        return o, mass, {**new, **more}

    def as_it_is(self, q, k, v, real, gates, state):
        """For `take`, with a rule that erases: S is read as it is, and n, which nothing erases from, sums the
        keys."""
        o, S = self.recurrence(self.normaliser(q), self.normaliser(k), v, **gates, S=state.get('S'))
        ones = torch.ones_like(v[..., :1])
        mass, n = self.recurrence(q, k, ones, write=real, log_f=gates.get('log_f'), S=state.get('n'))
        return wide(o), wide(mass), {'S': S, 'n': n}

    def as_mean(self, q, k, v, gates, state):
        """For `take`, with the other rules: a mean of the values, o divided by the mass. Ones are further
        value channels, so that one recurrence computes both: n is the last rows of S, the mass the last
        channels of its output."""
        ones = torch.ones_like(v[..., :1])
        if self.rule.z or self.rule.write == 'channel':         # each value channel has its own mass
            ones = torch.ones_like(v)
            for name in ('write', 'log_z'):
                if name in gates and gates[name].shape[-1] > 1:
                    gates[name] = torch.cat([gates[name], gates[name]], -1)
        o, S = self.recurrence(self.normaliser(q), self.normaliser(k), torch.cat([v, ones], -1), **gates,
                               S=state.get('S'))
        total, mass = wide(o).split([v.shape[-1], ones.shape[-1]], -1)
        return total / mass.clamp(min=1e-30), mass, {'S': S}


class Cache(nn.Module):
    """The heart of a layer that keeps keys and values: of all tokens (softmax), or of at most `cache`, by a
    policy that evicts the others. forward, write_all, read_all take and return the same as FastWeights' do,
    but the state is the cache: k, v and, if it is limited, pos, total (fastweight.bounded).

    With `overflow`, an evicted token is written into fast weights, by gates computed from its value; the
    state then has theirs, too. Cache and fast weights share one denominator:
    o = (sum e^s v + m o') / (sum e^s + m). The sums are over the cache. o' is the output of the fast weights
    and m the mass of their keys, times a learned factor e^(x W + b). As in LoLCATs for the window (Zhang
    2024, arXiv:2410.10254).

    n_head: H   n_kv: G; 0: H   cache, sinks, overflow, gate_rank, positions: the flags of Config
    rope(x, pos): for --positions=compress, log, sqrt"""
    forms = PLAIN

    def __init__(self, rule, n_embd, n_head, head_dim, cache=256, sinks=4, overflow='', gate_rank=0,
                 positions='true', causal=True, rope=None, n_kv=0):
        super().__init__()
        self.rule = RULES[rule]
        self.cache = cache
        self.sinks = sinks
        self.turn = None
        self.rope = rope
        if positions != 'true':
            self.turn = functools.partial(fastweight.turned, rope=rope, positions=positions)
        self.causal = causal
        self.overflow = None
        if overflow:
            name, _, spec = overflow.partition(':')
            n_kv = n_kv or n_head
            try:
                self.overflow = FastWeights(name, n_kv * head_dim, n_kv, head_dim, spec or 'favor',
                                            gate_rank=gate_rank)
            except ValueError as e:
                raise ValueError(f'--overflow={overflow}: {e}') from None
            if not self.overflow.phi.like_softmax:
                raise ValueError(f'--overflow={overflow}: cache and matrix share a denominator, so the map '
                                 'must stand for exp(q.k / sqrt(d)), as favor, hedgehog and taylor do')
            self.log_mass = nn.Linear(n_embd, n_head)   # scales of map and q may not fit exp's
            nn.init.zeros_(self.log_mass.weight)
            nn.init.zeros_(self.log_mass.bias)

    def attend_and_evict(self, q, k, v, cached=None, t=0):
        """fastweight.bounded with the settings of this layer"""
        return self.forms.bounded(q, k, v, cached, t, self.rule.keeps, self.cache, self.sinks,
                                  self.overflow is not None, self.turn)

    def evicted_at(self, q, k, v):
        """For each token of a text the step after which it is no longer cached, T if it stays to the end.
        q (B, H, T, d), k, v (B, G, T, d) -> (B, G, T)"""
        T = k.shape[2]
        gone = torch.full((*k.shape[:2], 1 + T), T, device=k.device)    # the first for steps that evict none
        if self.rule.bounded:
            _, _, went, _ = self.attend_and_evict(q, k, v)
            steps = torch.arange(T, device=k.device).expand(k.shape[:3])
            gone.scatter_(2, went['pos'] + 1, steps)
        return gone[:, :, 1:]

    def forward(self, x, q, k, v, state=None, t=0, real=None):
        if not self.causal:
            return fastweight.softmax_of_all(q, k, v, real=real)
        state = state or {}
        cached = {name: state[name] for name in ('k', 'v', 'pos', 'total') if name in state} or None
        if self.rule.keeps == 'all':
            return fastweight.softmax(q, k, v, cached, self.forms.longer)
        with without_autocast(x):
            o, log_cache, went, new = self.attend_and_evict(q, k, v, cached, t)
            if self.overflow is None:
                return o, new
            o_matrix, mass, matrix = self.overflow.take(*self.truly_turned(q, went, t), state)
            share = self.share(x, log_cache, mass)
            o = torch.lerp(o_matrix, o.to(o_matrix.dtype), share)
            return o.to(v.dtype), {**new, **matrix}

    def truly_turned(self, q, went, t=0):
        """Queries and evicted tokens for the matrix. Its keys have the rope of their true positions, whatever
        the cache has. `bare` are those without rope."""
        if self.turn is None:
            return q, went
        steps = t + torch.arange(q.shape[2], device=q.device)
        return self.rope(q, steps), {**went, 'k': self.rope(went['k'], went['pos']), 'bare': went['k']}

    def share(self, x, log_cache, mass):
        """How much of the output comes from the cache, (B, H, T, 1), or per value channel; the rest comes
        from the matrix. log_cache: log of the cache's denominator   mass: the matrix's, see `take`"""
        log_matrix = mass.clamp(min=1e-30).log() + self.log_mass(x).mT[..., None]
        return (log_cache - log_matrix).sigmoid()

    def write_all(self, x, k, v, real=None):
        """Keep the keys and values of a source -> dict: k, v, and real, if some of it is padding"""
        state = {'k': k, 'v': v}
        if real is not None:
            state['real'] = real
        return state

    def read_all(self, q, state, t=0):
        return fastweight.softmax_of_all(q, **state)[0]


# ---- layers ------------------------------------------------------------------------------------------------
class Conv(nn.Module):
    """y_t = sum_j w_j x_{t-n+j}, j = 0..n, per channel. Its state is the last n inputs, n = width - 1.
    Weights start random, so each channel sees the last tokens in its own way; starting as the identity learns
    slower. In an encoder (`causal` false) it is centred. With an even width, it sees one more input before t
    than after."""
    forms = PLAIN

    def __init__(self, channels, width, causal=True):
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(width, channels))
        nn.init.uniform_(self.weight, -width ** -0.5, width ** -0.5)

    def forward(self, x, last=None, real=None):
        """x (B, T, D), last None or the n inputs before x (B, n, D) -> y (B, T, D), the last n inputs.
        real (B, T), in an encoder: which inputs are not padding. Padding is replaced by zeros."""
        T = x.shape[1]
        n = len(self.weight) - 1
        shift = self.forms.shift
        if not self.causal:
            if real is not None:
                x = x * real[..., None]
            after = n // 2
            return shift(F.pad(x, (0, 0, 0, after)), self.weight)[:, after:], x[:, :0]
        if last is None:                            # a negative pad removes steps
            return shift(x, self.weight), F.pad(x, (0, 0, n - T, 0))
        x = torch.cat([last, x], 1)
        if T == 1:
            return (x * self.weight).sum(1, keepdim=True), x[:, 1:]
        return shift(x, self.weight)[:, n:], x[:, T:]


def by_head(x, size):
    """Channels side by side (B, T, heads * size) -> (B, heads, T, size)"""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


class Mixer(nn.Module):
    """What attention is in a transformer: projections, positions, and fast weights or a cache. It takes a
    state and returns one. causal is false in an encoder. Its sizes are those that the Config says for this
    rule, see Config.heads."""
    def __init__(self, c, rule, causal=True):
        super().__init__()
        flags = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)
                 if rule in field.metadata.get('of', ())}       # what Config says for this kind of rule
        n_query, n_key, self.n_value, self.key_dim, self.head_dim = c.heads(rule)
        self.n = flags.get('writes', 1)                 # keys and values per token, in each head
        self.sizes = [n_query * self.key_dim, n_key * self.n * self.key_dim,
                      self.n_value * self.n * self.head_dim]
        self.turn = functools.partial(rope, theta=c.theta, scaling=c.rope_scaling, share=c.rope_share)
        self.qkv = nn.Linear(c.n_embd, sum(self.sizes), bias=c.bias or c.qkv_bias)
        width = flags.pop('qkv_conv', 0)
        self.conv = Conv(sum(self.sizes), width) if width else None
        self.q_norm = self.k_norm = None
        if c.qk_norm and not c.apart(rule):
            self.q_norm = nn.RMSNorm(self.key_dim * (n_query if c.qk_norm_all else 1), c.eps)
            self.k_norm = nn.RMSNorm(self.key_dim * (n_key if c.qk_norm_all else 1), c.eps)
        self.rope = c.uses_rope(rule) and flags.get('positions', 'true') == 'true'  # else Cache rotates them
        gate = flags.pop('out_gate', c.cache_gate)
        if rule in MATRIX:
            flags['key_dim'] = self.key_dim
            self.memory = FastWeights(rule, c.n_embd, self.n_value, self.head_dim, causal=causal, **flags)
        else:
            self.memory = Cache(rule, c.n_embd, n_query, self.head_dim, n_kv=n_key, causal=causal,
                                rope=self.turn, **flags)
        self.out_norm = None
        if c.out_norm and rule in MATRIX and not self.memory.normalise:   # else they are normalised already
            self.out_norm = nn.LayerNorm(self.head_dim, bias=False)
            if c.out_eps:
                self.out_norm = nn.RMSNorm(self.head_dim, c.out_eps)
        width = max(n_query, self.n_value) * self.head_dim
        self.act = OUT_GATES.get(gate)
        self.gate = nn.Linear(c.n_embd, width, bias=False) if gate else None
        self.proj = nn.Linear(width, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def heads(self, x, t=0, state=None):
        """x (B, T, n_embd), t the position of the first step -> q (B, H, T, key_dim), k (B, G, T, n key_dim),
        v (B, G, T, n head_dim). Heads may share keys and values: G = n_kv_head of H (fastweight.for_heads).
        With more heads of values than of keys, q and k are repeated for them.
        state: a dict; with --qkv_conv, the inputs before x in it are replaced by the last ones of x"""
        state = {} if state is None else state
        y = self.qkv(x)
        if self.conv is not None:
            y, state['last'] = self.conv(y, state.get('last'))
            y = F.silu(y)
        q, k, v = y.split(self.sizes, -1)
        if self.q_norm is not None:
            q = self.q_norm(q.unflatten(-1, (-1, len(self.q_norm.weight)))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, len(self.k_norm.weight)))).flatten(-2)
        q = by_head(q, self.key_dim)
        k = by_head(k, self.n * self.key_dim)
        if self.rope:
            steps = t + torch.arange(x.shape[1], device=x.device)
            both = self.turn(torch.cat([q, k], 1), steps)
            q, k = both.split([q.shape[1], k.shape[1]], 1)
        if k.shape[1] < self.n_value:
            q = for_heads(q, self.n_value)
            k = for_heads(k, self.n_value)
        return q, k, by_head(v, self.n * self.head_dim)

    def merge(self, o, x):
        """The heads' outputs o (B, H, T, head_dim), x what the queries came from -> (B, T, n_embd)"""
        if self.out_norm is not None:
            o = self.out_norm(o)
        o = o.transpose(1, 2).flatten(2)
        if self.gate is not None:
            o = o * self.act(self.gate(x))
        return self.dropout(self.proj(o))

    def forward(self, x, state=None, t=0, real=None):
        """x (B, T, n_embd), state, t, real as for its memory -> like x, the new state of its memory. With a
        convolution, `last` in it has the last inputs of that."""
        state = {**(state or {})}
        q, k, v = self.heads(x, t, state)
        o, new = self.memory(x, q, k, v, state, t, real)
        if self.conv is not None:
            new['last'] = state['last']
        return self.merge(o, x), new

    def outputs(self, u, q, k, v, real=None):
        """The heads' outputs from a fresh start (B, H, T, head_dim), given the input u (B, T, n_embd) and its
        q, k, v (B, H, T, head_dim). real (B, T): which steps of u are not padding; None: all"""
        return self.memory(u, q, k, v, real=real)[0]


class Cross(Mixer):
    """Cross attention: queries come from the decoder, keys and values from the encoder. The source is written
    once, into S or, with softmax, a cache. Every step of the decoder reads it, so a step costs the same at
    any length of the translation. Vaswani 2017 sec. 3.2.3 with softmax, Kasai 2021 with fast weights."""
    def __init__(self, c, rule):
        super().__init__(c, rule, causal=False)     # each step reads the whole source
        self.rope = False                           # positions in two texts have no distance

    def write(self, x, real=None):
        """x (B, T, n_embd), real (B, T) -> its state: what `forward` reads at each step"""
        _, k, v = self.heads(x)
        return self.memory.write_all(x, k, v, real)

    def forward(self, x, state, t):
        """x (B, T, n_embd), t the position of the first step -> what it finds in the source, like x"""
        q, _, _ = self.heads(x)
        return self.merge(self.memory.read_all(q, state, t), x)

    def outputs(self, u, q, k, v, real=None):
        """As in Mixer, but u, k and v come from the source."""
        return self.memory.read_all(q, self.memory.write_all(u, k, v, real))


def layer_norm(c):
    """LayerNorm or RMSNorm, as the Config says."""
    if c.rms:
        return nn.RMSNorm(c.n_embd, c.eps)
    return nn.LayerNorm(c.n_embd, c.eps, bias=c.bias)


def swiglu(x):
    """silu(a) b, x = [a, b]. Shazeer 2020, arXiv:2002.05202"""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def relu_squared(x):
    """max(x, 0)^2 per entry. The backward keeps only the relu. So 2021 (Primer), arXiv:2109.08668, sec. 3"""
    r = x.relu()
    return r * r


ACTS = {'gelu': functools.partial(F.gelu, approximate='tanh'), 'gelu-erf': F.gelu, 'swiglu': swiglu,
        'relu2': relu_squared}


class Block(nn.Module):
    """x + mixer(norm(x)), then x + MLP(norm(x)). After its norm, each of these two branches has a short
    convolution (--conv=0: none). A decoder (`cross` names a rule) has x + cross(norm(x)) between them.

    With post_norm (BERT), it is u + mixer(u), u = norm(x). BERT's paper has norm(x + mixer(x)): the norm that
    ends a branch there begins the next one here. So BERT's norm of the embeddings is norm1 of the first
    block, and the last norm of its last block is the norm of the model.

    With norm_after (Olmo Hybrid), a layer that keeps keys is x + norm(mixer(x)), then x + norm(MLP(x))."""

    def __init__(self, c, rule, cross=None, causal=True):
        super().__init__()
        self.post_norm = c.post_norm
        self.norm_after = c.norm_after and rule not in MATRIX
        self.norm1 = layer_norm(c)
        self.norm2 = layer_norm(c)
        self.convs = nn.ModuleList()
        if c.conv:
            self.convs.extend(Conv(c.n_embd, c.conv, causal) for _ in range(2))
        self.mixer = Mixer(c, rule, causal)
        self.cross = None
        if cross:
            self.norm3 = layer_norm(c)
            self.cross = Cross(c, cross)
        self.act = ACTS[c.act]
        width = c.n_inner or 4 * c.n_embd
        self.up = nn.Linear(c.n_embd, width * (1 + (c.act == 'swiglu')), bias=c.bias)
        self.down = nn.Linear(width, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def branch(self, norm, x):
        """x -> base, input: the result will be base + ended(norm, what the branch makes of the input)"""
        if self.norm_after:
            return x, x
        u = norm(x)
        if self.post_norm:
            return u, u
        return x, u

    def ended(self, norm, y):
        """What a branch adds, given what it computed, y: with norm_after its norm"""
        if self.norm_after:
            return norm(y)
        return y

    def convolve(self, i, x, state, real=None):
        """x (B, T, n_embd) -> its convolution, if the model has any. Its part of `state` is replaced. i is 0
        before the mixer, 1 before the MLP."""
        if self.convs:
            part = state.get(f'conv{i}', {})
            x, last = self.convs[i](x, part.get('last'), real)
            state[f'conv{i}'] = {'last': last}
        return x

    def forward(self, x, state=None, t=0, real=None):
        """x (B, T, n_embd); state: None at first, or what the last call returned, a dict per part that has
        one: mixer, conv0, conv1, cross; t, real as for Mixer  ->  x, state"""
        state = {**(state or {})}                   # each part replaces its own; that of the caller stays
        x, u = self.branch(self.norm1, x)
        u = self.convolve(0, u, state, real)
        y, state['mixer'] = self.mixer(u, state.get('mixer'), t, real)
        return self.after_mixer(x + self.ended(self.norm1, y), state, t, real), state

    def after_mixer(self, x, state, t, real):
        """x (B, T, n_embd), with what the mixer adds -> x, with what cross attention and MLP add"""
        if self.cross is not None:
            x, u = self.branch(self.norm3, x)
            x = x + self.ended(self.norm3, self.cross(u, state['cross'], t))
        x, u = self.branch(self.norm2, x)
        u = self.convolve(1, u, state, real)
        return x + self.ended(self.norm2, self.dropout(self.down(self.act(self.up(u)))))


# ---- the model ---------------------------------------------------------------------------------------------
class GPT(nn.Module):
    """Embedding, blocks, norm, output. It computes with the fastest forms available, until `use` sets others.

    A state has t, the next position (on the CPU; one for each text if they were joined), and layers, a list.
    Each layer is a dict of parts, each part a dict of tensors: mixer has S (with slots M, too), or a cache
    (k, v; if it is limited pos, total; with overflow what `take` returns); conv0 and conv1 have last; in a
    decoder, cross has S, or k, v, real of the source. None is a fresh start."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        if c.encoder and (not c.source or c.pad is None):
            raise ValueError(f'--encoder={c.encoder}: an encoder reads the first part of a pair; give data '
                             'with pairs, such as multi30k (in Python: source and pad)')
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        if c.patch:
            self.embed = nn.Linear(c.patch, c.n_embd)
        self.cls = nn.Embedding(1, c.n_embd) if c.cls else None
        self.positions = nn.Embedding(c.n_inputs(), c.n_embd) if c.pos == 'learned' else None
        self.dropout = nn.Dropout(c.dropout)
        cross = None
        self.encoder = nn.ModuleList()
        self.encoder_norm = None
        if c.encoder:
            rule, cross = c.source_rules
            self.encoder.extend(Block(c, rule, causal=False) for _ in range(c.encoder))
            self.encoder_norm = layer_norm(c)
        self.blocks = nn.ModuleList(Block(c, rule, cross, c.causal) for rule in c.rules)
        self.norm = layer_norm(c)
        self.pooler = nn.Linear(c.n_embd, c.n_embd) if c.pooler else None
        self.head = None if c.tied else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.classes:
            self.head = nn.Linear(c.n_embd, c.classes)
        self.use(pick_forms())
        for name, p in self.named_parameters():
            std = p.shape[-1] ** -0.5               # a sum over so many inputs keeps their size
            if name.endswith(('qkv.weight', 'up.weight', 'gates.proj.weight', 'mixer.gate.weight')):
                nn.init.normal_(p, std=std)
            elif name.endswith(('mixer.proj.weight', 'cross.proj.weight', 'down.weight')):
                # and so does the sum over the layers: GPT-2, sec. 2.3
                depth = c.encoder if name.startswith('encoder.') else c.n_layer
                nn.init.normal_(p, std=std / (2 * depth) ** 0.5)
            elif name in ('embed.weight', 'positions.weight', 'cls.weight'):
                nn.init.normal_(p, std=0.3)
        if self.head is None:
            # logits near 0: a loss near ln(vocab_size), that of guessing. A gain of 1 gives 14 at width 128
            nn.init.constant_(self.norm.weight, 0.1)

    def use(self, forms):
        """Compute with these Forms from now on, in all modules. self.why is one line about them to print."""
        self.why = forms.why
        if set(self.config.all_rules) == {'softmax'}:
            self.why = 'none (softmax is PyTorch\'s)'
        for module in self.modules():
            if hasattr(module, 'forms'):                # FastWeights, Cache, Conv
                module.forms = forms

    def in_bfloat16(self):
        """Round the weights to bfloat16, to read and write but not to train: half the memory, and faster
        where the machine multiplies it. Gates, feature maps and S are computed in fp32."""
        self.to(torch.bfloat16)
        for module in self.modules():
            if isinstance(module, FastWeights):
                module.float()
                if hasattr(module.gates, 'proj'):
                    module.gates.proj.to(torch.bfloat16)

    def embedded(self, tokens, t=0):
        """tokens (B, T), t the position of the first -> the input of the first layer (B, T, n_embd). Patches
        give (B, T / patch, n_embd). cls adds one position."""
        if self.config.patch:
            tokens = tokens.unflatten(1, (-1, self.config.patch)).to(self.embed.weight) / 255
        x = self.embed(tokens)
        if self.cls is not None:
            x = torch.cat([self.cls.weight.expand(len(x), 1, -1), x], 1)
        if self.positions is not None:              # beyond block_size, the last position is repeated
            at = t + torch.arange(x.shape[1], device=x.device)
            x = x + self.positions(at.clamp(max=self.config.n_inputs() - 1))
        return self.dropout(x)

    def not_padding(self, tokens):
        """tokens (B, T) -> which of them are not padding (B, T); None: all"""
        if self.config.pad is None:
            return None
        return tokens != self.config.pad

    def hidden(self, tokens, state=None):
        """tokens (B, T) -> the hidden state of the last layer (B, T, n_embd), state"""
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(f'tokens {tuple(tokens.shape)}: expected (B, T), at least one text of one token')
        if state is not None and not self.config.causal:
            raise ValueError('an encoder reads a whole text at once: it cannot go on from a state')
        if self.encoder and state is None:          # the source stands first
            n = self.config.source
            state = self.read_source(tokens[:, :n])
            tokens = tokens[:, n:]
        if state is None:
            state = {'t': torch.zeros((), dtype=torch.long), 'layers': [{} for _ in self.blocks]}
        t = first = state['t']
        at = t - self.config.source                 # layers count the decoder's own tokens, as `sink` must
        if t.dim():                                 # the texts are of unequal length, see `join`
            if tokens.shape[1] > 1:
                raise ValueError('joined texts go on one token at a time')
            first = t[:, None].to(tokens.device)
            at = at[:, None, None].to(tokens.device)        # (B, 1, 1) goes with (B, G, tokens)
        x = self.embedded(tokens, first)
        if not x.shape[1]:                          # only a source, no decoder text yet
            return x, state
        real = None if self.config.causal else self.not_padding(tokens)
        layers = []
        for block, layer in zip(self.blocks, state['layers']):
            x, layer = block(x, layer, at, real)
            layers.append(layer)
        return self.norm(x), {'t': t + x.shape[1], 'layers': layers}

    def read_source(self, tokens):
        """Read a source, tokens (B, T) with padding at the end, T <= config.source -> the state with which
        the decoder begins. The encoder reads it. Each decoder layer writes the encoder's output into
        its state."""
        if tokens.shape[1] > self.config.source:
            raise ValueError(f'a source of {tokens.shape[1]} tokens, this model reads {self.config.source}')
        tokens, real = self.without_padding(tokens)
        x = self.embedded(tokens)
        for block in self.encoder:
            x, _ = block(x, None, 0, real)
        x = self.encoder_norm(x)
        t = torch.tensor(self.config.source)        # position in the row, padding included
        return {'t': t, 'layers': [{'cross': block.cross.write(x, real)} for block in self.blocks]}

    def without_padding(self, tokens, begins=False):
        """Cut tokens (B, T) at the end of the longest text -> tokens, and which of them are not padding.
        begins: the first token is not padding either, as in a translation."""
        real = self.not_padding(tokens)
        real[:, 0] |= begins
        longest = real.sum(1).max()
        return tokens[:, :longest], real[:, :longest]

    def pooled(self, x, tokens):
        """x (B, T, n_embd) -> (B, n_embd): the first position or the mean of all but padding, then the pooler
        if there is one"""
        real = self.not_padding(tokens)
        if self.config.pool == 'first':
            x = x[:, 0]
        elif real is None:
            x = x.mean(1)
        else:
            real = real[..., None]
            x = (x * real).sum(1) / real.sum(1)
        if self.pooler is None:
            return x
        return self.pooler(x).tanh()

    def forward(self, tokens, state=None, at=None):
        """tokens (B, T) -> logits (B, T, vocab), state. A given state is continued.
        at (B, T): return logits only where it is true, (N, vocab)
        With classes, logits are (.., classes). An encoder gives one vector per text, (B, classes). A row of a
        translator begins with config.source tokens for the encoder; logits are those of the others,
        (B, T - source, vocab)."""
        c = self.config
        if not (c.causal or c.classes):
            raise ValueError('an encoder without classes has no output layer: python train.py --init=MODEL '
                             '--data=DATA adds one for the classes of DATA; GPT.hidden needs none')
        x, state = self.hidden(tokens, state)
        if c.classes and not c.causal:
            return self.head(self.pooled(x, tokens)), state
        if at is not None and c.patch:
            at = at.unflatten(1, (-1, c.patch)).any(-1)
        if at is not None:
            x = x[at[:, at.shape[1] - x.shape[1]:]]         # a translator's x has only the decoder's part
        if c.classes:
            return self.head(x), state
        return F.linear(x, (self.head or self.embed).weight), state

    def mixers(self):
        """All mixers by name: encoder.0.mixer, blocks.0.mixer, blocks.0.cross, ..."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Mixer)}

    @property
    def max_len(self):
        """How many tokens the model has learned positions for, or cosformer takes; None: any number."""
        ends = [phi.max_len for phi in self.modules() if isinstance(phi, fastweight.FeatureMap)]
        if self.positions is not None:
            ends.append(self.config.block_size)
        return min((end for end in ends if end), default=None)

    @torch.no_grad()                                # not inference_mode: training may go on from the state
    def read(self, tokens, state=None, segment=2048, label=''):
        """Prefill: the state after tokens (B, T), for any T. It reads a `segment` at a time, so only the
        cache of softmax grows with T. label: begins a progress bar, see `progress`"""
        segment = max(segment, self.config.source)  # a source is read whole
        for i in progress(range(0, tokens.shape[1], segment), label, delay=4):
            _, state = self.hidden(tokens[:, i:i + segment], state)
        return state

    @torch.no_grad()
    def first_layer(self, B, T):
        """Compute the first layer on zeros (B, T, n_embd), as any model can, to see how long it takes."""
        x = self.embed.weight.new_zeros(B, T, self.config.n_embd)
        (self.encoder or self.blocks)[0](x)

    @torch.inference_mode()
    def generate(self, tokens, state=None, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Yield (token (B, 1), state) without end. First the prompt, tokens (B, T), T >= 1, is read in
        chunks, then there is one step per token. The state does not yet include the token it comes with.
        temperature 0 is greedy.

        No state is changed in place: you may keep those that are yielded."""
        state = self.read(tokens[:, :-1], state)
        token = tokens[:, -1:]
        while True:
            logits, state = self(token, state)
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)
            yield token, state

    @torch.inference_mode()
    def translate(self, tokens, beam=1, penalty=0.6):
        """Translate sources, tokens (B, T) -> tokens (B, n), padded at the end, where n is at most what fits
        into a row. Beam search follows the `beam` likeliest texts per source. Once as many have ended, it
        returns the one with the largest log p / ((5 + n) / 6)^penalty (Vaswani 2017 sec. 6.1, Wu 2016
        arXiv:1609.08144 eq. 14). A beam of 1 is greedy."""
        pad = self.config.pad
        B = len(tokens)
        first = beam * torch.arange(B, device=tokens.device)[:, None]       # first text of each source
        texts_of_sources = torch.arange(B).repeat_interleave(beam)
        state = chosen_texts(self.read_source(tokens), texts_of_sources, everything=True)
        token = tokens.new_full((B * beam, 1), pad)
        texts = tokens.new_empty(B, beam, 0)
        scores = torch.full((B, beam), -math.inf, device=tokens.device)
        best = texts[:, :1]                                 # best finished text, and its score
        best_score = scores[:, :1].clone()
        scores[:, 0] = 0                                    # all texts begin alike, so follow only one
        most = self.config.block_size - self.config.source
        ends = 0                                            # (B, 1): how many texts have ended
        for n in range(1, most + 1):
            logits, state = self(token, state)
            log_p = logits[:, -1].float().log_softmax(-1).view(B, beam, -1)
            scores, index = (scores[..., None] + log_p).flatten(1).topk(beam)
            parent = index // log_p.shape[-1]
            chosen = index % log_p.shape[-1]
            texts = torch.cat([texts.take_along_dim(parent[..., None], 1), chosen[..., None]], 2)
            ended = (chosen == pad) | (n == most)           # at the last step, all end
            final = (scores / ((5 + n) / 6) ** penalty).masked_fill(~ended, -math.inf)
            best_score, i = torch.cat([best_score, final], 1).max(1, keepdim=True)
            best = F.pad(best, (0, 1), value=pad)
            best = torch.cat([best, texts], 1).take_along_dim(i[..., None], 1)
            ends += final.isfinite().sum(1, keepdim=True)
            if (ends >= beam).all():
                break
            scores = scores.masked_fill(ended | (ends >= beam), -math.inf)
            state = chosen_texts(state, (first + parent).flatten())
            token = chosen.view(-1, 1)
        return best[:, 0]


# ---- sampling ----------------------------------------------------------------------------------------------
def chosen_texts(state, index, everything=False):
    """The state of some texts of a batch. index (N,) may repeat a text. What cross attention has of a source
    stays as it is, because texts of one source share it, unless `everything` is true."""
    def chosen(x):
        return x[index] if x.dim() else x           # t is that of all texts
    return map_state(chosen, state, () if everything else ('cross',))


def join(states):
    """The states of texts that were read one by one -> the state of all of them as a batch, which goes on
    token by token. The texts may have unequal lengths, except with softmax, whose caches then differ."""
    layers = []
    for same in zip(*(state['layers'] for state in states)):
        layer = {}
        for part, tensors in same[0].items():
            lengths = {other[part]['k'].shape[2] for other in same if 'k' in tensors}
            if len(lengths) > 1:
                raise ValueError('softmax caches all tokens of a text: join texts of one length, or load the '
                                 'model with rule=window and a cache longer than the texts')
            layer[part] = {name: torch.cat([other[part][name] for other in same]) for name in tensors}
        layers.append(layer)
    return {'t': torch.stack([state['t'] for state in states]), 'layers': layers}


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


# ---- models in files: ours, and those of the hub -----------------------------------------------------------
def save(path, model, meta, extra=None, own=None):
    """Write a model, metadata (data: its tokenizer, step, ...) and extra tensors into one file for `load`.
    own: the model's tensors by name, if not those of its state_dict (only what learns). What
    `load` returned can be saved again: then the extra tensors are those in the metadata."""
    data = meta.get('data') or Data('ids', model.config.vocab_size)
    meta = {**meta, 'config': dataclasses.asdict(model.config), 'data': data.as_dict()}
    others = meta.pop('tensors', {}) | (extra or {})
    meta.pop('digest', None)                        # of the file that was loaded
    tensors = {f'model.{name}': x for name, x in (own or model.state_dict()).items()}
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise ValueError(f'{name} is not finite any more, so nothing was saved; try a smaller --lr')
    write_tensors(path, tensors | others, meta)


class Undrawn(TorchFunctionMode):
    """Inside this context torch.nn.init does nothing. A file will overwrite the parameters anyway, and memory
    that is never written costs nothing."""
    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(f, '__module__', '') == 'torch.nn.init':
            return kwargs['tensor']
        return f(*args, **kwargs)


def load(source, device='cpu', dtype=torch.float32, **changes):
    """Load a checkpoint, a folder in the hub's layout, or a model on the hub, by name -> model, meta. The
    model is in eval mode, and several threads may use it.
    meta: data (name, tokenizer, ...), step, config, and tensors, which `save` got as extra. changes: flags of
    Config. dtype: what the weights of a folder become; those in bfloat16 then never take the memory of
    fp32, and `in_bfloat16` is to follow.
    ValueError, with the source, if something is missing, damaged or of another kind."""
    source = str(source)
    folder = None
    if os.path.isfile(source) or source.endswith('.safetensors'):
        weights, meta = checkpoint(source)
    else:
        from hub import folders
        folder = folders.Folder(folders.folder_of(source), source)
        meta = {'config': {**dataclasses.asdict(Config()), **folder.config}, 'data': folder.data.as_dict(),
                'step': 0, 'tensors': {}}
    if not {'config', 'data'} <= meta.keys():
        raise ValueError(f'{source}: holds no model (a state saved by sample.py?)')
    saved = typed(Config, meta['config'], f'{source}: cannot be built here, maybe of another version')
    config = with_cache_flags(saved, source, **changes)
    with of_package(f'{source}: no tokens'):
        data = meta['data'] = Data(**meta['data'])
        if data.json:
            vocabulary.subwords(data.json)
    if data.is_joined:
        data.row = 0                    # the rows were those of the pairs: the model reads any text
    model = unfilled(config, saved)
    if folder:
        with Undrawn():                 # all of the folder's, whatever the flags say
            weights = folder.tensors(GPT(saved).state_dict(), dtype)
    put_weights(model, weights, saved, source, changes)
    return model.to(device).eval(), meta


def checkpoint(path):
    """A file of `save` -> the model's tensors by name; its meta, with all other tensors in `tensors`"""
    tensors, meta = read_tensors(path)
    weights = {}
    for name in [*tensors]:
        if name.startswith('model.'):   # copied: a file's memory is not aligned, and then products round
            del tensors[name]                                                       # otherwise
            weights[name.removeprefix('model.')] = one_tensor(path, name).clone()
    return weights, {'step': 0, **meta, 'tensors': tensors}


def unfilled(config, saved):
    """A GPT of this Config for weights of the Config `saved`. What these do not have, another --overflow, is
    drawn, always alike."""
    if config.overflow == saved.overflow:
        with Undrawn():
            return GPT(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(config)


def put_weights(model, weights, saved, source, changes):
    """Fill a model with weights of the Config `saved`. ValueError, with the changes to it, if they are for
    another model; only those of --overflow may be missing or too many."""
    why = f'{source}: holds the weights of another model'
    other = [f'--{name}={value}' for name, value in changes.items() if getattr(saved, name) != value]
    if other:
        why = f'{" ".join(other)}: not what the weights of {source} are for'
    others = fill(model, weights, why, strict=model.config == saved, assign=True)
    for name in others.missing_keys + others.unexpected_keys:
        if '.overflow.' not in name and '.log_mass.' not in name:
            raise ValueError(f'{why}, see {name}')


def fill(model, tensors, why, **how):
    """load_state_dict. ValueError, beginning with `why`, for tensors with other names or shapes."""
    try:
        return model.load_state_dict(tensors, **how)
    except RuntimeError as e:
        raise ValueError(f'{why} ({" ".join(str(e).split())[:200]})') from None


def with_cache_flags(config, source, rule='', **changes):
    """A Config with other flags of `CacheFlags`. A new rule replaces softmax and every rule with a cache.
    ValueError, with the source, if it has neither."""
    if rule and rule not in RULES:
        raise ValueError(f'--rule={rule}: choose from {", ".join(RULES)}')
    if rule:
        if config.keeps() == {None}:
            raise ValueError(f'--rule={rule}: {source} has no softmax layers, only {briefly(config.rules)}')
        layers = [rule if RULES[name].keeps else name for name in config.rules]
        changes.update(rule=rule, layers=','.join(layers))
        if RULES[rule].keeps == 'all':
            changes = {'overflow': '', 'positions': 'true', **changes}
    new = dataclasses.replace(config, **changes)
    if config.overflow and new.overflow and new.positions != config.positions:
        raise ValueError(f'--positions={new.positions}: the matrix of {source} learned with --positions='
                         f'{config.positions}; leave the flag out, or give --overflow= for the cache alone')
    if any(RULES[then].matrix and RULES[was].keeps for then, was in zip(new.rules, config.rules)):
        given = f'--rule={rule}' if rule else f'--layers={new.layers}'
        raise ValueError(f'{given}: what softmax learned does not suit a matrix without training; '
                         f'python convert.py --from={source} {given} --data=TEXT trains it')
    return new
