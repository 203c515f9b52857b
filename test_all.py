"""Every claim of this project that can be checked without a GPU or a network. A test's name is the claim.

    pytest test_all.py                 about three minutes on two cores
    SLOW=1 pytest test_all.py          with the soaks: 100,000 tokens, kill -9, resume from every step
"""
import ast, contextlib, csv, dataclasses, hashlib, http.server, inspect, io, itertools, json, math, os, re
import shlex, shutil, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():    # before kernels is imported: its GPU kernels then run in plain numpy
    os.environ['TRITON_INTERPRET'] = '1'
import bench
import convert
import fastweight
import kernels
import model as model_py
import sample
import train
from data import prepare
from fastweight import FEATURE_MAPS, LOG_MIN, NORMALISERS, RULES, FastWeights, chunked, feature_map, recurrent
from model import GPT, Config, load, pack, read, save

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)
f64 = torch.float64
FORMS = recurrent, chunked, kernels.on_cpu
FAST = FORMS[1:]
STEPPERS = [r for r in RULES if not RULES[r].keeps]
VARIED = [*STEPPERS, 'softmax', 'sink', 'h2o', 'tova']     # where rules of a kind are alike
slow = pytest.mark.skipif('SLOW' not in os.environ, reason='a soak of minutes: run it with SLOW=1')

@pytest.fixture(autouse=True)
def seeded_and_offline(monkeypatch):
    """Random numbers that repeat, and no network but this machine."""
    torch.manual_seed(0)
    connect = socket.socket.connect

    def guarded(self, address):
        local = self.family == socket.AF_UNIX or address[0] in ('127.0.0.1', 'localhost', '::1')
        assert local, f'a test calls {address}'
        return connect(self, address)
    monkeypatch.setattr(socket.socket, 'connect', guarded)

def near(a, b, tol=1e-10):
    """Relative to the size of b; both may be nested."""
    if torch.is_tensor(b):
        assert a.shape == b.shape and torch.isfinite(a).all() and torch.isfinite(b).all()
        assert not b.numel() or (a - b).abs().max() <= tol * max(1.0, b.abs().max()), \
            f'differ by {(a - b).abs().max():.1e}'
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        near(list(a.values()), [b[name] for name in a], tol)
    else:
        assert len(a) == len(b)
        for x, y in zip(a, b):
            near(x, y, tol)

def in_parts(step, cuts, T, S=None):
    """Outputs of step(i, j, S) -> (o, S) from cut to cut, put together along time, and the last state."""
    o = []
    for i, j in zip((0, *cuts), (*cuts, T)):
        part, S = step(i, j, S)
        o.append(part)
    return torch.cat(o, -2), S


# ---- the recurrence ----------------------------------------------------------------------------------------

GATES = {  # name: (erase, size of log_f, size of log_z, normalise); sizes 0 none, 1 scalar, 'D' vector
    'none': (0, 0, 0, 0), 'scalar': (0, 1, 0, 0), 'vector': (0, 'D', 0, 0), 'z': (0, 0, 'D', 0),
    'both': (0, 'D', 'D', 0), 'attn': (0, 0, 0, 1), 'attn-scalar': (0, 1, 0, 1), 'attn-z': (0, 0, 1, 1),
    'attn-vector': (0, 'D', 0, 1), 'delta': (1, 0, 0, 0), 'delta-scalar': (1, 1, 0, 0),
    'delta-z': (1, 0, 'D', 0), 'delta-vector': (1, 'D', 0, 0), 'delta-both': (1, 'D', 'D', 0),
    'delta-scalars': (1, 1, 1, 0)}
all_gates, both_forms = pytest.mark.parametrize('gates', GATES), pytest.mark.parametrize('form', FORMS)

def inputs(gates, B=2, H=2, T=13, K=6, V=5, dtype=f64, grad=False):
    """Keyword arguments of `recurrent` at an odd size, K != V, with a state to start from; and normalise."""
    erase, f, z, normalise = GATES[gates]
    randn, rand = (lambda *s, draw=draw: draw(B, H, *s, dtype=dtype) for draw in (torch.randn, torch.rand))
    k = randn(T, K)
    a = dict(q=randn(T, K), k=k / k.norm(dim=-1, keepdim=True), v=randn(T, V), write=rand(T),
             S=randn(V + normalise, K))
    if normalise:    # positive features, as `attn` needs
        a.update(q=a['q'].abs() + .1, k=a['k'].abs() + .1, S=a['S'].abs())
    if erase:
        a['erase'] = 2 * rand(T)
    if f:
        a['log_f'] = -rand(T, 1 if f == 1 else K)
    if z:
        a['log_z'] = -rand(T, 1 if z == 1 else V)
    return {n: x.requires_grad_(grad) for n, x in a.items()}, bool(normalise)

def with_gradients(form, a, normalise, **kw):
    """o, S and the gradients of all inputs for fixed random cotangents."""
    o, S = form(**a, normalise=normalise, **kw)
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=f64).to(x) for x in (o, S)]
    return o, S, torch.autograd.grad([o, S], list(a.values()), cotangents)

@all_gates
def test_chunked_equals_recurrent_in_values_and_gradients(gates):
    for T, chunk in (1, 64), (13, 1), (13, 5), (13, 64), (37, 20):
        a, normalise = inputs(gates, T=T, grad=True)
        exact = with_gradients(recurrent, a, normalise)
        for form in FAST:
            near(with_gradients(form, a, normalise, chunk=chunk), exact)

@both_forms
@all_gates
def test_cut_anywhere(gates, form):
    a, normalise = inputs(gates, grad=True)
    whole, T = with_gradients(form, a, normalise), a['q'].shape[2]

    def form_in_parts(normalise, S, cuts, **a):
        step = lambda i, j, S: form(**{n: x[:, :, i:j] for n, x in a.items()}, S=S, normalise=normalise)
        return in_parts(step, cuts, T, S)
    for cuts in [(i,) for i in range(1, T)] + [(1, 2, 9), tuple(range(1, T))]:
        near(with_gradients(form_in_parts, a, normalise, cuts=cuts), whole)

@both_forms
@pytest.mark.parametrize('gates', ['attn-vector', 'delta-both', 'delta-scalars', 'both'])
def test_gradcheck(gates, form):
    a, normalise = inputs(gates, B=1, H=1, T=5, K=3, V=2, grad=True)
    run = lambda *x: form(**dict(zip(a, x)), normalise=normalise)
    assert torch.autograd.gradcheck(run, tuple(a.values()), eps=1e-6, atol=1e-5)

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('log_decay', [0.0, -1e-6, -5.0, -20.0])
@pytest.mark.parametrize('beta', [0.0, 1.0, 2.0])
def test_extremes_are_finite_and_accurate(log_decay, beta, dtype):
    """Against fp64, over several chunks, with a zero key and a key that repeats 110 times. Where beta is 2,
    such a key turns the state around every step and nothing is forgotten: errors add up in any form."""
    tol = 5e-3 if dtype == torch.bfloat16 else 5e-4 if beta == 2 else 1e-5
    for gates, T in itertools.product(('attn-vector', 'delta-scalar', 'delta-both'), (1, 150)):
        a, normalise = inputs(gates, T=T, dtype=torch.float32)
        a['k'][:, :, 40:] = a['k'][:, :, 40:41]
        a['k'][:, :, 7:8] = 0
        for n in {'log_f', 'log_z'} & a.keys():
            a[n].fill_(log_decay)
        for n in ('write', 'erase') if 'erase' in a else ():
            a[n].fill_(beta)
        a = {n: x.to(x.dtype if n == 'S' else dtype).requires_grad_() for n, x in a.items()}
        *exact, exact_grads = with_gradients(recurrent, {n: x.detach().double().requires_grad_()
                                                         for n, x in a.items()}, normalise)
        for form in FAST:
            near(with_gradients(form, a, normalise), [*exact, exact_grads], tol)

@all_gates
def test_step_is_recurrent_for_one_step(gates):
    """Also where heads do not lie one after the other, as q, k, v come from a projection."""
    a, normalise = inputs(gates, T=1)
    a = {n: x if n == 'S' else x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in a.items()}
    near(kernels.step(**a, normalise=normalise), recurrent(**a, normalise=normalise), 1e-14)
    with pytest.raises(ValueError, match='one step'):
        kernels.step(*(torch.cat([a[n], a[n]], 2) for n in 'qkv'))

def test_state_is_fp32_whatever_the_inputs():
    a = {n: x.bfloat16() for n, x in inputs('delta', T=300)[0].items()}
    ones = torch.ones(1, 1, 300, 1).bfloat16()    # a bf16 sum stops at 256
    for form in FORMS:
        o, S = form(**a)
        assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
        assert form(ones, ones, ones)[1].item() == 300

def test_log_decays_are_clamped_as_the_docstring_says():
    one = torch.ones(1, 1, 1, 1)
    for form, decay in itertools.product(FORMS, ('log_f', 'log_z')):
        S = form(one, 0 * one, one, S=one, **{decay: -99 * one})[1]
        assert S.item() == pytest.approx(math.exp(LOG_MIN))

gpu = pytest.mark.skipif(not kernels.triton, reason='Triton is not installed here')

@gpu
@all_gates
def test_triton_kernels_equal_recurrent(gates):
    """Values and gradients over three chunks and two blocks of value channels, then a step of its own. Where
    there is no GPU, in Triton's interpreter."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    a, normalise = inputs(gates, B=1, T=37, K=5, V=19, grad=True)
    fp32 = {n: x.detach().float().to(device).requires_grad_() for n, x in a.items()}
    *found, found_grads = with_gradients(kernels.on_gpu, fp32, normalise)
    *exact, grads = with_gradients(recurrent, a, normalise)
    back = lambda xs: [x.detach().cpu().double() for x in xs]
    near(back(found), exact, 1e-5)
    near(back(found_grads), grads, 5e-5)
    one = {n: x if n == 'S' else x[:, :, :1] for n, x in fp32.items()}
    near(*([*back(f(**one, normalise=normalise))] for f in (kernels.step_on_gpu, recurrent)), 1e-6)

@gpu
def test_a_wrong_kernel_is_found_out():
    """On every machine and for every kind of arguments, before it is used."""
    for gates in 'attn-scalar', 'delta-both':
        a, normalise = inputs(gates, dtype=torch.float32)
        args = *(a.get(n) for n in 'q k v write erase log_f log_z S'.split()), normalise
        assert kernels.fault(kernels.on_gpu, args) is None

        def wrong(q, *rest):
            o, S = kernels.on_gpu(q, *rest)
            return o + 0.1 * q.mean(), S
        assert 'differ' in kernels.fault(wrong, args)
        assert 'ZeroDivisionError' in kernels.fault(lambda *a: 1 / 0, args)

KERNELS = 'inverse forward states tokens one_step'
AOT = '''
import json, os, re, subprocess, sys, tempfile
import torch, triton, kernels
from triton.backends.compiler import GPUTarget

def compiled(kernel, cc, dtype, gates, K, V):
    """The kernel for these sizes -> bytes of stack a thread, of shared memory, tensor-core instructions."""
    x, kept = ('*bf16', '*bf16') if dtype == torch.bfloat16 else ('*fp32', '*fp32')
    types = {**dict.fromkeys('q k v o do dq dk dv'.split(), x), 'T': 'i32', 'floor': 'fp32',
             **dict.fromkeys('M states after'.split(), kept),
             **dict.fromkeys('S S_0 S_T S_new dS_0 dS_T'.split(), '*fp32')}
    for name in ('e', 'f', 'z', 'w'):
        types[name] = types['d' + name] = '*fp32' if name in gates else None
    types['M'] = types['M'] if 'e' in gates else None
    size = kernels.blocks(K, V, not gates, dtype)
    warps = size.pop('num_warps')
    fixed = dict(K=K, V=V, FD=K if 'f' in gates else 0, ZD=V if 'z' in gates else 0, NORM=1, LOG_MIN=-5.0)
    fixed.update(size)
    names = kernel.arg_names
    fixed.update({n: None for n in names if n not in fixed and types[n] is None})
    signature = {n: 'constexpr' if n in fixed else types[n] for n in names}
    aligned = {(i,): [['tt.divisibility', 16]] for i, n in enumerate(names) if signature[n][0] == '*'}
    source = triton.compiler.ASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()
                                                           if n in names}, aligned)
    built = triton.compile(source, target=GPUTarget('cuda', cc, 32), options=dict(num_warps=warps))
    tool = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', 'cuobjdump')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(built.asm['cubin']), f.flush()
        usage, code = (subprocess.run([tool, how, f.name], capture_output=True, text=True).stdout
                       for how in ('--dump-resource-usage', '-sass'))
    stack = int(re.search(r'STACK:([0-9]+)', usage)[1])
    return stack, built.metadata.shared, len(re.findall('HMMA|HGMMA', code))

for cc, names, dtype, gates, K, V in json.loads(sys.argv[1]):
    for name in names.split():
        stack, shared, tensor = compiled(getattr(kernels, name), cc, getattr(torch, dtype), gates, K, V)
        print(cc, name, dtype, gates, K, V, ': stack', stack, 'shared', shared, 'tensor', tensor)
        assert shared <= (227 if cc == 90 else 99) * 1024, 'shared memory'
        assert tensor or name == 'one_step', 'no tensor cores'
        assert not stack or name not in ('inverse', 'forward', 'one_step'), 'registers on the stack'
'''

def ahead_of_time(*cases):
    """Compile without a GPU, in a process of its own: this one has the interpreter."""
    env = {**os.environ, 'TRITON_INTERPRET': '0'}
    command = [sys.executable, '-c', AOT, json.dumps(cases)]
    out = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True)
    assert not out.returncode, out.stdout + out.stderr

@gpu
def test_kernels_compile_for_gpus_that_are_not_here():
    ahead_of_time((90, KERNELS, 'bfloat16', 'wefz', 64, 64))

@slow
@gpu
def test_soak_kernels_compile_for_every_rule_and_size():
    ahead_of_time(*((cc, KERNELS if 'e' in gates else KERNELS[8:], 'bfloat16', gates, K, K)
                    for cc in (80, 90) for K in (48, 64, 128) for gates in ('', 'we', 'f', 'fz', 'wefz')))

@pytest.mark.parametrize('name, shape', [
    ('q', (2, 13, 6)), ('q', (2, 2, 0, 6)), ('k', (2, 2, 13, 5)), ('v', (2, 2, 12, 5)),
    ('write', (2, 2, 13, 1)), ('erase', (2, 13)), ('log_f', (2, 2, 13, 5)), ('log_z', (2, 2, 13)),
    ('S', (2, 2, 6, 5))])
def test_shapes_that_do_not_fit_are_named(name, shape):
    a, _ = inputs('delta-both')
    with pytest.raises(ValueError, match=f'^{name}: expected .* not '):
        kernels.chunked(**{**a, name: torch.ones(shape, dtype=f64)})
    with pytest.raises(ValueError, match=f'^{name}: expected floating point'):
        kernels.chunked(**{**a, name: a[name].long()})


# ---- rules: what the papers say of them --------------------------------------------------------------------

PAPER = dict(    # the gates of each rule; * by channel
    sum='', gated='write log_f', delta='write erase', decay='log_f* log_z*', retention='log_f', gla='log_f*',
    gated_delta='write erase log_f', kda='write erase log_f*') | dict.fromkeys(model_py.ROWS, '')

def test_identities_between_rules():
    a, _ = inputs('delta-scalar')
    f, plain = a['log_f'], {n: a[n] for n in ('q', 'k', 'v', 'S')}
    zeros = lambda n: torch.zeros_like(f).expand(-1, -1, -1, n)
    for form in FORMS:
        near(form(**plain, log_f=zeros(6), log_z=zeros(5)), form(**plain))        # decay, f = z = 1: sum
        near(form(**{**a, 'log_f': zeros(1)}), form(**{**a, 'log_f': None}))      # gated_delta, f = 1: delta
        near(form(**{**a, 'log_f': f.expand(-1, -1, -1, 6)}), form(**a))          # kda, equal f: gated_delta
        k, v = (a[n][:, :, :1].expand_as(a[n]) for n in 'kv')                     # gated: a moving average,
        same = v[:, :, 0, :, None] * k[:, :, :1]                                  # here of equal things
        near(form(a['q'], k, v, write=-torch.expm1(f).squeeze(-1), log_f=f, S=same)[1], same)
    assert PAPER.keys() == RULES.keys()
    for rule in STEPPERS:
        g = FastWeights(rule, 8, 2, 4, phi='elu', norm='l2').gates(torch.randn(1, 3, 8))
        found = {n + '*' * (n[:3] == 'log' and x.shape[-1] == 4) for n, x in g.items()}
        assert found == set(PAPER[rule].split()) and ('erase' not in g or torch.equal(g['erase'], g['write']))
    g = FastWeights('gated', 8, 2, 4).gates(torch.randn(1, 3, 8))
    near(g['write'], 1 - g['log_f'].exp().squeeze(-1), 1e-6)

def test_delta_keeps_what_gated_shrinks():
    """Schlag 2021 appendix B: k1 -> v1, k2 -> v2, then k2 -> v3 with strength 0.5; k1 and k2 orthogonal."""
    k1, k2 = torch.eye(2)
    v1, v2, v3 = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
    k, v = torch.stack([k1, k2, k2])[None, None], torch.stack([v1, v2, v3])[None, None]
    beta = torch.tensor([[[1., 1., .5]]])
    K, V, b = k[:, :, 2:], v[:, :, 2:], beta[:, :, 2:]                         # the last write
    for form in FORMS:
        delta = form(k, k, v, beta, beta)[1][0, 0]
        assert torch.equal(delta @ k1, v1)                                     # untouched
        assert torch.allclose(delta @ k2, .5 * v2 + .5 * v3)                   # half way to the new value
        S = torch.stack([v1, v2], 1)[None, None]
        gated = form(K, K, V, b, log_f=torch.log(1 - b[..., None]), S=S)[1][0, 0]
        assert torch.allclose(gated @ k1, .5 * v1)            # shrunk, though k1 was not written
        assert torch.allclose(gated @ k2, .5 * v2 + .5 * v3)
        total = form(k, k, v)[1][0, 0]
        assert torch.allclose(total @ k2, v2 + v3)                             # sum only ever adds

def test_sum_with_attn_is_katharopoulos():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=f64) for _ in range(3))
    phi = FEATURE_MAPS['elu'](2, 4)
    A = (phi(q) @ phi(k).mT).tril()
    for form in FORMS:
        near(form(phi(q), phi(k), v, normalise=True)[0], (A / A.sum(-1, keepdim=True)) @ v)

def test_delta_attn_is_schlags_ablation():
    """v_bar_t = W_{t-1} k_t / (n_{t-1} . k_t), 0 at first; y_t = W_t q_t / (n_t . q_t). Schlag eqs. 27-29."""
    m = FastWeights('delta', 8, 2, 4, 'elu', 'attn').double().eval()
    x, (q, k, v) = torch.randn(1, 7, 8, dtype=f64), torch.randn(3, 1, 2, 7, 4, dtype=f64)
    beta = m.gates(x)['write'][..., None]
    fq, fk = (fastweight.sum_to_one(m.phi(y)) for y in (q, k))
    W, n, o = torch.zeros(1, 2, 4, 4, dtype=f64), torch.zeros(1, 2, 4, dtype=f64), []
    over = lambda W, n, x: (W @ x[..., None]).squeeze(-1) / (n * x).sum(-1, keepdim=True).clamp(min=1e-6)
    for t in range(7):
        u = beta[:, :, t] * (v[:, :, t] - over(W, n, fk[:, :, t]))
        W, n = W + u[..., None] * fk[:, :, t, None], n + fk[:, :, t]
        o.append(over(W, n, fq[:, :, t]))
    for form in FORMS:
        near(m(x, q, k, v, form=form)[0], torch.stack(o, 2))

def test_softmax_is_attention():
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=f64)
    A = (q @ k.mT / 2).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf).softmax(-1)
    near(fastweight.softmax(q, k, v)[0], A @ v)

def test_gates_start_where_the_docstring_says():
    """Memory lengths from 4 to 512 steps, log-uniform over heads or channels; RetNet's are 2^5, 2^6, ..."""
    spread = torch.tensor([4 * 128 ** (i / 7) for i in range(8)])
    for rule in 'gated', 'gla', 'gated_delta', 'kda', 'decay':
        layer = FastWeights(rule, 16, 8, 8)
        torch.nn.init.zeros_(layer.gates.proj.weight)
        g = layer.gates(torch.randn(1, 1, 16))
        for tau in (1 / -torch.expm1(x[0, :, 0]) for n, x in g.items() if n[:3] == 'log'):
            rows = tau.mT if RULES[rule].f == 'head' else tau                  # (1 or heads, 8)
            assert torch.allclose(rows.sort(-1).values, spread.expand_as(rows), rtol=1e-3)
    log_f = FastWeights('retention', 16, 4, 8).gates(torch.randn(1, 1, 16))['log_f']
    assert torch.allclose(1 - log_f.exp().flatten(), .5 ** torch.tensor([5., 6, 7, 8]), rtol=1e-4)


# ---- feature maps ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', FEATURE_MAPS)
def test_feature_map_has_its_shape_traits_and_heads(name):
    phi = FEATURE_MAPS[name](2, 4).double().eval()
    x = torch.randn(3, 2, 5, 4, dtype=f64)
    y = phi(x)
    assert y.shape == (3, 2, 5, phi.feature_dim) and torch.isfinite(y).all()
    assert not phi.positive or (y >= 0).all()
    near(phi(x.flip(0)), y.flip(0))                            # rows of a batch are alike,
    x2 = x.clone()
    x2[1, 0, 2] = torch.randn(4).double()
    changed = (phi(x2) != y).any(-1).nonzero()
    assert changed.tolist() == [[1, 0, 2]]                     # and neither rows nor heads nor steps mix
    assert torch.equal(phi(x), y)                              # evaluation is fixed
    if phi.kernel and name != 'rfa':                           # a similarity that `attn` may divide by
        assert (y @ phi(torch.randn(3, 2, 5, 4, dtype=f64)).mT >= 0).all()

def test_elu_is_exact_in_the_tail():
    x = torch.tensor([-50., -20, -1, 0, 3])
    exact = torch.tensor([math.exp(-50), math.exp(-20), math.exp(-1), 1, 4])
    assert torch.allclose(fastweight.elu1(x), exact, rtol=1e-6, atol=0)
    assert (fastweight.elu1(x.bfloat16()) > 0).all()

def test_dpfp_by_hand():
    """x = (1, -2): r = relu(1, -2, -1, 2) = (1, 0, 0, 2); by the next, cyclic: (0, 0, 0, 2)."""
    for spec, x, y in (('dpfp', [1, -2], [0, 0, 0, 2]),
                       ('dpfp:3', [1, -2], [0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0]),
                       ('dpfp:2', [1, 2, 3], [2, 6, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0]),
                       ('dpfp:2', [-1, 2, 3], [0, 6, 3, 0, 0, 0, 0, 2, 0, 0, 0, 0])):
        assert feature_map(spec, 1, len(x))(torch.tensor(x).float().view(1, 1, 1, -1)).flatten().tolist() == y

def test_taylor_is_the_second_order_series():
    q, k = torch.randn(2, 1, 1, 50, 8, dtype=f64)
    s = (q @ k.mT) / 8 ** .5
    phi = FEATURE_MAPS['taylor'](1, 8).double()
    near(phi(q) @ phi(k).mT, 1 + s + s ** 2 / 2)
    assert phi.feature_dim == 1 + 8 + 36

@pytest.mark.parametrize('name, sigma', [('favor', 0), ('rfa', 1), ('rfa', 2)])
def test_random_features_are_unbiased(name, sigma):
    """The mean over redraws approaches the kernel, as 1 / sqrt(draws) must; and redrawing does draw."""
    q, k = .5 * torch.randn(2, 1, 1, 6, 8, dtype=f64)
    phi = FEATURE_MAPS[name](1, 8, 16).double().requires_grad_(False)
    if name == 'favor':
        kernel = (q @ k.mT).exp()
    else:                                                      # Gaussian, of width sigma by channel
        phi.sigma *= torch.linspace(1, sigma, 8, dtype=f64)
        kernel = (-torch.cdist(*(fastweight.l2(x) * phi.sigma for x in (q, k))) ** 2 / 2).exp()
    draws = []
    for _ in range(4000):
        phi.redraw()
        draws.append(phi(q) @ phi(k).mT)
    draws = torch.stack(draws)
    z = (draws.mean(0) - kernel) / (draws.std(0) / len(draws) ** .5)
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
    x = torch.randn(1, 2, 3, 4)
    phi, e, t2r = (feature_map(name, 2, 4) for name in ('hedgehog', 'hedgehog:exp', 't2r:7'))
    y = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    assert torch.allclose(phi(x), y)
    assert torch.allclose(e(x), torch.cat([x - x.amax(-1, True), x.amin(-1, True) - x], -1).exp())
    phi.weight.data[1] *= 2
    assert torch.allclose(phi(x)[:, 0], y[:, 0]) and not torch.allclose(phi(x)[:, 1], y[:, 1])
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


# ---- any rule, map and normaliser, as a layer and as a model -----------------------------------------------

def combinations():
    """One case for every rule, map and normaliser that goes together, thinned to each pair once."""
    seen = set()
    for rule, phi, norm in itertools.product(STEPPERS, FEATURE_MAPS, NORMALISERS):
        try:
            FastWeights(rule, 8, 2, 4, phi, norm)
        except ValueError:
            continue
        pairs = {(rule, phi), (rule, norm), (phi, norm)}
        if pairs - seen:
            seen |= pairs
            yield rule, phi, norm
    assert set(sum(seen, ())) == {*STEPPERS, *FEATURE_MAPS, *NORMALISERS}, 'something goes with nothing'

@pytest.mark.parametrize('rule, phi, norm', list(combinations()))
def test_layer_can_be_cut_and_leaks_nothing(rule, phi, norm):
    """Equal outputs, states and gradients at any cut and in either form; the past never sees the future."""
    m = FastWeights(rule, 8, 2, 4, phi, norm).double().eval()
    x, (q, k, v) = torch.randn(2, 9, 8, dtype=f64), torch.randn(3, 2, 2, 9, 4, dtype=f64)
    given = [y.requires_grad_() for y in (q, k, v, x)]
    wanted = [y for y in (*given, *m.parameters()) if y.requires_grad]

    def run(cuts, form):
        step = lambda i, j, S: m(x[:, i:j], q[:, :, i:j], k[:, :, i:j], v[:, :, i:j], S, t=i, form=form)
        o, S = in_parts(step, cuts, 9)
        loss = (o * torch.linspace(-1, 1, o.numel(), dtype=f64).view_as(o)).sum() + S.square().sum()
        return o, S, [g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None]
    whole = run((), recurrent)
    for cuts in (), (4,), (1, 2, 7), tuple(range(1, 9)):
        near(run(cuts, lambda *a, **kw: chunked(*a, **kw, chunk=3)), whole, 1e-9)
    *qkv, of_x = torch.autograd.grad(m(x, q, k, v)[0][:, :, :5].sum(), given, allow_unused=True)
    for g in qkv:
        assert g[:, :, 5:].abs().max() < 1e-12 and g[:, :, :5].abs().max() > 1e-3
    assert of_x is None or of_x[:, 5:].abs().max() < 1e-12

@pytest.mark.parametrize('flags', [
    *(dict(rule=r, cache=5, sinks=2) for r in RULES if r != 'full'),
    dict(layers='delta,softmax', pos='learned'),
    dict(rule='tova', cache=6, positions='compress'), dict(rule='window', cache=0, overflow='sum'),
    dict(rule='h2o', cache=4, overflow='decay:taylor'), dict(rule='tova', cache=4, overflow='kda'),
    dict(rule='sum', phi='cosformer'), dict(rule='kda', pos='rope', conv=0),
    dict(rule='delta', norm='attn', phi='elu'), dict(rule='delta', beta_max=2.0, conv=1)],
    ids=lambda f: '-'.join(map(str, f.values())))
def test_model_can_be_cut_and_leaks_nothing(flags):
    def in_order(state):                                       # rows lie where there was room
        state = [dict(s) for s in state]
        for s in (s for s in state if isinstance(s.get('S'), dict)):
            i = s['S']['pos'].argsort(-1)
            s['S'] = {n: x if n in ('S', 'n') else x.take_along_dim(i if x.dim() == 3 else i[..., None], 2)
                      for n, x in s['S'].items()}
        return state
    m = GPT(Config(**flags, n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=11)).double().eval()
    tokens = torch.randint(11, (2, 15))
    with torch.no_grad():
        for p in m.parameters():
            p.add_(.1 * torch.randn_like(p))                   # nothing hides behind a zero at initialisation
        whole, state = m(tokens)
        for cuts in (1,), (7,), (2, 3, 14), tuple(range(1, 15)):
            parts, s = in_parts(lambda i, j, s: m(tokens[:, i:j], s), cuts, 15)
            near(parts, whole, 1e-9)
            near(pack(in_order(s)), pack(in_order(state)), 1e-9)
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 11
        near(m(changed)[0][:, :9], whole[:, :9], 1e-12)
        assert (m(changed)[0][:, 9:] - whole[:, 9:]).abs().max() > 1e-6
        near(m(tokens[:1])[0], whole[:1], 1e-12)               # a row alone is a row in a batch

def test_convolution_equals_torch_conv1d():
    conv = model_py.CausalConv(6, 4).double()
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 9, 6, dtype=f64)
    near(conv(x)[0], F.conv1d(F.pad(x.mT, (3, 0)), conv.weight.T[:, None], groups=6).mT)

def test_gradients_written_by_hand_are_right():
    x, w = (torch.randn(*s, dtype=f64, requires_grad=True) for s in ((2, 9, 6), (4, 6)))
    assert torch.autograd.gradcheck(model_py.ShiftedSum.apply, (x, w))
    assert torch.autograd.gradcheck(model_py.ReluSquared.apply, x)

def test_rope_sees_distances_only():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=f64)
    at = lambda i, j: (fastweight.rope(q, torch.tensor([i])) * fastweight.rope(k, torch.tensor([j]))).sum()
    near(torch.stack([at(7, 2), at(105, 100)]), at(5, 0).expand(2), 1e-5)      # angles are fp32
    assert (at(5, 0) - at(4, 0)).abs() > 1e-3


# ---- rows: softmax over a bounded set ----------------------------------------------------------------------

def by_the_book(policy, q, k, v, cache, sinks):
    """Oren 2024, Algorithm 1 and its like, in lists. -> o, the positions kept, by row and head"""
    (B, H, T, d), o, kept = q.shape, torch.zeros_like(v), [[[] for _ in q[0]] for _ in q]
    random = fastweight.POLICIES['random']
    for b in range(B):
        total = [dict.fromkeys(range(T), 0.0) for _ in range(H)]
        for t in range(T):
            a = []
            for h, rows in enumerate(kept[b]):
                rows.append(t)
                p = torch.stack([q[b, h, t] @ k[b, h, i] / d ** .5 for i in rows]).softmax(0)
                o[b, h, t] = sum(x * v[b, h, i] for x, i in zip(p, rows))
                a.append(dict(zip(rows, p.tolist())))
                for i in rows:
                    total[h][i] += a[h][i]
            for h, rows in enumerate(kept[b]):
                score = {'window': lambda i: i, 'sink': lambda i: i if i >= sinks else math.inf,
                         'h2o': lambda i: total[h][i] if i <= t - cache // 2 else math.inf,
                         'tova': lambda i: sum(x[i] for x in a) / H, 'tova-head': lambda i: a[h][i],
                         'random': lambda i: random(0, 0, torch.tensor(i), t, 0, 0).item()}
                if len(rows) > cache:
                    rows.remove(min(rows, key=lambda i: (score[policy](i), i)))
    return o, kept

@pytest.mark.parametrize('cache, sinks', [(1, 0), (5, 2), (8, 3), (40, 4)])
@pytest.mark.parametrize('policy', fastweight.POLICIES)
def test_policies_agree_row_for_row_with_the_book(policy, cache, sinks):
    """At once, in pieces, and where ties must be broken: a query of zeros looks at all rows alike."""
    q, k, v = torch.randn(3, 2, 3, 21, 4, dtype=f64)
    q[:, :, 9:15] = 0
    o, kept = by_the_book(policy, q, k, v, cache, sinks)
    for cuts in (), (3, 4, 15), range(1, 21):
        step = lambda i, j, S: fastweight.bounded(*(x[:, :, i:j] for x in (q, k, v)), S, i, policy, cache,
                                                  sinks)[::5]
        got, S = in_parts(step, cuts, 21)
        near(got, o, 1e-12)
        got = [[sorted(i for i in rows if i >= 0) for rows in heads] for heads in S['pos'].tolist()]
        assert got == kept
        assert S['pos'].shape == (2, 3, cache)

def test_policies_with_room_for_all_are_softmax_to_the_bit():
    q, k, v = torch.randn(3, 2, 3, 33, 8)
    o, _ = fastweight.softmax(q, k, v)
    for policy in fastweight.POLICIES:
        assert torch.equal(fastweight.bounded(q, k, v, None, 0, policy, 33)[0], o)

def test_compressed_positions_are_those_of_the_paper():
    """Gaps up to 10 as they are, longer ones ln ln g; with no gaps, rope's own."""
    q, k, v = torch.randn(3, 1, 1, 40, 8, dtype=f64)
    turn = lambda x: fastweight.rope(x, torch.arange(40))
    run = lambda q, k, cache, **kw: fastweight.bounded(q, k, v, None, 0, 'sink', cache, 2, **kw)
    near(run(q, k, 40, compress=1e4)[0], run(turn(q), turn(k), 40)[0], 1e-5)
    last = run(q, k, 6, compress=1e4)[0][0, 0, -1]             # rows 0, 1, 35..38 and its own, 39
    at = torch.tensor([0, 1, *(1 + math.log(math.log(34)) + i for i in range(5))])
    rows = [0, 1, 35, 36, 37, 38, 39]
    a = fastweight.rope(k[0, 0, rows], at) @ fastweight.rope(q[0, 0, 39:], at[-1:])[0] / 8 ** .5
    near(last, a.softmax(0) @ v[0, 0, rows], 1e-5)

@pytest.mark.parametrize('policy', ['window', 'tova'])
@pytest.mark.parametrize('rule', STEPPERS)
@pytest.mark.parametrize('phi', ['favor', 'taylor', 'hedgehog'])
def test_overflow_lies_between_fast_weights_and_softmax(rule, policy, phi):
    """An empty cache leaves the fast-weight rule, one without end softmax."""
    x, (q, k, v) = torch.randn(2, 9, 8, dtype=f64), torch.randn(3, 2, 2, 9, 4, dtype=f64)
    m = FastWeights(policy, 8, 2, 4, cache=0, overflow=f'{rule}:{phi}').double().eval()
    expected = m.overflow(x, q, k, v)[0]
    if RULES[rule].norm == 'none':                              # here it is a mean
        expected = expected / m.overflow(x, q, k, torch.ones_like(v))[0]
    near(m(x, q, k, v)[0], expected, 1e-9)
    m.limits['cache'] = 9
    near(m(x, q, k, v)[0], fastweight.softmax(q, k, v)[0], 1e-9)
    m.limits['cache'] = 3
    assert (m(x, q, k, v)[0] - expected).abs().max() > 1e-3     # in between it is neither

def test_overflow_with_taylor_is_near_softmax_where_scores_are_small():
    """What a window forgets, the matrix remembers: the error falls to the cube of the scores."""
    x, (q, k, v) = torch.randn(1, 40, 8, dtype=f64), torch.randn(3, 1, 2, 40, 4, dtype=f64) / 3
    wanted = fastweight.softmax(q, k, v)[0]
    alone = FastWeights('window', 8, 2, 4, cache=5)(x, q, k, v)[0]
    both = FastWeights('window', 8, 2, 4, cache=5, overflow='sum:taylor').double()(x, q, k, v)[0]
    assert (both - wanted).abs().max() < .02 * (alone - wanted).abs().max()


# ---- refusals: one sentence that says why ------------------------------------------------------------------

@pytest.mark.parametrize('rule, phi, norm, beta_max, why', [
    ('decay', 'elu', 'attn', 1, 'denominator of its own'), ('kda', 'elu', 'attn', 1, 'different sums'),
    ('sum', 'identity', 'attn', 1, 'zero or negative'), ('delta', 'silu', 'sum', 1, 'sum of the features'),
    ('delta', 'silu', 'attn', 1, 'zero or negative'), ('delta', 'elu', 'none', 1, 'diverges'),
    ('sum', 'elu', 'attn', 2, 'only rules that erase'), ('softmax', 'elu', 'none', 1, 'own kernel'),
    ('sum', 'nope', 'attn', 1, 'no such feature map; choose'), ('sum', 'elu:3', 'attn', 1, 'takes nothing'),
    ('nope', 'elu', 'attn', 1, 'no such rule; choose'),
    ('sum', 'elu', 'nope', 1, 'no such normaliser; choose'), ('sum', 'dpfp:8', 'attn', 1, '1..7'),
    ('sum', 't2r:0', 'attn', 1, 'above 0'), ('sum', 'favor:many', 'attn', 1, 'a whole number above 0'),
    ('sum', 'exp:nan', 'attn', 1, 'a number above 0'),
    ('sum', 'hedgehog:x', 'attn', 1, 'forms')])
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


# ---- flags and bad input: one line, exit code 2, nothing half-written --------------------------------------

TEXT = ''.join(f'line {i}: the quick brown fox jumps over {i * i} lazy dogs\n' for i in range(200))
TINY = ['--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--device=cpu']

@pytest.fixture
def text(tmp_path, monkeypatch):
    """A small text, and the folder where its prepared form goes instead of data/."""
    monkeypatch.setattr(prepare.load, '__defaults__', (str(tmp_path / 'data'), None))
    path = tmp_path / 'text.txt'
    path.write_text(TEXT)
    return str(path)

@pytest.fixture
def characters(text, monkeypatch):
    """Texts are cut into characters: the bytes of an untrained model are none."""
    monkeypatch.setattr(prepare.load, '__defaults__', (prepare.load.__defaults__[0], 'char'))

def prepared(text):
    """The folder of its prepared form, which another process can be told."""
    prepare.load(text)
    return next((Path(text).parent / 'data').iterdir())

def trained(text, out, *flags, steps=4, eval_every=4):
    """Train; the checkpoint it ends in."""
    run = [f'--data={text}', f'--out={out}', *TINY, f'--steps={steps}', f'--eval_every={eval_every}', *flags]
    assert train.main(run) == 0
    return os.path.join(out, 'ckpt.safetensors')

def log(out):
    return [json.loads(line) for line in open(os.path.join(out, 'log.jsonl'))]

def refused(capsys, main, *argv):
    """Run a script that must refuse; its one line of complaint."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith('error: ') and err.count('\n') == 1, err
    return err

@pytest.mark.parametrize('flags, named', [
    ('--ruel=delta', '--rule'), ('--rule=dleta', 'mean delta?'), ('--steps=1.5', 'whole number'),
    ('--steps=many', 'whole number'), ('--steps=0', 'at least 1'), ('--lr=nan', 'a number'),
    ('--lr=-1', 'at least 0'), ('--dropout=1', 'at most 0.99'), ('--carry=maybe', 'true or false'),
    ('--seed=1 --seed=2', 'twice'), ('--steps', 'missing'), ('steps=3', '--steps'),
    ('--n_embd=33', 'n_head'), ('--layers=delta,nope', "'nope' is"),
    ('--rule=decay --norm=attn', 'denominator'), ('--resume', 'no such file'),
    ('--beta_max=2 --rule=sum', 'erase'), ('--device=tpu9', '--device'),
    ('--data=nowhere.txt', 'nowhere.txt'), ('--carry --pos=learned', 'learned positions'),
    ('--carry --phi=favor --rule=sum', 'redrawn'), ('--carry --data=recall', 'nothing to do with each other'),
    ('--n_embd=12 --n_head=4 --pos=rope', 'even'), ('--block_size=100000', 'longer text'),
    ('--phi=\u00e9', 'no such feature map'), ('--', '--help'), ('', '--help')])
def test_train_refuses_in_one_line(flags, named, text, tmp_path, capsys):
    if named == '--impl' and (HERE / 'kernels.py').exists():
        pytest.skip('kernels.py is here')
    flags, name = flags.split(' '), lambda flag: flag.split('=')[0]
    defaults = [f'--data={text}', f'--out={tmp_path / "out"}', *TINY, '--steps=1']
    argv = [d for d in defaults if name(d) not in map(name, flags)] + flags
    assert named in refused(capsys, train.main, *argv)
    assert not (tmp_path / 'out').exists()

def test_help_lists_every_flag_and_choice(capsys):
    open_choices = dict(phi=FEATURE_MAPS, norm=NORMALISERS, data=prepare.DATASETS)
    for script, classes in (train, (train.Args, Config)), (sample, (sample.Args,)):
        with pytest.raises(SystemExit) as e:
            script.main(['--help'])
        out = capsys.readouterr().out
        assert not e.value.code
        for f in (f for c in classes for f in dataclasses.fields(c) if f.metadata):
            line = re.search(rf'^ *--{f.name}\b.*', out, re.M)[0]
            assert f.metadata['help'] in line
            choices = map(str, f.metadata['choices'] or open_choices.get(f.name, ()))
            assert set(choices) <= set(re.split(r'[][|, =]+', line)), line

def test_broken_checkpoints_are_refused(text, tmp_path, capsys):
    """Missing, cut, foreign, changed by one bit anywhere: never a wrong model, never another exception."""
    good, bad = trained(text, tmp_path / 'out'), tmp_path / 'bad.safetensors'
    assert load(good)[1]['step'] == 4
    whole, rng = Path(good).read_bytes(), np.random.default_rng(0)
    header = int.from_bytes(whole[:8], 'little') + 8
    broken = [b'', b'\x00' * 100, whole[:7], whole[:header - 1], whole[:-1], whole + b'x', b'<html>no</html>',
              b'PK\x03\x04' + whole[4:]]
    for _ in range(150):
        changed = bytearray(whole)
        changed[rng.integers(0, header if rng.random() < .5 else len(whole))] ^= 1 << rng.integers(8)
        broken.append(bytes(changed))
    for content in broken:
        bad.write_bytes(content)
        with pytest.raises(ValueError, match='bad.safetensors'):
            load(str(bad))
    assert 'bad.safetensors' in refused(capsys, sample.main, f'--init={bad}')
    assert 'no such file' in refused(capsys, sample.main, f'--init={tmp_path / "none"}')
    save_file({'x': torch.zeros(3)}, bad)
    assert 'not written by this project' in refused(capsys, sample.main, f'--init={bad}')

def test_broken_data_is_refused(text, tmp_path, capsys):
    folder = prepared(text)
    meta, train_bin = json.loads((folder / 'meta.json').read_text()), (folder / 'train.bin').read_bytes()
    short = {**meta['train'], 'tokens': 9, 'bytes': 9}
    for named, content, changes in (
            ('train.bin', b'', {}), ('train.bin', train_bin[:-5], {}), ('meta.json', train_bin, None),
            ('vocab', train_bin, dict(vocab_size=100)), ('float99', train_bin, dict(dtype='float99')),
            ('longer text', train_bin[:9], dict(train=short))):
        (folder / 'train.bin').write_bytes(content)
        (folder / 'meta.json').write_text('{"name": ' if changes is None else json.dumps({**meta, **changes}))
        flags = f'--data={folder}', f'--out={tmp_path / "out"}', *TINY, '--steps=1'
        assert named in refused(capsys, train.main, *flags)
        assert not (tmp_path / 'out').exists()
    (tmp_path / 'empty.txt').write_text('')
    assert 'empty.txt' in refused(capsys, train.main, f'--data={tmp_path / "empty.txt"}')

def test_downloads_end_whole_or_not_at_all(tmp_path, monkeypatch):
    """A server that cuts, lies, fails and sends web pages. Nothing wrong is left under the right name."""
    body, state = TEXT.encode(), {}

    class Server(http.server.BaseHTTPRequestHandler):
        log_message = lambda *args: None

        def do_GET(self):
            state['hits'] += 1
            mode, first = state['mode'], state['hits'] == 1
            start = 0 if mode == 'no-range' else int((self.headers.get('Range') or 'bytes=0-')[6:-1])
            if mode == '404' or mode == '503-then-fine' and first:
                return self.send_error(int(mode[:3]))
            content = {'wrong': b'x' * len(body), 'html': b'<html>sign in</html>'}.get(mode, body)
            self.send_response(206 if start else 200)
            self.send_header('Content-Type', 'text/html' if mode == 'html' else 'text/plain')
            if start:
                self.send_header('Content-Range', f'bytes {start}-{len(content) - 1}/{len(content)}')
            self.send_header('Content-Length', str(len(content) - start))
            self.end_headers()
            half = len(content) // 2 if mode in ('cut', 'no-range') and first else None
            self.wfile.write(content[start:start + 100 if mode == 'always-cut' else half])
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(prepare.time, 'sleep', lambda s: None)
    url = f'http://127.0.0.1:{server.server_port}/input.txt'
    row = dict(size=len(body), sha256=hashlib.sha256(body).hexdigest(), urls=[url])
    monkeypatch.setitem(prepare.DATASETS, 'shakespeare', {**prepare.DATASETS['shakespeare'], **row})
    for mode, hits in dict({'': 1, 'cut': 2, 'no-range': 2, '503-then-fine': 2},                   # end well
                           **{'always-cut': 0, 'wrong': 0, 'html': 0, '404': 0}).items():          # do not
        state.update(mode=mode, hits=0)
        root = tmp_path / (mode or 'fine')
        path = root / 'shakespeare' / 'input.txt'
        if hits:
            train_set, val_set, meta = prepare.load('shakespeare', str(root))
            assert (state['hits'], path.read_bytes(), meta['vocab_size']) == (hits, body, len(set(TEXT)))
            assert prepare.decode(np.concatenate([train_set, val_set]), meta) == TEXT
        else:
            with pytest.raises(ValueError, match='by hand') as e:
                prepare.load('shakespeare', str(root))
            assert url in str(e.value) and str(path) in str(e.value) and '\n' not in str(e.value)
            assert not path.exists() and state['hits']
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match='by hand'):                # nobody answers
        prepare.load('shakespeare', str(tmp_path / 'down'))

def test_generated_tasks_are_what_the_papers_say():
    for keep in False, True:
        for row, target in zip(*prepare.recall(50, np.random.default_rng(0), 40, False, keep=keep)):
            pairs = list(zip(row[1:-1:2], row[2::2]))
            assert dict(pairs)[row[-1]] == target[-1] and (target[:-1] == 40).all()    # a dict keeps the last
            assert keep == (len(set(pairs)) == len(dict(pairs)))
        for row, target in zip(*prepare.recall(50, np.random.default_rng(0), 40, True, keep=keep)):
            for t in range(128):
                seen = dict(zip(row[1:t:2], row[2:t + 1:2]))
                assert target[t] == (seen.get(row[t], 40) if t % 2 else 40)
    for row, target in zip(*prepare.mqar(50, np.random.default_rng(0), 8192, True)):
        keys, values = row[0:16:2], row[1:16:2]
        at = np.flatnonzero(target < 8192)
        assert len(set(keys)) == 8 == len(at) and (at % 2 == 0).all() and keys.max() < 4096 <= values.min()
        assert all(target[i] == values[list(keys).index(row[i])] for i in at)
        assert at.min() >= 16 and (np.flatnonzero(row[16:]) + 16 == at).all()                  # all else is 0


# ---- training ----------------------------------------------------------------------------------------------

def same(a, b):
    a, b = read(a)[0], read(b)[0]
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def resume_from(text, tmp_path, monkeypatch, flags, steps):
    """Train 5 steps and keep every checkpoint; going on from any of `steps` must end in the same bits."""
    end, kept, plain = tmp_path / 'out' / 'ckpt.safetensors', tmp_path / 'kept', train.save
    kept.mkdir()

    def save_and_keep(path, model, meta, extra={}):
        plain(path, model, meta, extra)
        extra and shutil.copy(path, kept / f'{meta["step"]}')
    monkeypatch.setattr(train, 'save', save_and_keep)
    trained(text, tmp_path / 'out', *flags, '--accum=2', '--dropout=0.2', steps=5, eval_every=1)
    monkeypatch.setattr(train, 'save', plain)
    for k in steps:
        again = tmp_path / f'again{k}'
        again.mkdir()
        shutil.copy(kept / str(k), again / end.name)
        assert train.main(['--resume', f'--out={again}']) == 0
        assert same(end, again / end.name), f'{flags}: resumed at step {k}'
        assert read(end)[1]['best'] == read(again / end.name)[1]['best']
        assert min(row['step'] for row in log(again) if 'step' in row) == k + 1    # went on, not anew
    assert not same(end, kept / '4')

@pytest.mark.parametrize('flags', [*(f'--rule={r}' for r in VARIED), '--carry', '--rule=sum --phi=favor'])
def test_resume_is_bitwise_identical(flags, text, tmp_path, monkeypatch):
    resume_from(text, tmp_path, monkeypatch, flags.split(), [3])

@slow
@pytest.mark.parametrize('rule', VARIED)
def test_soak_resume_is_bitwise_identical_from_any_step(rule, text, tmp_path, monkeypatch):
    resume_from(text, tmp_path, monkeypatch, [f'--rule={rule}'], [1, 2, 3, 4])

def test_resume_refuses_another_model(text, tmp_path, capsys):
    path, resume = trained(text, tmp_path / 'out'), ['--resume', f'--out={tmp_path / "out"}']
    assert '--n_layer=3' in refused(capsys, train.main, *resume, '--n_layer=3')
    assert 'more steps' in refused(capsys, train.main, *resume)
    assert train.main([*resume, '--steps=6', '--lr=1e-3']) == 0
    meta = read(path)[1]
    assert meta['step'] == 6 and meta['args']['lr'] == 1e-3

def test_training_learns_and_logs(text, tmp_path, capsys):
    out = tmp_path / 'out'
    trained(text, out, '--log_every=30', '--lr=1e-2', steps=60, eval_every=60)
    first, *rows = log(out)
    assert first['config']['rule'] == 'delta' and first['args']['steps'] == 60
    assert {'commit', 'device'} <= first.keys()
    losses = [r['loss'] for r in rows if 'loss' in r]
    assert losses[0] > 5 and losses[-1] < 3, losses    # ln 256 = 5.5 at first, ln 36 = 3.6 by characters
    printed = capsys.readouterr().out
    for word in 'tok/s', 'eta', 'MB', 'bits per byte', 'carried', 'next: python sample.py':
        assert word in printed
    assert load(out / 'best.safetensors')[1]['data']['tokenizer'] == 'byte'

def test_bits_per_byte_counts_every_token_but_the_first_once(characters, text, tmp_path, capsys):
    Path(text).write_text(TEXT.replace('o', '\u00f6'))                         # some characters of two bytes
    _, val, meta = prepare.load(text)
    model = GPT(Config(n_layer=1, n_head=1, n_embd=8, block_size=16)).eval()
    cpu, cast = torch.device('cpu'), torch.autocast('cpu', enabled=False)
    x = torch.from_numpy(val.astype(np.int64))
    by_hand = 0
    for i in range(0, len(x) - 1, 16):
        y = x[i + 1:i + 17]
        by_hand += F.cross_entropy(model(x[None, i:i + 16])[0][0][:len(y)], y, reduction='sum').item()
    by_hand /= len(x) - 1
    assert train.evaluate(model, val, 16, meta, cpu, cast)[0] == pytest.approx(by_hand, rel=1e-6)
    whole = F.cross_entropy(model(x[None, :-1])[0][0], x[1:]).item()
    assert train.evaluate_carried(model, val, meta, cpu, cast, segment=100) == pytest.approx(whole, rel=1e-5)
    trained(text, tmp_path / 'out')                                            # what is printed is of bytes
    shown = re.search(r'blocks of 16: ([\d.]+) bits per byte, perplexity ([\d.]+)', capsys.readouterr().out)
    nats = next(row['val_loss'] for row in log(tmp_path / 'out') if row.get('rule') == 'blocks')
    bits = nats / math.log(2) * len(val) / len(prepare.decode(val, meta).encode())
    assert [float(s) for s in shown.groups()] == pytest.approx([bits, math.exp(nats)], abs=1e-3)

def test_carry_hands_the_state_on(text, tmp_path, monkeypatch):
    """Each row continues the last one, and the state it gets is the one the last one left."""
    seen, plain = [], GPT.forward

    def watch(self, tokens, state=None, at=None):
        logits, new = plain(self, tokens, state, at)
        if self.training:
            seen.append((tokens, state, new))
        return logits, new
    monkeypatch.setattr(GPT, 'forward', watch)
    trained(text, tmp_path / 'out', '--carry')
    stream = torch.from_numpy(prepare.load(text)[0].astype(np.int64))
    assert len(seen) == 4 and seen[0][1] is None
    for step, (tokens, got, _) in enumerate(seen):
        starts = torch.arange(4) * (len(stream) // 4) + step * 16
        assert torch.equal(tokens, stream[starts[:, None] + torch.arange(16)])
        if step:
            near(pack(got), pack(seen[step - 1][2]), 0)
            assert not any(x.requires_grad for x in pack(got).values())

def test_rows_are_a_function_of_seed_step_and_index():
    starts = lambda seed, step: train.starts(train.Args(batch_size=8, seed=seed), 1000, step, 16, {})
    a = starts(3, 7)
    assert len(set(a)) > 4 and a.max() < 1000 - 16 and (a == starts(3, 7)).all()
    assert (a != starts(3, 8)).any() and (a != starts(4, 7)).any()

def test_not_finite_steps_are_skipped_named_and_end_the_run(text, tmp_path, capsys, monkeypatch):
    out, plain = tmp_path / 'out', F.cross_entropy
    path, resume = trained(text, out), ['--resume', f'--out={out}', '--eval_every=50']
    before = Path(path).read_bytes()

    def poison(*bad):
        calls = itertools.count(1)
        poisoned = lambda *a, **kw: plain(*a, **kw) * (math.nan if next(calls) in bad else 1)
        monkeypatch.setattr(train.F, 'cross_entropy', poisoned)
    poison(*range(3, 100))
    err = refused(capsys, train.main, *resume, '--steps=50')
    assert '10 steps in a row' in err and '--lr' in err
    assert Path(path).read_bytes() == before
    poison(2)                                                  # one bad step of four: the other three count
    assert train.main([*resume, '--steps=8']) == 0
    assert 'step 6: not finite' in capsys.readouterr().out
    tensors, meta = read(path)
    assert meta['step'] == 8 and tensors['opt.embed.weight.step'] == 7
    assert all(x.isfinite().all() for x in tensors.values())
    model = GPT(Config(n_layer=3, n_embd=16, n_head=2))
    model.blocks[1].up.weight.data[0, 0] = math.inf
    assert 'blocks.1.up' in train.culprit(model, torch.zeros(1, 4, dtype=torch.long))

def test_a_failed_write_leaves_the_old_checkpoint(text, tmp_path, monkeypatch):
    path = Path(trained(text, tmp_path / 'out'))
    before, model, names = path.read_bytes(), load(path)[0], sorted(os.listdir(path.parent))
    monkeypatch.setattr(model_py.os, 'fsync', Mock(side_effect=OSError(28, 'No space left on device')))
    with pytest.raises(OSError, match='No space'):
        save(path, model, {})
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == names

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
        left = list(tmp_path.glob('*.part'))
        middle += bool(left)
        for f in left:
            f.unlink()
        loaded, meta = load(path)
        assert torch.equal(loaded.embed.weight, models[meta['step'] % 2].embed.weight)
    assert middle > 20

def test_two_processes_train_like_one(text, tmp_path):
    data, rows, torchrun = prepared(text), [], [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    for n in 1, 2:
        run = subprocess.run([*torchrun, '--master_port=0', f'--nproc_per_node={n}', HERE / 'train.py', *TINY,
                              f'--data={data}', f'--out={tmp_path / str(n)}', '--steps=6', '--log_every=1',
                              '--eval_every=3'], capture_output=True, text=True,
                             env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert run.returncode == 0 and f'{n} x cpu' in run.stdout, run.stdout[-500:] + run.stderr[-3000:]
        rows.append(log(tmp_path / str(n))[1:])
        steps = [row.get('step', row.get('rule')) for row in rows[-1]]
        assert steps == [1, 2, 3, 3, 4, 5, 6, 6, 'blocks', 'carried']
    for a, b in zip(*rows):
        assert a.keys() == b.keys()
        for key in {'loss', 'val_loss'} & a.keys():
            assert a[key] == pytest.approx(b[key], abs=1e-6)


# ---- sampling ----------------------------------------------------------------------------------------------

@pytest.fixture
def ckpt(text, tmp_path):
    return trained(text, tmp_path / 'out', '--rule=gated_delta')

def written(capsys, *argv):
    """What sample.py writes to stdout and to stderr."""
    capsys.readouterr()
    assert sample.main(list(argv)) == 0
    return tuple(capsys.readouterr())

def test_sampling_repeats_streams_and_reports(ckpt, capsys, monkeypatch):
    flags, pieces = [f'--init={ckpt}', '--tokens=80', '--prompt=the '], []
    a, err = written(capsys, *flags)
    assert a != written(capsys, *flags, '--seed=1')[0]
    assert 'tokens/s' in err and 'bytes' in err and '80 written' in err
    note = lambda *a, **kw: (pieces.append(a) if kw.get('flush') else None, print(*a, **kw))
    monkeypatch.setattr(sample, 'print', note, raising=False)
    assert a == written(capsys, *flags)[0]
    assert len(pieces) > 80 / 4                                # a character has up to four bytes
    assert '--- 3 ---' in written(capsys, f'--init={ckpt}', '--tokens=5', '--samples=3')[0]

def test_prompts_come_from_text_file_and_stdin(ckpt, tmp_path, capsys, monkeypatch):
    (tmp_path / 'p.txt').write_text('the quick')
    monkeypatch.setattr(sys, 'stdin', io.StringIO('the quick'))
    prompts = ['the quick', f'@{tmp_path / "p.txt"}', '-']
    outs, errs = zip(*(written(capsys, f'--init={ckpt}', '--tokens=40', f'--prompt={p}') for p in prompts))
    assert len(set(outs)) == 1 and all('9 tokens' in e for e in errs)
    assert 'nofile' in refused(capsys, sample.main, f'--init={ckpt}', '--prompt=@nofile')

@pytest.mark.parametrize('rule', VARIED)
def test_a_saved_state_goes_on_as_if_never_stopped(rule, characters, text, tmp_path, capsys):
    """The same text, and, as a model this young may well say one thing whatever its state, the same state."""
    ckpt = trained(text, tmp_path / 'out', f'--rule={rule}', '--cache=9')

    def go(tokens, to, *flags):
        flags = f'--tokens={tokens}', f'--save_state={tmp_path / to}', *flags
        return written(capsys, f'--init={ckpt}', '--temperature=0', *flags)[0].removesuffix('\n')
    whole = go(90, 'whole', '--prompt=line 1')
    assert go(50, 'half', '--prompt=line 1') + go(40, 'second', f'--load_state={tmp_path / "half"}') == whole
    go(0, 'start', '--prompt=line 1')                                          # read once, go on often
    for to in 'once', 'twice':
        assert go(90, to, f'--load_state={tmp_path / "start"}') == whole
    for to in 'second', 'once', 'twice':
        near(read(tmp_path / to)[0], read(tmp_path / 'whole')[0], 1e-5)
    other = trained(text, tmp_path / 'other', f'--rule={rule}', '--seed=1')
    half = tmp_path / 'half'
    assert 'not a state' in refused(capsys, sample.main, f'--init={other}', f'--load_state={half}')
    assert 'holds no model' in refused(capsys, sample.main, f'--init={half}')

def test_softmax_becomes_an_rnn_without_training(characters, text, tmp_path, capsys):
    """With room for all rows the same text; with less, a state of fixed size; and fine-tuning from there."""
    ckpt, state = trained(text, tmp_path / 'out', '--layers=softmax,delta'), tmp_path / 'state'
    flags = f'--init={ckpt}', '--temperature=0', '--prompt=line 1'
    whole = written(capsys, *flags, '--tokens=60')[0]
    assert whole == written(capsys, *flags, '--tokens=60', '--rule=tova', '--cache=80')[0]
    for tokens in 40, 80:
        small = f'--tokens={tokens}', f'--save_state={state}', '--rule=tova', '--cache=9'
        assert 'whatever the length' in written(capsys, *flags, *small)[1]
        assert read(state)[0]['state.0.S.k'].shape == (1, 2, 9, 8)
    assert 'made with' in refused(capsys, sample.main, *flags, f'--load_state={state}')
    run = f'--init={ckpt}', '--rule=tova', '--cache=9', '--overflow=sum'
    tensors, meta = read(trained(text, tmp_path / 'tuned', *run))
    assert meta['config']['layers'] == 'tova,delta'
    assert any('0.mixer.memory.overflow.phi.R' in name for name in tensors)
    assert len(written(capsys, f'--init={tmp_path / "tuned" / "ckpt.safetensors"}', '--tokens=9')[0]) > 9

@pytest.mark.parametrize('flags, why', [
    ('--rule=tova --cache=0', 'at least 1'), ('--rule=sink --cache=4', '--sinks=4'),
    ('--rule=tova --overflow=sum:elu', 'favor, hedgehog, taylor'), ('--phi=elu', 'no such flag'),
    ('--overflow=sum', '--rule=tova'),
    ('--rule=tova --overflow=softmax', 'choose from'), ('--rule=delta', 'choose from softmax'),
    ('--positions=compress', 'bounded cache'),
    ('--rule=tova --overflow=sum --positions=compress', 'without')])
def test_rows_that_cannot_be_kept_are_refused(flags, why, text, tmp_path, capsys):
    ckpt = trained(text, tmp_path / 'out', '--rule=softmax', steps=1)
    assert why in refused(capsys, sample.main, f'--init={ckpt}', *flags.split())

def test_rows_need_softmax_layers(ckpt, capsys):
    err = refused(capsys, sample.main, f'--init={ckpt}', '--rule=tova')
    assert 'no softmax layers, only gated_delta' in err

def test_a_character_the_model_lacks_is_named(characters, text, tmp_path, capsys):
    ckpt = trained(text, tmp_path / 'out')
    assert '\u20ac' in refused(capsys, sample.main, f'--init={ckpt}', '--prompt=5 \u20ac')
    assert set(written(capsys, f'--init={ckpt}', '--tokens=50')[0]) <= set(TEXT)

@pytest.mark.parametrize('flag', 'top_p=0 top_p=1.1 temperature=-1 tokens=-1 samples=0 top_k=x'.split())
def test_sample_refuses_in_one_line(flag, capsys):
    assert f'--{flag}: expected' in refused(capsys, sample.main, f'--{flag}')

def test_draws_follow_the_distribution():
    """Chi-square of 200,000 draws against exact probabilities, with top_k and top_p; no value breaks it."""
    logits, g = torch.tensor([2., 1., 0., -1., -torch.inf]), torch.Generator().manual_seed(0)
    for kw, kept in (({}, 4), (dict(top_k=2), 2), (dict(top_p=.8), 2), (dict(temperature=.5), 4),
                     (dict(top_k=3, top_p=.999, temperature=2.), 3)):
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
    for flags in (dict(rule='delta'), dict(rule='decay'), dict(rule='gated', pos='rope'),
                  dict(rule='kda', pos='learned'), dict(rule='delta', norm='attn', phi='elu')):
        m = GPT(Config(**flags, n_layer=2, n_head=2, n_embd=16, block_size=8)).double().eval()
        with torch.inference_mode():
            tokens = torch.randint(256, (2, 30))
            _, s = m(tokens[:, :3])
            step = model_py.captured(m, tokens[:, 3:4], s)
            assert step is not m
            parts, _ = in_parts(lambda i, j, s: step(tokens[:, i + 3:j + 3], s), range(1, 27), 27, s)
            near(parts, m(tokens)[0][:, 3:], 1e-9)

@slow
@pytest.mark.parametrize('rule', [r for r in VARIED if r != 'softmax'])
def test_soak_100000_tokens_in_constant_memory(rule):
    """State bytes and resident memory stay as they are; rows know their true positions."""
    m = GPT(Config(rule=rule, n_layer=1, n_head=2, n_embd=16, cache=128)).eval()
    sizes, memory = set(), []
    texts = itertools.islice(m.generate(torch.zeros(1, 1, dtype=torch.long)), 100_000)
    for i, (_, state) in enumerate(texts, 1):
        if i % 10_000 == 0:
            tensors = pack(state).values()
            sizes.add(sum(x.numel() * x.element_size() for x in tensors))
            memory.append(int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))
            assert all(x.isfinite().all() for x in tensors)
    assert len(sizes) == 1 and int(state[0]['t']) == 100_000 and memory[-1] - memory[0] < 8 * 2 ** 20
    if RULES[rule].keeps:
        pos = state[0]['S']['pos'].sort()[0]
        assert pos.shape == (1, 2, 128) and (pos.diff() > 0).all() and pos.max() < 100_000
        last = dict(window=128, sink=124, h2o=64).get(rule, 0)
        assert (pos[..., 128 - last:] == torch.arange(100_000 - last, 100_000)).all()
        assert rule != 'sink' or (pos[..., :4] == torch.arange(4)).all()


SUITES = dict(train=('--heads=1 --head_dim=8 --lengths=40', 10),
              decode=('--heads=1 --head_dim=8 --lengths=8,40', 16), batch=('--lengths=32 --budget=1', 5),
              cache=('--lengths=4,8 --overflow=delta:favor:1', 15), kept=('--lengths=4', 4),
              layer=('--heads=1 --head_dim=8 --lengths=8,40 --dtype=bfloat16', 10),
              capacity=('--lengths=4 --steps=100 --only=elu,softmax', 2),
              update=('--lengths=4 --steps=100 --only=gated,delta', 2), monotone=('--steps=1', 10),
              recall=('--steps=1 --only=elu,delta', 2), mqar=('--steps=1 --only=tova --lengths=8', 1),
              language=('--steps=1 --only=sum', 1))

@pytest.mark.parametrize('suite', SUITES)
def test_bench_writes_table_picture_and_one_json_line(suite, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, 'seconds', lambda runs, *_: [(run(), 1e-3)[1] for run in runs])
    flags, rows = SUITES[suite]
    if suite in ('cache', 'kept', 'monotone'):
        flags += f' --init={trained(text, tmp_path / "out", "--rule=softmax", "--pos=rope")}'
    if suite == 'language':
        flags += f' --data={text}'
    assert bench.main([suite, *flags.split(), f'--out={tmp_path}']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['suite'] == suite
    assert len((tmp_path / f'{suite}.csv').read_text().splitlines()) > rows
    assert (tmp_path / f'{suite}.png').stat().st_size > 5000

def test_bench_exchanges_attention(tmp_path):
    flags = '--data=recall-kept --n_layer=2 --n_head=1 --n_embd=8 --conv=0 --steps=2 --eval_every=2'
    args = bench.Args(out=str(tmp_path), seeds=1)
    (theirs,), (path,) = bench.learned(args, 'recall', 'softmax', f'{flags} --device=cpu --rule=softmax')
    exchange = lambda rule, steps: bench.exchange(path, rule, steps, torch.device('cpu'), 0)
    same = exchange('--rule=softmax', 1)                                    # for itself
    assert same['before'] == pytest.approx(theirs['accuracy']) != same['accuracy']
    assert 4 < same['entropy'] < math.log(128)                              # a last query's 128 weights
    swapped, distilled = (exchange('--rule=sum --phi=hedgehog', steps)['before'] for steps in (2, 12))
    assert swapped != distilled                                             # a third of two steps is none

def test_bench_finds_where_softmax_becomes_the_slower_one():
    times = dict(softmax=(1, 100), a=(10, 10), b=(.1, .1), c=(900, 900))
    rows = [dict(form=f, T=T, ms=ms) for f in times for T, ms in zip((10, 1000), times[f])]
    assert bench.crossing(rows, 'ms', 'softmax') == dict(a=pytest.approx(100), b=10, c=None)

@pytest.mark.parametrize('rule, phi, norm', [
    ('sum', 'elu', 'attn'), ('sum', 'dpfp:1', 'sum'), ('gated', 'elu', 'attn'), ('delta', 'dpfp:2', 'sum')])
def test_associations_are_read_from_the_recurrence(rule, phi, norm):
    """Against the definition, in which a query is a further step whose key is 0."""
    model, keys = bench.Associative(5, rule, phi, norm, d=8).double().eval(), torch.randint(5, (2, 7))
    m, values = model.memory, torch.randint(5, (2, 7))
    v = torch.nn.functional.one_hot(values, 5).double()
    x = torch.cat([model.embed[keys], v], -1)
    qk = m.features(model.q(model.embed[keys])[:, None], model.k(x)[:, None], None, 0)
    q, k = NORMALISERS[norm](qk).chunk(2)
    after = lambda y: torch.nn.functional.pad(y, (0, 0, 0, 7) if y.dim() == 4 else (0, 7))
    q = torch.cat([torch.zeros_like(q), q], 2)
    gates = {name: after(gate) for name, gate in m.gates(x).items()}
    floor = norm == 'attn' and m.phi.floor
    o, _ = fastweight.recurrent(q, after(k), after(v[:, None]), **gates, normalise=floor)
    near(model(keys, values), o[:, 0, 7:], 1e-9)

def test_bench_cache_counts_every_token_and_with_room_for_all_is_softmax(text, tmp_path):
    ckpt = trained(text, tmp_path / 'out', '--rule=softmax')
    assert bench.main(['cache', f'--init={ckpt}', '--lengths=16', f'--out={tmp_path}']) == 0
    rows = list(csv.DictReader(open(tmp_path / 'cache.csv')))
    val = torch.from_numpy(prepare.load(text)[1].astype('int64'))
    pieces = torch.stack([val[i:i + 16] for i in torch.linspace(0, len(val) - 17, 16).long().tolist()])
    with torch.no_grad():
        nats = -load(ckpt)[0].eval()(pieces)[0].log_softmax(-1)[:, :-1].gather(-1, pieces[:, 1:, None]).mean()
    assert {r['form'] for r in rows} == {'full', *fastweight.POLICIES}
    near(torch.tensor([float(r['perplexity']) for r in rows]), nats.exp().expand(len(rows)), 1e-5)

def test_bench_refuses(ckpt, tmp_path, capsys):
    assert 'no softmax layers' in refused(capsys, bench.main, 'cache', f'--init={ckpt}')
    assert 'train.py' in refused(capsys, bench.main, 'kept', f'--init={tmp_path / "none"}')
    assert 'means nothing' in refused(capsys, bench.main, 'decode', '--only=sum')
    assert 'takes one' in refused(capsys, bench.main, 'batch', '--lengths=3,4')
    assert '16 or more' in refused(capsys, bench.main, 'batch', '--lengths=8')
    assert '--budget' in refused(capsys, bench.main, 'batch', '--budget=1', '--lengths=8192')
    assert 'a task' in refused(capsys, bench.main, 'language', '--data=recall')
    assert 'contradict' in refused(capsys, bench.main, '--quick', '--full')
    assert 'choose from softmax' in refused(capsys, bench.main, 'recall', '--only=elu,elo')
    bad = (['tran'], 'choose from'), (['train', '--lengths=4k'], '--lengths'), (['--hedas=2'], '--heads')
    for argv, named in bad:
        assert named in refused(capsys, bench.main, *argv)


# ---- conversion --------------------------------------------------------------------------------------------

def in_hub_layout(folder, kind, prefix=True, tied=True, shards=1, **config):
    """A small model with random weights as the hub keeps it, and its logits by a few lines of their own."""
    H, D, L, V, inner = 2, 8, 2, 30, 12
    draw = lambda *s: torch.randn(*s) / s[-1] ** .5
    linear = lambda x, n: x @ w[n + '.weight'] + w[n + '.bias'] if kind == 'gpt2' else x @ w[n + '.weight'].T
    heads = lambda x, n: x.view(*x.shape[:-1], n, D // H).transpose(-2, -3)
    names, w = [], {}
    if kind == 'gpt2':
        raw = dict(n_layer=L, n_head=H, n_embd=D, n_inner=inner, n_positions=16)
        w |= {'wte.weight': draw(V, D), 'wpe.weight': draw(16, D)}
        names = [(f'h.{i}.{n}', a, b) for i in range(L) for n, a, b in [('attn.c_attn', D, 3 * D),
                 ('attn.c_proj', D, D), ('mlp.c_fc', D, inner), ('mlp.c_proj', inner, D)]]
        w |= {f'{n}.weight': draw(a, b) for n, a, b in names} | {f'{n}.bias': draw(b) for n, _, b in names}
        for n in [f'h.{i}.ln_{j}' for i in range(L) for j in (1, 2)] + ['ln_f']:
            w |= {f'{n}.weight': draw(D), f'{n}.bias': draw(D)}
        w |= {'h.0.attn.bias': torch.ones(1, 1, 16, 16)}       # a mask, in older files
    else:
        G = config.pop('groups', 1)
        raw = dict(num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=G, hidden_size=D,
                   intermediate_size=inner, max_position_embeddings=16, rms_norm_eps=1e-5)
        sizes = dict(q_proj=(D, D), k_proj=(G * D // H, D), v_proj=(G * D // H, D), o_proj=(D, D))
        w |= {'embed_tokens.weight': draw(V, D), 'norm.weight': draw(D)}
        for i in range(L):
            w |= {f'layers.{i}.self_attn.{n}.weight': draw(*s) for n, s in sizes.items()}
            w |= {f'layers.{i}.mlp.{n}_proj.weight': draw(inner, D) for n in ('gate', 'up')}
            w |= {f'layers.{i}.mlp.down_proj.weight': draw(D, inner)}
            w |= {f'layers.{i}.{n}_layernorm.weight': draw(D) for n in ('input', 'post_attention')}
    head = w['wte.weight' if kind == 'gpt2' else 'embed_tokens.weight'] if tied else draw(V, D)

    def logits(tokens):
        T = tokens.shape[1]
        mask = torch.full((T, T), -math.inf).triu(1)
        if kind == 'gpt2':
            norm = lambda x, n: F.layer_norm(x, (D,), w[n + '.weight'], w[n + '.bias'])
            x = w['wte.weight'][tokens] + w['wpe.weight'][:T]
            for i in range(L):
                y = linear(norm(x, f'h.{i}.ln_1'), f'h.{i}.attn.c_attn')
                q, k, v = (heads(y, H) for y in y.split(D, -1))
                o = (q @ k.mT / (D // H) ** .5 + mask).softmax(-1) @ v
                x = x + linear(o.transpose(-2, -3).reshape(x.shape), f'h.{i}.attn.c_proj')
                y = linear(norm(x, f'h.{i}.ln_2'), f'h.{i}.mlp.c_fc')
                y = y / 2 * (1 + torch.tanh((2 / math.pi) ** .5 * (y + .044715 * y ** 3)))
                x = x + linear(y, f'h.{i}.mlp.c_proj')
            return norm(x, 'ln_f') @ head.T
        norm = lambda x, n: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[n + '.weight']
        theta = config.get('rope_theta') or config.get('rope_parameters', {}).get('rope_theta', 1e4)
        angle = torch.arange(T)[:, None] * theta ** (-torch.arange(0, D // H, 2) / (D // H))
        z = torch.polar(torch.ones(()), angle)                  # rotation as complex numbers
        turn = lambda x: torch.cat([(y := torch.complex(*x.chunk(2, -1)) * z).real, y.imag], -1)
        x = w['embed_tokens.weight'][tokens]
        for i in range(L):
            y, n = norm(x, f'layers.{i}.input_layernorm'), f'layers.{i}.self_attn.'
            q, k, v = (heads(linear(y, n + m), h) for m, h in [('q_proj', H), ('k_proj', G), ('v_proj', G)])
            k, v = (y[:, torch.arange(H) // (H // G)] for y in (k, v))
            o = (turn(q) @ turn(k).mT / (D // H) ** .5 + mask).softmax(-1) @ v
            x = x + linear(o.transpose(-2, -3).reshape(x.shape), n + 'o_proj')
            y, n = norm(x, f'layers.{i}.post_attention_layernorm'), f'layers.{i}.mlp.'
            x = x + linear(F.silu(linear(y, n + 'gate_proj')) * linear(y, n + 'up_proj'), n + 'down_proj')
        return norm(x, 'norm') @ head.T
    front = {'gpt2': 'transformer.', 'llama': 'model.'}[kind] if prefix else ''
    kept = {front + n: x for n, x in w.items()} | ({} if tied else {'lm_head.weight': head})
    folder.mkdir(parents=True, exist_ok=True)
    raw |= dict(model_type=kind, vocab_size=V, tie_word_embeddings=tied, **config)
    (folder / 'config.json').write_text(json.dumps(raw))
    files = ['model.safetensors'] if shards == 1 else [f'model-{i}.safetensors' for i in range(shards)]
    where = {n: files[i % shards] for i, n in enumerate(kept)}
    for file in files:
        save_file({n: kept[n].contiguous() for n in kept if where[n] == file}, folder / file)
    if shards > 1:
        (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': where}))
    return logits

@pytest.mark.parametrize('kind, how', [
    ('gpt2', {}), ('gpt2', dict(prefix=False)), ('gpt2', dict(tied=False, shards=3)), ('llama', {}),
    ('llama', dict(tied=False, groups=2, rope_theta=5e5)),
    ('llama', dict(rope_parameters=dict(rope_theta=1e3)))])
def test_hub_weights_give_the_logits_of_another_implementation(kind, how, tmp_path):
    """Loaded, exported and loaded again, and as one step after the other."""
    logits, tokens = in_hub_layout(tmp_path, kind, **how), torch.randint(30, (2, 11))
    model, meta = convert.pretrained(str(tmp_path))
    with torch.no_grad():
        near(model.eval()(tokens)[0], logits(tokens), 1e-5)
        parts, _ = in_parts(lambda i, j, s: model(tokens[:, i:j], s), range(1, 11), 11)
        near(parts, logits(tokens), 1e-5)
        convert.export(model, str(tmp_path / 'again'))
        near(convert.pretrained(str(tmp_path / 'again'))[0].eval()(tokens)[0], logits(tokens), 1e-5)
    given = json.loads((tmp_path / 'config.json').read_text())
    again = json.loads((tmp_path / 'again' / 'config.json').read_text())
    assert again['model_type'] == kind and all(again.get(k) == v for k, v in given.items() if k in again)
    assert meta['data']['vocab_size'] == 30
    for how in dict(rule='tova', cache=11), dict(rule='window', cache=11, overflow='sum'):
        near(convert.pretrained(str(tmp_path), **how)[0].eval()(tokens)[0], logits(tokens), 1e-5)

def test_hub_weights_that_do_not_fit_are_refused(tmp_path, capsys):
    def err(config=None, drop=None, wrong=None):
        in_hub_layout(tmp_path, 'llama', **(config or {}))
        path = tmp_path / 'model.safetensors'
        if drop or wrong:
            given = {n: x for n, x in load_file(path).items() if n != drop}
            save_file({n: torch.zeros(1) if n == wrong else x for n, x in given.items()}, path)
        return refused(capsys, convert.main, f'--from={tmp_path}')
    name = 'model.layers.1.mlp.up_proj.weight'
    assert 'rope of type yarn' in err(dict(rope_scaling=dict(rope_type='yarn')))
    assert f'{name} is missing' in err(drop=name)
    assert 'shape (1,), expected' in err(wrong='model.norm.weight')
    assert 'config.json' in err(dict(num_hidden_layers=None))
    (tmp_path / 'config.json').write_text('[]')
    assert 'no description' in refused(capsys, convert.main, f'--from={tmp_path}')
    (tmp_path / 'config.json').write_text('{"model_type": "mamba"}')
    assert 'mamba' in refused(capsys, convert.main, f'--from={tmp_path}')
    assert 'known are' in refused(capsys, convert.main, f'--from={tmp_path}')
    bad = {'model.bin': 'pickled', 'a/b/c': 'no such file', 'no.safetensors': 'no such'}
    for given, why in bad.items():
        assert why in refused(capsys, convert.main, f'--from={given}')

def test_the_hub_is_read_over_http(tmp_path, monkeypatch, capsys):
    """Single and sharded, resumed, checked; refused when it is another thing than it says."""
    monkeypatch.setattr(prepare.time, 'sleep', lambda s: None)
    logits, tokens, state = in_hub_layout(tmp_path / 'one', 'gpt2'), torch.randint(30, (1, 9)), {}
    in_hub_layout(tmp_path / 'many', 'gpt2', shards=2)

    class Server(http.server.BaseHTTPRequestHandler):
        log_message = lambda *args: None

        def do_HEAD(self, body=False):
            _, repo, name, _, revision, file = self.path.split('/')
            path, mode = tmp_path / name / file, state['mode']
            if mode in ('401', '404') or not path.exists() or (repo, revision) != ('me', 'main'):
                return self.send_error(int(mode) if mode in ('401', '404') else 404)
            if mode == 'token' and self.headers.get('Authorization') != 'Bearer secret':
                return self.send_error(401)
            content = path.read_bytes()
            digest, weights = hashlib.sha256(content).hexdigest(), file.endswith('.safetensors')
            start = int((self.headers.get('Range') or 'bytes=0-')[6:-1])
            self.send_response(206 if start else 200)
            if start:
                self.send_header('Content-Range', f'bytes {start}-{len(content) - 1}/{len(content)}')
            if weights:
                self.send_header('X-Linked-Etag', f'"{digest}"')
                self.send_header('X-Linked-Size', str(len(content)))
            if mode == 'wrong' and weights:
                content = content[::-1]
            if mode == 'html' and weights:
                content = b'<html>sign in</html>'
            self.send_header('Content-Length', str(len(content) - start))
            self.end_headers()
            cut = len(content) // 2 if mode == 'cut' and weights and body and state.pop('first', 0) else None
            body and self.wfile.write(content[start:cut])

        def do_GET(self):
            self.do_HEAD(True)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{server.server_port}')
    monkeypatch.setenv('HF_TOKEN', 'secret')
    for mode in 'fine', 'cut', 'token':
        state.update(mode=mode, first=1)
        root = str(tmp_path / mode)
        with torch.no_grad():
            model = convert.from_folder(convert.hub('me/one', 'main', root), 'me/one', {})
            near(model(tokens)[0], logits(tokens), 1e-5)
    assert len(list(Path(convert.hub('me/many', 'main', root)).glob('*.safetensors'))) == 2
    bad = {'wrong': 'sha256 is', 'html': 'bytes, not|HTML', '401': 'HF_TOKEN', '404': 'no such model'}
    for mode, why in bad.items():
        state['mode'] = mode
        with pytest.raises(ValueError, match=why):
            convert.hub('me/one', 'main', str(tmp_path / mode))
        assert not list((tmp_path / mode).rglob('*.safetensors'))
    server.shutdown()
    server.server_close()

@pytest.fixture
def teacher(text, tmp_path):
    return trained(text, tmp_path / 'teacher', '--rule=softmax', steps=30, eval_every=30)

@pytest.mark.parametrize('flags', [
    '--phi=hedgehog', '--phi=t2r --loss=next', '--rule=decay', '--rule=delta --distil=hidden',
    '--lora=2 --phi=t2r', '--rule=window --cache=6 --overflow=sum:hedgehog', '--layers=softmax,gla',
    '--rule=gated --distil=none'])
def test_conversion_recovers_and_says_how_much(flags, teacher, tmp_path, capsys):
    run = f'--from={teacher}', '--steps=4', '--distil_steps=8', '--eval_rows=4', f'--out={tmp_path / "c"}'
    assert convert.main([*run, *flags.split()]) == 0
    found = json.loads((tmp_path / 'c' / 'convert.json').read_text())
    names = [r['model'] for r in found['table']]
    assert names[:2] == ['teacher', 'swapped'] and names[-3] == 'fine-tuned' and names[-1].endswith('scratch')
    for r in found['table']:
        assert r['recovered'] == pytest.approx(found['table'][0]['perplexity'] / r['perplexity'])
    assert len(written(capsys, f'--init={tmp_path / "c" / "ckpt.safetensors"}', '--tokens=9')[1]) > 9
    given = load(teacher)[0].state_dict()                       # nothing of the teacher was touched
    assert all(torch.equal(x, given[n]) for n, x in convert.pretrained(teacher)[0].state_dict().items())
    if found['distil'] == 'ce':
        assert found['layers'] and all(r['KL to teacher'] > 0 for r in found['layers'])

@pytest.mark.parametrize('at', [3, 11, 15])
def test_stopped_conversion_goes_on_bit_for_bit(at, teacher, text, tmp_path, monkeypatch, capsys):
    """Stopped in stage 1, in stage 2 and in a control."""
    def run(name, *flags):
        code = convert.main([*flags, f'--out={tmp_path / name}'])
        tables = code == 0 and json.loads((tmp_path / name / 'convert.json').read_text())
        return code or [{**r, 'minutes': 0} for r in tables['table'] + tables['layers']]
    flags = [f'--from={teacher}', *'--steps=4 --distil_steps=8 --eval_rows=4 --eval_every=2 --seed=3'.split()]
    flags += '--lora=2 --phi=favor --layers=softmax,sum'.split() if at == 11 else []
    whole, rows, calls = run('whole', *flags), convert.rows, iter(range(at))

    def stop(*a):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return rows(*a)
    monkeypatch.setattr(convert, 'rows', stop)
    assert run('cut', *flags) == 130
    monkeypatch.setattr(convert, 'rows', rows)
    assert 'began' in refused(capsys, convert.main, '--resume', '--steps=5', f'--out={tmp_path / "cut"}')
    path = tmp_path / 'teacher' / 'ckpt.safetensors'
    kept, other = path.read_bytes(), trained(text, tmp_path / 'other', '--rule=softmax', steps=2)
    path.write_bytes(Path(other).read_bytes())
    assert 'the teacher is not' in refused(capsys, convert.main, '--resume', f'--out={tmp_path / "cut"}')
    path.write_bytes(kept)
    assert run('cut', '--resume') == whole
    assert 'was stopped' in refused(capsys, convert.main, '--resume', f'--out={tmp_path / "cut"}')
    a, b = (load(tmp_path / name / 'ckpt.safetensors')[0].state_dict() for name in ('whole', 'cut'))
    assert all(torch.equal(a[n], b[n]) for n in a)

def test_distilling_lowers_the_divergence_and_leaves_the_rest_alone(teacher, text):
    model = convert.pretrained(teacher)[0]
    before = {n: x.clone() for n, x in model.state_dict().items()}
    student, new = convert.swap(model, dict(rule='sum', phi='hedgehog'))
    assert all('phi.weight' in n for n in new) and len(new) == 2
    data = prepare.load(text)[0]
    args = convert.Args(distil_steps=30, batch_size=4)
    progress = convert.Progress(args)
    x = convert.rows(data, args, 16, 999, 'cpu')
    first = convert.fidelity(model, student, x)
    convert.distil(model, student, new, 'ce', lambda i: convert.rows(data, args, 16, i, 'cpu'), progress)
    for a, b in zip(first, convert.fidelity(model, student, x)):
        assert 0 < b['KL to teacher'] < .9 * a['KL to teacher']
    for n, y in student.state_dict().items():
        assert n in new or torch.equal(y, before[n])

def test_weights_of_attention_are_those_that_make_the_output():
    """Of softmax and of linear rules: they sum to 1, and times v they are the output."""
    x = torch.randn(1, 7, 16)
    for rule, phi in ('softmax', ''), ('sum', 'hedgehog'), ('gated', 'elu'), ('retention', 'elu'):
        norm = 'attn' if rule == 'retention' else ''
        c = Config(rule=rule, phi=phi, norm=norm, n_embd=16, n_head=2, n_layer=1)
        mixer = model_py.Mixer(c, rule)
        q, k, v = mixer.heads(x)
        a = convert.weights(mixer, x, q, k)
        near(a.sum(-1), torch.ones(1, 2, 7), 1e-5)
        near(a @ v, mixer.memory(x, q, k, v)[0], 1e-5)

def test_folding_t2r_is_an_identity():
    c = Config(rule='sum', phi='t2r', n_embd=16, n_head=2, n_layer=2, pos='learned')
    model, tokens = GPT(c).double(), torch.randint(256, (2, 9))
    for p in model.parameters():
        p.data.add_(.1 * torch.randn_like(p))
    near(convert.fold(model)(tokens)[0], model(tokens)[0], 1e-12)
    with pytest.raises(ValueError, match='no rope'):
        convert.fold(GPT(dataclasses.replace(c, pos='rope')))

def test_conversion_refuses(ckpt, teacher, text, tmp_path, capsys):
    err = lambda *flags: refused(capsys, convert.main, f'--out={tmp_path / "no"}', *flags)
    assert 'no softmax layers' in err(f'--from={ckpt}')
    assert 'none: take mse' in err(f'--from={teacher}', '--rule=delta', '--distil=ce')
    assert '--row' in err(f'--from={teacher}', f'--data={short(tmp_path)}')
    assert 'not in the tokens' in err(f'--from={teacher}', '--data=recall')
    assert '--fold' in err(f'--from={teacher}', '--phi=t2r', '--fold')
    few = trained(text, tmp_path / 'few', '--rule=window', steps=1)
    assert 'keep few rows' in err(f'--from={few}')
    assert not (tmp_path / 'no').exists()
    (tmp_path / 'no').touch()
    run = f'--from={teacher}', f'--out={tmp_path / "yes"}', '--steps=0', '--eval_rows=1'
    assert 'File exists' in refused(capsys, convert.main, *run, f'--export={tmp_path / "no"}')
    assert load(tmp_path / 'yes' / 'ckpt.safetensors')                 # what was trained is not lost

@pytest.mark.parametrize('part, change, why', [
    ('config', {}, ''), ('config', dict(layers='softmax,window'), 'no softmax model'),
    ('data', dict(row=9), 'no softmax model'), ('config', dict(newer=1), 'another version')])
def test_only_what_can_be_a_teacher_is_taken_for_one(part, change, why, teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors, meta = model_py.read(teacher)
    model_py.write('out/ckpt.safetensors', tensors, {**meta, part: {**meta[part], **change}})
    with pytest.raises(ValueError, match=why) if why else contextlib.nullcontext():
        assert convert.a_teacher(make=False) == 'out/ckpt.safetensors'

def short(tmp_path):
    path = tmp_path / 'short.txt'
    path.write_text('a few words\n' * 3)
    return path


# ---- the repository itself ---------------------------------------------------------------------------------

LAYER = dict(test_all=5, sample=4, train=3, convert=3, bench=4, model=2, kernels=1, fastweight=0, prepare=0,
             data=0)
BANNED = set('eval exec __import__ torch.load np.load os.system pickle marshal shelve dill'.split())

def sources():
    """Name and syntax tree of every file."""
    paths = [p for folder in (HERE, HERE / 'data') for p in sorted(folder.glob('*.py'))]
    trees = {p.stem: ast.parse(p.read_text()) for p in paths}
    assert {'fastweight', 'model', 'train', 'sample', 'prepare', 'test_all'} <= trees.keys()
    return trees.items()

def imported(n):
    """What a statement imports, as dotted names."""
    return [f'{n.module}.{a.name}' for a in n.names] if isinstance(n, ast.ImportFrom) else \
        [a.name for a in n.names] if isinstance(n, ast.Import) else []

def test_imports_only_point_down():
    for name, tree in sources():
        for other in (dotted.split('.')[0] for n in ast.walk(tree) for dotted in imported(n)):
            assert other not in LAYER or LAYER[other] < LAYER[name], f'{name} imports {other}'

def test_nothing_is_unpickled_or_evaluated():
    for name, tree in sources():
        for n in ast.walk(tree):
            used = [ast.unparse(n.func)] if isinstance(n, ast.Call) else imported(n)
            assert not BANNED & {*used, *(u.split('.')[0] for u in used)}, f'{name}: {used}'
            assert not (isinstance(n, ast.ExceptHandler) and n.type is None), f'{name}: bare except'

def test_public_functions_say_shapes_and_sources():
    for f in FORMS:
        wanted = 'q k v write erase log_f log_z S normalise'
        assert list(inspect.signature(f).parameters)[:9] == wanted.split()
    for word in '(B, H, T, K)', '(B, H, V, K)', 'LOG_MIN = -5', 'Schlag', 'ValueError':
        assert word in recurrent.__doc__
    assert '`recurrent`' in chunked.__doc__
    for f in fastweight.softmax, FastWeights, fastweight.score, fastweight.trimm:
        assert re.search(r'\((B|\.\.\.), ', f.__doc__), f
    for name, f in FEATURE_MAPS.items():
        assert not inspect.isclass(f) or re.search(r'20\d\d', f.__doc__), name

def test_readme_is_true_of_the_code():
    """Its tables are those of the dicts, its commands are accepted, the files it names exist."""
    text = (HERE / 'README.md').read_text()
    for row in [f'| `{name}` | {r.about} |' for name, r in RULES.items()]:
        assert row in text
    for name in (*FEATURE_MAPS, *NORMALISERS):
        assert f'`{name}`' in text, name
    suites = '|'.join(bench.SUITES)
    assert {*bench.SUITES} == {*SUITES, 'all'}
    command = (rf'(?:python|torchrun --\S+) (train|sample|bench|convert)\.py(?: (?:{suites})\b)?'
               r'((?: (?:"[^"]*"|[^\s"`|&>#)])+)*)')
    docs = (text, train.__doc__, sample.__doc__, bench.__doc__, convert.__doc__)
    found = re.findall(command, '\n'.join(docs))                       # to two blanks, # or |
    assert {script for script, _ in found} == {'train', 'sample', 'bench', 'convert'}
    for script, flags in found:
        classes = dict(train=(train.Args, Config), sample=(sample.Args, model_py.Swap),
                       bench=(bench.Args,),
                       convert=(convert.Args, convert.Student))[script]
        for given, c in zip(model_py.parse(shlex.split(flags), '', *classes), classes):
            c(**given)
    for path in re.findall(r'\]\(([\w./-]+)[)#]', text) + re.findall(r'[\w/]+\.py\b', text):
        assert (HERE / path).exists() or (HERE / 'data' / path).exists(), path
    wanted = re.search(r'pip install ([\w=. ]+) && python train.py', text)[1].split()
    pinned = (HERE / 'requirements.txt').read_text()
    assert all(re.search(rf'^{re.escape(w)}\b', pinned, re.M) for w in wanted)
