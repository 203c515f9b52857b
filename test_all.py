"""Every claim of this project that can be checked without a GPU and without a network. The name of a test is the claim.

    pytest test_all.py                 under two minutes on two cores
    SLOW=1 pytest test_all.py          with the soaks: 100,000 tokens, kill -9, resume from every step
"""
import ast
import inspect
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastweight
import model as model_py
import sample
import train
from data import prepare
from fastweight import FEATURE_MAPS, LOG_MIN, NORMALISERS, RULES, FastWeights, chunked, feature_map, recurrent
from model import GPT, Config, load, read, save

HERE = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)
f64 = torch.float64
STEPPERS = [r for r in RULES if not RULES[r].cache]
slow = pytest.mark.skipif('SLOW' not in os.environ, reason='a soak of minutes: run it with SLOW=1')


@pytest.fixture(autouse=True)
def seeded_and_offline(monkeypatch):
    """Random numbers that repeat, and no network but this machine."""
    torch.manual_seed(0)
    connect = socket.socket.connect

    def guarded(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ('127.0.0.1', 'localhost', '::1'), f'a test calls {address}'
        return connect(self, address)
    monkeypatch.setattr(socket.socket, 'connect', guarded)


def near(a, b, tol=1e-10):
    """Relative to the size of b; both may be nested."""
    if torch.is_tensor(b):
        assert a.shape == b.shape and torch.isfinite(a).all()
        assert (a - b).abs().max() <= tol * max(1.0, b.abs().max()), f'differ by {(a - b).abs().max():.1e}'
    else:
        assert len(a) == len(b)
        for x, y in zip(a.values() if isinstance(a, dict) else a, b.values() if isinstance(b, dict) else b):
            near(x, y, tol)


# ---- the recurrence ----------------------------------------------------------------------------------------------------

GATES = {  # name: (erase, size of log_f, size of log_z, normalise); sizes 0 none, 1 scalar, 'D' vector
    'none': (0, 0, 0, 0), 'attn': (0, 0, 0, 1), 'attn-scalar': (0, 1, 0, 1), 'attn-vector': (0, 'D', 0, 1), 'attn-z': (0, 0, 1, 1),
    'scalar': (0, 1, 0, 0), 'vector': (0, 'D', 0, 0), 'z': (0, 0, 'D', 0), 'both': (0, 'D', 'D', 0),
    'delta': (1, 0, 0, 0), 'delta-scalar': (1, 1, 0, 0), 'delta-vector': (1, 'D', 0, 0), 'delta-z': (1, 0, 'D', 0), 'delta-both': (1, 'D', 'D', 0),
    'delta-scalars': (1, 1, 1, 0),
}


def inputs(gates, B=2, H=2, T=13, K=6, V=5, strength=1.0, dtype=f64, grad=False):
    """Keyword arguments of `recurrent` at an odd size, K != V, with a state to start from."""
    erase, f, z, normalise = GATES[gates]
    r = lambda *s: torch.randn(*s, dtype=dtype)
    k = r(B, H, T, K)
    a = dict(q=r(B, H, T, K), k=k / k.norm(dim=-1, keepdim=True), v=r(B, H, T, V), write=torch.rand(B, H, T, dtype=dtype), S=r(B, H, V + normalise, K))
    if normalise:    # positive features, as `attn` needs
        a.update(q=a['q'].abs() + .1, k=a['k'].abs() + .1, S=a['S'].abs())
    if erase:
        a['erase'] = 2 * torch.rand(B, H, T, dtype=dtype)
    if f:
        a['log_f'] = -strength * torch.rand(B, H, T, 1 if f == 1 else K, dtype=dtype)
    if z:
        a['log_z'] = -strength * torch.rand(B, H, T, 1 if z == 1 else V, dtype=dtype)
    return {n: x.requires_grad_(grad) for n, x in a.items()}, bool(normalise)


def with_gradients(form, a, normalise, cotangents=None, **kw):
    """o, S and the gradients of all inputs for fixed random cotangents."""
    o, S = form(**a, normalise=normalise, **kw)
    torch.manual_seed(1)
    return o, S, torch.autograd.grad([o, S], list(a.values()), [torch.randn_like(o), torch.randn_like(S)])


@pytest.mark.parametrize('gates', GATES)
def test_chunked_equals_recurrent_in_values_and_gradients(gates):
    for T, chunk in (1, 64), (13, 1), (13, 5), (13, 64), (37, 20):
        a, normalise = inputs(gates, T=T, grad=True)
        near(with_gradients(chunked, a, normalise, chunk=chunk), with_gradients(recurrent, a, normalise))


@pytest.mark.parametrize('form', [recurrent, chunked])
@pytest.mark.parametrize('gates', GATES)
def test_cut_anywhere(gates, form):
    a, normalise = inputs(gates, grad=True)
    whole, T = with_gradients(form, a, normalise), a['q'].shape[2]

    def in_parts(normalise, S, cuts=(), **a):
        o = []
        for i, j in zip((0, *cuts), (*cuts, T)):
            part, S = form(**{n: x[:, :, i:j] for n, x in a.items()}, S=S, normalise=normalise)
            o.append(part)
        return torch.cat(o, 2), S
    for cuts in [(i,) for i in range(1, T)] + [(1, 2, 9), tuple(range(1, T))]:
        near(with_gradients(in_parts, a, normalise, cuts=cuts), whole)


@pytest.mark.parametrize('form', [recurrent, chunked])
@pytest.mark.parametrize('gates', ['attn-vector', 'delta-both', 'delta-scalars', 'both'])
def test_gradcheck(gates, form):
    a, normalise = inputs(gates, B=1, H=1, T=5, K=3, V=2, grad=True)
    names = list(a)
    assert torch.autograd.gradcheck(lambda *x: form(**dict(zip(names, x)), normalise=normalise), tuple(a.values()), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize('log_decay', [0.0, -1e-6, -5.0, -20.0])
@pytest.mark.parametrize('beta', [0.0, 1.0, 2.0])
def test_extremes_stay_finite(log_decay, beta):
    """In fp32, over several chunks, with a zero key and a key that repeats; and the forms still agree."""
    for gates in 'attn-vector', 'delta-scalar', 'delta-both':
        a, normalise = inputs(gates, T=150, dtype=torch.float32)
        a['k'][:, :, 40:] = a['k'][:, :, 40:41]
        a['k'][:, :, 7] = 0
        for n in 'log_f', 'log_z':
            if n in a:
                a[n].fill_(log_decay)
        if 'erase' in a:
            a['write'].fill_(beta), a['erase'].fill_(beta)
        a = {n: x.requires_grad_() for n, x in a.items()}
        fast, slow = with_gradients(chunked, a, normalise), with_gradients(recurrent, a, normalise)
        near(fast[:2], slow[:2], 1e-4)
        near(fast[2], slow[2], 2e-3)


def test_state_is_fp32_whatever_the_inputs():
    a, _ = inputs('delta', T=300)
    a = {n: x.bfloat16() for n, x in a.items()}
    for form in recurrent, chunked:
        o, S = form(**a)
        assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    ones = torch.ones(1, 1, 300, 1).bfloat16()    # a bf16 sum stops at 256
    assert chunked(ones, ones, ones)[1].item() == recurrent(ones, ones, ones)[1].item() == 300


def test_log_decays_are_clamped_as_the_docstring_says():
    one = torch.ones(1, 1, 1, 1)
    for form in recurrent, chunked:
        assert form(one, 0 * one, one, log_f=-99 * one, S=one)[1].item() == pytest.approx(math.exp(LOG_MIN))


# ---- rules: what the papers say of them -----------------------------------------------------------------------------------

def test_identities_between_rules():
    a, _ = inputs('delta-scalar')
    zero, channels = torch.zeros_like(a['log_f']), a['log_f'].expand(-1, -1, -1, 6)
    plain = {n: a[n] for n in ('q', 'k', 'v', 'S')}
    for form in recurrent, chunked:
        near(form(**plain, log_f=zero.expand(-1, -1, -1, 6), log_z=zero.expand(-1, -1, -1, 5)), form(**plain))    # decay, f = z = 1: sum
        near(form(**{**a, 'log_f': zero}), form(**{n: x for n, x in a.items() if n != 'log_f'}))                 # gated_delta, alpha = 1: delta
        near(form(**{**a, 'log_f': channels}), form(**a))                                                         # kda, equal channels: gated_delta
        near(form(**{**plain, 'write': 1 - a['log_f'].exp().squeeze(-1), 'log_f': a['log_f']})[1],                # gated is a moving average
             recurrent(**plain, log_f=a['log_f'], write=-torch.expm1(a['log_f']).squeeze(-1))[1])


def test_delta_keeps_what_gated_shrinks():
    """Schlag 2021 appendix B: k1 -> v1, k2 -> v2, then k2 -> v3 with strength 0.5; k1 and k2 orthogonal."""
    k1, k2 = torch.eye(2)
    v1, v2, v3 = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
    k, v, beta = (torch.stack(x)[None, None] for x in ((k1, k2, k2), (v1, v2, v3), (torch.tensor(1.), torch.tensor(1.), torch.tensor(.5))))
    for form in recurrent, chunked:
        delta = form(k, k, v, beta, beta)[1][0, 0]
        assert torch.equal(delta @ k1, v1)                                     # untouched
        assert torch.allclose(delta @ k2, .5 * v2 + .5 * v3)                   # half way to the new value
        gated = form(k[:, :, 2:], k[:, :, 2:], v[:, :, 2:], beta[:, :, 2:], log_f=torch.log(1 - beta[:, :, 2:, None]),
                     S=torch.stack([v1, v2], 1)[None, None])[1][0, 0]
        assert torch.allclose(gated @ k1, .5 * v1)                             # shrunk, though k1 was not written
        assert torch.allclose(gated @ k2, .5 * v2 + .5 * v3)
        total = form(k, k, v)[1][0, 0]
        assert torch.allclose(total @ k2, v2 + v3)                             # sum only ever adds


def test_sum_with_attn_is_katharopoulos():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=f64) for _ in range(3))
    phi = FEATURE_MAPS['elu'](2, 4)
    A = (phi(q) @ phi(k).mT).tril()
    for form in recurrent, chunked:
        near(form(phi(q), phi(k), v, normalise=True)[0], (A / A.sum(-1, keepdim=True)) @ v)


def test_delta_attn_is_schlags_ablation():
    """v_bar_t = W_{t-1} k_t / (n_{t-1} . k_t), 0 at first; y_t = W_t q_t / (n_t . q_t). Schlag 2021, eqs. 27-29."""
    m = FastWeights('delta', 8, 2, 4, 'elu', 'attn').double().eval()
    x, (q, k, v) = torch.randn(1, 7, 8, dtype=f64), torch.randn(3, 1, 2, 7, 4, dtype=f64)
    beta = m.gates(x)['write']
    fq, fk = (fastweight.sum_to_one(m.phi(y)) for y in (q, k))
    W, n, o = torch.zeros(1, 2, 4, 4, dtype=f64), torch.zeros(1, 2, 4, dtype=f64), []
    for t in range(7):
        old = (W @ fk[:, :, t, :, None]).squeeze(-1) / (n * fk[:, :, t]).sum(-1, keepdim=True).clamp(min=1e-6)
        W = W + (beta[:, :, t, None] * (v[:, :, t] - old))[..., None] * fk[:, :, t, None]
        n = n + fk[:, :, t]
        o.append((W @ fq[:, :, t, :, None]).squeeze(-1) / (n * fq[:, :, t]).sum(-1, keepdim=True))
    for form in recurrent, chunked:
        near(m(x, q, k, v, form=form)[0], torch.stack(o, 2))


def test_softmax_is_attention():
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=f64)
    A = (q @ k.mT / 2).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf).softmax(-1)
    near(fastweight.softmax(q, k, v)[0], A @ v)


def test_gates_start_where_the_docstring_says():
    for rule in 'gated', 'gla', 'gated_delta', 'kda', 'decay':
        g = FastWeights(rule, 16, 4, 8).gates
        torch.nn.init.zeros_(g.proj.weight)
        log_f = g(torch.randn(1, 1, 16))['log_f']
        tau = 1 / -torch.expm1(log_f)
        assert tau.min().item() == pytest.approx(4, rel=1e-3) and tau.max().item() == pytest.approx(512, rel=1e-3)
    log_f = FastWeights('retention', 16, 4, 8).gates(torch.randn(1, 1, 16))['log_f']
    assert torch.allclose(1 - log_f.exp().flatten(), torch.tensor([2 ** -5., 2 ** -6, 2 ** -7, 2 ** -8]), rtol=1e-4)


# ---- feature maps ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', FEATURE_MAPS)
def test_feature_map_has_its_shape_traits_and_heads(name):
    phi = FEATURE_MAPS[name](2, 4).double().eval()
    x = torch.randn(3, 2, 5, 4, dtype=f64)
    y = phi(x)
    assert y.shape == (3, 2, 5, phi.feature_dim) and torch.isfinite(y).all()
    assert not phi.positive or (y >= 0).all()
    near(phi(x.flip(0)), y.flip(0))                            # rows of a batch do not mix
    assert torch.equal(phi(x), y)                              # evaluation is fixed
    if phi.kernel and name != 'rfa':                           # a similarity that `attn` may divide by
        assert (y @ phi(torch.randn(3, 2, 5, 4, dtype=f64)).mT >= 0).all()


def test_elu_is_exact_in_the_tail():
    x = torch.tensor([-50., -20, -1, 0, 3])
    assert torch.allclose(fastweight.elu1(x), torch.tensor([math.exp(-50), math.exp(-20), math.exp(-1), 1, 4]), rtol=1e-6, atol=0)
    assert (fastweight.elu1(x.bfloat16()) > 0).all()


def test_dpfp_by_hand():
    """x = (1, -2): r = relu(1, -2, -1, 2) = (1, 0, 0, 2); with the next, cyclic: (0, 0, 0, 2); with the next but one: 0."""
    x = torch.tensor([1., -2.]).view(1, 1, 1, 2)
    assert feature_map('dpfp', 1, 2)(x).flatten().tolist() == [0, 0, 0, 2]
    assert feature_map('dpfp:3', 1, 2)(x).flatten().tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0]
    y = feature_map('dpfp:2', 1, 3)(torch.tensor([[1., 2., 3.], [-1., 2., 3.]]).view(1, 1, 2, 3))[0, 0]
    assert y[0].tolist() == [2, 6, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0] and y[1].tolist() == [0, 6, 3, 0, 0, 0, 0, 2, 0, 0, 0, 0]


def test_taylor_is_the_second_order_series():
    q, k = torch.randn(2, 1, 1, 50, 8, dtype=f64)
    s = (q @ k.mT) / 8 ** .5
    phi = FEATURE_MAPS['taylor'](1, 8).double()
    near(phi(q) @ phi(k).mT, 1 + s + s ** 2 / 2)
    assert phi.feature_dim == 1 + 8 + 36


@pytest.mark.parametrize('name, kernel', [('favor', lambda q, k: (q @ k.mT).exp()),
                                          ('rfa', lambda q, k: (fastweight.l2(q) @ fastweight.l2(k).mT - 1).exp())])
def test_random_features_are_unbiased(name, kernel):
    """The mean over redraws approaches the kernel, as 1 / sqrt(draws) must; and redrawing does draw."""
    q, k = .5 * torch.randn(2, 1, 1, 6, 8, dtype=f64)
    phi = FEATURE_MAPS[name](1, 8, 16).double()
    draws = []
    for _ in range(4000):
        phi.redraw()
        draws.append(phi(q) @ phi(k).mT)
    draws = torch.stack(draws)
    z = (draws.mean(0) - kernel(q, k)) / (draws.std(0) / len(draws) ** .5)
    assert z.abs().max() < 4.5 and draws.std(0).min() > 0
    R = phi.R[:8]
    near(R @ R.mT - torch.diag((R ** 2).sum(-1)), torch.zeros(8, 8, dtype=f64), 1e-5)       # orthogonal


def test_random_features_are_redrawn_in_training_only():
    m = FastWeights('sum', 8, 2, 4, 'favor')
    x, (q, k, v) = torch.randn(1, 5, 8), torch.randn(3, 1, 2, 5, 4)
    assert not torch.equal(m(x, q, k, v)[0], m(x, q, k, v)[0])
    m.eval()
    assert torch.equal(m(x, q, k, v)[0], m(x, q, k, v)[0])


def test_learned_maps_are_per_head_and_start_as_told():
    phi = FEATURE_MAPS['hedgehog'](2, 4)
    x = torch.randn(1, 2, 3, 4)
    assert torch.allclose(phi(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    e = feature_map('hedgehog:exp', 2, 4)(x)
    assert torch.allclose(e[..., :4], (x - x.amax(-1, True)).exp()) and e.max() == 1
    phi.weight.data[1] *= 2
    assert torch.allclose(phi(x)[:, 0], FEATURE_MAPS['hedgehog'](2, 4)(x)[:, 0]) and not torch.allclose(phi(x)[:, 1], FEATURE_MAPS['hedgehog'](2, 4)(x)[:, 1])
    t2r = feature_map('t2r:7', 2, 4)
    assert t2r(x).shape[-1] == 7 and torch.allclose(t2r(x)[0, 1], (x[0, 1] @ t2r.weight[1].T).relu())
    assert torch.allclose(feature_map('exp:2', 1, 4)(x), (2 * x).exp())


def test_cosformer_knows_its_positions():
    phi = feature_map('cosformer:8', 1, 4)
    q, k = torch.randn(2, 1, 1, 8, 4, dtype=f64)
    t = torch.arange(8., dtype=f64)
    near(phi(q) @ phi(k).mT, (q.relu() @ k.relu().mT) * torch.cos(math.pi / 16 * (t[:, None] - t)))
    near(phi(q[:, :, 3:], 3), phi(q)[:, :, 3:])
    with pytest.raises(ValueError, match='up to 8'):
        phi(q, 1)


# ---- any rule, map and normaliser, as a layer and as a model ------------------------------------------------------------------

def combinations():
    """One case for every rule, map and normaliser that goes together, thinned to each pair once."""
    seen = set()
    for rule in STEPPERS:
        for phi in FEATURE_MAPS:
            for norm in NORMALISERS:
                try:
                    FastWeights(rule, 8, 2, 4, phi, norm)
                except ValueError:
                    continue
                pairs = {(rule, phi), (rule, norm), (phi, norm)}
                if pairs - seen:
                    seen |= pairs
                    yield rule, phi, norm


@pytest.mark.parametrize("rule, phi, norm", list(combinations()))
def test_layer_can_be_cut_and_leaks_nothing(rule, phi, norm):
    """Equal outputs, states and gradients at any cut and in either form; the past never sees the future."""
    m = FastWeights(rule, 8, 2, 4, phi, norm).double().eval()
    x, (q, k, v) = torch.randn(2, 9, 8, dtype=f64), torch.randn(3, 2, 2, 9, 4, dtype=f64)
    given = [y.requires_grad_() for y in (x, q, k, v)]

    def run(cuts, form):
        S, o = None, []
        for i, j in zip((0, *cuts), (*cuts, 9)):
            part, S = m(x[:, i:j], q[:, :, i:j], k[:, :, i:j], v[:, :, i:j], S, t=i, form=form)
            o.append(part)
        o, wanted = torch.cat(o, 2), [y for y in (*given, *m.parameters()) if y.requires_grad]
        grads = torch.autograd.grad((o * torch.linspace(-1, 1, o.numel(), dtype=f64).view_as(o)).sum() + S.square().sum(), wanted, allow_unused=True)
        return o, S, [g for g in grads if g is not None]
    whole = run((), recurrent)
    for cuts in (), (4,), (1, 2, 7), tuple(range(1, 9)):
        near(run(cuts, lambda *a, **kw: chunked(*a, **kw, chunk=3)), whole, 1e-9)
    o, _ = m(x, q, k, v)
    for g in torch.autograd.grad(o[:, :, :5].sum(), given, allow_unused=True):
        assert g is None or (g[:, 5:] if g.dim() == 3 else g[:, :, 5:]).abs().max() < 1e-12


@pytest.mark.parametrize('flags', [
    dict(rule=r) for r in RULES] + [dict(layers='delta,softmax', pos='learned'), dict(rule='kda', pos='rope', conv=0), dict(rule='delta', norm='attn', phi='elu'),
                                    dict(rule='sum', phi='cosformer'), dict(rule='delta', beta_max=2.0, conv=1)], ids=lambda f: '-'.join(map(str, f.values())))
def test_model_can_be_cut_and_leaks_nothing(flags):
    m = GPT(Config(**flags, n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=11)).double().eval()
    tokens = torch.randint(11, (2, 15))
    with torch.no_grad():
        for p in m.parameters():
            p.add_(.1 * torch.randn_like(p))                   # nothing hides behind a zero at initialisation
        whole, state = m(tokens)
        for cuts in (1,), (7,), (2, 3, 14), tuple(range(1, 15)):
            s, parts = None, []
            for i, j in zip((0, *cuts), (*cuts, 15)):
                logits, s = m(tokens[:, i:j], s)
                parts.append(logits)
            near(torch.cat(parts, 1), whole, 1e-9)
            near([x['S'] for x in s], [x['S'] for x in state], 1e-9)
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 11
        near(m(changed)[0][:, :9], whole[:, :9], 1e-12)
        assert (m(changed)[0][:, 9:] - whole[:, 9:]).abs().max() > 1e-6
        near(m(tokens[:1])[0], whole[:1], 1e-12)               # a row alone is a row in a batch


def test_convolution_equals_torch_conv1d():
    conv = model_py.CausalConv(6, 4).double()
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 9, 6, dtype=f64, requires_grad=True)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), conv.weight.T[:, None], groups=6).mT
    near(conv(x)[0], expected)
    assert torch.autograd.gradcheck(lambda x, w: model_py.ShiftedSum.apply(x, w), (x, conv.weight))


# ---- refusals: one sentence that says why ----------------------------------------------------------------------------------

@pytest.mark.parametrize('rule, phi, norm, beta_max, why', [
    ('decay', 'elu', 'attn', 1, 'denominator of its own'), ('kda', 'elu', 'attn', 1, 'different sums'), ('sum', 'identity', 'attn', 1, 'zero or negative'),
    ('delta', 'silu', 'sum', 1, 'sum of the features'), ('delta', 'silu', 'attn', 1, 'zero or negative'), ('delta', 'elu', 'none', 1, 'diverges'),
    ('sum', 'elu', 'attn', 2, 'erase'), ('softmax', 'elu', 'none', 1, 'own kernel'), ('sum', 'nope', 'attn', 1, 'choose from'), ('nope', 'elu', 'attn', 1, 'choose from'),
    ('sum', 'elu', 'nope', 1, 'choose from'), ('sum', 'elu:3', 'attn', 1, 'takes nothing'), ('sum', 'dpfp:0', 'attn', 1, '1..7'), ('sum', 'hedgehog:x', 'attn', 1, 'forms'),
])
def test_meaningless_combinations_are_refused(rule, phi, norm, beta_max, why):
    with pytest.raises(ValueError, match=re.escape(why)) as e:
        FastWeights(rule, 8, 2, 4, phi, norm, beta_max)
    assert '\n' not in str(e.value)


def test_delta_without_normalised_keys_does_diverge():
    """The reason for the refusal, in numbers."""
    k, v = torch.randn(2, 1, 1, 200, 6)
    beta = torch.full((1, 1, 200), .9)
    assert not recurrent(k, k, v, beta, beta)[1].abs().max() < 1e9
    assert recurrent(k, fastweight.l2(k), v, beta, beta)[1].abs().max() < 100


# ---- flags and bad input: one line, exit code 2, nothing half-written ------------------------------------------------------------

TEXT = ''.join(f'line {i}: the quick brown fox jumps over {i * i} lazy dogs\n' for i in range(200))
TINY = ['--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--device=cpu']


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A small text, and the folder where its prepared form goes instead of data/."""
    monkeypatch.setattr(prepare.load, '__defaults__', (str(tmp_path / 'data'), None))
    path = tmp_path / 'text.txt'
    path.write_text(TEXT)
    return str(path)


def refused(capsys, main, *argv):
    """Run a script that must refuse; its one line of complaint."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith('error: ') and err.count('\n') == 1, err
    return err


@pytest.mark.parametrize('flags, named', [
    (['--ruel=delta'], '--rule'), (['--rule=dleta'], 'delta'), (['--steps=1.5'], 'whole number'), (['--steps=many'], 'whole number'), (['--steps=0'], 'at least 1'),
    (['--lr=nan'], 'a number'), (['--lr=-1'], 'at least 0'), (['--dropout=1'], 'at most 0.99'), (['--carry=maybe'], 'true or false'), (['--seed=1', '--seed=2'], 'twice'),
    (['--steps'], 'missing'), (['steps=3'], '--steps'), (['--n_embd=130'], 'n_head'), (['--layers=delta,nope'], 'nope'), (['--rule=decay', '--norm=attn'], 'denominator'),
    (['--beta_max=2', '--rule=sum'], 'erase'), (['--device=tpu9'], '--device'), (['--impl=fused'], '--impl'), (['--data=nowhere.txt'], 'nowhere.txt'), (['--carry', '--pos=learned'], '--carry'),
    (['--carry', '--phi=favor', '--rule=sum'], 'redrawn'), (['--carry', '--data=recall'], '--carry'), (['--resume'], 'no such file'), (['--n_embd=12', '--n_head=4', '--pos=rope'], 'even'),
    (['--block_size=100000'], 'longer text'), (['--phi=\u00e9'], 'phi'), (['--'], '--help'), ([''], '--help'),
], ids=lambda x: ' '.join(x) if isinstance(x, list) else '')
def test_train_refuses_in_one_line(flags, named, text, tmp_path, capsys, monkeypatch):
    if named == '--impl' and os.path.exists(os.path.join(HERE, 'kernels.py')):
        pytest.skip('kernels.py is here')
    defaults = [f'--data={text}', f'--out={tmp_path / "out"}', *TINY, '--steps=1']
    given = {f.split('=')[0] for f in flags}
    argv = [d for d in defaults if d.split('=')[0] not in given] + flags
    assert named in refused(capsys, train.main, *argv)
    assert not (tmp_path / 'out').exists()


def test_help_lists_every_flag_and_choice(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(['--help'])
    out = capsys.readouterr().out
    assert not e.value.code
    for name in (*RULES, *FEATURE_MAPS, *NORMALISERS, *prepare.DATASETS, '--lr', '--rule', '--carry'):
        assert name in out


def trained(text, out, *flags):
    assert train.main([f'--data={text}', f'--out={out}', *TINY, '--steps=4', '--eval_every=4', *flags]) == 0
    return os.path.join(out, 'ckpt.safetensors')


def test_broken_checkpoints_are_refused(text, tmp_path, capsys):
    """Missing, cut, foreign, changed by one bit anywhere: never a wrong model, never another exception."""
    good = trained(text, str(tmp_path / 'out'))
    assert load(good)[1]['step'] == 4
    whole, bad, rng = open(good, 'rb').read(), str(tmp_path / 'bad.safetensors'), np.random.default_rng(0)
    header = int.from_bytes(whole[:8], 'little') + 8
    broken = [b'', b'\x00' * 100, whole[:7], whole[:header - 1], whole[:-1], whole + b'x', b'<html>no</html>', b'PK\x03\x04' + whole[4:]]
    for _ in range(150):
        changed = bytearray(whole)
        changed[rng.integers(0, header if rng.random() < .5 else len(whole))] ^= 1 << rng.integers(8)
        broken.append(bytes(changed))
    for content in broken:
        open(bad, 'wb').write(content)
        with pytest.raises(ValueError, match='bad.safetensors'):
            load(bad)
    assert 'bad.safetensors' in refused(capsys, sample.main, f'--init={bad}')
    assert 'no such file' in refused(capsys, sample.main, f'--init={tmp_path / "none"}')
    from safetensors.torch import save_file
    save_file({'x': torch.zeros(3)}, bad)
    assert 'not written by this project' in refused(capsys, sample.main, f'--init={bad}')


def test_broken_data_is_refused(text, tmp_path, capsys):
    folder = tmp_path / 'set'
    prepare.load(text)
    shutil.copytree(next((tmp_path / 'data').iterdir()), folder)
    meta = json.loads((folder / 'meta.json').read_text())
    train_bin = (folder / 'train.bin').read_bytes()

    def attempt(named, **files):
        for name, content in {'train.bin': train_bin, 'meta.json': json.dumps(meta).encode(), **{k.replace('_', '.'): v for k, v in files.items()}}.items():
            (folder / name).write_bytes(content)
        assert named in refused(capsys, train.main, f'--data={folder}', f'--out={tmp_path / "out"}', *TINY, '--steps=1')
        assert not (tmp_path / 'out').exists()
    attempt('train.bin', train_bin=b'')
    attempt('train.bin', train_bin=train_bin[:-5])
    attempt('vocab', meta_json=json.dumps({**meta, 'vocab_size': 100}).encode())
    attempt('float99', meta_json=json.dumps({**meta, 'dtype': 'float99'}).encode())
    attempt('meta.json', meta_json=b'{"name": ')
    attempt('longer text', train_bin=train_bin[:9], meta_json=json.dumps({**meta, 'train': {**meta['train'], 'tokens': 9, 'bytes': 9}}).encode())
    (tmp_path / 'empty.txt').write_text('')
    assert 'empty.txt' in refused(capsys, train.main, f'--data={tmp_path / "empty.txt"}')


def test_downloads_end_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    """A server that cuts, lies, fails and sends web pages. Nothing wrong is ever left under the right name."""
    import http.server
    import threading
    body = TEXT.encode()
    state = {'mode': '', 'hits': 0}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            state['hits'] += 1
            mode, start = state['mode'], int((self.headers.get('Range') or 'bytes=0-')[6:-1])
            if mode == '404' or (mode == '503-then-fine' and state['hits'] == 1):
                return self.send_error(404 if mode == '404' else 503)
            content = {'wrong': b'x' * len(body), 'html': b'<html>sign in</html>'}.get(mode, body)
            if mode == 'no-range':
                start = 0
            self.send_response(206 if start else 200)
            self.send_header('Content-Type', 'text/html' if mode == 'html' else 'text/plain')
            if start:
                self.send_header('Content-Range', f'bytes {start}-{len(content) - 1}/{len(content)}')
            self.send_header('Content-Length', str(len(content) - start))
            self.end_headers()
            cut = mode in ('cut', 'no-range') and state['hits'] == 1 or mode == 'always-cut'
            self.wfile.write(content[start:start + 100 if mode == 'always-cut' else len(content) // 2 if cut else None])

        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(prepare.time, 'sleep', lambda s: None)
    import hashlib
    url = f'http://127.0.0.1:{server.server_port}/input.txt'
    row = dict(prepare.DATASETS['shakespeare'], size=len(body), sha256=hashlib.sha256(body).hexdigest(), urls=[url])
    monkeypatch.setitem(prepare.DATASETS, 'shakespeare', row)
    for mode, fine in ('', True), ('cut', True), ('no-range', True), ('503-then-fine', True), ('always-cut', False), ('wrong', False), ('html', False), ('404', False):
        state.update(mode=mode, hits=0)
        root = tmp_path / (mode or 'fine')
        path = root / 'shakespeare' / 'input.txt'
        if fine:
            train_set, val_set, meta = prepare.load('shakespeare', str(root))
            assert path.read_bytes() == body and meta['vocab_size'] == len(set(TEXT))
            assert prepare.decode(np.concatenate([train_set, val_set]), meta) == TEXT
        else:
            with pytest.raises(ValueError, match='by hand') as e:
                prepare.load('shakespeare', str(root))
            assert url in str(e.value) and str(path) in str(e.value) and '\n' not in str(e.value) and not path.exists()
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match='by hand'):                # nobody answers
        prepare.load('shakespeare', str(tmp_path / 'down'))


def test_generated_tasks_are_what_the_papers_say():
    for keep in False, True:
        x, y = prepare.recall(50, np.random.default_rng(0), 40, False, keep=keep)
        for row, target in zip(x, y):
            pairs = list(zip(row[1:-1:2], row[2::2]))
            assert dict(pairs)[row[-1]] == target[-1] and (target[:-1] == 40).all()            # a dict keeps the last value
            assert keep == (len(set(pairs)) == len(dict(pairs)))
        x, y = prepare.recall(50, np.random.default_rng(0), 40, True, keep=keep)
        for row, target in zip(x, y):
            for t in range(128):
                seen = dict(zip(row[1:t:2], row[2:t + 1:2]))
                assert target[t] == (seen.get(row[t], 40) if t % 2 else 40)
    x, y = prepare.mqar(50, np.random.default_rng(0), 8192, True)
    for row, target in zip(x, y):
        keys, values = row[0:16:2], row[1:16:2]
        at = np.flatnonzero(target < 8192)
        assert len(set(keys)) == 8 == len(at) and (at % 2 == 0).all() and keys.max() < 4096 <= values.min()
        assert all(target[i] == values[list(keys).index(row[i])] for i in at)


# ---- training ---------------------------------------------------------------------------------------------------------------------

def tensors_of(path):
    return {k: v for k, v in read(path)[0].items()}


def same(a, b):
    a, b = tensors_of(a), tensors_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def resume_from(text, tmp_path, monkeypatch, flags, steps):
    """Train 5 steps and keep every checkpoint; going on from any of `steps` must end in the same bits."""
    out, keep = str(tmp_path / 'out'), tmp_path / 'kept'
    keep.mkdir()
    plain = train.save

    def save_and_keep(path, model, meta, extra={}):
        plain(path, model, meta, extra)
        if extra:
            shutil.copy(path, keep / f'{meta["step"]}')
    monkeypatch.setattr(train, 'save', save_and_keep)
    run = [f'--data={text}', *TINY, '--steps=5', '--eval_every=1', '--accum=2', '--dropout=0.2', *flags]
    assert train.main(run + [f'--out={out}']) == 0
    monkeypatch.setattr(train, 'save', plain)
    for k in steps:
        again = tmp_path / f'again{k}'
        again.mkdir()
        shutil.copy(keep / str(k), again / 'ckpt.safetensors')
        assert train.main(['--resume', f'--out={again}']) == 0
        assert same(f'{out}/ckpt.safetensors', again / 'ckpt.safetensors'), f'{flags}: resumed at step {k}'
    assert not same(f'{out}/ckpt.safetensors', keep / '4')


@pytest.mark.parametrize('flags', [[f'--rule={r}'] for r in RULES] + [['--carry'], ['--rule=sum', '--phi=favor']], ids=lambda f: f[0] + f[-1])
def test_resume_is_bitwise_identical(flags, text, tmp_path, monkeypatch):
    resume_from(text, tmp_path, monkeypatch, flags, [3])


@slow
@pytest.mark.parametrize('rule', RULES)
def test_soak_resume_is_bitwise_identical_from_any_step(rule, text, tmp_path, monkeypatch):
    resume_from(text, tmp_path, monkeypatch, [f'--rule={rule}'], [1, 2, 3, 4])


def test_resume_refuses_another_model(text, tmp_path, capsys):
    trained(text, str(tmp_path / 'out'))
    assert '--n_layer=3' in refused(capsys, train.main, '--resume', f'--out={tmp_path / "out"}', '--n_layer=3')
    assert 'more steps' in refused(capsys, train.main, '--resume', f'--out={tmp_path / "out"}')
    assert train.main(['--resume', f'--out={tmp_path / "out"}', '--steps=6', '--lr=1e-3']) == 0


def test_training_learns_and_logs(text, tmp_path, capsys):
    out = tmp_path / 'out'
    assert train.main([f'--data={text}', f'--out={out}', *TINY, '--steps=60', '--eval_every=60', '--log_every=30', '--lr=1e-2']) == 0
    rows = [json.loads(line) for line in open(out / 'log.jsonl')]
    assert rows[0]['config']['rule'] == 'delta' and rows[0]['args']['steps'] == 60
    losses = [r['loss'] for r in rows if 'loss' in r]
    assert losses[0] > 5 and losses[-1] < 3, losses                        # ln 256 = 5.5 at the start, ln 36 = 3.6 for its characters
    printed = capsys.readouterr().out
    assert all(word in printed for word in ('tok/s', 'eta', 'MB', 'bits per byte', 'carried', 'next: python sample.py'))
    model, meta = load(out / 'best.safetensors')
    assert meta['data']['tokenizer'] == 'byte'


def test_bits_per_byte_counts_every_token_but_the_first_once(text):
    _, val, meta = prepare.load(text)
    model = GPT(Config(n_layer=1, n_head=1, n_embd=8, block_size=16)).eval()
    cast = torch.autocast('cpu', enabled=False)
    x = torch.from_numpy(val.astype(np.int64))
    by_hand = sum(F.cross_entropy(model(x[None, i:i + 16])[0][0][:len(x[i + 1:i + 17])], x[i + 1:i + 17], reduction='sum').item() for i in range(0, len(x) - 1, 16))
    assert train.evaluate(model, val, 16, meta, torch.device('cpu'), cast)[0] == pytest.approx(by_hand / (len(x) - 1), rel=1e-6)
    whole = F.cross_entropy(model(x[None, :-1])[0][0], x[1:]).item()
    assert train.evaluate_carried(model, val, meta, torch.device('cpu'), cast, segment=100) == pytest.approx(whole, rel=1e-5)


def test_carry_hands_the_state_on(text, tmp_path, monkeypatch):
    """Each row continues the last one, and the state it gets is the one the last one left."""
    seen, plain = [], GPT.forward

    def watch(self, tokens, state=None):
        logits, new = plain(self, tokens, state)
        if self.training:
            seen.append((tokens, state, new))
        return logits, new
    monkeypatch.setattr(GPT, 'forward', watch)
    trained(text, str(tmp_path / 'out'), '--carry')
    stream = torch.from_numpy(prepare.load(text)[0].astype(np.int64))
    assert seen[0][1] is None
    for step, (tokens, got, _) in enumerate(seen):
        for i, row in enumerate(tokens):
            start = i * (len(stream) // 4) + step * 16
            assert torch.equal(row, stream[start:start + 16])
        assert not step or (torch.equal(got[0]['S'], seen[step - 1][2][0]['S']) and not got[0]['S'].requires_grad)


def test_rows_are_a_function_of_seed_step_and_index():
    args, meta = train.Args(batch_size=8, seed=3), {}
    a = train.starts(args, 1000, 7, 16, meta)
    assert len(set(a)) > 4 and (a == train.starts(args, 1000, 7, 16, meta)).all() and (a != train.starts(args, 1000, 8, 16, meta)).any()
    assert a.max() < 1000 - 16
    assert (a != train.starts(train.Args(batch_size=8, seed=4), 1000, 7, 16, meta)).any()


def test_not_finite_steps_are_skipped_named_and_end_the_run(text, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / 'out')
    trained(text, out)
    before = open(f'{out}/ckpt.safetensors', 'rb').read()
    plain, calls = F.cross_entropy, []

    def poisoned(*a, **kw):
        calls.append(1)
        return plain(*a, **kw) * (float('nan') if len(calls) > 2 else 1)
    monkeypatch.setattr(train.F, 'cross_entropy', poisoned)
    err = refused(capsys, train.main, '--resume', f'--out={out}', '--steps=50', '--eval_every=50')
    assert '10 steps in a row' in err and '--lr' in err
    assert open(f'{out}/ckpt.safetensors', 'rb').read() == before
    model = GPT(Config(n_layer=3, n_embd=16, n_head=2))
    model.blocks[1].up.weight.data[0, 0] = math.inf
    assert 'blocks.1.up' in train.culprit(model, torch.zeros(1, 4, dtype=torch.long))


def test_a_failed_write_leaves_the_old_checkpoint(text, tmp_path, monkeypatch):
    path = trained(text, str(tmp_path / 'out'))
    before, model, names = open(path, 'rb').read(), load(path)[0], os.listdir(tmp_path / 'out')

    def full(*a):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(model_py.os, 'fsync', full)
    with pytest.raises(OSError, match='No space'):
        save(path, model, {})
    assert open(path, 'rb').read() == before and os.listdir(tmp_path / 'out') == names


@slow
def test_soak_kill_9_leaves_a_checkpoint_that_loads(tmp_path):
    """A process that does nothing but save is killed 200 times, most of them in the middle of it."""
    path, models = str(tmp_path / 'ckpt.safetensors'), [GPT(Config(n_layer=2, n_embd=64)) for _ in range(2)]
    save(path, models[0], {'step': 0})
    middle, rng = 0, np.random.default_rng(0)
    for _ in range(200):
        child = os.fork()
        if not child:
            for i in range(10 ** 6):
                save(path, models[i % 2], {'step': i})
        time.sleep(rng.uniform(.002, .05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = [f for f in os.listdir(tmp_path) if f.endswith('.part')]
        middle += bool(left)
        for f in left:
            os.remove(tmp_path / f)
        loaded, meta = load(path)
        assert torch.equal(loaded.embed.weight, models[meta['step'] % 2].embed.weight)
    assert middle > 20


def test_two_processes_train_like_one(text, tmp_path):
    for n in 1, 2:
        subprocess.run([sys.executable, '-m', 'torch.distributed.run', f'--nproc_per_node={n}', '--master_port=0', '--standalone', os.path.join(HERE, 'train.py'),
                        f'--data={tmp_path / "set"}' if n == 2 else f'--data={prepared(text, tmp_path / "set")}', f'--out={tmp_path / str(n)}', *TINY, '--steps=6', '--log_every=1', '--eval_every=3'],
                       check=True, capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    one, two = ([json.loads(line) for line in open(tmp_path / str(n) / 'log.jsonl')][1:] for n in (1, 2))
    assert len(one) == len(two) == 8
    for a, b in zip(one, two):
        for key in {'loss', 'val_loss'} & a.keys():
            assert a[key] == pytest.approx(b[key], abs=1e-6)


def prepared(text, folder):
    """The prepared form of a text, at a place that another process can be told."""
    prepare.load(text)
    shutil.copytree(next(p for p in (folder.parent / 'data').iterdir()), folder)
    return folder


# ---- sampling ----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def ckpt(text, tmp_path):
    return trained(text, str(tmp_path / 'out'), '--rule=gated_delta')


def written(capsys, *argv):
    capsys.readouterr()
    assert sample.main(list(argv)) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_sampling_repeats_streams_and_reports(ckpt, capsys):
    a, err = written(capsys, f'--init={ckpt}', '--tokens=80', '--prompt=the ')
    assert a == written(capsys, f'--init={ckpt}', '--tokens=80', '--prompt=the ')[0]
    assert a != written(capsys, f'--init={ckpt}', '--tokens=80', '--prompt=the ', '--seed=1')[0]
    assert 'tokens/s' in err and 'bytes' in err and '80 written' in err
    assert '--- 3 ---' in written(capsys, f'--init={ckpt}', '--tokens=5', '--samples=3')[0]


def test_prompts_come_from_text_file_and_stdin(ckpt, tmp_path, capsys, monkeypatch):
    import io
    (tmp_path / 'p.txt').write_text('the quick')
    monkeypatch.setattr(sys, 'stdin', io.StringIO('the quick'))
    texts = {written(capsys, f'--init={ckpt}', '--tokens=40', f'--prompt={p}')[0] for p in ('the quick', f'@{tmp_path / "p.txt"}', '-')}
    assert len(texts) == 1
    assert 'nofile' in refused(capsys, sample.main, f'--init={ckpt}', '--prompt=@nofile')


@pytest.mark.parametrize('rule', RULES)
def test_a_saved_state_goes_on_as_if_never_stopped(rule, text, tmp_path, capsys):
    prepare.load.__defaults__ = (prepare.load.__defaults__[0], 'char')       # bytes of an untrained model are no characters
    ckpt, state = trained(text, str(tmp_path / 'out'), f'--rule={rule}'), tmp_path / 's.safetensors'
    greedy = [f'--init={ckpt}', '--temperature=0']
    whole = written(capsys, *greedy, '--tokens=90', '--prompt=line 1')[0].rstrip('\n')
    first = written(capsys, *greedy, '--tokens=50', '--prompt=line 1', f'--save_state={state}')[0].removesuffix('\n')
    second = written(capsys, *greedy, '--tokens=40', f'--load_state={state}')[0].rstrip('\n')
    assert first + second == whole
    written(capsys, *greedy, '--tokens=0', '--prompt=line 1', f'--save_state={state}')       # read once, go on often
    assert written(capsys, *greedy, '--tokens=90', f'--load_state={state}')[0].rstrip('\n') == whole
    other = trained(text, str(tmp_path / 'other'), f'--rule={rule}', '--seed=1')
    assert 'not a state' in refused(capsys, sample.main, f'--init={other}', f'--load_state={state}')
    assert 'holds no model' in refused(capsys, sample.main, f'--init={state}')


def test_a_character_the_model_lacks_is_named(text, tmp_path, capsys, monkeypatch):
    prepare.load.__defaults__ = (prepare.load.__defaults__[0], 'char')
    ckpt = trained(text, str(tmp_path / 'out'))
    assert '\u20ac' in refused(capsys, sample.main, f'--init={ckpt}', '--prompt=5 \u20ac')
    assert set(written(capsys, f'--init={ckpt}', '--tokens=50')[0]) <= set(TEXT)


@pytest.mark.parametrize('flags', [['--top_p=0'], ['--top_p=1.1'], ['--temperature=-1'], ['--tokens=-1'], ['--samples=0'], ['--top_k=x']])
def test_sample_refuses_in_one_line(flags, capsys):
    assert flags[0].split('=')[0] in refused(capsys, sample.main, *flags)


def test_draws_follow_the_distribution():
    """Chi-square of 200,000 draws against the exact probabilities, with top_k and top_p; and no value breaks it."""
    logits, g = torch.tensor([2., 1., 0., -1., -torch.inf]), torch.Generator().manual_seed(0)
    for kw, kept in ({}, 4), (dict(top_k=2), 2), (dict(top_p=.8), 2), (dict(temperature=.5), 4), (dict(top_k=3, top_p=.999, temperature=2.), 3):
        p = (logits / kw.get('temperature', 1)).softmax(0)
        p[kept:] = 0
        p /= p.sum()
        draws = model_py.sample(logits.expand(200_000, -1), generator=g, **kw).flatten().bincount(minlength=5)
        expected = 200_000 * p[:kept]
        assert draws[kept:].sum() == 0 and ((draws[:kept] - expected) ** 2 / expected).sum() < 20
    for kw in dict(temperature=0), dict(temperature=1e-9), dict(top_k=1), dict(top_p=1e-6):
        assert (model_py.sample(logits.expand(50, -1), **kw) == 0).all()
    assert model_py.sample(logits[None], temperature=1e9, top_k=99).item() < 4


def test_recorded_steps_equal_the_model():
    for flags in dict(rule='delta'), dict(rule='decay'), dict(rule='gated', pos='rope'), dict(rule='kda', pos='learned'), dict(rule='delta', norm='attn', phi='elu'):
        m = GPT(Config(**flags, n_layer=2, n_head=2, n_embd=16, block_size=8)).double().eval()
        with torch.inference_mode():
            tokens = torch.randint(256, (2, 30))
            _, state = m(tokens[:, :3])
            step, s = model_py.captured(m, tokens[:, 3:4], state), state
            assert step is not m
            for i in range(3, 30):
                logits, s = step(tokens[:, i:i + 1], s)
            near(logits, m(tokens)[0][:, -1:], 1e-9)


@slow
@pytest.mark.parametrize('rule', STEPPERS)
def test_soak_100000_tokens_in_constant_memory(rule):
    """State bytes and resident memory stay where they are. (sample.py prints the speed of the first and the last tenth.)"""
    rss = lambda: int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    m = GPT(Config(rule=rule, n_layer=1, n_head=2, n_embd=16)).eval()
    sizes, memory = set(), []
    for i, (token, state) in enumerate(m.generate(torch.zeros(1, 1, dtype=torch.long))):
        if i % 10_000 == 9_999:
            sizes.add(sum(x.numel() * x.element_size() for x in model_py.pack(state).values()))
            memory.append(rss())
            assert all(x.isfinite().all() for x in model_py.pack(state).values())
        if i == 99_999:
            break
    assert len(sizes) == 1 and int(state[0]['t']) == 100_000 and memory[-1] - memory[0] < 8 * 2 ** 20


# ---- the repository itself ------------------------------------------------------------------------------------------------------------

LAYER = {'test_all': 4, 'train': 3, 'convert': 3, 'sample': 3, 'bench': 3, 'model': 2, 'kernels': 1, 'fastweight': 0, 'prepare': 0, 'data': 0}


def sources():
    return [p for folder in ('', 'data') for p in sorted(os.listdir(os.path.join(HERE, folder))) if p.endswith('.py') for p in [os.path.join(HERE, folder, p)]]


def test_imports_only_point_down():
    for path in sources():
        name, tree = os.path.basename(path)[:-3], ast.parse(open(path).read())
        imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names] + [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        for other in (m.split('.')[0] for m in imported):
            assert other not in LAYER or LAYER[other] < LAYER[name], f'{name} imports {other}'


def test_nothing_is_unpickled_or_evaluated():
    for path in sources():
        for node in ast.walk(ast.parse(open(path).read())):
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ('eval', 'exec', 'torch.load', 'os.system', 'pickle.load', 'pickle.loads'), f'{path}: {call}'
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f'{path}: bare except'


def test_public_functions_say_shapes_and_sources():
    for f in recurrent, chunked:
        assert list(inspect.signature(f).parameters)[:9] == ['q', 'k', 'v', 'write', 'erase', 'log_f', 'log_z', 'S', 'normalise']
    for word in ('(B, H, T, K)', '(B, H, V, K)', 'LOG_MIN = -5', 'Schlag', 'ValueError'):
        assert word in recurrent.__doc__


def test_readme_is_true_of_the_code():
    """Its tables are those of the dicts, its commands parse, the files it names exist."""
    text = open(os.path.join(HERE, 'README.md')).read()
    for name, r in RULES.items():
        assert f'| `{name}` | {r.about} |' in text, name
    for name in (*FEATURE_MAPS, *NORMALISERS):
        assert f'`{name}`' in text, name
    for script, flags in re.findall(r'python (train|sample)\.py((?: --\S+(?:="[^"]*")?)*)', text):
        fields = (train.Args, Config) if script == 'train' else (sample.Args,)
        import shlex
        model_py.parse(shlex.split(flags), '', *fields)
    for path in re.findall(r'\]\(([\w./]+)\)', text):
        assert os.path.exists(os.path.join(HERE, path)), path
    wanted = re.search(r'pip install ([\w=. ]+) && python train.py', text)[1].split()
    pinned = open(os.path.join(HERE, 'requirements.txt')).read()
    assert all(re.search(rf'^{re.escape(w)}\b', pinned, re.M) for w in wanted)
