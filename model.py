"""The GPT around the fast weights: flags, layers, checkpoints. Imported by every script, run by none.

    model = GPT(Config(rule='delta', vocab_size=256))
    logits, state = model(tokens)               # tokens (B, T) -> logits (B, T, vocab), state: a dict a layer
    logits, state = model(more_tokens, state)   # goes on where the first call stopped: at any cut, by any T
"""
import ctypes
import dataclasses
import difflib
import hashlib
import itertools
import json
import os
import sys
import typing
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import fastweight
import kernels
from fastweight import FEATURE_MAPS, NORMALISERS, RULES, FastWeights, rope

# ---- flags: a dataclass field is the flag, its type, default, help, choices and range ----------------------
def flag(default, help, choices=None, low=None, high=None):
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high))


def kind(field):
    """int, float, str or bool; `int | None` is int."""
    return next(t for t in (*typing.get_args(field.type), field.type) if t is not type(None))


def value_of(name, text, field):
    """The flag's text as its type, or a ValueError that says what was expected."""
    type_, (choices, low, high) = kind(field), (field.metadata[k] for k in ('choices', 'low', 'high'))
    try:
        if type_ is bool:
            words = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}
            value = words[text.lower()]
        else:
            value = type_(text)
            if value != value:
                raise ValueError
    except (KeyError, ValueError):
        expected = {int: 'a whole number', float: 'a number', bool: 'true or false'}[type_]
        raise ValueError(f'--{name}={text}: expected {expected}') from None
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), map(str, choices), 1)
        hint = f' (did you mean {near[0]}?)' if near else ''
        raise ValueError(f'--{name}={text}: choose from {", ".join(map(str, choices))}{hint}')
    if (low is not None and value < low) or (high is not None and value > high):
        ends = [f'{word} {x:g}' for word, x in (('at least', low), ('at most', high)) if x is not None]
        raise ValueError(f'--{name}={text}: expected {" and ".join(ends)}')
    return value


def parse(argv, doc, *classes):
    """--key=value, --key value, --key for true -> a dict of the flags given for each class. --help exits."""
    fields = {f.name.rstrip('_'): f for c in classes for f in dataclasses.fields(c) if f.metadata}
    if '--help' in argv or '-h' in argv:
        print(doc.strip(), '\n')
        for name, f in fields.items():
            m = f.metadata
            choices = f' [{"|".join(map(str, m["choices"]))}]' if m['choices'] else ''
            print(f'  --{name}={"" if f.default is None else f.default}'.ljust(24), m['help'] + choices)
        sys.exit(0)
    given, args = {}, list(argv)
    while args:
        word = args.pop(0)
        name, equals, text = word.removeprefix('--').partition('=')
        if not word.startswith('--') or name not in fields:
            near = ' or '.join('--' + n for n in difflib.get_close_matches(name, fields, 3, 0.5))
            hint = f'did you mean {near}?' if near else '--help lists them'
            raise ValueError(f'{word}: no such flag; {hint}')
        if name in given:
            raise ValueError(f'--{name} is given twice')
        if not equals:
            bare = not args or args[0].startswith('--')
            if bare and kind(fields[name]) is not bool:
                raise ValueError(f'--{name}: its value is missing')
            text = 'true' if bare else args.pop(0)
        given[name] = value_of(name, text, fields[name])
    given = {fields[name].name: x for name, x in given.items()}
    return [{f.name: given[f.name] for f in dataclasses.fields(c) if f.name in given} for c in classes]


def pick_device(name):
    """'auto' or a name -> torch.device that works, or a ValueError that says why not."""
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f'--device={name}: {str(e).splitlines()[0]}') from None


def keep_memory():
    """Tell glibc to keep what is freed (up to 32 MB a piece). It else returns megabytes to the system and
    takes them again, with a page fault every 4 KB: half the time of a layer at T = 4,096."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)                   # M_MMAP_THRESHOLD
    except (OSError, AttributeError, TypeError):    # no glibc, no need
        pass


def table(rows):
    """Print a list of dicts with the same keys."""
    def show(x):
        if isinstance(x, float):
            return f'{x:.4g}' if abs(x) < 1e4 else f'{x:,.0f}'
        return '-' if x is None else f'{x:,}' if isinstance(x, int) else x
    cells = [list(rows[0])] + [[show(x) for x in r.values()] for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for c in cells:
        print('  '.join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(c, widths))))


def script(main):
    """Run a script's main(argv): what a user can cause ends as one line on stderr and exit code 2."""
    def run(argv=None):
        keep_memory()
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except (ValueError, OSError) as e:
            print('error:', ' '.join(str(e).split()), file=sys.stderr)
            return 2
        except ModuleNotFoundError as e:
            print(f'error: {e}: pip install -r requirements.txt brings it', file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print('\nstopped', file=sys.stderr)
            return 130
    return run


@dataclass
class Config:
    rule: str = flag('delta', 'update rule of every layer', list(RULES))
    layers: str = flag('', 'a rule per layer instead, tiled over depth: delta,delta,softmax')
    phi: str = flag('', f'feature map, if not the rule\'s; with option: dpfp:3 [{"|".join(FEATURE_MAPS)}]')
    norm: str = flag('', f'normaliser, if not the rule\'s [{"|".join(NORMALISERS)}]')
    beta_max: float = flag(1.0, 'delta rules: beta lies in (0, beta_max)', low=0, high=2)
    conv: int = flag(4, 'width of the causal convolution before each mixer and MLP; 0: none', low=0, high=64)
    cache: int = flag(256, 'rules that keep rows: how many', low=0)
    sinks: int = flag(4, 'sink: first rows that stay', low=0)
    overflow: str = flag('', 'rule and map for the rows that go: sum:favor, delta:taylor, decay:hedgehog')
    positions: str = flag('true', 'of kept rows; compress: gaps g > 10 count ln ln g', ['true', 'compress'])
    pos: str = flag('auto', 'auto: rope where rows are kept', ['auto', 'none', 'learned', 'rope'])
    n_layer: int = flag(4, 'layers', low=1)
    n_head: int = flag(8, 'heads', low=1)
    n_embd: int = flag(128, 'width', low=1)
    block_size: int = flag(128, 'tokens in a training row', low=1)
    dropout: float = flag(0.0, 'dropout', low=0, high=0.99)
    vocab_size: int = 256
    act: str = 'relu2'          # from here on: what pretrained models have, and train.py leaves alone
    bias: bool = False
    rms: bool = False           # RMSNorm for LayerNorm
    eps: float = 1e-5
    theta: float = 1e4          # of rope
    n_kv_head: int = 0          # fewer heads for k and v than for q; 0: as many
    n_inner: int = 0            # width of the MLP; 0: 4 n_embd
    tied: bool = True           # the output layer is the embedding

    def __post_init__(self):
        head_dim, rest = divmod(self.n_embd, self.n_head)
        if rest:
            raise ValueError(f'--n_embd={self.n_embd} is not a multiple of --n_head={self.n_head}')
        for r in self.rules():
            if r not in RULES:
                raise ValueError(f'--layers={self.layers}: {r!r} is no rule; choose from {", ".join(RULES)}')
        kept = self.keeps() - {None, 'all'}
        if self.turns() and head_dim % 2:
            raise ValueError(f'rope turns pairs: n_embd / n_head = {head_dim} must be even; or --pos=none')
        if kept and self.cache < (0 if self.overflow else 1):
            raise ValueError(f'--cache={self.cache}: at least 1 row, or --overflow says where all rows go')
        if 'sink' in kept and self.sinks >= max(1, self.cache):
            raise ValueError(f'--sinks={self.sinks}: fewer than --cache={self.cache}, or no new row is kept')
        if self.overflow and not kept:
            raise ValueError(f'--overflow={self.overflow} takes what a bounded cache lets go: --rule=tova')
        over = self.overflow.partition(':')[0]
        if over and (over not in RULES or RULES[over].keeps):
            names = ', '.join(r for r in RULES if not RULES[r].keeps)
            raise ValueError(f'--overflow={self.overflow}: choose from {names}')
        if self.positions == 'compress' and (not kept or self.overflow or self.pos not in ('auto', 'rope')):
            raise ValueError('--positions=compress turns the keys of a bounded cache at every step anew: it '
                             'needs one, with rope, and without --overflow')
        if self.layers.count(',') >= self.n_layer:
            raise ValueError(f'--layers={self.layers}: more rules than --n_layer={self.n_layer} layers')

    def rules(self):
        """The rule of each layer."""
        pattern = [r.strip() for r in self.layers.split(',')] if self.layers else [self.rule]
        return [pattern[i % len(pattern)] for i in range(self.n_layer)]

    def keeps(self):
        """What the layers' rules keep: a set of 'all' rows, policies, and None for fast weights."""
        return {RULES[r].keeps for r in self.rules()}

    def turns(self):
        """Whether rope turns the keys of some layer."""
        return self.pos == 'rope' or self.pos == 'auto' and self.keeps() != {None}


# What may be changed of a trained model without training: softmax keeps its weights, whatever rows it keeps.
def subset(*names, **own):
    """Some of Config's flags, and others, for scripts that change a model."""
    fields = [(f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
              for f in dataclasses.fields(Config) if f.name in names]
    return dataclasses.make_dataclass('Subset', [(name, str, f) for name, f in own.items()] + fields)


ROWS = [r for r in RULES if RULES[r].keeps]
Swap = subset('cache', 'sinks', 'overflow', 'positions', rule=flag('', 'what softmax layers become', ROWS))


def swapped(model, path, rule=None, **changes):
    """The model with its weights and other flags; a rule goes where softmax or another rule with rows was."""
    old = model.config
    if rule:
        if rule not in ROWS:
            raise ValueError(f'--rule={rule}: softmax weights as they are can only become '
                             f'{", ".join(ROWS)}; python convert.py swaps for other rules')
        if not {*old.rules()} & {*ROWS}:
            raise ValueError(f'--rule={rule}: {path} has no softmax layers, only {",".join(old.rules())}')
        changes |= dict(rule=rule, layers=','.join(rule if r in ROWS else r for r in old.rules()))
        if RULES[rule].keeps == 'all':
            changes = dict(overflow='', positions='true') | changes
    config = dataclasses.replace(old, **changes)
    if config == old:
        return model
    new = GPT(config)                       # what only one of the two has is the fast weights of overflow
    new.load_state_dict(model.state_dict(), strict=False, assign=True)
    return new


# ---- layers ------------------------------------------------------------------------------------------------
class ShiftedSum(torch.autograd.Function):
    """y_t = sum_s w_s x_{t-s}, s = 0..n, zeros before x. x (B, T, D), w (n + 1, D), its last row for s = 0 ->
    y (B, T, D). The backward is by hand, because autograd's own takes three times as long."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x * w[-1]
        for s in range(1, min(len(w), x.shape[1])):
            y[:, s:].addcmul_(x[:, :-s], w[-1 - s])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dw = dy * w[-1], torch.zeros_like(w)
        dw[-1] = (dy * x).sum((0, 1))
        for s in range(1, min(len(w), x.shape[1])):
            dx[:, :-s].addcmul_(dy[:, s:], w[-1 - s])
            dw[-1 - s] = (dy[:, s:] * x[:, :-s]).sum((0, 1))
        return dx, dw


class ReluSquared(torch.autograd.Function):
    """max(x, 0)^2 (Primer, arXiv:2109.08668, sec. 3); keeps only max(x, 0): half autograd's traffic."""
    @staticmethod
    def forward(ctx, x):
        r = x.clamp(min=0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, dy):
        r, = ctx.saved_tensors
        return (dy * r).mul_(2)


class CausalConv(nn.Module):
    """y_t = sum_j w_j x_{t-n+j}, j = 0..n, in each channel; its state is the last n inputs, n = width - 1.
    Random at first: every channel is another view of the last tokens. Identities learn slower."""
    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        nn.init.uniform_(self.weight, -width ** -0.5, width ** -0.5)

    def forward(self, x, state=None):
        (_, T, _), n = x.shape, len(self.weight) - 1
        if state is None:
            return ShiftedSum.apply(x, self.weight), F.pad(x[:, max(0, T - n):], (0, 0, max(0, n - T), 0))
        x = torch.cat([state, x], 1)
        if T == 1:
            return (x * self.weight).sum(1, keepdim=True), x[:, 1:]
        return ShiftedSum.apply(x, self.weight)[:, n:], x[:, T:]


class Mixer(nn.Module):
    """What attention was: projections, positions, fast weights or softmax. State in and out."""
    def __init__(self, c, rule):
        super().__init__()
        self.n_head, self.head_dim, self.theta = c.n_head, c.n_embd // c.n_head, c.theta
        self.n_kv_head = c.n_kv_head or c.n_head
        softmax, bounded = RULES[rule].keeps, RULES[rule].keeps not in (None, 'all')
        self.rope = c.pos == 'rope' or (c.pos == 'auto' and bool(softmax))
        compress = c.theta if bounded and c.positions == 'compress' else 0
        self.rope &= not compress               # then `bounded` turns the keys
        overflow = c.overflow if bounded else ''
        self.qkv = nn.Linear(c.n_embd, (c.n_head + 2 * self.n_kv_head) * self.head_dim, bias=c.bias)
        mixed = len(set(c.rules())) > 1         # beside fast weights, softmax layers ignore --phi and --norm
        phi, norm = ('', '') if softmax and mixed else (c.phi, c.norm)
        beta_max = c.beta_max if RULES[rule].erase or not mixed else 1.0
        self.memory = FastWeights(rule, c.n_embd, c.n_head, self.head_dim, phi, norm, beta_max, c.cache,
                                  c.sinks, compress, overflow)
        averaged = softmax or self.memory.norm == 'attn'        # o is normalised already
        self.out_norm = None if averaged else nn.LayerNorm(self.head_dim, bias=False)
        self.proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def heads(self, x, t=0):
        """x (B, T, n_embd), t the position of the first step -> q, k, v (B, H, T, head_dim)"""
        (B, T, D), n = x.shape, self.n_kv_head
        q, k, v = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2).split([self.n_head, n, n], 1)
        if self.rope:
            steps = t + torch.arange(T, device=x.device, dtype=torch.float32)
            q, k = rope(q, steps, self.theta), rope(k, steps, self.theta)
        if n < self.n_head:
            k, v = (y.repeat_interleave(self.n_head // n, 1) for y in (k, v))
        return q, k, v

    def forward(self, x, state, form):
        t, new = state.get('t', torch.zeros((), dtype=torch.long)), {}
        q, k, v = self.heads(x, t)
        o, new['S'] = self.memory(x, q, k, v, state.get('S'), t, form)
        if self.out_norm is not None:
            o = self.out_norm(o)
        new['t'] = t + x.shape[1]
        return self.dropout(self.proj(o.transpose(1, 2).reshape(x.shape))), new


def norm(c):
    return nn.RMSNorm(c.n_embd, c.eps) if c.rms else nn.LayerNorm(c.n_embd, c.eps, bias=c.bias)


def swiglu(x):
    """silu(a) b, x = [a, b]. Shazeer 2020, arXiv:2002.05202"""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


ACTS = {'relu2': ReluSquared.apply, 'gelu': lambda x: F.gelu(x, approximate='tanh'), 'swiglu': swiglu}


class Block(nn.Module):
    def __init__(self, c, rule):
        super().__init__()
        self.norm1, self.norm2, inner = norm(c), norm(c), c.n_inner or 4 * c.n_embd
        self.convs = nn.ModuleList(CausalConv(c.n_embd, c.conv) for _ in range(2 if c.conv else 0))
        self.mixer = Mixer(c, rule)
        self.up = nn.Linear(c.n_embd, inner * (2 if c.act == 'swiglu' else 1), bias=c.bias)
        self.act, self.down = ACTS[c.act], nn.Linear(inner, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def view(self, i, x, state, new):
        """x and the tokens before it, where there is a convolution."""
        if self.convs:
            x, new[f'conv{i}'] = self.convs[i](x, state.get(f'conv{i}'))
        return x

    def forward(self, x, state, form):
        state, views = state or {}, {}
        y, new = self.mixer(self.view(0, self.norm1(x), state, views), state, form)
        x = x + y
        x = x + self.dropout(self.down(self.act(self.up(self.view(1, self.norm2(x), state, views)))))
        return x, {**new, **views}


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.positions = nn.Embedding(c.block_size, c.n_embd) if c.pos == 'learned' else None
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, rule) for rule in c.rules())
        self.norm, self.head = norm(c), None if c.tied else nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.form = kernels.chunked
        for name, p in self.named_parameters():
            if name.endswith(('qkv.weight', 'up.weight', 'gates.proj.weight')):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
            elif name.endswith(('mixer.proj.weight', 'down.weight')):   # x keeps its size: GPT-2, sec. 2.3
                nn.init.normal_(p, std=p.shape[1] ** -0.5 / (2 * c.n_layer) ** 0.5)
            elif name in ('embed.weight', 'positions.weight'):
                nn.init.normal_(p, std=0.3)

    def first(self, tokens, state=None):
        """tokens (B, T) -> what the first layer gets (B, T, n_embd)"""
        x = self.embed(tokens)
        if self.positions is not None:                # beyond block_size the last position is repeated
            t = torch.arange(tokens.shape[1], device=x.device) + (state[0]['t'] if state else 0)
            x = x + self.positions(t.clamp(max=self.config.block_size - 1))
        return self.dropout(x)

    def hidden(self, tokens, state=None):
        """tokens (B, T) -> what the last layer says of each (B, T, n_embd), state"""
        x, new = self.first(tokens, state), []
        for block, s in zip(self.blocks, state or [None] * len(self.blocks)):
            x, s = block(x, s, self.form)
            new.append(s)
        return self.norm(x), new

    def forward(self, tokens, state=None, at=None):
        """tokens (B, T) -> logits (B, T, vocab), state. With a state it goes on from there. at (B, T): logits
        only where this is true (N, vocab)."""
        x, state = self.hidden(tokens, state)
        return F.linear(x if at is None else x[at], (self.head or self.embed).weight), state

    @property
    def max_len(self):
        """Positions this model knows; None without a limit. Learned positions and cosformer end somewhere."""
        ends = [b.mixer.memory.phi.max_len for b in self.blocks if b.mixer.memory.phi.max_len]
        return min(ends + ([self.config.block_size] if self.positions is not None else []), default=None)

    @torch.inference_mode()
    def read(self, tokens, state=None, segment=2048):
        """Only the state after tokens (B, T), any T, a `segment` at a time: memory does not grow with T."""
        for some in tokens.split(segment, 1) if tokens.shape[1] else ():
            state = self.hidden(some, state)[1]
        return state

    @torch.inference_mode()
    def generate(self, tokens, state=None, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Yield (token (B, 1), state) without end: tokens (B, T), T >= 1, are read in chunks, then one
        step a token. The state includes all but the token it comes with. temperature 0: the likeliest."""
        state, token, step = self.read(tokens[:, :-1], state), tokens[:, -1:], self
        for i in itertools.count():
            if i == 32 and token.device.type in ('cpu', 'cuda'):   # worth its tenth of a second
                step = (captured if token.device.type == 'cpu' else graphed)(self, token, state)
            logits, state = step(token, state)
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)
            yield token, state


class OneStep(nn.Module):
    """The model with its state as a flat list of tensors, as a tracer wants it."""
    def __init__(self, model, state):
        super().__init__()
        self.model, self.names = model, list(pack(state))

    def forward(self, token, *tensors):
        logits, state = self.model(token, unpack(dict(zip(self.names, tensors))))
        return logits, *pack(state).values()


def grows(model):
    """Whether the work of a step changes with the position: a cache that grows, features of a position."""
    return any(b.mixer.memory.rule.keeps == 'all' or b.mixer.memory.phi.max_len for b in model.blocks)


def captured(model, token, state):
    """model(token, state) for single tokens as a recorded list of operations: Python is most of a step
    at this size. Only for a state of fixed size and positions without end; else the model itself."""
    if grows(model):
        return model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')                 # torch.jit is frozen in time, and says so
            step = torch.jit.trace(OneStep(model, state), (token, *pack(state).values()), check_trace=False)
    except (RuntimeError, AttributeError) as e:
        print(f'steps are not recorded ({str(e).splitlines()[0]})', file=sys.stderr)
        return model
    names = list(pack(state))

    def run(token, state):
        logits, *tensors = step(token, *pack(state).values())
        return logits, unpack(dict(zip(names, tensors)))
    return run


def graphed(model, token, state):
    """The same on an Nvidia GPU, as one CUDA graph: one launch a step, in place of some hundred. The state it
    returns is always the same memory, good until the next step. Positions would stand still."""
    knows = model.positions is not None or any(m.rope or m.memory.rule.keeps
                                               for m in (b.mixer for b in model.blocks))
    if grows(model) or knows:
        return model
    tensors = {k: x.clone() for k, x in pack(state).items()}
    moving = [k for k in tensors if not k.endswith('.t')]           # t counts on the CPU
    here, step, graph = token.clone(), OneStep(model, state), torch.cuda.CUDAGraph()
    try:
        expected = model(token, state)[0]
        with torch.cuda.graph(graph):
            logits, *new = step(here, *tensors.values())
            for k, x in zip(tensors, new):
                if k in moving:
                    tensors[k].copy_(x)
    except RuntimeError as e:
        print(f'steps are not captured ({str(e).splitlines()[0]})', file=sys.stderr)
        return model

    def run(token, state):
        here.copy_(token)
        for k, x in pack(state).items():
            if x is not tensors[k]:
                tensors[k].copy_(x)
        graph.replay()
        for k in tensors.keys() - set(moving):
            tensors[k] += 1
        return logits, unpack(tensors)
    if not torch.allclose(run(token, state)[0], expected, 1e-2, 1e-2):      # the caller's state is untouched
        print('steps are not captured (the graph computes something else)', file=sys.stderr)
        return model
    return run


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw a token a row from logits (B, vocab) -> (B, 1). top_k keeps the k likeliest, top_p mass p."""
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature      # <= 0: a tiny one cannot overflow
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    p = logits.softmax(-1)
    if top_p < 1:
        p_sorted, order = p.sort(descending=True)
        p_sorted[p_sorted.cumsum(-1) - p_sorted >= top_p] = 0            # the token that crosses top_p stays
        p = torch.zeros_like(p).scatter(-1, order, p_sorted)
    return torch.multinomial(p, 1, generator=generator)


# ---- which form of the recurrence runs ---------------------------------------------------------------------
def pick_form(impl):
    """'loop', 'chunk', 'fused' or 'auto' -> (function, one line: which and why). The only choice point."""
    forms = {'loop': (fastweight.recurrent, 'loop (the definition, slow)'),
             'chunk': (fastweight.chunked, 'chunk (plain torch and autograd)'),
             'fused': (kernels.chunked, 'fused (kernels.py: Triton on a GPU, else batched products)')}
    return forms['fused' if impl == 'auto' else impl]


# ---- checkpoints: one safetensors file, replaced in one step, with a digest over its contents --------------
def digest(meta, tensors):
    """sha256 over the metadata and every tensor's name, type, shape and bytes."""
    h = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        h.update(f'{name} {x.dtype} {tuple(x.shape)}'.encode())
        h.update(x.flatten().view(torch.uint8).numpy() if x.numel() else b'')
    return h.hexdigest()


def write(path, tensors, meta):
    """tensors and a JSON-able dict into a file, with a digest of both."""
    tensors, text = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, json.dumps(meta)
    replace(path, tensors, {'meta': text, 'digest': digest(text, tensors)})


def replace(path, tensors, notes):
    """A safetensors file, written beside, flushed, renamed. Readers see the old one or the new one."""
    temp, folder = f'{path}.{os.getpid()}.part', os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    try:
        save_file(tensors, temp, notes)
        with open(temp, 'rb+') as f:
            os.fsync(f.fileno())
        os.replace(temp, path)
        if os.name == 'posix':              # the new name itself must reach the disk, too
            fd = os.open(folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    except SafetensorError as e:
        raise OSError(f'{path}: cannot be written ({e})') from None
    finally:
        if os.path.exists(temp):
            os.remove(temp)


def read(path):
    """-> tensors, meta. Raises ValueError for a file that is missing, foreign, cut off or changed."""
    if not os.path.isfile(path):
        raise ValueError(f'{path}: no such file; python train.py writes out/ckpt.safetensors')
    try:
        with safe_open(path, 'pt') as f:
            header, tensors = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
    except (SafetensorError, RuntimeError) as e:
        raise ValueError(f'{path}: not a whole safetensors file ({e})') from None
    if 'meta' not in header or 'digest' not in header:
        raise ValueError(f'{path}: a safetensors file, but not written by this project')
    if digest(header['meta'], tensors) != header['digest']:
        raise ValueError(f'{path}: its contents do not match its digest: the file was damaged or changed')
    return tensors, {**json.loads(header['meta']), 'digest': header['digest']}


def save(path, model, meta, extra={}):
    """Model, metadata (tokenizer, step, ...) and further tensors -> one file that `load` reads back."""
    write(path, {**{f'model.{k}': v for k, v in model.state_dict().items()}, **extra},
          {**meta, 'config': dataclasses.asdict(model.config)})


def config_of(path, meta):
    """-> the Config of a checkpoint's meta"""
    if 'config' not in meta:
        raise ValueError(f'{path}: holds no model (a state saved by sample.py?)')
    try:
        return Config(**meta['config'])
    except TypeError as e:
        raise ValueError(f'{path}: made by another version of this project ({e})') from None


def load(path, device='cpu', **changes):
    """-> model, meta. meta['tensors'] holds what `save` was given as extra. changes: flags of `Swap`."""
    tensors, meta = read(path)
    model = GPT(config_of(path, meta))
    weights = {k.removeprefix('model.'): tensors.pop(k) for k in [*tensors] if k.startswith('model.')}
    try:
        missing, extra = model.load_state_dict(weights, strict=False)
    except RuntimeError as e:
        raise ValueError(f'{path}: {e}') from None
    if missing or extra:
        raise ValueError(f'{path}: holds the weights of another model ({", ".join([*missing, *extra][:3])})')
    return swapped(model, path, **changes).to(device), {**meta, 'tensors': tensors}


def pack_optimiser(model, opt):
    """What AdamW remembers of each parameter, as a flat dict of tensors, for `save`."""
    return {f'opt.{n}.{k}': x for n, p in model.named_parameters() for k, x in opt.state.get(p, {}).items()}


def unpack_optimiser(model, opt, tensors):
    """The inverse of `pack_optimiser`, into opt."""
    for name, p in model.named_parameters():
        kept = {k: tensors[f'opt.{name}.{k}'] for k in ('step', 'exp_avg', 'exp_avg_sq')
                if f'opt.{name}.{k}' in tensors}
        if kept:                                    # unless fused, the count of steps stays on the CPU
            opt.state[p] = {k: x.to('cpu' if k == 'step' and not opt.defaults['fused'] else p.device)
                            for k, x in kept.items()}


def pack(state, prefix='state'):
    """A state as a flat dict of tensors, for `write` and `save`."""
    flat = {}
    for i, s in enumerate(state):
        for key, x in s.items():            # S is a tensor, or a dict of some
            for n, y in x.items() if isinstance(x, dict) else [('', x)]:
                flat['.'.join(filter(None, (prefix, str(i), key, n)))] = y
    return flat


def state_bytes(state):
    return sum(x.numel() * x.element_size() for x in pack(state or []).values())


def unpack(tensors, prefix='state', device=None):
    """The inverse of `pack`; None if there is none."""
    state = {}
    for name, x in tensors.items():
        if name.startswith(prefix + '.'):
            i, *keys, last = name[len(prefix) + 1:].split('.')
            s = state.setdefault(int(i), {})
            for key in keys:
                s = s.setdefault(key, {})
            s[last] = x if device is None or last == 't' else x.to(device)
    return [state[i] for i in sorted(state)] or None
