"""Every claim of this project that can be checked without a GPU and without a network. The name of a test is the claim.

    pytest test_all.py                 under two minutes on two cores
    pytest test_all.py -m slow         the soaks: 100,000 tokens, kill -9, resume from every step
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
    expected = F.conv1d(F.pad(x.mT, (3, 0)), conv.weight.flip(0).T[:, None], groups=6).mT
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
