"""An encoder: each step reads the whole text. For classes of texts and pictures, and BERT and ViT of the hub.

    Encoder(EncoderConfig(rule='sum', classes=2, pad=0))        # tokens (B, T) -> logits (B, classes)

First all steps are written into S, then each query reads the same S: o_t = S q_t. If the queries come from
another text, that is cross attention, see translator.py.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from caches import attention
from common.flags import flag, known
from fastweight import FLOOR, RULES, chunked, filled, finish, full_precision, without_autocast
from memory import FastWeights
from model import ACTS, GPT, Block, Config, Conv, Mixer, check_tokens


# ---- the equation, for a whole text ------------------------------------------------------------------------
def in_any_order(erase, log_f, log_z):
    """Whether nothing is forgotten or erased. S is then a plain sum, in which the order does not matter."""
    return erase is None and log_f is None and log_z is None

@full_precision
def write_all(k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, form=chunked):
    """S after all steps, (B, H, V, K). Arguments as for `recurrent`; `form` computes the recurrence. If the
    order of the steps does not matter, S + sum_t w_t v_t k_t^T is one product."""
    if in_any_order(erase, log_f, log_z):
        _, k, v, w, _, _, _, S = filled(k, k, v, write, erase, log_f, log_z, S, normalise)
        return S + (w * v).mT @ k
    return form(k, k, v, write, erase, log_f, log_z, S, normalise)[1]

@full_precision
def read_all(q, S, normalise=False, floor=FLOOR):
    """o_t = S q_t for any number of queries. q (B, H, T, K)  ->  (B, H, T, V)"""
    return finish(q.to(S.dtype) @ S.mT, normalise, floor, q.dtype)

def where_real(real, v, gates):
    """Gates for a text with padding. real (B, T) is false where a step is padding. Such a step writes and
    erases with strength 0 and forgets nothing, so it leaves S alone. v (B, H, T, V)"""
    real = real[:, None].to(v.dtype)
    masked = {'write': real.expand(v.shape[:3])}
    for name, x in gates.items():
        if x is not None:
            masked[name] = x * (real if x.dim() == 3 else real[..., None])
    return masked

@full_precision
def encoded(q, k, v, write=None, erase=None, log_f=None, log_z=None, S=None, normalise=False, floor=FLOOR,
            real=None, form=chunked):
    """`recurrent` for an encoder: same arguments, but each step reads what all steps have written. real
    (B, T) says which steps are not padding (None: all). `form` computes the recurrence.

    If steps are forgotten or erased, their order matters, so the text is read in both directions. The output
    is S_t q_t, from the steps up to t, plus D_t q_t of the reversed text. D_t is read before step t is
    written, so each step counts once. Numerators and denominators are added separately, then divided."""
    dtype = v.dtype
    gates = {'write': write, 'erase': erase, 'log_f': log_f, 'log_z': log_z}
    if real is not None:
        gates = where_real(real, v, gates)
    if in_any_order(erase, log_f, log_z):
        S = write_all(k, v, gates['write'], S=S, normalise=normalise)
        return read_all(q, S, normalise, floor), S
    decays = gates.get('log_f'), gates.get('log_z')
    _, _, v, _, _, log_f, log_z, S = filled(q, k, v, write, erase, *decays, S, normalise)
    o, S = form(q, k, v, **gates, S=S)
    reversed_text = {name: x.flip(2) for name, x in {'k': k, 'v': v, **gates}.items() if x is not None}
    next_q = (log_f.exp() * q).flip(2).roll(-1, 2)          # D_t q_t = z_t * (S_{t+1} (f_t * q_t))
    later, _ = form(next_q, **reversed_text)
    later = F.pad(later.flip(2)[:, :, 1:], (0, 0, 0, 1))    # nothing follows the last step
    return finish(o + log_z.exp() * later, normalise, floor, dtype), S


def softmax_of_all(q, k, v, real=None):
    """Softmax attention where each step sees all steps except padding. real (B, T) or None"""
    mask = None
    if real is not None:
        mask = real[:, None, None]
    return attention(q, k, v, mask)


# ---- the layer ---------------------------------------------------------------------------------------------
class WholeWeights(FastWeights):
    """Fast weights that are read when the whole text is written. real (B, T): which steps are not padding"""
    def forward(self, x, q, k, v, real=None):
        with without_autocast(x):
            self.redraw({})
            o, _ = encoded(self.to_read(q), **self.to_write(x, k, v), normalise=self.normalise,
                           floor=self.phi.floor, real=real, form=self.forms.recurrence)
        return o

    def write_all(self, x, k, v, real=None):
        """Write a source that any number of queries can then read -> dict: S (B, H, V, K)"""
        with without_autocast(x):
            self.redraw({})
            written = self.to_write(x, k, v)
            if real is not None:
                gates = {name: written.get(name) for name in ('write', 'erase', 'log_f', 'log_z')}
                written.update(where_real(real, written['v'], gates))
            S = write_all(**written, normalise=self.normalise, form=self.forms.recurrence)
        return {'S': S}

    def read_all(self, q, state, t=0):
        """Read what `write_all` returned. q (B, H, T, head_dim), t position of the first step -> like q"""
        with without_autocast(q):
            o = read_all(self.to_read(q, t), state['S'], self.normalise, self.phi.floor)
        return o.to(q.dtype)


class WholeCache(nn.Module):
    """Softmax attention to a whole text"""
    def __init__(self, rule):
        super().__init__()
        self.rule = RULES[rule]

    def forward(self, x, q, k, v, real=None):
        return softmax_of_all(q, k, v, real)

    def write_all(self, x, k, v, real=None):
        state = {'k': k, 'v': v}
        if real is not None:
            state['real'] = real
        return state

    def read_all(self, q, state, t=0):
        return softmax_of_all(q, **state)


class CentredConv(Conv):
    """A Conv that sees as many inputs after t as before; with an even width, one more before"""
    def forward(self, x, real=None):
        if real is not None:
            x = x * real[..., None]
        after = (len(self.weight) - 1) // 2
        return self.forms.shift(F.pad(x, (0, 0, 0, after)), self.weight)[:, after:]


class WholeMixer(Mixer):
    """A Mixer that reads the whole text"""
    def memory_of(self, c, rule):
        if RULES[rule].matrix:
            return WholeWeights(rule, c.n_embd, c.n_head, self.head_dim, c.phi, c.norm, c.beta_max,
                                c.gate_rank, self.key_dim)
        return WholeCache(rule)

    def forward(self, x, real=None):
        q, k, v = self.project(x)
        o = self.memory(x, q, k, v, real)
        return self.dropout(self.proj(self.merge(o)))


class EncoderBlock(Block):
    """x + mixer(norm(x)), then x + MLP(norm(x)), without a state. real (B, T): which steps are not padding

    With post_norm (BERT), it is u + mixer(u), u = norm(x). BERT's paper has norm(x + mixer(x)): the norm that
    ends a branch there begins the next one here. So BERT's norm of the embeddings is norm1 of the first
    block, and the last norm of its last block is the norm of the model."""
    mixer_class = WholeMixer
    conv_class = CentredConv
    post_norm = False           # of a translator; an encoder has it in its Config

    def convolve(self, i, x, real=None):
        if self.convs:
            return self.convs[i](x, real)
        return x

    def forward(self, x, real=None):
        u = self.norm1(x)
        base = u if self.post_norm else x
        x = base + self.mixer(self.convolve(0, u, real), real)
        u = self.norm2(x)
        base = u if self.post_norm else x
        return base + self.mlp(u, real)


def not_padding(tokens, pad):
    """tokens (B, T) -> which of them are not padding (B, T); None: all"""
    if pad is None:
        return None
    return tokens != pad


ACTS['gelu-erf'] = F.gelu                           # BERT, ViT


# ---- a classifier ------------------------------------------------------------------------------------------
@dataclass
class EncoderConfig(Config):
    """A Config of a model that reads a whole text at once, and says its class"""
    causal: bool = flag(False, 'needs data with classes. false: an encoder, each step sees all of the text; '
                               'true: a decoder, whose last place says the class')
    pool: str = flag('mean', 'encoder: read the class from the mean of all positions, or the first',
                     ['mean', 'first'])
    classes: int = known(0, 0, 2 ** 32)     # 0: there is no output layer
    pad: int = known(None, 0, 2 ** 32)      # the token that marks padding
    patch: int = known(0, 0, 2 ** 24)       # numbers 0..255 per input, a patch; 0: inputs are tokens
    # from here on: BERT, ViT
    cls: bool = False           # one more position, first, with a learned input (ViT)
    pooler: bool = False        # read classes from tanh(W x + b) of the pooled x (BERT)
    post_norm: bool = False     # the residual starts after the norm, not before it (BERT), see `EncoderBlock`
    act: str = flag('relu2', '', ['relu2', 'gelu', 'gelu-erf'])
    eps: float = known(1e-5, 0, 1)
    n_inner: int = known(0, 0, 2 ** 20)     # width of the MLP; 0: 4 n_embd

    def __post_init__(self):
        if self.pos == 'auto':
            self.pos = 'learned'                    # all steps are read at once: mark their order
        super().__post_init__()

    def contradictions(self):
        yield from super().contradictions()
        yield self.causal, 'causal=True: an encoder sees all of the text; models/classifier.py does not'
        yield from unreadable(self.rules, self.phi, self.norm)

    def layer_norm(self):
        return nn.LayerNorm(self.n_embd, self.eps, bias=self.bias)

    def width_of_mlp(self):
        return self.n_inner or super().width_of_mlp()

    def n_inputs(self):
        """The number of inputs for block_size tokens: one per token or patch, and cls."""
        return self.block_size // (self.patch or 1) + self.cls


def unreadable(rules, phi, norm):
    """For `refuse`: rules and maps that cannot see all steps at once"""
    yield phi.partition(':')[0] == 'slots', '--phi=slots: it is for a text that is read step by step'
    for name in rules:
        yield RULES[name].bounded, (
            f'--causal=false --rule={name}: it evicts step by step, but an encoder sees all at once; '
            'take softmax, or fast weights')
        yield RULES[name].erases and norm == 'attn', (
            f'--rule={name} --norm=attn divides by the keys so far, but an encoder sees all at once; '
            'take --norm=sum or l2')


class WideBlock(EncoderBlock):
    """An EncoderBlock of BERT's and ViT's kind"""
    def __init__(self, c, rule):
        super().__init__(c, rule)
        self.post_norm = c.post_norm


class Encoder(GPT):
    """tokens (B, T) -> logits (B, classes); there is no state"""
    config_class = EncoderConfig
    block_class = WideBlock
    task = 'classify'

    def add_input(self, c):
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        if c.patch:
            self.embed = nn.Linear(c.patch, c.n_embd)
        self.cls = nn.Embedding(1, c.n_embd) if c.cls else None
        self.positions = nn.Embedding(c.n_inputs(), c.n_embd) if c.pos == 'learned' else None
        self.dropout = nn.Dropout(c.dropout)

    def add_output(self, c):
        self.norm = c.layer_norm()
        self.pooler = nn.Linear(c.n_embd, c.n_embd) if c.pooler else None
        self.head = nn.Linear(c.n_embd, c.classes) if c.classes else None
        if self.head is None:
            nn.init.constant_(self.norm.weight, 0.1)

    def first_std(self, name, n):
        if name == 'cls.weight':
            return 0.3
        return super().first_std(name, n)

    def embedded(self, tokens, t=0):
        """As GPT. Patches give (B, T / patch, n_embd). cls adds one position."""
        c = self.config
        if c.patch:
            tokens = tokens.unflatten(1, (-1, c.patch)).to(self.embed.weight) / 255
        x = self.embed(tokens)
        if self.cls is not None:
            x = torch.cat([self.cls.weight.expand(len(x), 1, -1), x], 1)
        if self.positions is not None:              # beyond block_size, the last position is repeated
            at = torch.arange(x.shape[1], device=x.device)
            x = x + self.positions(at.clamp(max=c.n_inputs() - 1))
        return self.dropout(x)

    def not_padding(self, tokens):
        return not_padding(tokens, self.config.pad)

    def hidden(self, tokens, state=None):
        """tokens (B, T) -> the hidden state of the last layer (B, T, n_embd), None"""
        check_tokens(tokens)
        if state is not None:
            raise ValueError('an encoder reads a whole text at once: it cannot go on from a state')
        real = self.not_padding(tokens)
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x, real)
        return self.norm(x), None

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
        """tokens (B, T) -> logits (B, classes), None"""
        if self.head is None:
            raise ValueError('an encoder without classes has no output layer: python train.py --init=MODEL '
                             '--data=DATA adds one for the classes of DATA; GPT.hidden needs none')
        x, _ = self.hidden(tokens, state)
        return self.head(self.pooled(x, tokens)), None

    def cannot_train(self, data, name, steps):
        yield not data.classes, (
            f'--causal=false --data={name}: each step would see the token that it should say; an '
            'encoder needs classes: lines 0<TAB>text in a .tsv (not .csv), or a set such as listops (pairs: '
            '--encoder=3)')
