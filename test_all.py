"""What must be true of the code, without a GPU and a network; a test's name is the claim.

    pytest test_all.py                              one to four minutes on two cores
    SLOW=1 pytest test_all.py -k soak               resuming from every step, kernels for GPUs
    EXERCISE=1 pytest test_all.py -k exercise       the README's exercises: they fail until solved

Part one is what must be true of the definitions: section 1 is on the README's path. Then come the
exercises, and part two with all else, in the order of the floors and rooms that README names.
"""
import doctest
import math
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():   # before kernels is imported: its GPU kernels then run in plain numpy
    os.environ.setdefault('TRITON_INTERPRET', '1')
import caches
import fast.caches
import fast.chunks
import fastweight
import kernels
from caches import POLICIES
from fastweight import LOG_MIN, chunked, feature_map, l2, recurrent
from memory import FastWeights
from models import encoder

torch.set_num_threads(1)
f64 = torch.float64

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

def near(found, exact, tol=1e-10):
    """Equal but for rounding: within tol * max(1, largest entry of exact). Lists: item by item."""
    if not torch.is_tensor(exact):
        assert len(found) == len(exact)
        for one, other in zip(found, exact):
            near(one, other, tol)
    else:
        assert found.shape == exact.shape and found.isfinite().all() and exact.isfinite().all()
        if exact.numel():
            error = (found - exact).abs().max()
            assert error <= tol * max(1, exact.abs().max()), f'differ by {error:.1e}'

def in_parts(step, cuts, T, state=None):
    """Run step(start, end, state) -> o, state between the cuts -> all of o along time, and the last state"""
    o = []
    for start, end in zip([0, *cuts], [*cuts, T]):
        part, state = step(start, end, state)
        o.append(part)
    return torch.cat(o, 2), state


# ==== Part one: what must be true of the definitions ========================================================
# ---- 1. A matrix that is written and read ------------------------------------------------------------------

every_form = pytest.mark.parametrize('form', [recurrent, chunked, kernels.chunked],
                                     ids=['recurrent', 'chunked', 'kernels'])

def one_head(*steps):
    """Numbers or vectors, one a step (of S: one a row) -> (1, 1, T) or (1, 1, T, d)"""
    return torch.tensor(steps, dtype=f64)[None, None]

@every_form
def test_sum_accumulates_where_delta_overwrites(form):
    """k1 -> v1, k2 -> v2, then k1 -> v3. Keys are unit vectors: column i of S is what key i finds."""
    k = one_head([1, 0], [0, 1], [1, 0])
    v = one_head([1, 2], [3, 4], [5, 6])
    one = one_head(1, 1, 1)
    o, S = form(k, k, v)
    near(S, one_head([1 + 5, 3], [2 + 6, 4]))
    o, S = form(k, k, v, write=one, erase=one)
    near(S, one_head([5, 3], [6, 4]))
    near(o, v)                                  # a step reads after it has written, so it finds its own value

@every_form
def test_delta_keeps_what_gated_shrinks(form):
    """k2 -> (5, 6) with strength 1/2. Delta moves k2's value half the way to (5, 6) and leaves k1 alone. The
    gated rule (f = 1/2, w = 1 - f) also shrinks what k1 finds. Schlag 2021, appendix B."""
    S = one_head([1, 3], [2, 4])                # k1 -> (1, 2), k2 -> (3, 4)
    k, v, half = one_head([0, 1]), one_head([5, 6]), one_head(.5)
    near(form(k, k, v, write=half, erase=half, S=S)[1], one_head([1, 4], [2, 5]))
    near(form(k, k, v, write=half, log_f=half.log()[..., None], S=S)[1], one_head([.5, 4], [1, 5]))

def test_delta_learns_keys_that_are_alike():
    """Two keys at 60 degrees: written once, they disturb each other. Shown again and again, delta gets both
    right: each write is a step of gradient descent on |v - S k|^2 / 2."""
    k, v, one = one_head([1, 0], [.5, .75 ** .5]), one_head([1, 2], [3, 4]), one_head(1, 1)
    _, S = recurrent(k, k, v, write=one, erase=one)
    assert (k @ S.mT - v).abs().max() > 1
    for again in range(30):
        _, S = recurrent(k, k, v, write=one, erase=one, S=S)
    near(k @ S.mT, v)

def test_the_numbers_in_the_docstrings_are_true():
    """fastweight.py's worked examples."""
    failures, examples = doctest.testmod(fastweight)
    assert examples and not failures


# ---- 2. The equation, and its forms ------------------------------------------------------------------------

K, V = 6, 5                 # features of keys, of values: odd sizes, and not the same, on purpose
GATES = {           # f, z, w, e: channels of log_f, log_z, write, erase; erase=True: one number per head
    'sum': dict(w=None), 'attn': dict(normalise=True), 'attn, decays': dict(f='K', z=1, normalise=True),
    'head': dict(f=1), 'values': dict(z='V'), 'both': dict(f='K', z='V'), 'delta': dict(erase=True),
    'delta, head': dict(f=1, erase=True), 'delta, values': dict(z='V', erase=True),
    'delta, both': dict(f='K', z='V', erase=True), 'delta, heads': dict(f=1, z=1, erase=True),
    'delta, head and values': dict(f=1, z='V', erase=True), 'write': dict(w='V'), 'gdn2': dict(f='K', w='V', e='K'), 'all': dict(f='K', z='V', w='V', e='K'),
    'ones': dict(f=1, w=1, e=1)}
every_gate = pytest.mark.parametrize('gates', GATES.values(), ids=GATES)

def inputs(f=0, z=0, w=0, e=0, erase=False, normalise=False, T=13, K=K, V=V, dtype=f64):
    """-> arguments of a form at B = H = 2, with a state to start from; normalise: features are then >= 0. f, z,
    w, e: channels of log_f, log_z, write, erase; 0: none, but write then has one number per head"""
    sizes = {'K': K, 'V': V}

    def random(*shape):
        return torch.rand(2, 2, *[sizes.get(n, n) for n in shape], dtype=dtype)
    shift = 0 if normalise else 1 / 2
    given = dict(q=random(T, K) - shift, k=l2(random(T, K) - shift), v=random(T, V) - shift)
    given['S'] = random(V + normalise, K)
    if w is not None:
        given['write'] = random(T, w) if w else random(T)
    if erase or e:
        given['erase'] = 2 * random(T, e) if e else 2 * random(T)
    if f:
        given['log_f'] = -random(T, f)
    if z:
        given['log_z'] = -random(T, z)
    for name in {'log_f', 'log_z'} & given.keys():
        if given[name].shape[-1] == 1:
            given[name][:, :, 3::5] *= 28           # heads of trained models forget so fast
    return given, normalise

def with_gradients(form, given, normalise, **options):
    """o, S, and the gradients of one fixed function of both with respect to every input."""
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, S = form(**given, normalise=normalise, **options)
    weights = torch.linspace(-1, 1, o.numel()).view_as(o).to(o.device)
    mixture = (o * weights).sum() + S.square().sum() / 2
    return [o, S, *torch.autograd.grad(mixture, list(given.values()))]

def test_recurrent_is_the_equation():
    """D = (z f^T) * S, S = D + (w * v - D (e * k)) k^T, o = S q: entry by entry, for one head, however fast
    it forgets."""
    given, _ = inputs(f=K, z=V, w=V, e=K, T=3)
    given['log_f'][:, :, 1] = given['log_z'][:, :, 2] = 2 * LOG_MIN
    o, last = recurrent(**given)
    names = 'q', 'k', 'v', 'S', 'write', 'erase', 'log_f', 'log_z'
    q, k, v, S, w, e, log_f, log_z = [given[name][0, 0] for name in names]
    f, z = log_f.exp(), log_z.exp()
    for t in range(3):
        for i in range(V):
            for j in range(K):
                S[i, j] *= z[t, i] * f[t, j]
            found = sum(S[i, j] * e[t, j] * k[t, j] for j in range(K))
            for j in range(K):
                S[i, j] += (w[t, i] * v[t, i] - found) * k[t, j]
            near(o[0, 0, t, i], sum(S[i, j] * q[t, j] for j in range(K)))
    near(last[0, 0], S)

@every_gate
@pytest.mark.parametrize('features', [K, V - 1])        # more than channels of values, and fewer
def test_chunked_equals_recurrent_in_values_and_gradients(gates, features):
    for T, chunk in (1, 64), (13, 5), (75, 64):
        given, normalise = inputs(**gates, T=T, K=features)
        exact = with_gradients(recurrent, given, normalise)
        near(with_gradients(chunked, given, normalise, chunk=chunk), exact)
        near(with_gradients(kernels.chunked, given, normalise), exact)

@every_form
@every_gate
def test_cut_anywhere(gates, form):
    """Training, reading a prompt and writing word by word are one function, as long as S is handed on."""
    given, normalise = inputs(**gates)

    def cut(cuts, S, normalise, **rows):
        def step(start, end, S):
            return form(**{name: x[:, :, start:end] for name, x in rows.items()}, S=S, normalise=normalise)
        return in_parts(step, cuts, 13, S)
    whole = with_gradients(form, given, normalise)
    for cuts in [1], [6], [2, 3, 12], range(1, 13):
        near(with_gradients(cut, given, normalise, cuts=cuts), whole)
    start = given['S'].clone()
    with torch.no_grad():                       # then kernels.chunked uses another form for a single step
        near(cut(range(1, 13), **given, normalise=normalise), whole[:2], 1e-13)
    assert torch.equal(given['S'], start)       # the state that is given stays as it is

def test_in_chunks_a_channel_forgets_no_faster_than_log_min():
    given, _ = inputs(f=K, z=V, erase=True)
    given['log_f'][:, :, 1] = given['log_z'][:, :, 2] = -28
    bounded = {name: x.clamp(min=LOG_MIN) for name, x in given.items()}
    for form in chunked, kernels.chunked:
        near(form(**given), recurrent(**bounded))

@pytest.mark.parametrize('dtype, tol', [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize('log_decay', [0, -1e-6, -5, -28, -math.inf])
def test_extremes_are_finite_and_accurate(log_decay, dtype, tol):
    """Against fp64, with a zero key and a key that comes 60 times. With beta = 2 and no decay, each of its
    writes turns S k into 2 v - S k. Nothing is forgotten, so rounding errors add up in any form."""
    for gates, beta in ('attn, decays', 1), ('delta, head', 1), ('delta, both', 0), ('delta, both', 2):
        given, normalise = inputs(**GATES[gates], T=100, dtype=torch.float32)
        given['k'][:, :, 40:] = given['k'][:, :, 40:41]
        given['k'][:, :, 7] = 0
        for name, value in dict(write=beta, erase=beta, log_f=log_decay, log_z=log_decay).items():
            if name in given:
                given[name].fill_(value).clamp_(min=LOG_MIN if given[name].shape[-1] > 1 else -math.inf)
        rounded = {name: x if name == 'S' else x.to(dtype) for name, x in given.items()}
        exact = with_gradients(recurrent, {name: x.double() for name, x in rounded.items()}, normalise)
        for form in chunked, kernels.chunked:
            near(with_gradients(form, rounded, normalise), exact, max(tol, 5e-4) if beta == 2 else tol)


# ---- 3. What the rules have in common, and what they must not ----------------------------------------------

@every_form
def test_rules_contain_each_other(form):
    given, _ = inputs(f=1, erase=True)
    none, same = torch.zeros(2, 2, 13, 1, dtype=f64), given['log_f'].clamp_(min=LOG_MIN).expand(-1, -1, -1, K)

    def o(**changes):
        return form(**given | changes)[0]
    near(o(erase=None, log_f=none, log_z=none), o(erase=None, log_f=None))      # decay with f = z = 1: sum
    near(o(log_f=none), o(log_f=None))                          # gated_delta with f = 1: delta
    near(o(log_f=same), o())                                    # kda with equal channels: gated_delta
    write, erase = given['write'][..., None], given['erase'][..., None]
    equal = dict(write=write.expand(-1, -1, -1, V), erase=erase.expand(-1, -1, -1, K))
    near(o(log_f=same, **equal), o(log_f=same))                 # gdn2 with equal channels: kda
    near(o(write=write, erase=erase), o())

def weights(q, k, **gates):
    """How much of each value is in each output (B, H, T, T): outputs are linear in values, so let v be I."""
    T = k.shape[2]
    return recurrent(q, k, torch.eye(T, dtype=f64).expand(*k.shape[:2], T, T), **gates)[0]

def test_sum_is_linear_attention():
    """With weights q_t.k_s, which are made to sum to 1 by `normalise`. Katharopoulos 2020."""
    q, k, v = torch.rand(3, 1, 2, 9, 4, dtype=f64)
    A = (q @ k.mT).tril()
    near(weights(q, k), A)
    near(recurrent(q, k, v, normalise=True)[0], A / A.sum(-1, keepdim=True) @ v)

def test_normalise_is_refused_with_erase_as_erasing_makes_weights_negative():
    """Let all values be 1. The third key finds 2/3 of the first and 2/3 of the second. Delta takes away both,
    4/3, and adds 1, so it writes -1/3 to this key; a query for its third feature finds a third of that."""
    k = one_head([1, 0, 0], [0, 1, 0], [2 / 3, 2 / 3, 1 / 3])
    q = one_head([0, 0, 1]).expand(1, 1, 3, 3)
    one = one_head(1, 1, 1)
    A = weights(q, k, write=one, erase=one)[0, 0, 2]
    near(A, one_head(-2 / 9, -2 / 9, 1 / 3)[0, 0])
    n_q = recurrent(q, k, one[..., None], one, one)[0][0, 0, 2, 0]
    near(n_q, A.sum())                          # value channels do share a denominator: it is -1/9
    for form in recurrent, chunked, kernels.chunked, encoder.encoded:
        with pytest.raises(ValueError, match='erase'):
            form(q, k, k, write=one, erase=one, normalise=True)
        for gate in 'log_z', 'write':                           # where channels differ, none is shared
            with pytest.raises(ValueError, match=f'vector {gate}'):
                form(q, k, k, **{gate: -k}, normalise=True)


# ---- Write all, then read: each step sees the whole text ---------------------------------------------------

def read_from_both_sides(q, k, v, normalise, S=None, **gates):
    """The definition, step by step: o_t = S_t q_t + D_t q_t, S_t of the steps up to t, D_t of those behind t,
    the last one first, which has forgotten once more, but not been written to."""
    if normalise:
        v = F.pad(v, (0, 1), value=1.0)
    rows = dict(k=k, v=v, **gates)
    o = []
    for t in range(q.shape[2]):
        before = {name: x[:, :, :t + 1] for name, x in rows.items()}
        behind = {name: x[:, :, t + 1:].flip(2) for name, x in rows.items()}
        _, S_t = recurrent(before['k'], **before, S=S)
        D_t = 0
        if t + 1 < q.shape[2]:
            _, D_t = recurrent(behind['k'], **behind)
        if 'log_f' in gates:
            D_t = D_t * gates['log_f'][:, :, t, None].exp()
        if 'log_z' in gates:
            D_t = D_t * gates['log_z'][:, :, t, :, None].exp()
        o.append(fastweight.find(S_t + D_t, q[:, :, t]))
    return fastweight.finish(torch.stack(o, 2), normalise, fastweight.FLOOR, v.dtype), S_t

@every_gate
def test_an_encoder_reads_from_both_sides(gates):
    """In values and gradients; and padding is exact: a padded row is as the row without."""
    forms = recurrent, chunked, kernels.chunked
    for T in 1, 13:
        given, normalise = inputs(**gates, T=T)
        exact = with_gradients(read_from_both_sides, given, normalise)
        for form in forms:
            near(with_gradients(partial(encoder.encoded, form=form), given, normalise), exact)
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 9:] = False
    cut = {name: x if name == 'S' else x[:, :, :9] for name, x in given.items()}
    written = {name: x for name, x in given.items() if name != 'q'}
    for form in forms:
        o, S = encoder.encoded(**given, normalise=normalise, real=real, form=form)
        o_cut, S_cut = encoder.encoded(**cut, normalise=normalise, form=form)
        near([o[1, :, :9], S[1]], [o_cut[1], S_cut[1]])
        near(encoder.write_all(**written, normalise=normalise, form=form), exact[1])


def test_an_encoder_of_a_sum_is_attention_and_of_one_decay_looks_both_ways_alike():
    q, k, v = torch.rand(3, 1, 2, 9, 4, dtype=f64)
    A = q @ k.mT
    near(encoder.encoded(q, k, v, normalise=True)[0], A / A.sum(-1, keepdim=True) @ v)
    log_f = torch.tensor([-0.1, -0.5], dtype=f64).view(1, 2, 1, 1).expand(1, 2, 9, 1)
    t = torch.arange(9)
    A = A * ((t[:, None] - t).abs() * log_f[:, :, :1]).exp()
    near(encoder.encoded(q, k, v, log_f=log_f)[0], A @ v)


# ---- 4. Feature maps, by hand ------------------------------------------------------------------------------

def features(spec, *x):
    """phi of one vector."""
    return feature_map(spec, 1, len(x)).double()(one_head(x)).flatten().tolist()

def test_dpfp_by_hand():
    """x = (1, -2): r = relu(1, -2, -1, 2) = (1, 0, 0, 2), times its next (0, 0, 2, 1), the one after, ..."""
    assert features('dpfp', 1, -2) == [2, 0, 0, 0]
    assert features('dpfp:3', 1, -2) == [2, 0, 0, 0] + [0, 0, 0, 0] + [0, 0, 0, 2]
    assert features('dpfp:2', 1, 2, 3) == [0, 2, 6, 0, 0, 0] + [0, 0, 3, 0, 0, 0]

def test_maps_of_exponentials_by_hand():
    """At x = (0, ln 2) e^x is (1, 2), and e^-x is (1, 1/2)."""
    x = 0, math.log(2)
    assert features('elu', -50, 0, 3) == [math.exp(-50), 1, 4]                  # no 1 - 1 in the tail
    assert features('exp:2', *x) == pytest.approx([1, 4])
    assert features('hedgehog', *x) == pytest.approx([1 / 3, 2 / 3] + [2 / 3, 1 / 3])
    assert features('hedgehog:exp', *x) == pytest.approx([1 / 2, 1] + [1, 1 / 2])       # over the greatest
    assert features('hedgehog:paper', *x) == pytest.approx([1, 2])
    assert features('hedgehog:listing', *x) == pytest.approx([1, 2] + [1, 1 / 2])

def test_taylor_is_the_second_order_series_of_softmax():
    q, k = torch.randn(2, 1, 1, 50, 8, dtype=f64)
    phi, s = feature_map('taylor', 1, 8).double(), q @ k.mT / 8 ** .5
    near(phi(q) @ phi(k).mT, 1 + s + s ** 2 / 2)


# ---- 5. The other kind of state: a cache ------------------------------------------------------------------

BY_TOTAL = 'h2o h2o-layer mean mean-v'.split()
BY_HAND = 'window sink tova tova-sink tova-head random'.split() + BY_TOTAL

def by_the_book(policy, q, k, v, cache, sinks):
    """Oren 2024, algorithm 1, and its like, in lists. q (H, T, d), k, v (G, T, d): of H / G heads each -> o,
    what each of these groups keeps"""
    (H, T, d), G = q.shape, len(k)
    o, total, kept = torch.zeros_like(q), torch.zeros(G, T, dtype=f64), [[] for h in range(G)]

    def worth(i, h, t, a):
        """Of token i to group h, behind step t, whose attention is a; total: of all steps so far."""
        if policy not in BY_HAND:               # one of your own: its line is its book
            pos = torch.arange(T).expand(1, G, T)
            return POLICIES[policy](a[None], total[None], pos, v[None], t, cache, sinks)[0, h, i]
        if 'sink' in policy and i < sinks:
            return math.inf
        if policy in BY_TOTAL and i > t - cache // 2:
            return math.inf
        if policy in ('window', 'sink'):
            return i
        if policy == 'random':
            return (i * 40503 + t * 30011) % 65537
        if 'mean' in policy:
            length = v[h, i].square().sum().sqrt() if policy == 'mean-v' else 1
            return total[h, i] * length / (t - i + 1)
        seen = total if policy in BY_TOTAL else a
        return seen[h, i] if policy in ('h2o', 'tova-head') else seen[:, i].mean()
    for t in range(T):
        a = torch.zeros(G, T, dtype=f64)
        for h in range(G):
            kept[h].append(t)
        for head in range(H):
            h = head * G // H
            weights = (k[h, kept[h]] @ q[head, t] / d ** .5).softmax(0)
            a[h, kept[h]] += weights
            o[head, t] = weights @ v[h, kept[h]]
        total += a
        for h in range(G):
            worths = [worth(i, h, t, a) for i in kept[h]]
            if len(worths) > cache:
                kept[h].pop(worths.index(min(worths)))              # of several the first: the oldest
    return o, kept

def cached_in_parts(bounded, cuts, q, k, v, *how):
    """`bounded` from cut to cut -> o, the positions of the evicted tokens, the cache"""
    gone = []

    def step(start, end, cached):
        qkv = [x[:, :, start:end] for x in (q, k, v)]
        o, _, went, cached = bounded(*qkv, cached, start, *how)
        gone.append(went['pos'])
        return o, cached
    o, cached = in_parts(step, cuts, q.shape[2])
    return o, torch.cat(gone, 2), cached

@pytest.mark.parametrize('bounded', [caches.bounded, fast.caches.bounded], ids=['definition', 'fast'])
@pytest.mark.parametrize('policy', POLICIES)
def test_policies_agree_with_the_book_token_for_token(policy, bounded):
    """Cut anywhere, also where ties must be broken: a query of zeros looks at all tokens alike. Each is
    either still there or was handed out when it went. With room for all of them this is softmax."""
    q, k, v = torch.randn(1, 6, 21, 4, dtype=f64), *torch.randn(2, 1, 3, 21, 4, dtype=f64)
    q[:, :, 9:15] = 0
    for cache, sinks in (1, 0), (5, 2), (40, 4):
        o, kept = by_the_book(policy, q[0], k[0], v[0], cache, sinks)
        for cuts in [], [3, 4, 15], range(1, 21):
            found, gone, cached = cached_in_parts(bounded, cuts, q, k, v, policy, cache, sinks)
            near(found[0], o)
            assert [[i for i in sorted(head) if i >= 0] for head in cached['pos'][0].tolist()] == kept
            everything = torch.cat([gone, cached['pos']], 2)[0].sort().values  # -1: an empty slot
            assert (everything[:, cache:] == torch.arange(21)).all()
    near(o, caches.softmax(q, k, v)[0][0])

def test_a_cache_grows_as_by_cat_and_texts_that_share_a_beginning_do_not_meet():
    """Nothing that was returned changes, though later steps lie behind it, in one buffer."""
    kept = [[torch.randn(2, 3, 5, 4)] * 2]
    for i, T in enumerate([1, 1, 7, 1, 200, 1, 1]):
        mode = torch.inference_mode if i in (2, 5) else torch.no_grad
        found, exact = kept[-1]
        for new in torch.randn(3, 2, 3, T, 4):              # three texts go on from here
            with mode():
                kept.append((fast.caches.longer(found, new), caches.longer(exact, new)))
    assert all(torch.equal(found, exact) for found, exact in kept)
    with torch.no_grad():
        many = fast.caches.longer(found, new)
        assert fast.caches.longer(many, new).data_ptr() == many.data_ptr()       # not copied
        for x in many, many.clone():                            # neither is repeated for two texts
            with pytest.raises(RuntimeError, match='match except in dimension 2'):
                fast.caches.longer(x, new[:1])
    new.requires_grad_()
    one = fast.caches.longer(many, new)
    loss = one.square().sum()
    (loss + fast.caches.longer(one, new).square().sum()).backward()      # what was kept for this is as it was
    near(new.grad, 6 * new.detach())

def test_compressed_positions_shrink_long_gaps():
    """A gap g > 10 counts ceil(10 + ln ln(g - 10 + e)) (Oren 2024, the authors' code), rows in any order."""
    gaps = 1, 10, 11, 34, 10 ** 6
    pos = torch.tensor(gaps).cumsum(0)
    near(caches.compressed(pos[None, None]), torch.tensor([[[0, 10, 21, 33, 46]]]), 1e-6)
    mixed = caches.compressed(pos[None, None, [3, 0, 4, 2, 1]])
    near(mixed, torch.tensor([[[33, 0, 46, 21, 10]]]), 1e-6)
    near(caches.compressed(pos[None, None], 'log'), torch.tensor([[[0, 10, 21, 35, 59]]]), 1e-6)
    near(caches.compressed(pos[None, None], 'sqrt'), torch.tensor([[[0, 10, 21, 36, 1046]]]), 1e-6)


# ---- The bridge: the default model on one page -------------------------------------------------------------

def on_one_page(w, tokens, n_head=8, n_layer=4):
    """What `python train.py --rule=delta` trains, whole. w: its weights by name, tokens (B, T) -> logits (B, T, vocab).
    `recurrent` in place of `chunked` gives the same, a step at a time; S is the state that a next text would go on from.
    """
    def norm(x, gain):
        return F.layer_norm(x, x.shape[-1:], gain)

    def conv(x, taps):
        """Each channel sees its last inputs, weighted by taps (4, channels): the last tap is for its own step."""
        return sum(tap * F.pad(x, (0, 0, ago, 0))[:, :x.shape[1]] for ago, tap in enumerate(taps.flip(0)))

    def heads(x):
        return x.unflatten(-1, (n_head, -1)).transpose(1, 2)                    # (B, T, H d) -> (B, H, T, d)
    x = w['embed.weight'][tokens]                                               # a vector for each token
    for i in range(n_layer):
        b = {name.removeprefix(f'blocks.{i}.'): p for name, p in w.items()}     # the weights of block i
        # the mixer: each head writes v under k into its S, erases what k found there, and reads with q
        u = conv(norm(x, b['norm1.weight']), b['convs.0.weight'])               # like x, (B, T, 128)
        q, k, v = (heads(y) for y in (u @ b['mixer.qkv.weight'].T).chunk(3, -1))
        beta = 2 * (u @ b['mixer.memory.gates.proj.weight'].T).sigmoid().mT     # how strongly: --beta_max, (B, H, T)
        o, S = chunked(l2(F.silu(q)), l2(F.silu(k)), v, write=beta, erase=beta)         # (B, H, T, d), (B, H, d, d)
        o = norm(o, b['mixer.out_norm.weight']).transpose(1, 2).flatten(2)      # the heads side by side
        x = x + o @ b['mixer.proj.weight'].T
        # the MLP
        u = conv(norm(x, b['norm2.weight']), b['convs.1.weight'])
        x = x + (u @ b['up.weight'].T).relu() ** 2 @ b['down.weight'].T
    return norm(x, w['norm.weight']) @ w['embed.weight'].T                      # the output layer is the embedding

def test_the_default_model_fits_on_one_page(tmp_path):
    """Of a checkpoint with weights far from any special place: the logits of model.GPT, and no weight is left out."""
    from model import GPT, Config, load, save
    model = GPT(Config())
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    save(tmp_path / 'ckpt.safetensors', model, {})
    model, _ = load(tmp_path / 'ckpt.safetensors')
    tokens = torch.randint(256, (2, 70))
    w = {name: p.double().requires_grad_() for name, p in model.state_dict().items()}
    logits = on_one_page(w, tokens)
    near(logits, model.double()(tokens)[0])
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(logits.square().sum(), list(w.values())))


# ==== Exercises: skipped unless EXERCISE=1, red until solved; answers: assets/ANSWERS.md ====================

exercise = pytest.mark.skipif('EXERCISE' not in os.environ, reason='an exercise: run it with EXERCISE=1')

@exercise
def test_exercise_1_the_recurrence_from_memory():
    """Write recurrence(q, k, v, S, write, erase, log_f, log_z) -> o, S into exercise.py: the equation of README,
    a loop over the steps. f, z = e^log_f, e^log_z; q, k, log_f, erase (B, H, T, K), v, log_z, write (B, H, T, V),
    S (B, H, V, K), the state to begin from."""
    from exercise import recurrence
    given, _ = inputs(f=K, z=V, w=V, e=K)
    near(recurrence(**given), recurrent(**given))

@exercise
def test_exercise_2_breaks_sum_and_mends_it_by_one_gate():
    """Write into exercise.py: breaks() -> k (1, 1, T, 2), v (1, 1, T, 1), keys of length 1 which find, by `sum`,
    something else than the value they have just got; mends(k) -> {one gate of `recurrent`: a tensor}, by which any
    keys find theirs, and a key at a right angle keeps what it had."""
    from exercise import breaks, mends
    k, v = breaks()
    near(k.norm(dim=-1), torch.ones_like(k[..., 0]), 1e-6)
    assert (recurrent(k, k, v)[0] - v).abs().max() > 0.5
    for key, value in (k, v), (l2(torch.randn(2, 3, 9, 4)), torch.randn(2, 3, 9, 5)):
        gate = mends(key)
        assert len(gate) == 1 and gate.keys() <= {'write', 'erase', 'log_f', 'log_z'}
        near(recurrent(key, key, value, **gate)[0], value, 1e-5)
    k, v = torch.eye(2)[None, None], torch.randn(1, 1, 2, 3)
    near(recurrent(k, k, v, **mends(k))[1].mT, v, 1e-5)

@exercise
def test_exercise_3_erases_by_a_number_of_its_own():
    """Between kda and gdn2: RULES['two'] is kda, but how much a head writes and how much it erases are two
    numbers, each a gate of x."""
    layer = FastWeights('two', n_embd=8, n_head=2, head_dim=4)
    x, k, v = torch.randn(3, 7, 8), torch.randn(3, 2, 7, 4), torch.randn(3, 2, 7, 4)
    written = layer.to_write(x, k, v)
    assert written.keys() == {'k', 'v', 'write', 'erase', 'log_f'} and written['log_f'].shape == (3, 2, 7, 4)
    for gate in written['write'], written['erase']:
        assert gate.shape == (3, 2, 7, 1) and gate.min() > 0 and gate.max() < 1
    assert (written['write'] != written['erase']).all()
    same = FastWeights('kda', n_embd=8, n_head=2, head_dim=4).to_write(x, k, v)
    assert torch.equal(same['write'], same['erase'])                    # and kda is what it was

@exercise
def test_exercise_4_a_new_feature_map():
    """FEATURE_MAPS['relu2']: max(x, 0)^2 in each entry. It is >= 0, so that `attn` may divide by n.q."""
    assert features('relu2', -1, 2, 3) == [0, 4, 9]
    layer = FastWeights('sum', n_embd=8, n_head=2, head_dim=4, phi='relu2', norm='attn')
    ones = torch.ones(1, 2, 5, 4)
    o, _ = layer(torch.randn(1, 5, 8), ones, torch.rand(1, 2, 5, 4), ones)
    near(o, ones, 1e-6)                         # the mean of ones

class Operations(TorchDispatchMode):
    """Counts those that really run inside `with`, autograd's too."""
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **kwargs or {})

@exercise
def test_exercise_5_chunked_for_delta_with_one_decay_a_head():
    """Write chunked_delta(q, k, v, beta, log_f, S=None, chunk=16) -> o, S into exercise.py, from memory:
    `recurrent` with write = erase = beta, in matrix products. It has no loop over the steps of a chunk."""
    from exercise import chunked_delta
    given, _ = inputs(f=1, erase=True, T=37)
    given['log_f'][:, :, 9] = -28
    given['beta'] = given.pop('erase') / 2
    del given['write']

    def definition(q, k, v, S, log_f, beta, normalise):
        return recurrent(q, k, v, beta, beta, log_f, S=S)

    def yours(q, k, v, S, log_f, beta, normalise):
        return chunked_delta(q, k, v, beta, log_f, S)
    near(with_gradients(yours, given, False), with_gradients(definition, given, False))
    counts = []
    for chunk in 5, 10:
        first = {name: x[:, :, :chunk] for name, x in given.items() if name != 'S'}
        with Operations() as operations:
            chunked_delta(**first, chunk=chunk)
        counts.append(operations.count)
    assert counts[0] == counts[1]

@exercise
def test_exercise_6_the_rule_of_rwkv_7_is_two_writes():
    """RWKV-7 (Peng 2025, arXiv 2503.14456) erases at a key of its own: S_t = S (diag(w) - c (a * c)^T) + v k^T,
    o_t = S_t r, c of length 1, w and a between 0 and 1. Write rwkv7(r, log_w, k, v, c, a, form) -> o, S into
    exercise.py, by one call of `recurrent` or `chunked` with two steps a token."""
    from exercise import rwkv7
    r, k, c = torch.randn(3, 1, 2, 9, 4, dtype=f64)
    v, c, a = torch.randn(1, 2, 9, 3, dtype=f64), l2(c), 0.1 + 0.8 * torch.rand(1, 2, 9, 4, dtype=f64)
    log_w = -0.6 * torch.rand(1, 2, 9, 4, dtype=f64)
    S = torch.zeros(1, 2, 3, 4, dtype=f64)
    o = []
    for t in range(9):
        erased = fastweight.outer(fastweight.find(S, c[:, :, t]), a[:, :, t] * c[:, :, t])
        S = S * log_w[:, :, t, None].exp() - erased + fastweight.outer(v[:, :, t], k[:, :, t])
        o.append(fastweight.find(S, r[:, :, t]))
    for form in recurrent, chunked:
        near(rwkv7(r, log_w, k, v, c, a, form), [torch.stack(o, 2), S])

def weight_kept(policy):
    """Which share of its attention weights a cache of 6 tokens keeps, of a text in which all look at the 5 newest
    tokens, the first 8 tokens six times as much at the first 3, and from 14 on each fifth at token 9, with twice the
    weight of all the rest."""
    a = torch.ones(32, 32).tril() * torch.ones(32, 32).triu(-4)
    a[:8, :3] = 6 * torch.ones(8, 3).tril()
    a[14::5, 9] = 2 * a[14::5].sum(-1)
    a /= a.sum(-1, keepdim=True)
    key = torch.eye(32)[None, None]
    q = (a.clamp(min=1e-30).log() * 32 ** 0.5)[None, None]
    o, *_ = caches.bounded(q, key, key, None, 0, policy, 6)
    return (a * (o[0, 0] > 0)).sum(-1).mean().item()

@exercise
def test_exercise_7_a_policy_ahead_of_h2o():
    """POLICIES['mine'] in caches.py, one line: in `weight_kept` h2o has 0.78, window and tova 0.93, mean 0.97.
    What do they drop?"""
    assert weight_kept('mine') > 0.01 + max(weight_kept(policy) for policy in POLICIES if policy != 'mine')

@exercise
def test_exercise_8_the_layer_of_qwen_3_5():
    """Write qwen(x, w) -> (B, T, n_embd) into exercise.py, with `chunked`, for x (B, T, n_embd) and one head of
    width 4: w['qkv'] makes q, k, v; a causal convolution of each channel, w['conv'] (taps, the last is the
    step's own; channels), and silu; q and k to length 1, q / sqrt(4); gated_delta with beta = sigmoid(w['b'] x),
    log f = -e^A softplus(w['a'] x + w['dt']), A = w['A']; RMSNorm with w['norm'] and eps 1e-6; times
    silu(w['z'] x); then w['out']."""
    from exercise import qwen
    shapes = dict(qkv=(12, 8), conv=(4, 12), b=(1, 8), a=(1, 8), A=(), dt=(), norm=(4,), z=(4, 8), out=(8, 4))
    w = {name: torch.randn(shape) for name, shape in shapes.items()}
    config = pretrained.PretrainedConfig(rule='gated_delta', n_embd=8, n_head=1, head_dim=4, qkv_conv=4,
                                         phi='identity', beta_max=1, out_gate='silu', out_eps=4e-6)
    mixer = pretrained.PretrainedMixer(config, 'gated_delta')
    mixer.load_state_dict({
        'qkv.weight': w['qkv'], 'conv.weight': w['conv'], 'gate.weight': w['z'], 'proj.weight': w['out'],
        'memory.gates.proj.weight': torch.cat([w['b'], w['a']]), 'out_norm.weight': w['norm'],
        'memory.gates.log_rate': w['A'].view(1, 1, 1), 'memory.gates.bias_f': w['dt'].view(1, 1, 1)})
    x = torch.randn(2, 21, 8)
    with torch.no_grad():
        near(qwen(x, w), mixer(x)[0], 1e-5)


# ==== Part two: all the rest ================================================================================

import ast
import base64
import contextlib
import csv
import copy
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

import bench
import convert
import model as model_py
import sample
import train
import memory
import models
from common import errors, files, flags as flags_py, machine, weights as weights_py
from common.weights import pack
from data import chat, prepare, rows as data_rows_py, sources as sources_py, tasks, vocabulary, ways
from data.kinds import TRAVELS, Data
from data.rows import Rows, rows_of as made_rows
from data.sets import find_set
from fastweight import FEATURE_MAPS, NORMALISERS, RULES
from hub import folders, texts
from look import page as page_py, watch
from look.watch import through
from memory import pick_forms
from model import load, rope, save
from models import ablation, files as model_files, hybrid, pretrained, translator, writes
from papers import beyond, harness, oren, report, schlag, zhang
from papers.suites import Way
from runs import answers, log as log_py, processes, starts, talk
from students import begin, fold, judge, lora, stages

HERE = Path(__file__).resolve().parent

def built(**given):
    """A model of the first kind that has all of this in its Config"""
    cls = models.asked_for(given)
    return cls(cls.config_class(**given))

PLAIN_STATE = [name for name in RULES if not RULES[name].keeps]
VARIED = ['gated_delta', 'softmax', 'tova']     # one of each kind of state
slow = pytest.mark.skipif('SLOW' not in os.environ, reason='a soak of minutes: run it with SLOW=1')
gpu = pytest.mark.skipif(not kernels.triton, reason='Triton is not installed here')

@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network but this machine."""
    connect = socket.socket.connect

    def guarded(self, address):
        local = self.family == socket.AF_UNIX or address[0] in ('127.0.0.1', 'localhost', '::1')
        assert local, f'a test calls {address}'
        return connect(self, address)
    monkeypatch.setattr(socket.socket, 'connect', guarded)

@pytest.fixture(scope='session', autouse=True)
def prepared_data(tmp_path_factory):
    """Sets are prepared in a folder of the test's, once; the samples that end a training are short."""
    prepare.FOLDER = str(tmp_path_factory.mktemp('data'))
    train.SAMPLE = 5

def close(found, exact, tol=1e-10):
    """`near` for dicts: the same names, each with each."""
    assert found.keys() == exact.keys()
    near([found[name] for name in exact], list(exact.values()), tol)

TEXT = ''.join(f'line {i}: the quick brown fox jumps over {i * i} lazy dogs\n' for i in range(200))
TINY = '--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --device=cpu --threads=1'.split()
SHORT = '--steps=3 --distil_steps=4 --eval_rows=4 --batch_size=2'.split()

def put(folder, name, content):
    """The path of a file with this text."""
    path = folder / name
    path.write_text(content)
    return str(path)

@pytest.fixture(scope='session')
def text(tmp_path_factory):
    """The path of a small text."""
    return put(tmp_path_factory.mktemp('text'), 'text.txt', TEXT)

@pytest.fixture(scope='session')
def characters(text, prepared_data):
    """The same, prepared as characters: the bytes of an untrained model are none."""
    return prepare.prepare(text, tokenizer='char')

def trained(data, out, *flags, steps=4, eval_every=4):
    """Train; the path of the checkpoint it ends in."""
    run = [f'--data={data}', f'--out={out}', *TINY, f'--steps={steps}', f'--eval_every={eval_every}', *flags]
    assert train.main(run) == 0
    return os.path.join(out, 'ckpt.safetensors')

@pytest.fixture(scope='session')
def a_model(text, characters, tmp_path_factory):
    """a_model('--rule=kda', ...): a checkpoint that is trained once for all tests, and left as it is."""
    @functools.cache
    def get(*flags, data=text, steps=4):
        return trained(data, tmp_path_factory.mktemp('model'), *flags, steps=steps, eval_every=steps)
    return get

def log(out):
    return [json.loads(line) for line in (Path(out) / 'log.jsonl').read_text().splitlines()]

def refused(capsys, main, *argv):
    """Run a script that must refuse; its one line of complaint, after notes if any."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    *notes, err = capsys.readouterr().err.splitlines()
    assert err.startswith('error: ') and all(line.startswith('note: ') for line in notes), err
    return err

def written(capsys, *argv, main=sample.main):
    """What sample.py writes to stdout and to stderr."""
    capsys.readouterr()
    assert main(list(argv)) == 0
    return tuple(capsys.readouterr())

@pytest.fixture(scope='session')
def places(text, characters, threes, turned_around, few_words, a_model, tmp_path_factory):
    """What words in capitals stand for in tables of flags."""
    texts = tmp_path_factory.mktemp('texts')
    found = dict(TEXT=text, CHARACTERS=characters, THREES=threes, PAIRS=turned_around, WORDS=few_words)
    found.update({rule.upper(): a_model(f'--rule={rule}') for rule in ('softmax', 'gated_delta', 'window')})
    found.update({pos.upper(): a_model('--rule=softmax', f'--pos={pos}') for pos in ('rope', 'learned')})
    found['READER'] = a_model('--causal=false', data=threes)
    found['TRANSLATOR'] = a_model('--encoder=1', '--rule=softmax', data=turned_around)
    found['TALKER'] = a_model('--rule=softmax', data=characters)
    for name, content in dict(SCRAP='few words\n' * 3, FEW_WORDS='a b c d\n' * 999, EMPTY='').items():
        found[name] = put(texts, name, content)
    found['FOLDER'] = os.path.dirname(found['SOFTMAX'])
    found['LINK'] = str(texts / 'link.safetensors')
    os.symlink(found['SOFTMAX'], found['LINK'])
    return found

def filled(flag, places):
    return re.sub('[A-Z_]{4,}', lambda word: places[word[0]], flag)

def small(**flags):
    """A model in fp64 whose weights are far from any special place: nothing hides behind a zero."""
    sizes = dict(n_layer=2, n_head=2, n_embd=16, block_size=32)
    model = built(**sizes | flags).double().eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model

def model_in_parts(model, tokens, cuts):
    """Logits (B, T, vocab) from cut to cut, and the last state."""
    def of_part(start, end, state):
        logits, state = model(tokens[:, start:end], state)
        return logits.mT, state
    logits, state = in_parts(of_part, cuts, tokens.shape[1])
    return logits.mT, state

def in_order(cached, *more):
    """Positions, keys and values by their position: tokens lie where there was room."""
    order = cached['pos'].argsort(-1)
    taken = cached['pos'].take_along_dim(order, -1) >= 0
    found = []
    for name in ('pos', 'k', 'v', *more):
        x = cached[name]
        found.append(x.take_along_dim(order if x.dim() == 3 else order[..., None], 2)[taken])
    return found

def comparable(state):
    """A model's state as a flat dict, with rows in order."""
    layers = [dict(layer, mixer=dict(layer['mixer'])) for layer in state['layers']]
    for cached in [layer['mixer'] for layer in layers]:
        if cached.pop('total', None) is not None:
            cached['pos'], cached['k'], cached['v'] = in_order(cached)
    return {name: x.double() for name, x in pack({**state, 'layers': layers}).items()}

def same(a, b):
    a, b = weights_py.read_tensors(a)[0], weights_py.read_tensors(b)[0]
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

@torch.no_grad()
def costs(model, tokens):
    """Nats of each next token (B, T - 1), of whole rows at once."""
    return F.cross_entropy(model.eval()(tokens[:, :-1])[0].mT, tokens[:, 1:], reduction='none')


# ---- 6. fastweight.py and caches.py: what part one left out ------------------------------------------------

@pytest.mark.parametrize('name', FEATURE_MAPS)
def test_feature_map_has_its_shape_and_traits_and_mixes_nothing(name):
    """Neither rows nor heads nor steps; and evaluation is fixed."""
    phi = feature_map(name, 2, 4).double().eval()
    x = torch.randn(3, 2, 5, 4, dtype=f64)
    other = x.clone()
    other[1, 0, 2] = torch.randn(4)
    for side in 'k' if name == 'slots' else 'qk':            # a slot is read by the keys so far
        y = phi(x, side)
        assert y.shape == (3, 2, 5, phi.feature_dim) and y.isfinite().all()
        assert not phi.positive or y.min() >= 0
        assert (phi(other, side) != y).any(-1).nonzero().tolist() == [[1, 0, 2]]
        assert torch.equal(phi(x, side), y)
    if phi.mean and name not in ('rfa', 'slots'):             # whose estimate of a similarity >= 0 may be below
        assert (phi(x, 'q') @ phi(torch.randn_like(x), 'k').mT).min() >= 0

def test_maps_that_care_for_the_side_and_for_heads():
    """T2R with q / sqrt(d), the two maps of Hedgehog's listing. What is learned is learned by head."""
    x = torch.randn(1, 2, 5, 4, dtype=f64)
    scaled, plain = feature_map('t2r-scaled:3', 2, 4).double(), feature_map('t2r:3', 2, 4).double()
    plain.load_state_dict(scaled.state_dict())
    near(scaled(x, 'k'), plain(x, 'k'))
    near(scaled(x, 'q'), plain(x / 2, 'q'))
    near(plain(x, 'q')[0, 1], (x[0, 1] @ plain.weight[1].mT).relu())
    listing = feature_map('hedgehog:listing', 2, 4).double()
    near(listing(x, 'q'), listing(x, 'k'))
    listing.weight.data[1, 0] *= 2              # of keys, the first head
    differ = listing(x, 'k') != listing(x, 'q')
    assert differ[:, 0].all() and not differ[:, 1].any()

@pytest.mark.parametrize('name, sigma', [('favor', 0), ('rfa', 2)])
def test_random_features_are_unbiased(name, sigma):
    """The mean over redraws approaches the kernel, as 1 / sqrt(draws) must; and redrawing does draw."""
    q, k = .5 * torch.randn(2, 1, 1, 6, 8, dtype=f64)
    phi = feature_map(f'{name}:16', 1, 8).double().requires_grad_(False)
    if name == 'favor':
        kernel = (q @ k.mT / 8 ** .5).exp()
    else:                                       # Gaussian, of another width in each channel
        phi.sigma *= torch.linspace(1, sigma, 8, dtype=f64)
        kernel = (-torch.cdist(l2(q) * phi.sigma, l2(k) * phi.sigma) ** 2 / 2).exp()
    draws = []
    for _ in range(1000):
        phi.redraw()
        draws.append(phi(q, 'q') @ phi(k, 'k').mT)
    draws = torch.stack(draws)
    z = (draws.mean(0) - kernel) / (draws.std(0) / len(draws) ** .5)
    assert z.abs().max() < 4.5 and draws.std(0).min() > 0
    assert phi.feature_dim == 32                            # two a draw, as in table 6 of Schlag
    R = phi.R[:8]
    near(R @ R.mT, torch.diag((R ** 2).sum(-1)), 1e-5)      # orthogonal

def test_cosformer_weighs_by_the_cosine_of_the_distance():
    q, k = torch.randn(2, 1, 1, 8, 4, dtype=f64)
    phi = feature_map('cosformer:8', 1, 4)
    t = torch.arange(8, dtype=f64)
    cosine = torch.cos(math.pi / 16 * (t[:, None] - t))
    near(phi(q, 'q') @ phi(k, 'k').mT, q.relu() @ k.relu().mT * cosine)
    near(phi(q[:, :, 3:], 'q', 3), phi(q, 'q')[:, :, 3:])
    with pytest.raises(ValueError, match='up to 8'):
        phi(q, 'q', 1)

def test_slots_begin_as_clusters_of_the_keys():
    """Three heaps of keys, and the first token apart from them."""
    which = F.pad(torch.randint(1, 4, (80,)), (1, 0))
    k = 9 * torch.eye(4)[which] + .1 * torch.randn(1, 1, 81, 4)
    phi = feature_map('slots:4', 1, 4)
    found = []
    for seed in range(9):                       # k-means may end in a poorer place
        torch.manual_seed(seed)
        phi.begin(k)
        slots = phi(k, 'k')[0, 0].argmax(-1)
        assert slots[0] == 0
        found.append(len({*zip(which.tolist(), slots.tolist())}) == len(set(slots.tolist())) == 4)
    assert any(found)
    phi.begin(k[:, :, :3])                      # fewer keys than slots
    assert phi(k, 'k').isfinite().all()

@every_form
def test_the_state_is_fp32_whatever_the_inputs(form):
    ones = torch.ones(1, 1, 300, 1, dtype=torch.bfloat16)
    o, S = form(ones, ones, ones)
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    assert S.item() == 300                      # a sum in bf16 stops at 256

@every_form
def test_autocast_leaves_the_recurrence_alone(form):
    """As in a model of one's own: forward inside, backward outside."""
    q, k, v, write, erase = torch.randn(5, 1, 2, 40, 8).sigmoid() / 8
    grads = []
    for on in False, True:
        leaf = k.clone().requires_grad_()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=on):
            o, S = form(q, leaf, v, write=write, erase=erase)
        assert S.dtype == o.dtype == torch.float32
        grads.append([o, S, *torch.autograd.grad(o.sum() + S.sum(), leaf)])
    near(*grads, 1e-6)

def test_the_rule_of_rwkv_7_is_two_writes_a_token(monkeypatch):
    """The first, with the key a c, forgets and erases what S_{t-1} has for c, the second adds v for k: this
    solves exercise 6."""
    def rwkv7(r, log_w, k, v, c, a, form):
        at = partial(writes.spread, n=2)
        o, S = form(at(r, i=1), at(a * c, i=0) + at(k, i=1), at(v, i=1), erase=at(1 / (a * log_w.exp()), i=0),
                    log_f=at(log_w, i=0))
        return o[:, :, 1::2], S
    monkeypatch.setitem(sys.modules, 'exercise', Mock(rwkv7=rwkv7))
    test_exercise_6_the_rule_of_rwkv_7_is_two_writes()

def test_the_rule_of_comba_is_a_gated_delta_of_two_strengths():
    """S_t = S_{t-1} (a - b beta k k^T) + beta v k^T, o_t = S_t (q - d k), |k| = 1, numbers a, b, d. Hu 2025,
    arXiv:2506.02475. It erases from S_{t-1} before it forgets, so our erase is b beta / a."""
    (q, k), v = torch.randn(2, 2, 3, 13, 6, dtype=f64), torch.randn(2, 3, 13, 5, dtype=f64)
    a, beta = torch.randn(2, 2, 3, 13, 1, dtype=f64).sigmoid()
    k, b, d = l2(k), .6, .3
    S, o = torch.zeros(2, 3, 5, 6, dtype=f64), []
    for t in range(13):
        keep = a[:, :, t, None] * torch.eye(6, dtype=f64)
        S = S @ (keep - b * beta[:, :, t, None] * k[:, :, t, :, None] * k[:, :, t, None])
        S = S + beta[:, :, t, None] * v[:, :, t, :, None] * k[:, :, t, None]
        o.append((S @ (q - d * k)[:, :, t, :, None])[..., 0])
    for form in recurrent, chunked:
        near(form(q - d * k, k, v, beta, b * beta / a, a.log()), [torch.stack(o, 2), S])

def test_rows_that_go_first_are_a_shorter_window_and_turned_keys_are_those_of_rope():
    q, k, v = torch.randn(3, 1, 2, 11, 4, dtype=f64)
    first = caches.bounded(q, k, v, None, 0, 'window', 4, 0, True)
    near(first[:2], caches.bounded(q, k, v, None, 0, 'window', 3)[:2])
    near(first[1][:, :, 10:], (q[:, :, 10:] @ k[:, :, 7:].mT / 2).logsumexp(-1, keepdim=True))
    t = torch.arange(11)
    wanted = caches.softmax(rope(q, t), rope(k, t), v)[0]
    nearer = partial(caches.rotate_nearer, rope=rope, positions='compress')
    found = caches.bounded(q, k, v, None, 0, 'sink', 11, 2, rotate=nearer)[0]
    near(found, wanted, 1e-5)                   # angles are fp32


# ---- 7. fast/ and kernels.py: the same, faster -------------------------------------------------------------

@pytest.mark.parametrize('policy', POLICIES)
def test_fast_caches_equal_the_definition_in_all_they_return(policy):
    """With a prompt, then steps; with tokens evicted before a step reads, and keys that are rotated."""
    q, k, v = torch.randn(2, 6, 17, 4, dtype=f64), *torch.randn(2, 2, 3, 17, 4, dtype=f64)
    q[:, :, 6:9] = 0                            # ties
    totals = ['total'] if policy in BY_TOTAL else []             # which nobody else asks for
    nearer = partial(caches.rotate_nearer, rope=rope, positions='compress')
    for cache, spill, rotate, t in [
            (5, False, None, 0), (5, True, None, 0), (4, False, nearer, 0), (4, True, nearer, 0), (20, False, None, 0),
            (5, False, None, 1), (5, True, None, 9), (3, False, nearer, 9)]:
        cached = cached2 = None
        tol = 1e-6 if rotate else 1e-10               # angles are fp32: those of other positions are rounded otherwise
        for start, end in (0, 1), (1, 9), (9, 10), (10, 17):
            qkv = [x[:, :, start:end] for x in (q, k, v)]
            how = t + start, policy, cache, 2, spill, rotate
            o, mass, went, cached = caches.bounded(*qkv, cached, *how)
            o2, mass2, went2, cached2 = fast.caches.bounded(*qkv, cached2, *how)
            there = went['pos'] >= 0
            assert torch.equal(went2['pos'], went['pos'])
            near([o2, mass2], [o, mass], tol)
            near([went2[name][there] for name in 'kv'], [went[name][there] for name in 'kv'])
            near(in_order(cached2, *totals), in_order(cached, *totals), tol)

@every_gate
def test_a_long_text_in_segments_is_the_same(gates, monkeypatch):
    """Values and gradients, where the last segment alone keeps what the backward needs, the last one is
    short, and S comes from an earlier call. Through a checkpoint bit for bit. The backward keeps tensors nowhere
    else than autograd does, or a checkpoint would save nothing."""
    monkeypatch.setattr(fast.chunks, 'NUMBERS', 1)                      # so that a segment has 64 steps
    monkeypatch.setattr(fast.chunks, 'KEPT_SEGMENTS', 1)
    forward = Mock(wraps=fast.chunks.forward_of)
    monkeypatch.setattr(fast.chunks, 'forward_of', forward)
    given, normalise = inputs(**gates, T=150)
    found = with_gradients(kernels.chunked, given, normalise)
    near(found, with_gradients(chunked, given, normalise), 1e-9)
    shapes = [call.args[1].shape for call in forward.call_args_list]
    assert [shape[1] * shape[2] for shape in shapes] == [64, 64, 32, 64, 64]

    def again(**given):
        return checkpoint(kernels.chunked, use_reentrant=False, **given)
    near(with_gradients(again, given, normalise), found, 0)
    _, S = kernels.chunked(**{name: x.requires_grad_() for name, x in given.items()}, normalise=normalise)
    node, _ = S.grad_fn.next_functions[0]
    assert vars(node).keys() == {'segments', 'C'}

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'         # there, kernels run in Triton's interpreter
KERNELS = 'inverse_kernel', 'forward_kernel', 'backward_states_kernel', 'backward_inputs_kernel'

def launch_by(monkeypatch, instead):
    """Each launch of a Triton kernel is instead(kernel, grid, *args, **fixed)."""
    for name in KERNELS:
        stand_in = MagicMock()
        stand_in.__getitem__.side_effect = partial(partial, instead, getattr(kernels, name))
        monkeypatch.setattr(kernels, name, stand_in)

tl = kernels.tl             # by this name kernels look for it

@kernels.jit
def passing_of_channels(inside, out):
    """kernels.passing, but no sum over channels may be scanned: Triton 3.6 cannot."""
    tl.static_assert(inside.shape[1] > 1)
    return tl.cumsum(inside, 0, reverse=True) + tl.cumsum(out, 0) - out

@gpu
@pytest.mark.parametrize('gates', ['sum', 'attn, decays', 'both', 'delta, heads', 'all'])
def test_triton_kernels_equal_recurrent(gates, monkeypatch):
    """Values and gradients over two chunks and several blocks of value channels. All on the device of the
    tensors: Triton takes the current one, which need not be that of --device=cuda:1."""
    given, normalise = inputs(**GATES[gates], T=21, V=35)
    given = {name: x[:1] for name, x in given.items()}
    fp32 = {name: x.float().to(DEVICE) for name, x in given.items()}
    device_of, names = MagicMock(), []
    monkeypatch.setattr(torch.cuda, 'device_of', device_of)

    def watched(kernel, grid, *args, **fixed):
        names.append(kernel.fn.__name__)
        within = device_of.return_value
        assert within.__enter__.call_count == within.__exit__.call_count + 1
        assert device_of.call_args.args[0].device.type == DEVICE
        return kernel[grid](*args, **fixed)
    launch_by(monkeypatch, watched)
    monkeypatch.setattr(kernels, 'passing', passing_of_channels)
    found = [x.cpu().double() for x in with_gradients(kernels.on_gpu, fp32, normalise)]
    near(found, with_gradients(recurrent, given, normalise), 1e-5)
    assert names == [name for name in KERNELS if name != 'inverse_kernel' or 'erase' in given]

@kernels.jit
def rounded(x, DT: tl.constexpr):
    """x as bf16 has it, in fp32: the interpreter's own bf16 would compute with the bits."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.to(tl.float32, bitcast=True)

@kernels.jit
def dot_of_rounded(a, b, DT: tl.constexpr):
    return tl.dot(rounded(a, DT), rounded(b, DT))

@kernels.jit
def store_rounded(p, x, row, col, ok, D: tl.constexpr):
    """kernels.store_tile, to the nearest as a GPU does: the interpreter cuts off."""
    if p.dtype.element_ty == tl.bfloat16:
        x = rounded(x, tl.bfloat16)
    inside = ok[:, None] & (col < D)[None, :]
    tl.store(p + row[:, None] * D + col[None, :], x.to(p.dtype.element_ty), inside)

@gpu
@pytest.mark.filterwarnings('ignore:.* encountered in matmul')       # above the diagonal: masked
@pytest.mark.parametrize('gates', ['attn, decays', 'delta, head', 'all'])
def test_triton_gradients_of_strong_decays_in_bf16(gates, monkeypatch):
    """Log-decays all over [-5, 0], where what is written and read in the same step is nearly everything, and
    no gate sees it; both decays of a head are together twice as strong. In the interpreter the operands of
    products are rounded. pytest -s prints the table."""
    if DEVICE == 'cpu':
        monkeypatch.setattr(kernels, 'operand', rounded)
        monkeypatch.setattr(kernels, 'dot', dot_of_rounded)
        monkeypatch.setattr(kernels, 'store_tile', store_rounded)
    given, normalise = inputs(**GATES[gates], T=40, K=64, V=64)
    times = dict(log_f=5, log_z=5, erase=1 / 2, q=3)
    given = {name: x[:1, :1] * times.get(name, 1) for name, x in given.items()}
    if normalise:
        given['v'] += 4                         # a mean moves with its values
    low = {name: x.to(torch.bfloat16) if name in 'qkv' else x.float() for name, x in given.items()}
    do = torch.randn(low['v'].shape).to(torch.bfloat16)

    def all_of(form, given):
        given = {name: x.requires_grad_() for name, x in given.items()}
        o, S = form(**given, normalise=normalise)
        return o, S, *torch.autograd.grad((o * do.to(o)).sum() + S.sum(), list(given.values()))
    exact = all_of(recurrent, {name: x.double() for name, x in low.items()})
    found = all_of(kernels.on_gpu, {name: x.to(DEVICE) for name, x in low.items()})
    limits = dict(o=5e-3, log_f=1.5e-2, log_z=3e-2)
    for name, x, y in zip(['o', 'last S', *given], found, exact):
        error = ((x.cpu() - y).norm() / y.norm()).item()
        print(f'{gates} | {name} {error:.1e}')
        assert error <= limits.get(name, 2e-2), f'{name}: {error:.1e}'

@gpu
def test_triton_sums_in_fp16_stay_finite(monkeypatch):
    """fp16 ends at 65,504: states and the sum of the keys pass that, and so may operands."""
    ones = torch.ones(1, 1, 20, 4, dtype=torch.float16, device=DEVICE)
    S = torch.full((1, 1, 5, 4), 1e6, device=DEVICE)
    near(kernels.on_gpu(ones, ones, ones, S=S, normalise=True)[0], ones)
    apply = Mock(return_value=(ones, S))
    monkeypatch.setattr(kernels.Tiles, 'apply', apply)
    kernels.on_gpu(ones, ones, ones)
    q, k, v, *_ = apply.call_args.args
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    monkeypatch.setattr(kernels.triton.knobs.runtime, 'interpret', False)
    assert kernels.tiles(q, v, None, None, None, None)['DT'] == kernels.tl.bfloat16

def resources(cases):
    """What the compiler makes of each kernel, in bf16: for each case, a GPU, a width of the heads and gates, rows
    of name, bytes of shared memory. Not where TRITON_INTERPRET is 1."""
    from triton.backends.compiler import GPUTarget
    found = []

    def compiled(kernel, grid, *args, **fixed):
        made = kernel.warmup(*args, grid=grid, **fixed)
        found[-1].append((kernel.fn.__name__, made.metadata.shared))
    launch_by(pytest.MonkeyPatch(), compiled)
    for target, width, gates in cases:
        driver = Mock(**{'get_current_target.return_value': GPUTarget('cuda', target, 32)})
        kernels.triton.runtime.driver.set_active(driver)
        found.append([])
        given, _ = inputs(**gates, erase=True, K=width, V=width, dtype=torch.float32)
        given.update({name: given[name].bfloat16() for name in 'qkv'})
        with_gradients(kernels.on_gpu, given, False)
    return found

KILOBYTES = {80: 163, 89: 99, 90: 227}      # of shared memory: of an A100, an RTX 4090 and an H100
COMPILED = [        # the GPU, the width of the heads, gates
    (90, 64, dict(f='K', z='V')), (90, 256, dict(f='K', w='V', e='K')), (80, 256, {}),
    (89, 128, dict(f='K', w='V', e='K'))]

@gpu
@slow
def test_soak_triton_kernels_compile_for_gpus_that_are_not_here(monkeypatch):
    """In a process that does not interpret them; shared memory stays within what there is."""
    if not Path(kernels.triton.__file__).with_name('backends').joinpath('nvidia/bin/ptxas').exists():
        pytest.skip("this Triton comes without NVIDIA's compiler")
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        found = pool.apply(resources, [COMPILED])
    for (target, *_), rows in zip(COMPILED, found):
        assert [name for name, _ in rows] == [*KERNELS]
        assert all(shared <= 1024 * KILOBYTES[target] for _, shared in rows), rows

def unwritten(**given):
    o, S = chunked(**given)
    return torch.cat([torch.empty_like(o[:, :, :1]), o[:, :, 1:]], 2), S

def blind(gate, **given):
    o, S = chunked(**{**given, gate: None})
    return o + 0 * sum(x.sum() for x in given.values() if torch.is_tensor(x)), S

@gpu
def test_a_wrong_triton_kernel_is_found_out(capsys):
    """On every machine and for every kind of arguments, before it is used, and that is said once. The gradient
    of S arrives transposed."""
    given, normalise = inputs(f=K, z=V, erase=True, dtype=torch.float32)
    given = {name: x.to(DEVICE) for name, x in given.items()}
    faults = {unwritten: 'differ', Mock(side_effect=ZeroDivisionError): 'ZeroDivisionError'}
    faults |= {partial(blind, gate): 'differ' for gate in ('log_f', 'log_z', 'erase', 'S')}
    for form, fault in faults.items():
        assert not kernels.trusted(form, given, normalise)
        assert fault in capsys.readouterr().err, form
        assert not kernels.trusted(form, given, normalise)
    assert kernels.trusted(chunked, given, normalise)
    fewer = {name: given[name] for name in 'qkvS'}
    with torch.autocast(DEVICE, torch.bfloat16), torch.inference_mode():
        assert kernels.trusted(kernels.on_gpu, fewer, normalise)
    wide = {name: torch.empty(1, 1, 1, 64, device=DEVICE) for name in 'qkv'}    # longer keys: delta overflows
    wide.update({name: torch.empty(1, 1, 1, device=DEVICE) for name in ('write', 'erase')})
    assert kernels.trusted(chunked, wide, False)
    assert capsys.readouterr().err == ''

def test_the_check_of_a_kernel_knows_what_is_rounded_and_what_cancels():
    """The gradient of a gate in bf16 is in bf16. In one head all numbers may be near 0, or large."""
    given, _ = inputs(dtype=torch.float32)
    given['write'] = given['write'].bfloat16()
    assert kernels.trusted(chunked, given, False)

    def inexact(times, more, **given):
        o, S = recurrent(**given)
        return times * o + more, S
    for quiet, small in (slice(0, 1), True), (slice(0, 4, 2), False):           # one of its kind, and all
        x = {name: torch.rand(1, 4, 5, 3) for name in 'qkv'}
        x['S'] = torch.rand(1, 4, 3, 3)
        for name in 'vS':
            x[name][:, quiet] *= 1e-6
        assert (kernels.largest_error(partial(inexact, 1, 1e-4), x, False) < 1e-2) == small
    x = {name: torch.rand(1, 16, 5, 3) for name in 'qkv'}
    x['v'][:, 0] *= 1e6                             # as far off as the others, for its size
    assert kernels.largest_error(partial(inexact, 1.001, 0), x, False) < 3e-3

@gpu
def test_what_no_triton_kernel_takes_is_said_once(monkeypatch, capsys):
    """More features than fit. A moment without memory is no such reason: the next call asks again."""
    given, normalise = inputs(dtype=torch.float32)
    given = {name: x.to(DEVICE) for name, x in given.items()}
    for features, dtype in (kernels.MAX_K // 2 + 1, torch.float32), (kernels.MAX_K + 1, torch.bfloat16):
        wide = {**given, **dict.fromkeys('qk', torch.randn(1, 1, 3, features, device=DEVICE))}
        wide['v'] = given['v'].to(dtype)
        for again in range(2):
            assert not kernels.trusted(kernels.on_gpu, wide, False)
        assert capsys.readouterr().err.count(f'{features} features') == 1
    tiles = Mock(side_effect=torch.OutOfMemoryError('CUDA out of memory'))
    monkeypatch.setattr(kernels, 'tiles', tiles)
    for again in range(2):
        assert not kernels.trusted(kernels.on_gpu, given, normalise)
    assert tiles.call_count == 2
    assert capsys.readouterr().err == ''


# ---- 8. memory.py and model.py: layers and models of any rule, map and normaliser --------------------------

PAPER = dict(    # the gates of each rule; * by channel
    sum='', gated='write log_f', delta='write erase', decay='log_f* log_z*', retention='log_f', gla='log_f*',
    mamba2='write log_f', gated_delta='write erase log_f', kda='write erase log_f*',
    gdn2='write* erase* log_f*')

@pytest.mark.parametrize('rule', PAPER)
def test_rules_have_the_gates_of_their_papers(rule):
    layer = FastWeights(rule, 8, 2, 4, phi='elu', norm='l2')
    gates = layer.gates(torch.randn(1, 3, 8))
    found = {name + '*' * (x.shape[-1] == 4) for name, x in gates.items()}
    assert found == set(PAPER[rule].split())
    for name, x in layer.gates(1e3 * torch.randn(1, 99, 8)).items():        # else chunks would not equal steps
        assert name + '*' not in found or not name.startswith('log') or x.min() == LOG_MIN
    if rule == 'gated':
        near(gates['write'], 1 - gates['log_f'].exp(), 1e-6)
    elif rule == 'mamba2':                      # g = exp(-A dt), w = dt, here with A = 1
        near(gates['write'], -gates['log_f'], 1e-6)
    elif 'erase' in gates:
        assert torch.equal(gates['erase'], gates['write']) == (rule != 'gdn2')

def test_gates_start_where_the_docstring_says():
    """Memory lengths from 4 to 512 steps, log-uniform over heads or channels; RetNet's are 2^5, 2^6, ..."""
    spread = torch.tensor([4 * 128 ** (i / 7) for i in range(8)])
    for rule in 'gated', 'gla', 'gated_delta', 'kda', 'decay':
        gates = FastWeights(rule, 16, 8, 8).gates
        torch.nn.init.zeros_(gates.proj.weight)
        for name, x in gates(torch.randn(1, 1, 16)).items():
            if name[:3] == 'log':
                tau = 1 / -torch.expm1(x[0, :, 0])
                rows = tau.mT if RULES[rule].f == 'head' else tau          # (1 or heads, 8)
                assert torch.allclose(rows.sort(-1).values, spread.expand_as(rows), rtol=1e-3)
    log_f = FastWeights('retention', 16, 4, 8).gates(torch.randn(1, 1, 16))['log_f']
    near(1 - log_f.exp().flatten(), .5 ** torch.tensor([5., 6, 7, 8]), 1e-4)

@pytest.mark.parametrize('rule, phi', [('sum', 'favor'), ('gated', 'rfa')])
def test_random_features_are_redrawn_in_training_only_where_batches_may_share_a_backward(rule, phi):
    layer, x = FastWeights(rule, 8, 2, 4, phi), torch.randn(1, 5, 8)
    q, k, v = torch.randn(3, 1, 2, 5, 4, requires_grad=True)
    torch.manual_seed(0)
    one, other = layer(x, q, k, v)[0], layer(x, q, k, v)[0]
    assert not torch.equal(one, other)
    together = torch.autograd.grad((one + other).sum(), q)[0]
    torch.manual_seed(0)
    one_by_one = sum(torch.autograd.grad(layer(x, q, k, v)[0].sum(), q)[0] for _ in range(2))
    near(together, one_by_one, 1e-5)                                            # fp32
    layer.eval()
    assert torch.equal(layer(x, q, k, v)[0], layer(x, q, k, v)[0])

@pytest.mark.parametrize('phi', ['slots:3', 't2r'])
def test_heads_that_share_keys_share_a_matrix(phi):
    """Its map and its gates; so each reads what it would read alone. Heads 0, 1, 2 share one, 3, 4, 5 another."""
    layer = hybrid.Slotted('gla-beta', 8, 2, 4, phi, gate_rank=2).double().eval()
    assert layer.gates.narrow.weight.shape == (2, 8)
    x, q = torch.randn(2, 9, 8, dtype=f64), torch.randn(2, 6, 9, 4, dtype=f64)
    k, v = torch.randn(2, 2, 2, 9, 4, dtype=f64)
    o, shared = layer(x, q, k, v)
    for h in range(3):
        alone, own = layer(x, q[:, h::3], k, v)
        near([o[:, h::3], shared['S']], [alone, own['S']])

@pytest.mark.parametrize('t', [5, 10 ** 6, 10 ** 8])
def test_rope_depends_on_the_distance_alone_at_any_position(t):
    """And turns by t w_i, as by hand in fp64."""
    q, k = torch.randn(2, 1, 1, 1, 8)
    rotated = [rope(x, t + torch.tensor([n])) for x, n in ((q, 7), (k, 3))]
    near((rotated[0] * rotated[1]).sum(), (rope(q, torch.tensor([4])) * rope(k, torch.tensor([0]))).sum(), 1e-5)
    w = [np.float64(np.float32(10 ** -i)) for i in range(4)]
    pairs = q.flatten().view(2, 4).double()
    wanted = [complex(*pairs[:, i]) * np.exp(1j * (t + 7) * w[i]) for i in range(4)]
    near(rotated[0].flatten(), torch.tensor([z.real for z in wanted] + [z.imag for z in wanted]).float(), 1e-5)

PAIRS = dict(encoder=2, n_embd=32, n_head=4, vocab_size=20, pad=19, source=7, block_size=16)
TRANSLATORS = [
    dict(rule='softmax'), dict(rule='sum', phi='hedgehog', conv=0), dict(rule='delta'),
    dict(rule='delta', cross='softmax', encoder_rule='sum'), dict(rule='window', cache=3),
    dict(rule='sum', phi='cosformer:24'), dict(rule='softmax', cross='decay', bias=True)]

@pytest.mark.parametrize('flags', [
    *(dict(rule=rule, cache=5, sinks=2, n_layer=1) for rule in RULES), dict(layers='delta,softmax', pos='learned'),
    dict(rule='tova', cache=6, positions='compress'), dict(rule='window', cache=0, overflow='sum'),
    dict(rule='window', cache=4, overflow='kda'),
    dict(rule='sink', cache=4, sinks=1, overflow='decay:taylor'),
    dict(rule='h2o', cache=4, overflow='gla-beta:slots:3', n_kv_head=1, gate_rank=2),
    dict(rule='gla-beta', phi='slots:3', n_kv_head=1, gate_rank=2),
    dict(rule='sum', phi='cosformer'), dict(rule='sum', phi='cosformer', n_kv_head=1),
    dict(rule='delta', phi='dpfp', norm='sum', n_kv_head=1), dict(rule='kda', pos='rope', conv=0, out_norm=False),
    dict(rule='delta', norm='attn', phi='elu'), dict(rule='delta', beta_max=2.0, conv=1, writes=2),
    *(PAIRS | flags for flags in TRANSLATORS)], ids=lambda flags: '-'.join(map(str, flags.values())))
def test_model_can_be_cut_and_leaks_nothing(flags, monkeypatch):
    """By all forms, gradients too. A source is read first and at once, all of it is seen, and its padding is as
    nothing. Without gradients a layer is cut by itself, but not one of an encoder."""
    m = small(**{'vocab_size': 20, **flags})
    n = flags.get('source', 0)
    tokens = torch.randint(19, (3, n + 12))
    tokens[1, 4:n] = 19
    tokens[2, 6:n] = 19
    with torch.no_grad():
        whole, state = m(tokens)
        assert whole.shape == (3, 12, 20)
        for nothing in tokens[0], tokens[:0], tokens[:, :0]:
            with pytest.raises(ValueError, match='at least one text'):
                m(nothing)
        for cuts in [7], [2, 3, 11], range(1, 12):
            parts, s = model_in_parts(m, tokens, [n + cut for cut in cuts])
            near(parts, whole, 1e-9)
            close(comparable(s), comparable(state), 1e-9)
        for place, first in (n + 9, 9), *((place, 0) for place in (0, 3) if n):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 19
            found = m(changed)[0]
            near(found[:, :first], whole[:, :first], 1e-12)
            assert ((found - whole)[:, first:].abs().amax((1, 2)) > 1e-6).all()
        near(m(tokens[:1])[0], whole[:1], 1e-12)               # a row alone is a row in a batch
        kept = [m.read(tokens[:, :n + 6])]
        for t in range(n + 6, n + 12):
            kept.append(m(tokens[:, t:t + 1], kept[-1])[1])
        for t, s in enumerate(kept, n + 6):                    # no later step has changed a state
            close(comparable(s), comparable(m.read(tokens[:, :t])), 1e-9)
        close(comparable(m.read(tokens, segment=5)), comparable(state), 1e-9)
        if n:
            near(m(tokens[1:2, n:], m.read_source(tokens[1:2, :4]))[0], whole[1:2])
        m.use(pick_forms('loop'))
        found, cut = m(tokens)
        near(found, whole, 1e-9)
        close(comparable(cut), comparable(state), 1e-9)
    gradients = []
    for form, cuts in ('loop', []), ('fused', [n + 4, n + 9]):
        m.use(pick_forms(form))
        found = model_in_parts(m, tokens, cuts)[0].square().sum()
        gradients.append([g for g in torch.autograd.grad(found, m.parameters(), allow_unused=True) if g is not None])
        found, _ = m(tokens[:, n + 6:], kept[0])               # training may go on from what `read` returned
        near(found, whole[:, 6:], 1e-9)
        found.sum().backward()
    near(*gradients, 1e-8)

def test_a_seed_gives_the_weights_and_logits_it_has_always_given():
    """The same draws in the same order as in commit 0db4890, whose last norm began with a gain of 1."""
    torch.manual_seed(0)
    m = built(layers='delta,decay,softmax', n_layer=3, beta_max=1.0)
    found = m(torch.arange(20)[None])[0][0, -1, :4]
    near(10 * found, torch.tensor([-0.3310, -6.5162, 1.2637, -6.7830]), 1e-3)
    assert not [name for name in built(out_norm=False).state_dict() if 'out_norm' in name]

def test_a_rule_a_map_and_a_policy_of_your_own_may_come_at_any_time(a_model, monkeypatch):
    """A rule whose gates do not fit is refused."""
    monkeypatch.setitem(POLICIES, 'odd', lambda a, total, pos, v, t, cache, sinks: pos % 2 + pos / 1e3)
    monkeypatch.setitem(FEATURE_MAPS, 'cube', partial(fastweight.FeatureMap, f=lambda x: x.relu() ** 3))
    monkeypatch.setitem(RULES, 'mine', fastweight.Rule('sum by cubes', 'cube', 'attn'))
    monkeypatch.setitem(RULES, 'oddly', fastweight.Rule('keeps odd places', keeps='odd'))
    assert load(a_model('--rule=softmax'), rule='oddly', cache=4)[0].config.rules == 2 * ['oddly']
    built(rule='softmax', layers='mine,oddly', cache=4, beta_max=2.0).read(torch.zeros(1, 9, dtype=int))
    for wrong in dict(rule='yours'), dict(layers='yours'), dict(encoder=1, cross='yours'):
        with pytest.raises(ValueError, match='gdn2, softmax, .*mine'):
            built(**wrong)
    for bounded in caches.bounded, fast.caches.bounded:
        test_policies_agree_with_the_book_token_for_token('odd', bounded)
    for gates, why in (dict(f='channel', write='1-f'), 'needs f=head'), (
            dict(phi='elu', norm='attn', write='channel'), 'denominator of its own'):
        monkeypatch.setitem(RULES, 'mine', fastweight.Rule('', **gates))
        with pytest.raises(ValueError, match=why):
            FastWeights('mine', 8, 2, 4)

@pytest.mark.parametrize('given, why', [
    (dict(encoder=1, source=5), 'source'), (dict(rope_scaling=[8, 4, 1, 32]), 'low below high'), (dict(rule='sink', overflow=':favor'), '--overflow=:favor'),
    (dict(norm='zzz'), '--norm=zzz: one of attn, sum'), (dict(n_head=0), 'a whole number, at least 1')], ids=str)
def test_what_no_flag_says_is_refused_in_python_too(given, why):
    with pytest.raises(ValueError, match=why):
        built(**dict(n_layer=1, n_embd=16, n_head=4) | given)

@pytest.mark.parametrize('flags', [dict(rule=rule, cache=8) for rule in RULES] + [
    dict(rule='window', cache=4, overflow='sum:hedgehog'), dict(rule='softmax', causal=False, classes=3, patch=2)],
    ids=str)
def test_weights_in_bfloat16_give_nearly_the_same(flags):
    """At once and step by step; the states of matrices are fp32."""
    m, tokens = built(n_layer=2, n_head=2, n_embd=16, block_size=32, **flags).eval(), torch.randint(9, (2, 8))
    with torch.inference_mode():
        exact = m(tokens)[0]
        model_files.round_weights(m)
        assert F.cosine_similarity(m(tokens)[0].float().flatten(), exact.flatten(), 0) > .99
        if m.task == 'complete':
            found, state = model_in_parts(m, tokens, range(1, 8))
            assert F.cosine_similarity(found.float().flatten(), exact.flatten(), 0) > .99
            S = [x for layer in state['layers'] for name, x in layer['mixer'].items() if name == 'S']
            assert all(x.dtype == torch.float32 for x in S)

@pytest.mark.parametrize('flags', [
    *[dict(rule=rule, cache=4, sinks=2) for rule in (*VARIED, 'sink', 'random', 'h2o-layer', 'mean-v')],
    dict(rule='sum', phi='cosformer:64', pos='learned'), dict(layers='window,delta', cache=5, overflow='sum:favor'),
    dict(rule='tova', cache=4, n_kv_head=1), dict(rule='sink', cache=6, positions='compress')], ids=str)
def test_texts_of_unequal_length_are_joined(flags):
    """And go on as each does alone; the caches of softmax are of the length of the text."""
    m = small(**flags, block_size=64).double()
    prompts = [torch.randint(7, (1, n)) for n in (2, 13, 8)]
    states = [m.read(prompt[:, :-1]) for prompt in prompts]
    if m.config.rule == 'softmax':
        with pytest.raises(ValueError, match='join texts of one length'):
            weights_py.join(states)
        return
    state, token = weights_py.join(states), torch.cat([prompt[:, -1:] for prompt in prompts])
    for _ in range(6):
        logits, state = m(token, state)
        for i, own in enumerate(states):
            wanted, states[i] = m(token[i:i + 1], own)
            near(logits[i], wanted[0], 1e-5)                    # angles of rope are fp32
        token = logits.argmax(-1)

def test_threads_share_a_model(a_model):
    """One generates, one reads layer by layer, one evaluates, each four times: as each alone."""
    model, meta = load(a_model('--layers=softmax,delta,tova', '--n_layer=3'))
    _, val, data = prepare.load_set(meta['args']['data'], like=meta['data'])
    rows = made_rows(val, val, data, 16, torch.device('cpu'))
    tokens = torch.from_numpy(val[:24].astype(int))[None]

    def generate():
        return [token.item() for token, _ in itertools.islice(model.generate(tokens, temperature=0), 12)]

    def look():
        return [seen.o.sum().item() for _ in range(6) for seen in through(model, tokens)]

    def evaluate():
        return train.evaluate(model, rows, np.arange(0, 640, 16))
    jobs = [generate, look, evaluate] * 4
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(job) for job in jobs]
    assert [job.result() for job in together] == alone and not model.training

def test_draws_are_those_of_multinomial(monkeypatch):
    """Bit for bit, of the tokens that are left: a seed says what it has always said. No value breaks it."""
    logits = torch.tensor([2., 1., 0., -1., -torch.inf])
    for kw, kept in (({}, 4), (dict(top_k=2), 2), (dict(top_p=.8), 2), (dict(temperature=.5), 4),
                     (dict(top_k=3, top_p=.999, temperature=2.), 3)):
        left = logits.masked_fill(torch.arange(5) >= kept, -torch.inf) / kw.get('temperature', 1)
        mine, torchs = (torch.Generator().manual_seed(0) for _ in range(2))
        expected = torch.multinomial(left.softmax(0).expand(999, -1), 1, generator=torchs)
        assert torch.equal(model_py.sample(logits.expand(999, -1), generator=mine, **kw), expected)
    for kw in dict(temperature=0), dict(temperature=1e-9), dict(top_k=1), dict(top_p=1e-6):
        assert (model_py.sample(logits.expand(50, -1), **kw) == 0).all()
    assert model_py.sample(logits[None], temperature=1e9, top_k=99).item() < 4
    assert len(set(model_py.sample(torch.zeros(99, 9), top_k=3).flatten().tolist())) <= 3       # level ones, too
    monkeypatch.setattr(torch.Tensor, 'exponential_', lambda r, generator: r.zero_().neg_())
    assert (model_py.sample(logits.expand(50, -1)) == 0).all()             # some devices draw -0.0 now and then


# ---- 9. models/: a matrix beside a cache, published layers, several writes, encoders, translators; their files ----

def hybrid_cache(rule, n_embd, n_head, head_dim, **given):
    """The cache of a layer, maybe with a matrix beside it"""
    return hybrid.HybridCache(rule, n_embd, n_head, n_head, head_dim, rope, hybrid.HybridConfig(rule=rule, **given))

@pytest.mark.parametrize('rule, phi, policy', [*zip(
    PLAIN_STATE, itertools.cycle(['favor', 'taylor', 'hedgehog']), itertools.cycle(['window', 'sink']))])
def test_overflow_lies_between_fast_weights_and_softmax(rule, phi, policy):
    """An empty cache leaves the fast-weight rule, one without end softmax."""
    x, (q, k, v) = torch.randn(2, 9, 8, dtype=f64), torch.randn(3, 2, 2, 9, 4, dtype=f64)
    layer = hybrid_cache(policy, 8, 2, 4, cache=0, sinks=0, overflow=f'{rule}:{phi}').double().eval()
    seen = v.transpose(1, 2).flatten(2)                         # by the gates: who goes, not who comes
    expected = layer.overflow(seen, q, k, v)[0]
    if RULES[rule].norm != 'attn' and not RULES[rule].erase:    # here it is a mean
        expected = expected / layer.overflow(seen, q, k, torch.ones_like(v))[0]
    near(layer(x, q, k, v)[0], expected, 1e-9)
    layer.cache = 9
    near(layer(x, q, k, v)[0], caches.softmax(q, k, v)[0], 1e-9)
    layer.cache = 3
    assert (layer(x, q, k, v)[0] - expected).abs().max() > 1e-3     # in between it is neither
    layer.log_mass.bias.data.fill_(-99)                         # what is learned may be that rows are all
    rows_alone = caches.bounded(q, k, v, None, 0, policy, 3, 0, spill=True)[0]
    near(layer(x, q, k, v)[0], rows_alone, 1e-9)
    layer.log_mass.bias.data.fill_(0)                           # or for some queries only: those with a 1
    layer.log_mass.weight.data[:, 0] = -99
    x[..., 0] = torch.arange(9) % 2
    found = layer(x, q, k, v)[0]
    near(found[:, :, 1::2], rows_alone[:, :, 1::2], 1e-9)
    assert (found - rows_alone).abs().max() > 1e-3

def test_a_matrix_beside_compressed_positions_has_keys_of_true_ones():
    """Whether matrix or cache is all that counts: with keys as they came, long after they went."""
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=f64)
    t = torch.arange(40)
    layers = [hybrid_cache('sink', 16, 2, 8, cache=6, sinks=2, overflow='sum:hedgehog', positions=positions).double()
              for positions in ('true', 'compress')]
    true, compress = layers
    compress.load_state_dict(true.state_dict())
    x = torch.randn(1, 40, 16, dtype=f64)
    for bias, wanted in (99, None), (-99, caches.bounded(q, k, v, None, 0, 'sink', 6, 2, True, compress.rotate)[0]):
        for layer in layers:
            layer.log_mass.bias.data.fill_(bias)
        found, state = compress(x[:, :30], q[:, :, :30], k[:, :, :30], v[:, :, :30])
        later = compress(x[:, 30:], q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], state, 30)[0]
        near(torch.cat([found, later], 2), true(x, rope(q, t), rope(k, t), v)[0] if wanted is None else wanted, 1e-5)

def test_slots_beside_compressed_positions_are_chosen_by_keys_before_rope():
    """By hand: weights of the bare keys, by which a slot's key is the mean of keys with rope."""
    q, k, v = -torch.randn(3, 1, 1, 30, 8, dtype=f64)
    layer = hybrid_cache('window', 8, 1, 8, cache=6, sinks=0, overflow='sum:slots:3', positions='compress').double()
    layer.log_mass.bias.data.fill_(99)
    t = torch.arange(30)
    q_t, k_t = rope(q, t)[0, 0, -1], rope(k, t)[0, 0, :24]      # 6 are still in the cache
    w = (k[0, 0, :24] @ layer.overflow.phi.weight[0].mT + layer.overflow.phi.bias[0]).softmax(-1)
    mean = (w.mT @ k_t) / w.sum(0)[:, None]
    slots = (mean @ q_t / 8 ** .5).exp()
    wanted = slots @ (w.mT @ v[0, 0, :24]) / (slots @ w.sum(0))
    near(layer(torch.randn(1, 30, 8, dtype=f64), q, k, v)[0][0, 0, -1], wanted, 1e-5)
    config = hybrid.HybridConfig(rule='sink', overflow='sum:slots', positions='compress')
    with pytest.raises(ValueError, match='--positions=true: the matrix of M learned'):
        model_files.with_other_cache(hybrid.Hybrid, config, 'M', positions='true')
    assert not model_files.with_other_cache(hybrid.Hybrid, config, 'M', positions='true', overflow='')[1].overflow

@pytest.mark.parametrize('rule', [*pretrained.PUBLISHED])
def test_a_rule_is_trained_as_published(rule, tmp_path, text, capsys):
    """Step by step it computes the same, and nothing of the paper is left out of the file."""
    run = f'--out={tmp_path}', f'--data={text}', '--steps=1', *TINY, '--published'
    assert train.main([f'--layers={rule},softmax', *run]) == 0
    model = load(tmp_path / 'ckpt.safetensors')[0].double()
    for field, value in pretrained.PUBLISHED[rule].items():
        assert getattr(model.config, field) == value
    tokens = torch.randint(256, (2, 13))
    near(model_in_parts(model, tokens, range(1, 13))[0], model(tokens)[0])
    mixer = model.blocks[0].mixer
    assert (mixer.conv is None) == (rule in ('gla', 'retention')) and isinstance(mixer.out_norm, torch.nn.RMSNorm)
    assert (mixer.gate is None) == (rule == 'delta')
    assert 'take one of delta' in refused(capsys, train.main, '--rule=sum', *run)

def of_transformers(path, name, config, **sizes):
    """A layer of transformers with random weights; its gates decay by up to e^-28 a step."""
    hf, module = pytest.importorskip('transformers'), pytest.importorskip(f'transformers.models.{path}')
    torch.manual_seed(0)
    layer = getattr(module, name)(getattr(hf, config)(num_hidden_layers=4, **sizes), 0)
    for part, p in layer.named_parameters():
        p.data = torch.randn(p.shape) / p.shape[-1] ** .5 + 2 * part.endswith('A_log') + (part[-11:] == 'norm.weight')
    return layer

@torch.no_grad()
def test_the_layer_of_kimi_linear_is_kda():
    theirs = of_transformers('kimi_linear.modeling_kimi_linear', 'KimiLinearDeltaAttention', 'KimiLinearConfig',
                             hidden_size=24, linear_head_dim=6, linear_num_heads=4)
    x = torch.randn(2, 70, 24)
    conv = model_py.Conv(72, 4)
    conv.weight = torch.nn.Parameter(theirs.conv1d.weight[:, 0].T)
    y = F.silu(conv(torch.cat([theirs.q_proj(x), theirs.k_proj(x), theirs.v_proj(x)], -1))[0])
    q, k, v = (model_py.by_head(part, 6) for part in y.chunk(3, -1))
    beta = theirs.b_proj(x).sigmoid().mT
    o, _ = recurrent(l2(q) / 6 ** .5, l2(k), v, beta, beta, theirs.forget_gate(x).transpose(1, 2))
    o = F.rms_norm(o.transpose(1, 2), (6,), theirs.o_norm.weight, theirs.o_norm.variance_epsilon)
    gate = theirs.g_b_proj(theirs.g_a_proj(x)).sigmoid()
    near(theirs.o_proj(o.flatten(2) * gate), theirs(x), 1e-5)

@torch.no_grad()
def test_the_layer_of_minimax_is_retention():
    theirs = of_transformers('minimax.modeling_minimax', 'MiniMaxLightningAttention', 'MiniMaxConfig',
                             hidden_size=24, num_attention_heads=4, head_dim=6, block_size=32)
    x = torch.randn(2, 70, 24)
    q, k, v = F.silu(theirs.qkv_proj(x)).view(2, 70, 4, 18).transpose(1, 2).chunk(3, -1)
    o, _ = recurrent(q, k, v, log_f=-theirs.slope_rate.expand(2, -1, 70, 1))
    o = theirs.norm(o.transpose(1, 2).flatten(2)) * theirs.output_gate(x).sigmoid()
    near(theirs.out_proj(o), theirs(x, None, None)[0], 1e-5)

@torch.no_grad()
def test_the_layer_of_mamba_2_shares_keys_and_has_a_skip():
    """Up to its norm, which comes after the gate there, and the bias of its convolution."""
    theirs = of_transformers('mamba2.modeling_mamba2', 'Mamba2Mixer', 'Mamba2Config', hidden_size=24, num_heads=4,
                             head_dim=12, state_size=6, n_groups=2, chunk_size=32, use_conv_bias=False).eval()
    config = pretrained.PretrainedConfig(rule='mamba2', n_embd=24, n_head=4, key_heads=2, key_dim=6, value_dim=12,
                                         qkv_conv=4, phi='identity', skip=True, out_norm=False)
    mixer = pretrained.PretrainedMixer(config, 'mamba2')
    gate, v, k, q, dt = theirs.in_proj.weight.split([48, 48, 12, 12, 4])
    v_conv, k_conv, q_conv = theirs.conv1d.weight[:, 0].split([48, 12, 12])
    given = {'qkv.weight': torch.cat([q, k, v]), 'conv.weight': torch.cat([q_conv, k_conv, v_conv]).T,
             'memory.gates.proj.weight': dt, 'memory.gates.log_rate': theirs.A_log.view(-1, 1, 1),
             'memory.gates.bias_f': theirs.dt_bias.view(-1, 1, 1), 'memory.skip': theirs.D.view(-1, 1, 1),
             'proj.weight': theirs.out_proj.weight}
    mixer.load_state_dict(given)
    x = torch.randn(2, 70, 24)
    o = mixer.merge(mixer.memory(x, *mixer.project(x))[0])
    near(theirs.out_proj(theirs.norm(o, x @ gate.T)), theirs(x), 1e-5)

@pytest.mark.parametrize('rule, n', [('delta', 2), ('gated_delta', 3), ('gdn2', 2)])
def test_n_writes_a_token_are_n_steps_of_which_the_first_forgets_and_the_last_is_read(rule, n):
    """DeltaProduct, token by token; by any form, cut anywhere."""
    layer = writes.ManyFastWeights(rule, 8, 2, 4, beta_max=2, n=n).double().eval()
    x, q = torch.randn(1, 7, 8, dtype=f64), torch.randn(1, 2, 7, 4, dtype=f64)
    k, v = torch.randn(2, 1, 2, 7, n * 4, dtype=f64)
    gates = layer.gates(x)
    S, wanted = torch.zeros(1, 2, 4, 4, dtype=f64), []
    for t in range(7):
        if 'log_f' in gates:
            assert not gates['log_f'][:, :, n * t + 1:n * t + n].any()
            S = S * gates['log_f'][:, :, n * t, None].exp()
        for i in range(n):
            key = l2(F.silu(k[:, :, t, 4 * i:4 * i + 4]))
            u = gates['write'][:, :, n * t + i] * v[:, :, t, 4 * i:4 * i + 4]
            S = S + fastweight.outer(u - fastweight.find(S, gates['erase'][:, :, n * t + i] * key), key)
        wanted.append(fastweight.find(S, l2(F.silu(q[:, :, t]))))
    for impl in 'loop', 'chunk', 'fused':
        layer.forms = pick_forms(impl)

        def part(start, end, state):
            rows = [y[:, :, start:end] for y in (q, k, v)]
            return layer(x[:, start:end], *rows, state)
        for cuts in [], [3], range(1, 7):
            o, state = in_parts(part, cuts, 7)
            near([o, state['S']], [torch.stack(wanted, 2), S])

def test_delta_attn_is_schlags_ablation():
    """v_bar_t = W_{t-1} k_t / (n_{t-1} . k_t), 0 at first; y_t = W_t q_t / (n_t . q_t). Schlag eqs. 27-29."""
    layer = ablation.ByKeys('delta', 8, 2, 4, 'elu', 'attn').double().eval()
    x, (q, k, v) = torch.randn(1, 7, 8, dtype=f64), torch.randn(3, 1, 2, 7, 4, dtype=f64)
    written, reads = layer.to_write(x, k, v), layer.to_read(q)
    keys, beta = written['k'], written['write']
    near(keys.sum(-1), torch.ones(1, 2, 7, dtype=f64))
    W, n = torch.zeros(1, 2, 4, 4, dtype=f64), torch.zeros(1, 2, 4, dtype=f64)
    o = []

    def over(x):
        return (W @ x[..., None]).squeeze(-1) / (n * x).sum(-1, keepdim=True).clamp(min=1e-6)
    for t in range(7):
        k_t = keys[:, :, t]
        u = beta[:, :, t] * (v[:, :, t] - over(k_t))
        W = W + u[..., None] * k_t[..., None, :]
        n = n + k_t
        o.append(over(reads[:, :, t]))
    for impl in 'loop', 'chunk', 'fused':
        layer.forms = pick_forms(impl)
        near(layer(x, q, k, v)[0], torch.stack(o, 2))

@pytest.fixture(scope='session')
def threes(tmp_path_factory):
    """The path of a task: is there a 3 among up to 7 numbers? Half of the rows are shorter, padded with 9."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 8, (1200, 7))
    x[::2, 5:] = 9
    y = np.full_like(x, 10)
    ends = (x != 9).sum(1) - 1
    y[np.arange(1200), ends] = (x == 3).any(1)
    return made(tmp_path_factory.mktemp('threes'), x, y, [1000, 1200], vocab_size=10, ignore=10, pad=9,
                classes=2)

@pytest.mark.parametrize('flags', ['--rule=sum', '--rule=softmax --pool=first', '--rule=gated_delta'])
def test_an_encoder_learns_classes_says_them_and_is_converted(flags, threes, tmp_path, capsys):
    learn = ('--causal=false --n_layer=1 --n_head=2 --n_embd=16 --steps=9 --lr=1e-2 --batch_size=32 '
             '--device=cpu --threads=1 ')
    assert train.main([f'--data={threes}', f'--out={tmp_path}', *(learn + flags).split()]) == 0
    path = tmp_path / 'ckpt.safetensors'
    model = load(path)[0].eval()
    _, val, _ = prepare.load_set(threes)
    x, y = torch.from_numpy(val.astype(int)).view(-1, 2, 7).unbind(1)
    alone = torch.cat([model(row[row != 9][None])[0] for row in x])         # without padding
    near(model(x)[0], alone, 1e-5)
    right = alone.argmax(1) == y.min(1).values                              # other targets are 10
    assert log(tmp_path)[-1]['accuracy'] == pytest.approx(right.float().mean().item())
    expected = np.nan_to_num(np.corrcoef(alone.argmax(1), y.min(1).values)[0, 1])       # of two, it is Matthews'
    assert (log(tmp_path)[-1]['matthews'], log(tmp_path)[-1]['majority']) == pytest.approx((expected, .53))
    p = model(torch.tensor([[1, 2, 3, 4]]))[0].softmax(-1)[0]
    likelier = p.argmax().item()
    said = [f'class {i}: {p[i]:.1%}' for i in (likelier, 1 - likelier)]
    assert written(capsys, f'--init={path}', '--prompt=1 2 3 4')[0].splitlines() == said
    if 'softmax' in flags:
        for recipe in 'pure', 'hedgehog':
            found = converted(path, tmp_path / 'rnn', f'--recipe={recipe}', '--controls=false',
                              '--batch_size=16')
            teacher, *_, last = found['table']
            assert last['recovered'] == pytest.approx(last['accuracy'] / teacher['accuracy'])

@pytest.mark.parametrize('kind, fields', [
    ('GPT', dict(rule='tova', pos='learned', bias=True)), ('Hybrid', dict(rule='window', cache=0, overflow='sum')),
    ('Hybrid', dict(rule='sum', phi='slots')), ('Pretrained', dict(rule='delta', rms=True)),
    ('DividedByKeys', dict(rule='delta', norm='attn', phi='elu')), ('ManyWrites', dict(rule='delta', writes=2)),
    ('Encoder', dict(rule='sum', classes=3, pad=1, pos='learned')), ('Classifier', dict(rule='delta', classes=3, pad=1)),
    ('Translator', dict(PAIRS, rule='delta', cross='sum'))])
def test_a_file_of_one_config_for_all_kinds_has_the_class_of_what_it_uses(kind, fields):
    """As older versions wrote them, all fields in one, those of joined pairs in a decoder, too."""
    cls = models.named(kind)
    config = cls.config_class(**fields)
    old = model_files.whole_config(config) | dict(causal=kind != 'Encoder')
    if kind == 'GPT':
        old['pad'] = 10
    assert model_files.class_and_config({'config': old}, 'old') == (cls, config)
    new = {'model': kind, 'config': dataclasses.asdict(config)}
    assert model_files.class_and_config(new, 'new') == (cls, config)

def test_a_decoder_says_the_class_of_what_it_has_read(threes, tmp_path, capsys):
    """With --causal=true: at each place, in a state, from what stands before; --lines asks the last place."""
    run = f'--data={threes}', f'--out={tmp_path}', *'--causal=true --rule=delta --n_layer=1 --n_embd=16'.split()
    assert train.main([*run, '--steps=2', '--device=cpu', '--threads=1']) == 0
    path = tmp_path / 'ckpt.safetensors'
    model, tokens = load(path)[0], torch.tensor([[1, 2, 3, 4]])
    whole, _ = model(tokens)
    assert whole.shape == (1, 4, 2)
    near(model_in_parts(model, tokens, [1, 3])[0], whole, 1e-5)
    p = whole[0, -1].softmax(-1)
    assert written(capsys, f'--init={path}', '--prompt=1 2 3 4', '--lines')[0] == f'{p.argmax()}\t{p.max():.3f}\t1 2 3 4\n'
    assert [seen.real.tolist() for seen in through(model, torch.tensor([[1, 2, 9, 9]]))] == [[[True, True, False, False]]]

@pytest.mark.parametrize('rule', ['sink', 'tova-sink'])
def test_a_decoder_keeps_its_own_first_tokens(rule):
    model = small(**PAIRS, rule=rule, cache=4, sinks=2)
    tokens = torch.randint(19, (2, 19))
    whole, state = model(tokens)
    assert (state['layers'][0]['mixer']['pos'].sort().values[:, :, :2] == torch.arange(2)).all()
    near(model_in_parts(model, tokens, range(8, 19))[0], whole, 1e-9)

@pytest.mark.parametrize('rule', translator.SOURCE_RULES)
def test_cross_attention_is_all_of_the_source_and_then_a_query(rule):
    """Fast weights by the definition, step by step; softmax by explicit weights."""
    c = translator.TranslatorConfig(**PAIRS | dict(rule=rule, norm='' if rule == 'softmax' else 'l2'))
    cross = translator.Cross(c, rule).double().eval()
    x, u = torch.randn(2, 1, 6, 32, dtype=f64)
    _, k, v = cross.project(x)
    q, _, _ = cross.project(u)
    if rule == 'softmax':
        expected = (q @ k.mT / 8 ** 0.5).softmax(-1) @ v
    else:
        written = cross.memory.to_write(x, k, v)
        _, S = recurrent(written['k'], **written)
        expected = cross.memory.to_read(q) @ S.mT
    near(cross(u, cross.write(x), 7), cross.proj(cross.merge(expected)))
    if not RULES[rule].z and RULES[rule].write != 'channel':    # channels of v apart have weights each
        eye = torch.eye(6).to(q).expand(1, 4, 6, 6)
        near(cross.memory.read_all(q, cross.memory.write_all(x, k, eye)) @ v, expected)

@pytest.mark.parametrize('penalty', [0.0, 2.0])
def test_a_wide_beam_finds_the_best_text_of_all(penalty):
    """Of all texts of up to 3 tokens and an end, or 4 tokens, each judged by itself, for 8 sources."""
    model = small(**PAIRS | dict(rule='delta', beta_max=1.0, vocab_size=4, pad=3, source=3,
                                  block_size=10))
    model.config.block_size = 7                                 # 3 of the source, 4 to write
    for block in model.blocks:                                  # what was said before matters
        block.mixer.proj.weight.data *= 9
    model.norm.weight.data.fill_(1)                             # tokens are far from alike
    model.embed.weight.data *= 2
    model.embed.weight.data[3] = 0.3                            # an end is neither first nor never
    source = torch.randint(3, (8, 3))
    said = model.translate(source, 64, penalty)
    lengths = set()
    for row, found in zip(source, said.tolist()):
        scores = {}
        for n in 1, 2, 3, 4:
            last = range(4) if n == 4 else [3]                  # those of 4 may be cut off
            texts = torch.tensor(list(itertools.product(*[range(3)] * (n - 1), last)))
            read = torch.cat([row.expand(len(texts), 3), F.pad(texts[:, :-1], (1, 0), value=3)], 1)
            log_p = model(read)[0].log_softmax(-1).gather(2, texts[..., None]).sum((1, 2))
            for text, score in zip(texts.tolist(), log_p.tolist()):
                scores[*text, *[3] * (4 - n)] = score / ((5 + n) / 6) ** penalty
        best = max(scores, key=scores.get)
        lengths.add([*best, 3].index(3))
        assert found == list(best)[:len(found)]
    assert len(lengths) > 1

@pytest.fixture(scope='session')
def turned_around(tmp_path_factory):
    """The path of pairs: 2 to 6 digits, and the same in reverse."""
    rng = np.random.default_rng(0)
    x, y = np.full((2050, 13), 10), np.full((2050, 13), 11)         # 6 to be read, 7 to be written
    for i in range(2050):
        n = rng.integers(2, 7)
        x[i, :n] = rng.integers(0, 10, n)
        x[i, 7:7 + n] = y[i, 6:6 + n] = x[i, :n][::-1]
        y[i, 6 + n] = 10
    return made(tmp_path_factory.mktemp('turned'), x, y, [1800, 2000], vocab_size=11, ignore=11, pad=10,
                source=6)

@pytest.mark.parametrize('flags', ['--rule=softmax --n_layer=1', '--rule=delta --cross=sum --n_layer=1'])
def test_a_translator_learns_translates_and_is_converted(flags, turned_around, tmp_path, capsys):
    """To write digits in reverse; what it says, good or bad, is what GPT.translate makes of each source.
    Conversion finds its own number of threads, as for who gives none."""
    learn = '--encoder=1 --n_head=2 --n_embd=32 --steps=30 --lr=1e-2 --batch_size=64 --device=cpu --threads=1 '
    assert train.main([f'--data={turned_around}', f'--out={tmp_path}', *(learn + flags).split()]) == 0
    losses = [row['loss'] for row in log(tmp_path) if 'loss' in row]
    assert losses[-1] < .9 * losses[0]                      # at first that of guessing
    path = tmp_path / 'ckpt.safetensors'
    say = partial(written, capsys, f'--init={path}')
    sources = '1 2 3', '4 5', '9 8 7 6 5 4'
    lines = '--source=@' + put(tmp_path, 'lines', '\ufeff' + '\r\n'.join(sources))
    model, meta = load(path)
    for source, text in zip(sources, say(lines)[0].splitlines(), strict=True):
        row = torch.tensor([[int(digit) for digit in source.split()]])
        assert text == vocabulary.decode(model.translate(row)[0].tolist(), meta['data'])
        assert say(f'--source={source}')[0] == text + '\n'
    assert len(say(lines, '--beam=3')[0].splitlines()) == 3
    if 'softmax' not in flags:
        return
    short = '--controls=false', '--distil_steps=2', '--steps=2', '--batch_size=32', '--lr=5e-3'
    for more in '--recipe=t2r --fold', '--recipe=hedgehog --swap=self,encoder --threads=1':
        found = converted(path, tmp_path / 'rnn', *short, *more.split())
        torch.set_num_threads(1)
        assert found['args']['threads'] in (1, 2) and found['table'][-1]['model'] == 'fine-tuned'
        assert 'rnn/ckpt.safetensors --source="..."\n' in capsys.readouterr().out
    assert log_py.next_command('a b', Data()) == "python sample.py --init='a b'/ckpt.safetensors"

def test_a_failed_write_leaves_the_old_files(a_model, text, tmp_path, monkeypatch):
    """Of a model in a folder nothing stays once another is there: here its tokenizer.json. The error names the
    file, which that of an open file does not by itself."""
    path, hub = Path(shutil.copy(a_model(), tmp_path)), tmp_path / 'hub'
    in_hub_layout(hub, 'llama')
    model, meta = load(hub)
    export = partial(folders.to_folder, hub, config=model_files.whole_config(model.config))
    export(model.state_dict(), data=dataclasses.replace(meta['data'], json='{}'))
    before = {old: old.read_bytes() for old in tmp_path.rglob('*.*')}
    assert {old.name for old in before} == {path.name, 'config.json', 'model.safetensors', 'tokenizer.json'}
    weights, full = {name: x + 1 for name, x in model.state_dict().items()}, OSError(28, 'No space left')
    with monkeypatch.context() as faulty:
        faults = full, None, OSError(28, 'No space left')                       # config.json comes last
        faulty.setattr(os, 'fsync', Mock(side_effect=faults))
        for write in partial(save, path, model, {'data': Data()}), partial(export, weights, data=meta['data']):
            with pytest.raises(OSError, match='No space'):
                write()
    assert {old: old.read_bytes() for old in tmp_path.rglob('*.*')} == before
    export(weights, data=meta['data'])
    assert sorted(os.listdir(hub)) == ['config.json', 'model.safetensors']
    prepare.prepare(text, str(tmp_path))
    with monkeypatch.context() as faulty:
        faulty.setattr(os, 'replace', Mock(side_effect=full))
        with pytest.raises(ValueError, match='No space'):
            prepare.prepare(text, str(tmp_path))
    prepare.load_set(text, str(tmp_path))

def test_broken_checkpoints_are_refused(a_model, tmp_path, capsys):
    """Missing, cut, foreign, changed by one bit anywhere: never a wrong model, never another exception."""
    whole, rng = Path(a_model()).read_bytes(), np.random.default_rng(0)
    bad, header = tmp_path / 'bad.safetensors', int.from_bytes(whole[:8], 'little') + 8
    broken = [b'', b'<html>no</html>', whole[:7], whole[:header - 1], whole[:-1], whole + b'x']
    for _ in range(40):
        changed = bytearray(whole)
        changed[rng.integers(0, header if rng.random() < .5 else len(whole))] ^= 1 << rng.integers(8)
        broken.append(bytes(changed))
    for content in broken:
        bad.write_bytes(content)
        with pytest.raises(ValueError, match='bad.safetensors'):
            load(bad)
    save_file({'x': torch.zeros(3)}, bad)
    assert 'not written by this project' in refused(capsys, sample.main, f'--init={bad}')

def test_a_model_from_a_file_is_not_drawn_first(a_model):
    path, softmax = a_model('--rule=retention'), a_model('--rule=softmax')
    before = torch.get_rng_state()
    load(path)
    how = dict(rule='window', cache=4, overflow='delta:taylor')
    close(dict(load(softmax, **how)[0].state_dict()), dict(load(softmax, **how)[0].state_dict()), 0)
    assert torch.equal(torch.get_rng_state(), before)           # what is new is always the same

@pytest.mark.parametrize('rule, change, why', [
    ('softmax', dict(beta_max=1.0), ''), ('delta', dict(rule='full'), 'full'),
    ('delta', dict(newer=1), 'newer is unknown'),
    ('delta', dict(out_norm=...), 'out_norm is unknown, or is missing'),
    ('delta', dict(data=dict(newer=1)), "keyword argument 'newer'"),
    ('delta', dict(data=dict(tokenizer='json', vocab_size=256, json='{}')), 'no description of a tok')], ids=str)
def test_files_of_other_versions_load_or_are_refused_in_one_sentence(rule, change, why, a_model, tmp_path, capsys):
    """What is missing, unknown or gone cannot be built."""
    if 'tok' in why:
        pytest.importorskip('tokenizers')
    path = tmp_path / 'old.safetensors'
    tensors, meta = weights_py.read_tensors(a_model(f'--rule={rule}'))
    data = change.get('data', meta['data'])
    config = {name: x for name, x in (meta['config'] | change).items() if x is not ... and name != 'data'}
    weights_py.write_tensors(path, tensors, meta | {'config': config, 'data': data})
    if not why:
        load(path)
        return
    err = refused(capsys, sample.main, f'--init={path}')
    assert why in err and 'old.safetensors' in err


# ---- 10. data/: tasks, published sets, files of your own, tokens, rows -------------------------------------

def test_generated_tasks_are_what_the_papers_say():
    for name, keep, every in ('recall', False, True), ('recall-kept', True, True), ('recall-one', True, False):
        for training in False, True:
            for row, target in zip(*find_set(name).make(50, np.random.default_rng(0), 40, training)):
                pairs = list(zip(row[1:-1:2], row[2::2]))
                assert dict(pairs)[row[-1]] == target[-1]       # a dict keeps the last
                assert keep == (len(set(pairs)) == len(dict(pairs)))
                if not (training and every):
                    assert len(target) == 1
                    continue
                for t in range(128):
                    seen = dict(zip(row[1:t:2], row[2:t + 1:2]))
                    assert target[t] == (seen.get(row[t], 40) if t % 2 else 40)
    for name, n in ('mqar', 8), ('mqar:64', 64):
        for row, target in zip(*find_set(name).make(50, np.random.default_rng(0), 8192, True, length=8 * n + 64)):
            keys, values = row[0:2 * n:2], row[1:2 * n:2]
            at = np.flatnonzero(target < 8192)
            assert len(set(keys)) == n == len(at) and (at % 2 == 0).all() and keys.max() < 4096 <= values.min()
            assert all(target[i] == values[list(keys).index(row[i])] for i in at)
            assert at.min() >= 2 * n and (np.flatnonzero(row[2 * n:]) + 2 * n == at).all()      # all else is 0

@pytest.mark.parametrize('name, order', [('S3', 6), ('A5', 60)])
def test_targets_of_a_group_are_its_products(name, order):
    """By composing permutations. Each set of elements is closed, with an inverse."""
    elements = tasks.GROUPS[name]
    assert len(set(elements)) == order
    make = find_set(f'group:{name}').make
    for row, target in zip(*make(20, np.random.default_rng(0), order, True, 9)):
        so_far = range(len(elements[0]))
        for x, y in zip(row, target):
            so_far = [elements[x][i] for i in so_far]
            assert list(elements[y]) == so_far

def rows_of(name, root, **how):
    """A set prepared anew: each side's inputs and targets, the third one's too, and its meta."""
    folder = prepare.prepare(name, str(root), **how)
    *sides, meta = prepare.load_set(folder)
    if meta.test:
        sides.append(prepare.test_side(folder)[0])
    return [side.reshape(-1, 2, meta.row).swapaxes(0, 1) for side in sides], meta

def answered(text):
    """The value of a ListOps expression: lists without lists in them become their values, over and over."""
    def value(found):
        v = sorted(map(int, found[2].split()))
        return str(dict(MIN=v[0], MAX=v[-1], SM=sum(v) % 10, MED=int(np.median(v)))[found[1]])
    while '[' in text:
        text, changes = re.subn(r'\[([A-Z]+)((?: \d){2,10}) \]', value, text)
        assert changes, text
    return int(text)

def test_listops_answers_are_those_of_its_text(tmp_path, monkeypatch):
    """Rows of another length are a set of their own; the same rows each time."""
    monkeypatch.setitem(prepare.DATASETS, 'listops', prepare.DATASETS['listops']._replace(rows=(900, 40)))
    sides, meta = rows_of('listops-64', tmp_path)
    assert [len(x) for x, _ in sides] == [900, 40]
    for row, target in np.concatenate(sides, axis=1).swapaxes(0, 1):
        n = (row != meta.pad).sum()
        text = vocabulary.decode(row, meta)
        assert vocabulary.encode(text, meta) == row[:n].tolist() and 16 <= n <= 64
        assert answered(text) == target[n - 1] and (np.delete(target, n - 1) == meta.ignore).all()
    assert meta.row == 64 and rows_of('listops-64', tmp_path)[1] == meta                  # and sha256

@pytest.fixture(scope='session')
def few_words(tmp_path_factory):
    """The path of a text of 81 words"""
    words = np.array([a + b for a in 'abcdefghi' for b in 'abcdefghi'])
    lines = np.random.default_rng(0).choice(words, (1000, 8))
    return put(tmp_path_factory.mktemp('words'), 'words.txt', '\n'.join(map(' '.join, lines)))

@pytest.fixture
def few_facts(few_words, tmp_path, monkeypatch):
    """The task facts with few rows, in a text of 81 words; the text"""
    monkeypatch.setattr(prepare, 'FOLDER', str(tmp_path / 'data'))
    for name in 'facts', 'facts-text':
        monkeypatch.setitem(prepare.DATASETS, name, prepare.DATASETS[name]._replace(rows=(20, 200)))
    return few_words

def test_the_answer_to_a_row_of_facts_stands_somewhere_in_its_text(few_facts, tmp_path):
    """In training the answers to others count, too; of facts-text each next word does."""
    sides, meta = rows_of('facts-256', tmp_path, file=few_facts)
    texts = [text.decode().replace('\n', ' ') for text in sources_py.local_text(few_facts)]
    form = r'the (\w+ of \w+) is(?: (\w+) \.| ?$)'
    for (x, y), text, last_only in zip(sides, texts, (False, True)):
        for row, target in zip(x, y):
            said = vocabulary.decode(row, meta)
            assert len(row) == 256 and said.endswith(' is') and re.sub(form + ' ?', '', said).strip() in text
            known, at = {}, []
            for found in re.finditer(form, said):
                fact, answer = found.groups()
                if fact in known:
                    at.append(len(said[:found.start()].split()) + 4)
                    assert meta.chars[target[at[-1]]] == known[fact] and answer in (None, known[fact])
                known.setdefault(fact, answer)
            assert len(known) == 2 and len(at) == (1 if last_only else 16) and at[-1] == 255
            assert (np.delete(target, at) == meta.ignore).all()
    at = tasks.asked_fact(x)
    for row, i, answer in zip(x, at, y[:, -1]):
        assert (row[i:i + 5] == row[-5:]).all() and row[i + 5] == answer
    assert abs(at.mean() - 125) < 15 and at.max() > 230 and at.min() < 20
    [[x, y], told], _ = rows_of('facts-text-256', tmp_path, file=few_facts)
    [plain_x, plain_y], asked = sides
    assert (x == plain_x).all() and (y[:, :-1] == x[:, 1:]).all() and (y[:, -1] == plain_y[:, -1]).all()
    assert np.array_equal(told, asked)

def idx(x):
    return gzip.compress(bytes([0, 0, 8, x.ndim]) + np.array(x.shape, '>i4').tobytes() + x.tobytes())

def zipped(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, 'w') as z:
        for name, body in members.items():
            z.writestr(name, body)
    return packed.getvalue()

def in_lines(texts):
    return ''.join(f'{text}\n' for text in texts).encode()

DIGITS = np.random.default_rng(0).integers(256, size=(17, 28, 28), dtype=np.uint8)
KINDS_OF_DIGITS = np.arange(17, dtype=np.uint8) % 10
COLA = {f'cola_public/raw/{name}.tsv': f'x\t{i % 2}\t\tof {i}\nx\t1\t*\tmore\n'.encode()
        for i, name in enumerate(['in_domain_train', 'in_domain_dev', 'out_of_domain_dev'])}
ENGLISH = ['a man ' * (i % 7) + f'and {i} hats' for i in range(52)]
GERMAN = ['ein Mann ' * (i % 5) + f'und {i} H\u00fcte' for i in range(52)]
SIDES = {'train': slice(40), 'val': slice(40, 47), 'test_2016_flickr': slice(47, 52)}
WIKI = {f'wiki.{side}.raw': TEXT[:4000].encode() for side in ('train', 'valid', 'test')}
PUBLISHED = {       # small files as those of each set are; of users' own, in the order of their names. A zip has
                    # its files in their folder or at the top
    'mnist': {'train-images-idx3-ubyte.gz': idx(DIGITS[:12]),
              'train-labels-idx1-ubyte.gz': idx(KINDS_OF_DIGITS[:12]),
              't10k-images-idx3-ubyte.gz': idx(DIGITS[12:]),
              't10k-labels-idx1-ubyte.gz': idx(KINDS_OF_DIGITS[12:])},
    'cola': {'cola_public_1.1.zip': zipped({'cola_public/tokenized/in_domain_train.tsv': 'wrong', **COLA})},
    'polarity': {'rt-polarity.all': '0 no\n1 caf\u00e9\n'.encode('cp1252') * 10},
    'trec': {'TREC.train.all': b'0 Who ?\n1 What ?\n', 'TREC.test.all': '1 Which \u201c?\n'.encode('cp1252')},
    'multi30k': {f'{side}.{language}.gz': gzip.compress('\n'.join(lines[part]).encode() + b' \r\n')
                 for side, part in SIDES.items() for language, lines in (('en', ENGLISH), ('de', GERMAN))},
    'wikitext2': {'wikitext-2-raw-v1.zip': zipped(WIKI)},
    'mine.tsv': {'mine.tsv': in_lines(f'{i % 3}\tcaf\u00e9 {i}' for i in range(40))},
    'a.en:a.de.gz': {'a.en': in_lines(ENGLISH), 'a.de.gz': gzip.compress(in_lines(GERMAN))},
    'my.txt': {'my.txt': TEXT.encode()}}

@pytest.fixture
def published(tmp_path, monkeypatch):
    """published(set, {file: content}): a name for prepare.py and its flags, to make the set in tmp_path / data
    from its files, of which some have other content (None: they are not there)."""
    monkeypatch.setattr(prepare, 'FOLDER', str(tmp_path / 'data'))
    folder = tmp_path / 'files'

    def put(name, spoiled=None):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = PUBLISHED[name]
        for base, data in {**files, **(spoiled or {})}.items():
            if data is not None:
                (folder / base).write_bytes(data)
        base = next(iter(files))
        flags = {} if name == 'mnist' else {'tokenizer': 'char'}
        if name not in prepare.DATASETS:
            return ':'.join(str(folder / part) for part in name.split(':')), flags
        unknown = prepare.DATASETS[name]._replace(files=dict.fromkeys(files))
        monkeypatch.setitem(prepare.DATASETS, name, unknown)
        return name, {**flags, 'file': str(folder if len(files) > 1 else folder / base)}
    return put

CUT_OFF = 'end-of-stream|not a zip|Compressed file ended'
IMAGES, LABELS = 't10k-images-idx3-ubyte.gz', 't10k-labels-idx1-ubyte.gz'
COLA_ZIP, WIKI_ZIP = 'cola_public_1.1.zip', 'wikitext-2-raw-v1.zip'

@pytest.mark.parametrize('name, file, content, words', [
    ('mnist', LABELS, None, 'No such file.*labels'),
    ('mnist', IMAGES, idx(KINDS_OF_DIGITS), 'no idx file of items of 784 bytes'),
    ('mnist', IMAGES, idx(DIGITS)[:999], CUT_OFF),
    ('mnist', 'train-images-idx3-ubyte.gz', None, 'too few rows: one of the sides has none'),
    ('cola', COLA_ZIP, zipped(COLA)[:99], CUT_OFF),
    ('trec', 'TREC.test.all', b'1 \x81 ?', 'TREC.test.all, line 1: .* in cp1252'),
    ('wikitext2', WIKI_ZIP, zipped({key: body for key, body in WIKI.items() if 'valid' not in key}),
     'has no wiki.valid.raw'),
    ('my.txt', 'my.txt', b'abc\xff', 'my.txt: not UTF-8 at byte 3; unpack it'),
    ('my.txt', 'my.txt', b'', 'too short to be split'),
    ('mine.tsv', 'mine.tsv', b'0\tno\n1 no\n', 'line 2: .* is not a label .number the classes from 0., a tab'),
    ('mine.tsv', 'mine.tsv', b'0\tno\n3\tno\n' * 9, 'no line to train on has label 1'),
    ('mine.tsv', 'mine.tsv', b'0\tno\n' * 40, 'all lines have label 0: nothing is told apart'),
    ('a.en:a.de.gz', 'a.en', b'one\n' * 51, 'a.en has 51 .*a.de.gz 52')],
    ids=lambda value: value if isinstance(value, str) else '')
def test_a_damaged_file_is_refused_in_a_line_and_what_was_there_stays(name, file, content, words, published,
                                                                      capsys):
    def run(spoiled):
        name_, flags = published(name, spoiled)
        return name_, *(f'--{key}={value}' for key, value in flags.items())
    assert prepare.main(run({})) == 0
    before = {path: path.read_bytes() for path in Path(prepare.FOLDER).rglob('*.*')}
    assert re.search(words, refused(capsys, prepare.main, *run({file: content})))
    assert len(before) >= 3 and before == {path: path.read_bytes() for path in before}
    assert set(Path(prepare.FOLDER).rglob('*.*')) == before.keys()

@pytest.mark.parametrize('name, tokenizer, expected', [
    ('trec', 'byte', [('Which \u201c?', 1)]),
    ('cola', 'byte', [('of 1', 1), ('more', 1), ('of 2', 0), ('more', 1)]),
    ('polarity', 'char', 2 * [('caf\u00e9', 1)]),
    ('mine.tsv', 'bpe:300', [(f'caf\u00e9 {i}', i % 3) for i in range(9, 40, 10)])])
def test_the_last_target_of_a_labelled_text_is_its_label(name, tokenizer, expected, published, tmp_path):
    if tokenizer == 'bpe:300':
        pytest.importorskip('tokenizers')
    name, flags = published(name)
    sides, meta = rows_of(name, tmp_path, **{**flags, 'tokenizer': tokenizer})
    found = []
    for row, target in zip(*sides[1]):
        n = (row != meta.pad).sum()
        assert (np.delete(target, n - 1) == meta.ignore).all()
        found.append((vocabulary.decode(row, meta), target[n - 1]))
    assert sorted(found) == sorted(expected) and meta.row == 32
    assert meta.classes == (3 if 'tsv' in name else 2) and meta.pad == meta.vocab_size - 1

def test_pictures_are_rows_of_numbers_or_of_patches(published, tmp_path):
    """Of the published training side the last 3,000 validate, if there are as many."""
    name, flags = published('mnist')
    (_, (pixels, y)), meta = rows_of(name, tmp_path, **flags)
    assert (pixels == DIGITS[12:].reshape(5, 784)).all()
    assert (y[:, -1] == KINDS_OF_DIGITS[12:]).all() and (y[:, :-1] == 256).all()
    (_, (pixels, _)), cut = rows_of('mnist-patch7', tmp_path, **flags)
    assert (pixels[:, 49 * 6:49 * 7] == DIGITS[12:, 7:14, 14:21].reshape(5, 49)).all()
    assert cut.patch == 49 and not meta.has_tokens_of(cut)
    for path in tmp_path.glob('files/train*'):          # the test side alone is shared
        path.unlink()
    x = np.zeros((3010, 28, 28), np.uint8)
    x[10:] = 1
    (tmp_path / 'files' / IMAGES).write_bytes(idx(x))
    (tmp_path / 'files' / LABELS).write_bytes(idx(x[:, 0, 0]))
    (old, (pixels, y)), _ = rows_of('mnist', tmp_path, **flags)
    assert len(old[0]) == 10 and (pixels == 1).all() and (y[:, -1] == 1).all()

@pytest.mark.parametrize('name, tokenizer', [('multi30k', 'bpe:300'), ('a.en:a.de.gz', 'byte')])
def test_a_pair_is_a_source_and_what_a_decoder_reads_and_says(name, tokenizer, published, tmp_path):
    """On all sides, line by line; no part is 8 tokens longer than it must be. Of files of your own every
    tenth line validates."""
    if tokenizer == 'bpe:300':
        pytest.importorskip('tokenizers')
    lines = list(zip(ENGLISH, GERMAN))
    parts = [lines[part] for part in SIDES.values()]
    if name == 'a.en:a.de.gz':
        parts = [pair for i, pair in enumerate(lines) if i % 10 != 9], lines[9::10]
    path, flags = published(name)
    sides, meta = rows_of(path, tmp_path, **{**flags, 'tokenizer': tokenizer})
    S, pad, ignore = meta.source, meta.pad, meta.ignore
    T, longest = meta.row - S, [0, 0]
    for rows, pairs in zip(sides, parts, strict=True):
        for x, y, pair in zip(*rows, pairs, strict=True):
            read, said = (vocabulary.encode(text, meta) for text in pair)
            rest = T - 1 - len(said)
            assert x.tolist() == read + [pad] * (S - len(read)) + [pad] + said + [pad] * rest
            assert y.tolist() == [ignore] * S + said + [pad] + [ignore] * rest
            assert (vocabulary.decode(x[:S], meta), vocabulary.decode(x[S:], meta)) == pair
            longest = np.maximum(longest, [len(read), 1 + len(said)])
    assert [S, T] == (-(-longest // 8) * 8).tolist() and pad == meta.vocab_size - 1
    if tokenizer == 'bpe:300':
        assert meta.json == vocabulary.learn_tokenizer('\n'.join(ENGLISH[:40] + GERMAN[:40]).encode(), 300)

def test_files_of_your_own_fit_the_rows_of_a_model_or_are_cut_off(published, tmp_path, capsys):
    mine = put(tmp_path, 'mine.tsv', '0\tno\n1\tyes\n' * 9 + '1\t' + 'x' * 9999)
    *_, meta = prepare.load_set(mine, str(tmp_path))
    assert meta.row == 1024 and meta.name.startswith('lines-mine-')
    assert '1 of 18 texts have more than 1024' in capsys.readouterr().out
    put(tmp_path, 'mine.tsv', '0\tno 1\n1\tno 2\n' * 10)
    for row in 1024, 32, 64, 1024:                              # of models of other rows
        assert prepare.load_set(mine, str(tmp_path), like=dataclasses.replace(meta, row=row))[2].row == row
    name, _ = published('a.en:a.de.gz')
    like = Data('byte', 257, pad=256, source=16, row=32)
    *_, meta = prepare.load_set(name, like=like)
    assert meta.source == 16 and meta.row == 32 and meta.name.startswith('pairs-a-')
    assert '36 of 47 texts have more than 15 tokens' in capsys.readouterr().out
    with pytest.raises(ValueError, match='no test side'):
        prepare.test_side(name, like=like)

@pytest.mark.parametrize('kind', ['byte', 'llama2', 'llama3'])
def test_a_model_of_texts_reads_one_file_behind_the_other(kind, tmp_path):
    """Line by line; only what it is to say counts. What is too long is cut off, not what stands behind it."""
    like = Data('byte', 256) if kind == 'byte' else subwords(kind)
    for name, word in ('a', 'what'), ('b', 'yes'):
        lines = [' '.join([word] * (1 + i % 3)) for i in range(20)]
        lines[4] = ' '.join([word] * 900)
        (tmp_path / name).write_text('\n'.join(lines))
    sides, meta = rows_of(f'{tmp_path}/a:{tmp_path}/b', tmp_path, like=like)
    assert not meta.source and meta.vocab_size == like.vocab_size and meta.row == 1024
    x, y = sides[0][:, 4]
    targets = y[y < meta.ignore]
    assert len(targets) == 513 and x[511] == meta.pad == targets[-1]
    end = vocabulary.encode('\n', like)[-1:]
    for i, (x, y) in zip([9, 19], sides[1].swapaxes(0, 1)):
        read, said = (' '.join([word] * (1 + i % 3)) for word in ('what', 'yes'))
        inputs = vocabulary.frame(like)[0] + vocabulary.encode(f'{read}\n', like)
        whole = vocabulary.frame(like)[0] + vocabulary.encode(f'{read}\n{said}', like)       # as one text
        begin, targets = len(inputs) - 1, whole[len(inputs):] + end
        assert x.tolist() == whole + end * (1024 - len(whole))
        assert y[begin:begin + len(targets)].tolist() == targets
        assert (y < meta.ignore).sum() == len(targets)
        assert vocabulary.decode(x, meta) == vocabulary.decode(x, like)               # with its line ends

def test_two_processes_may_prepare_the_same_text(tmp_path, monkeypatch):
    """As torchrun's do: what one has written is there while the other writes the same once more."""
    mine = put(tmp_path, 'mine.txt', TEXT)
    meta = Path(prepare.prepare(mine, str(tmp_path))) / 'meta.json'
    there, replace = [], os.replace

    def watched(*paths):
        there.append(meta.exists())
        replace(*paths)
    monkeypatch.setattr(os, 'replace', watched)
    prepare.prepare(mine, str(tmp_path))
    assert there == [True] * 3

@pytest.mark.parametrize('tokenizer, folder', [
    ('byte', 'stdlib'), ('char', 'stdlib-char'), ('bpe:300', 'stdlib-bpe-300')])
def test_a_text_is_prepared_in_tokens_that_say_it_again_or_in_those_of_another(tokenizer, folder, tmp_path,
                                                                               monkeypatch):
    """Each in a folder of its own, beside what the text itself would make. Subwords are learned from the training
    side, and what is no UTF-8 is refused."""
    if tokenizer == 'bpe:300':
        pytest.importorskip('tokenizers')
    train_side, val = TEXT[:6000].encode(), '\u00e9 quick brown line'.encode() * 40

    def stdlib_is(sides):
        entry = prepare.DATASETS['stdlib']._replace(make=lambda: sides)
        monkeypatch.setitem(prepare.DATASETS, 'stdlib', entry)
    stdlib_is((train_side, val))
    root, new = str(tmp_path), put(tmp_path, 'new.txt', 'the quick lazy fox jumps\n' * 20)
    *sides, meta = prepare.load_set('stdlib', root, tokenizer)
    assert meta.name == folder and meta.tokenizer == tokenizer
    assert [vocabulary.decode(side, meta).encode() for side in sides] == [train_side, val]
    assert prepare.load_set('stdlib', root, like=meta)[2] == meta
    data, _, found = prepare.load_set(new, root, like=meta)
    assert found.has_tokens_of(meta) and 'the quick lazy fox jumps\n' in vocabulary.decode(data, found)
    if tokenizer == 'bpe:300':
        assert meta.json == vocabulary.learn_tokenizer(train_side, 300) and meta.vocab_size == 300
        assert len(sides[0]) < len(train_side) / 1.5
        other = dataclasses.replace(meta, json=vocabulary.learn_tokenizer(val, 300))       # another model's
        assert prepare.load_set('stdlib', root, like=other)[2].name.startswith('stdlib-bpe-300-')
        stdlib_is((train_side, b'\xff' + val))
        with pytest.raises(ValueError, match='utf-8'):
            prepare.load_set('stdlib', root, 'bpe:301')

def test_files_and_standard_input_are_bytes(tmp_path, monkeypatch, capsys):
    """CR, a BOM and NUL come as they are, in prompts as in training texts."""
    raw = '\ufeffone\r\ntwo\rthree\n\0four\n'.encode()
    (tmp_path / 'a@b').write_bytes(raw * 9)
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(raw)))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert files.text_of('@~/a@b') == files.text_of('-') * 9 == raw.decode() * 9
    assert flags_py.from_home('~/a:~/b~,~') == f'{tmp_path}/a:{tmp_path}/b~,{tmp_path}'
    *sides, meta = prepare.load_set(str(tmp_path / 'a@b'), tokenizer='char')
    assert vocabulary.decode(np.concatenate(sides), meta).encode() == raw * 9
    (tmp_path / 'mine.tsv').write_bytes(b'\xef\xbb\xbf0\tno\r\n1\tyes\r\n')
    assert sources_py.lines(str(tmp_path / 'mine.tsv'))[0] == ([b'no', b'yes'], [[0], [1]])

STRANGE = ("It's so.\n\n  Then he...\nwent\ton, 1234567 \u2581 or\u3000so a\u0300 b; <s> not </s> a <|end|> "
           'caf\u00e9 \u0431\u044b\u043b \u0431\u044b \u4f60\u597d\u4e16\u754c\U0001f600 end \u00a0 x  y '
           'z?!\nNo, no: "yes" he said')

@functools.cache
def tokenizer_json(kind):
    """A small tokenizer.json of a kind that there is, learned from TEXT."""
    package = pytest.importorskip('tokenizers')
    models, pre, decoders = package.models, package.pre_tokenizers, package.decoders
    specials = ['<unk>', '<s>', '</s>']
    words = dict(vocab_size=400, special_tokens=specials, show_progress=False)
    found = package.Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    found.pre_tokenizer = pre.Metaspace()
    if kind in ('llama2', 'metaspace'):
        specials += [f'<0x{i:02X}>' for i in range(256)]
        words.update(vocab_size=656, special_tokens=specials)
        found.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    else:
        found.model = models.BPE()
        found.decoder = decoders.ByteLevel()
        words.update(initial_alphabet=pre.ByteLevel.alphabet())
        found.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=kind == 'gpt2')
    if kind == 'llama3':
        regex = package.Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                              r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
        found.pre_tokenizer = pre.Sequence([pre.Split(regex, 'isolated'), found.pre_tokenizer])
    found.train_from_iterator([TEXT, STRANGE], package.trainers.BpeTrainer(**words))
    template = '<s> $A </s>' if kind == 'metaspace' else '<s> $A'
    ends = [('<s>', 1), ('</s>', 2)]
    found.post_processor = package.processors.TemplateProcessing(single=template, special_tokens=ends)
    raw = json.loads(found.to_str())
    raw['added_tokens'] = raw['added_tokens'][:3]               # bytes are tokens as others are
    raw['truncation'] = dict(max_length=8, strategy='LongestFirst', stride=0, direction='Right')
    if kind == 'llama2':
        front = dict(type='Prepend', prepend='\u2581')
        blanks = dict(type='Replace', pattern=dict(String=' '), content='\u2581')
        raw['normalizer'] = dict(type='Sequence', normalizers=[front, blanks])
        raw['pre_tokenizer'] = None
    return json.dumps(raw)

def word_pieces(words, single='$A', ends=()):
    """A tokenizer.json as BERT's, of these words and 290 more. single, ends: what stands around a text"""
    package = pytest.importorskip('tokenizers')
    ids = {word: i for i, word in enumerate([*words, *(f'w{i}' for i in range(290))])}
    found = package.Tokenizer(package.models.WordPiece(ids, unk_token='[UNK]'))
    found.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    found.decoder = package.decoders.WordPiece()
    found.post_processor = package.processors.TemplateProcessing(single=single, special_tokens=[*ends])
    return found.to_str()

def subwords(kind):
    """The meta of a model with such a tokenizer, and room for some tokens more."""
    text = tokenizer_json(kind)
    vocab = vocabulary.subwords(text).get_vocab_size() + 9
    return Data('json', vocab, kind, json=text)

@pytest.mark.parametrize('kind', ['gpt2', 'llama2', 'llama3', 'metaspace', 'prefix'])
def test_what_goes_on_has_the_tokens_of_the_whole_text(kind, tmp_path, capsys):
    """Wherever the whole text's tokens have a border."""
    raw = json.loads(tokenizer_json('gpt2' if kind == 'prefix' else kind))
    if kind == 'prefix':
        raw['pre_tokenizer']['add_prefix_space'] = True
    data = Data('json', 700, json=json.dumps(raw))
    text, borders = TEXT[:99] + STRANGE.replace('\u2581', '') + "it's ..'s a\n\n b   d\te\n x", 0
    whole = vocabulary.encode(text, data)
    for i in range(1, len(whole)):
        said = vocabulary.decode(whole[:i], data).removeprefix(' ')
        if text.startswith(said):
            borders += 1
            assert vocabulary.continued(text[len(said):], whole[i - 1:i], data) == whole[i:]
    assert borders > 60
    in_hub_layout(tmp_path, 'llama', vocab=700)
    put(tmp_path, 'tokenizer.json', data.json)
    flags, state = (f'--init={tmp_path}', '--temperature=0', '--tokens=5'), f'{tmp_path}/state'
    written(capsys, *flags[:2], '--tokens=0', '--prompt=line 1:', f'--save_state={state}')
    on = written(capsys, *flags, f'--load_state={state}', '--prompt= the quick fox')[0]
    assert on == written(capsys, *flags, '--prompt=line 1: the quick fox')[0]

def made(folder, x, y, ends, **more):
    """The path of a set of these rows, whose sides end at `ends`, with more in its meta.json."""
    dtype = 'uint8' if more['vocab_size'] < 256 else 'uint16'
    rows = np.concatenate([x, y], 1).astype(dtype)
    meta = dict(name=folder.name, tokenizer='ids', dtype=dtype, row=x.shape[1], **more)
    for side, part in zip(('train', 'val', 'test'), np.split(rows, ends)):
        if len(part):
            meta[side] = dict(tokens=part.size, sha256='')
            (folder / f'{side}.bin').write_bytes(part.tobytes())
    put(folder, 'meta.json', json.dumps(meta))
    return str(folder)

def test_what_a_prepared_set_says_and_holds_is_checked_before_a_model_is_built(tmp_path, capsys):
    x, out = np.tile(np.arange(8), (12, 1)), tmp_path / 'out'
    for more, cut_off, words in (dict(newer=3), 0, 'unexpected keyword argument .newer'), (
            {}, 5, 'multiple of the data-type size'):
        folder = made(tmp_path, x, x, [6, 12], vocab_size=300, ignore=300, **more)
        os.truncate(tmp_path / 'val.bin', x[:6].size * 4 - cut_off)
        err = refused(capsys, train.main, f'--data={folder}', f'--out={out}', *TINY, '--steps=1')
        assert re.search(words, err) and 'prepare it anew' in err and not out.exists()

def test_rows_and_draws_are_functions_of_seed_and_step():
    """And of the index of a row, or of a process's rank."""
    def starts(seed, step):
        return made_rows(np.zeros(1000), None, Data(), 16, torch.device('cpu'), 8, seed).starts(step)
    a = starts(3, 7)
    assert len(set(a)) > 4 and a.max() < 1000 - 16 and (a == starts(3, 7)).all()
    assert (a != starts(3, 8)).any() and (a != starts(4, 7)).any()
    opt = train.adamw(torch.nn.Linear(1, 1), 1e-3, 0.0)

    def drawn(step, seed, rank):
        train.begin_step(opt, step, 1e-3, seed, rank)
        return torch.rand(1).item()
    cases = [(step, *more) for step in range(4) for more in [(0, 0), (1, 0), (0, 1)]]
    numbers = [drawn(*case) for case in cases]
    assert len(set(numbers)) == 12 and numbers[::-1] == [drawn(*case) for case in cases[::-1]]

def test_rows_end_with_the_last_target_of_all():
    """Of a task, unless its inputs are patches; a text's last row has targets up to the text's end."""
    def rows(begin, **meta):
        x, y = made_rows(None, None, Data(**meta), 6, torch.device('cpu')).rows(data.reshape(-1), begin)
        return x.tolist(), y.tolist()
    data = np.arange(24, dtype=np.uint8).reshape(2, 2, 6)
    data[:, 1] = 99
    data[0, 1, 1], data[1, 1, 3] = 5, 7
    task = [[0, 1, 2, 3], [12, 13, 14, 15]], [[-1, 5, -1, -1], [-1, -1, -1, 7]]
    assert rows([0, 12], row=6, ignore=99) == task
    assert [len(side[0]) for side in rows([0, 12], row=6, ignore=99, patch=2)] == [6, 6]
    assert rows([20])[1] == [[7, 99, 99, -1, -1, -1]]

@pytest.mark.parametrize('more', [dict(source=12), {}], ids=['apart', 'one text'])
def test_pairs_of_like_length_come_together(more):
    """A batch's longer sides lie between those of two others, and the batches are in no order."""
    T, pad, meta = 24, 99, Data('ids', 100, row=24, pad=99, **more)
    pairs = np.random.default_rng(0).integers(pad, size=(500, 2, T))
    for row in pairs:
        for side in np.split(row[0], 2):
            side[1 + side[0] % 12:] = pad
    data = pairs.reshape(-1)
    rows = made_rows(data, None, meta, T, torch.device('cpu'), 8)
    begin = [rows.starts(step) for step in range(2 * data_rows_py.POOL)]
    sides = (pairs[:, 0] != pad).reshape(500, 1 + len(more), -1).sum(2).max(1)
    first = [sides[b // (2 * T)] for b in begin[:data_rows_py.POOL]]
    assert all((b % (2 * T) == 0).all() for b in begin) and len(set(np.concatenate(begin))) > 300
    for least, most in itertools.pairwise(sorted((side.min(), side.max()) for side in first)):
        assert least[1] <= most[0]
    means = [side.mean() for side in first]
    assert means != sorted(means) and means != [sides[b // (2 * T)].mean() for b in begin[data_rows_py.POOL:]]

@pytest.mark.parametrize('kind', ['texts', 'lines', 'tasks', 'pairs', 'pairs as one text'])
def test_batches_and_processes_are_parts_of_one_larger_batch(kind, text, turned_around, tmp_path, monkeypatch):
    """The gradients of 8 rows at once, whose numbers of targets differ."""
    monkeypatch.setattr(data_rows_py, 'POOL', 1)

    def lines_of(name, words):
        return put(tmp_path, name, ''.join(f'{i % 3}\t{"word " * (1 + i % words)}\n' for i in range(90)))
    lines, both = lines_of('x.tsv', 7), f'{lines_of("a", 5)}:{lines_of("b", 9)}'
    name = {'texts': text, 'lines': lines, 'tasks': 'recall', 'pairs': turned_around}.get(kind, both)
    like = Data('byte', 256) if name not in (lines, 'recall', turned_around) else None
    train_side, val, meta = prepare.load_set(name, like=like)
    T = meta.row or 16
    data = made_rows(train_side, val, meta, T, torch.device('cpu'), 8)
    config = model_py.Config(n_layer=2, n_head=2, n_embd=16)
    model = starts.built(train.Args(), model_py.GPT, config, data, {}).double()         # of the kind of the data

    def gradients(batch_size, accum, world=1):
        total = 0
        for rank in range(world):
            how = dict(batch_size=batch_size, accum=accum, rank=rank, world=world)
            for loss in train.losses(model, dataclasses.replace(data, **how), [None] * accum, 3):
                loss.backward()
            total = total + torch.cat([p.grad.flatten() for p in model.parameters()]) / world
            model.zero_grad()
        return total
    whole = gradients(8, 1)
    for split in (4, 2), (2, 4), (1, 8), (8, 1, 2), (8, 1, 4), (4, 2, 2):
        near(gradients(*split), whole, 1e-12)

@contextlib.contextmanager
def served(contents, fault):
    """A server of contents by path -> its address, and the list of paths it was asked for. They meet a fault: a
    status, 'silent', 'cut', or another content; or none."""
    asked, over = [], threading.Event()

    class Server(http.server.BaseHTTPRequestHandler):
        log_message = Mock()

        def do_GET(self):
            asked.append(self.path)
            sent = contents[self.path]
            if fault == 'silent':
                return over.wait()
            if isinstance(fault, int):
                return self.send_error(fault)
            if isinstance(fault, bytes):
                sent = fault
            self.send_response(200)
            self.send_header('Content-Length', str(len(sent)))
            self.end_headers()
            self.wfile.write(sent[:5] if fault == 'cut' else sent)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}', asked
        over.set()
        server.shutdown()

@pytest.mark.parametrize('fault', [None, 'cut', 404, b'<html>sign in</html>', 'silent'])
def test_downloads_end_whole_or_not_at_all(fault, tmp_path, monkeypatch):
    """Two files, from a server that cuts, fails, sends web pages, is silent. Nothing wrong is
    left. Other rows are made of the same files, as long as they are those."""
    bodies = PUBLISHED['trec']
    known = {base: hashlib.sha256(body).hexdigest() for base, body in bodies.items()}
    monkeypatch.setattr(files, 'TIMEOUT', .2 if fault == 'silent' else 10)
    with served({'/' + base: body for base, body in bodies.items()}, fault) as (address, asked):
        entry = prepare.DATASETS['trec']._replace(files=known, urls=[address])
        monkeypatch.setitem(prepare.DATASETS, 'trec', entry)
        if fault is None:
            prepare.load_set('trec', str(tmp_path))
            assert {base: (tmp_path / 'trec' / base).read_bytes() for base in bodies} == bodies
            assert prepare.load_set('trec-16', str(tmp_path))[2].row == 16
            assert len(asked) == 2
            (tmp_path / 'trec' / next(iter(bodies))).write_bytes(b'1 What ?')
            with pytest.raises(ValueError, match='is not the file of trec: sha256 is'):
                prepare.prepare('trec', str(tmp_path))
        else:
            with pytest.raises(ValueError, match='by hand') as e:
                prepare.load_set('trec', str(tmp_path))
            place = tmp_path / 'trec' / next(iter(bodies))
            assert f'{address}/{place.name}: ' in str(e.value) and str(place) in str(e.value)
            assert '\n' not in str(e.value) and len(asked) == 1
            assert not list(tmp_path.rglob('*.*'))
    with pytest.raises(ValueError, match='by hand'):                # nobody answers
        prepare.load_set('trec', str(tmp_path / 'down'))


# ---- 11. hub/: models in the hub's layout, their tokens, their templates -----------------------------------

LLAMAS = 'llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_5_text', 'olmo_hybrid'

SIZES = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, intermediate_size=12)
LAYOUTS = dict(     # names in transformers, sizes
    gpt2=('GPT2', 'LMHeadModel', dict(n_layer=2, n_head=4, n_embd=16, n_inner=12, vocab_size=30, n_positions=16)),
    llama=('Llama', 'ForCausalLM', dict(SIZES, head_dim=6, max_position_embeddings=16, rms_norm_eps=1e-5)),
    mistral=('Mistral', 'ForCausalLM', dict(SIZES, head_dim=6, sliding_window=7)),
    qwen2=('Qwen2', 'ForCausalLM', dict(SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    qwen3=('Qwen3', 'ForCausalLM', dict(SIZES, head_dim=6)),
    qwen3_5_text=('Qwen3_5', 'ForCausalLM', dict(
        SIZES, head_dim=16, layer_types=['linear_attention', 'full_attention'], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10)),
    olmo_hybrid=('OlmoHybrid', 'ForCausalLM', dict(
        SIZES, head_dim=6, layer_types=['linear_attention', 'full_attention'], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10, rope_theta=None, pad_token_id=None,
        eos_token_id=None)),
    bert=('Bert', 'ForSequenceClassification', dict(SIZES, vocab_size=300, max_position_embeddings=16,
                                                    pad_token_id=3)),
    vit=('ViT', 'ForImageClassification', dict(SIZES, image_size=8, patch_size=4)))
EMBEDS = 'gpt2', *LLAMAS

def in_hub_layout(folder, kind, prefix=True, old=False, shards=1, dtype=torch.float32, tied=True, vocab=30,
                  groups=1, classes=3, **more):
    """A model of transformers, of two layers with random weights, as the hub keeps it -> functions to its last
    norm and to its logits, from tokens or from pictures of 8 x 8 pixels 0..255. old: names of 2018, and no
    pooler; more: for config.json"""
    hf = pytest.importorskip('transformers')
    name, head, sizes = LAYOUTS[kind]
    rope = {key: copy.copy(value) for key, value in more.items() if key.startswith('rope')}
    given = sizes | ({} if 'yarn' in str(rope) else rope)
    if kind in LLAMAS:
        given.update(vocab_size=vocab, num_key_value_heads=groups)
    given.update(dict(tie_word_embeddings=tied) if kind in EMBEDS else dict(num_labels=classes))
    config = getattr(hf, f'{name}TextConfig' if kind == 'qwen3_5_text' else f'{name}Config')(**given)
    model = getattr(hf, name + (head if classes or kind in EMBEDS else 'Model'))(config).eval()
    for part, p in model.named_parameters():
        fast = 2 * part.endswith('A_log')               # log-decays to about -20
        p.data = (torch.randn(p.shape) / p.shape[-1] ** .5 + fast).to(dtype).float()
    kept = {'h.0.attn.bias': torch.ones(1, 1, 16, 16)} if kind == 'gpt2' else {}    # a mask, in older files
    model.save_pretrained(folder)
    tensors = load_file(folder / 'model.safetensors')
    for key in [key for key in tensors if 'q_conv1d' in key]:       # transformers 5.24 writes them as three thirds
        convs = [key.replace('q_conv1d', f'{x}_conv1d') for x in 'qkv']
        sizes = [len(tensors[name.replace('conv1d', 'proj')]) for name in convs]
        tensors.update(zip(convs, torch.cat([tensors[name] for name in convs]).split(sizes)))
    for key, x in tensors.items():
        if old:
            key = key.replace('m.weight', 'm.gamma').replace('m.bias', 'm.beta')
        if not prefix:
            key = key.removeprefix(f'{model.base_model_prefix}.')
        if not (old and 'pooler' in key):
            kept[key] = x.to(dtype, copy=True)
    (folder / 'model.safetensors').unlink()
    (folder / 'generation_config.json').unlink(missing_ok=True)
    put(folder, 'config.json', json.dumps({**given, 'model_type': kind, **more}))
    files = ['model.safetensors'] if shards == 1 else [f'model-{i}.safetensors' for i in range(shards)]
    where = {key: files[i % shards] for i, key in enumerate(kept)}
    for file in files:
        save_file({key: x for key, x in kept.items() if where[key] == file}, folder / file)
    if shards > 1:
        put(folder, 'model.safetensors.index.json', json.dumps({'weight_map': where}))

    def of(model, x):
        how = dict(pixel_values=(x / 255 - .5) / .5) if kind == 'vit' else dict(input_ids=x)
        return model(**how, **dict(attention_mask=x != 3) if kind == 'bert' else {})
    return lambda x: of(model.base_model, x).last_hidden_state, lambda x: of(model, x).logits

LLAMA31 = dict(rope_type='llama3', factor=8.0, low_freq_factor=.02, high_freq_factor=1.5,
               original_max_position_embeddings=10)

def examples(kind):
    """What transformers takes, the tokens of it, and which places are none of padding."""
    if kind in EMBEDS:
        tokens = torch.randint(30, (2, 11))
        return tokens, tokens, tokens >= 0
    if kind == 'vit':
        x = torch.randint(256, (3, 3, 8, 8))
        tokens = F.unfold(x.float(), 4, stride=4).mT.flatten(1)     # a patch: channel, row, column
        return x, tokens, torch.ones(3, 5, dtype=torch.bool)
    tokens = torch.randint(4, 300, (3, 11))
    tokens[1, 6:] = tokens[2, 1:] = 3
    return tokens, tokens, tokens != 3

@pytest.mark.parametrize('kind, how', [
    ('gpt2', {}), ('gpt2', dict(prefix=False)), ('gpt2', dict(tied=False, shards=3, dtype=torch.bfloat16)),
    ('llama', {}), ('llama', dict(tied=False, groups=2, rope_theta=5e5)),
    ('llama', dict(groups=4, rope_parameters=dict(rope_theta=1e3))), ('llama', dict(rope_scaling=LLAMA31)),
    ('llama', dict(rope_parameters=dict(LLAMA31, rope_theta=1e3))),
    ('bert', {}), ('bert', dict(prefix=False, classes=0, old=True)),
    ('vit', {}), ('vit', dict(prefix=False, classes=0))])
def test_hub_weights_give_what_another_implementation_gives(kind, how, tmp_path):
    """Each place and the logits: loaded, written and loaded again, with bounded rows, and step by step."""
    last, logits = in_hub_layout(tmp_path, kind, **how)
    x, tokens, there = examples(kind)
    model, meta = load(tmp_path)
    models = [model]
    write = partial(folders.to_folder, tmp_path / 'again', model.state_dict(),
                    model_files.whole_config(model.config), meta['data'])
    writable = kind != 'vit' and 'old' not in how               # the old BERT has no pooler
    if writable:
        write()
        again, meta_again = load(tmp_path / 'again')
        models.append(again)
    else:
        with pytest.raises(ValueError, match='Olmo Hybrid, BERT with its pooler alone'):
            write()
    if kind in EMBEDS:
        positions = 'compress' if kind == 'llama' else 'true'       # no gap is long enough
        models.append(load(tmp_path, rule='tova', cache=11, positions=positions)[0])
        models.append(load(tmp_path, rule='window', cache=11, overflow='sum')[0])
    with torch.no_grad():
        for found in models:
            near(found.eval().hidden(tokens)[0][there], last(x)[there], 1e-5)
            if how.get('classes', 3):
                near(found(tokens)[0], logits(x), 1e-5)
        if kind in EMBEDS:
            near(model_in_parts(model, tokens, range(1, 11))[0], logits(x), 1e-5)
    assert getattr(model.config, 'pooler', False) == (kind == 'bert' and writable)
    assert getattr(model.config, 'pad', None) == (3 if kind == 'bert' else None)
    assert meta['data'].vocab_size == dict(bert=300, vit=256).get(kind, 30)
    if not writable:
        return
    given, raw = (json.loads((path / 'config.json').read_text()) for path in (tmp_path, tmp_path / 'again'))
    assert raw['model_type'] == kind and raw['architectures'] == [''.join(LAYOUTS[kind][:2])]
    assert kind != 'gpt2' or raw['activation_function'] == 'gelu_new'
    if kind in EMBEDS:                                          # 10 positions are not 10.0, says transformers
        assert all(repr(raw[key]) == repr(value) for key, value in given.items() if key in raw)
    assert raw.get('num_key_value_heads') == (how.get('groups', 1) if kind == 'llama' else None)
    assert meta_again['data'].pad == getattr(model.config, 'pad', None)

@pytest.mark.parametrize('kind', LLAMAS)
def test_models_that_people_run_are_read_tuned_and_written(kind, tmp_path, capsys, text):
    """Of odd sizes: a whole text, pieces, step by step, with bounded rows, and greedy text are theirs; so are
    the logits of what train.py makes of it and convert.py writes. Parts of the whole Qwen3.5 are skipped."""
    hf = pytest.importorskip('transformers')
    data = a_talker(tmp_path / 'a', family=kind, groups=2, tied=False, dtype=torch.bfloat16)
    tokens = torch.randint(data.vocab_size, (2, 75))

    def theirs(folder):
        return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(folder):
        with torch.no_grad():
            return theirs(folder)(tokens).logits

    wanted, model = logits(tmp_path / 'a'), load(tmp_path / 'a')[0]
    models = [model]
    if 'window' not in model.config.rules:
        models.append(load(tmp_path / 'a', rule='h2o', cache=75)[0])
    if kind == 'qwen3_5_text':
        folder = shutil.copytree(tmp_path / 'a', tmp_path / 'whole')
        raw = json.loads((folder / 'config.json').read_text())
        put(folder, 'config.json', json.dumps(dict(model_type='qwen3_5', text_config=raw, vision_config={})))
        tensors = load_file(folder / 'model.safetensors')
        tensors = {name.replace('model.', 'model.language_model.'): x for name, x in tensors.items()}
        more = {'model.visual.blocks.0.a': torch.ones(2), 'mtp.norm.weight': torch.ones(2)}
        save_file(tensors | more, folder / 'model.safetensors')
        capsys.readouterr()
        models.append(load(folder)[0])
        assert '2 tensors not used, such as model.visual.blocks.0.a' in capsys.readouterr().err
    with torch.no_grad():
        for found in models:
            for cuts in [], [1, 31, 32], range(1, 75):
                near(model_in_parts(found, tokens, cuts)[0], wanted, 1e-4 * wanted.std() / wanted.abs().max())
    rounded, low = load(tmp_path / 'a')[0], load(tmp_path / 'a', dtype=torch.bfloat16)[0]
    model_files.round_weights(rounded)
    assert all(torch.equal(x, rounded.state_dict()[name]) for name, x in low.state_dict().items())
    row = vocabulary.with_bos(vocabulary.encode('the quick', data), data)
    says = theirs(tmp_path / 'a').generate(torch.tensor([row]), do_sample=False, max_new_tokens=5, eos_token_id=None)
    greedy = f'--init={tmp_path}/a', '--prompt=the quick', '--tokens=5', '--temperature=0'
    assert vocabulary.decode(says[0, len(row):].tolist(), data) in written(capsys, *greedy)[0]
    written(capsys, *greedy, '--rule=h2o', '--cache=4', f'--html={tmp_path}/page.html')
    run = f'--init={tmp_path}/a', f'--data={text}', '--steps=1', '--block_size=16', f'--out={tmp_path}/o', '--device=cpu'
    assert train.main([*run]) == 0
    assert convert.main([f'--from={tmp_path}/o/ckpt.safetensors', f'--export={tmp_path}/b']) == 0
    tuned = load(tmp_path / 'o' / 'ckpt.safetensors')[0]
    near(tuned(tokens)[0], logits(tmp_path / 'b'), 1e-4)
    assert (tuned(tokens)[0] - wanted).abs().max() > 1e-3

def test_a_qwen3_becomes_an_rnn(tmp_path, text):
    """Its norms of q and k go along, into caches and into matrices."""
    a_talker(tmp_path / 'a', family='qwen3', groups=2)
    for recipe in '--recipe=hybrid', '--recipe=pure':
        found = converted(tmp_path / 'a', tmp_path / 'o', f'--data={text}', '--row=100', '--steps=2', recipe, '--controls=false')
        assert found['table'] and load(tmp_path / 'o' / 'ckpt.safetensors')[0].blocks[1].mixer.q_norm is not None

DAMAGED = [     # kind; an entry of config.json, a tensor (by shape) or a file; what it is now; what is said
    ('llama', 'rope_scaling', dict(rope_type='yarn'), 'rope of type yarn'),
    ('qwen3', 'head_dim', 7, 'rope rotates pairs'),
    ('qwen2', 'layer_types', ['full_attention'], 'layer_types: 1 of full_attention, expected 2 of'),
    ('mistral', 'layer_types', ['full_attention'] * 2, 'expected None'),
    ('llama', 'partial_rotary_factor', .5, 'partial_rotary_factor 0.5, expected 1'),
    ('olmo_hybrid', 'rope_parameters', dict(rope_theta=5e5), 'config.json: rope_theta 500000.0, expected None'),
    ('olmo_hybrid', 'linear_allow_neg_eigval', False, 'linear_allow_neg_eigval False, expected True'),
    ('bert', 'id2label', 'rain', 'not as the hub has it'),
    ('llama', 'model_type', 'mamba', 'model_type mamba'),
    ('gpt2', 'scale_attn_weights', False, 'attn_weights False'),
    ('gpt2', 'n_layer', 0, '--n_layer=0: expected a whole number, at least 1'),
    ('bert', 'architectures', ['BertForTokenClassification'], 'TokenC'),
    ('vit', 'image_size', 9, 'position_embeddings has shape'),
    ('llama', 'model.layers.1.mlp.up_proj.weight', None, 'mlp.up_proj.weight is missing in model.safetensors'),
    ('gpt2', 'transformer.h.0.mlp.c_fc.weight', (12, 16), 'shape (12, 16), expected (16, 12)'),
    ('bert', 'classifier.weight', (1, 16), 'one row'), ('llama', 'config.json', b'[]', 'not as the hub has it'),
    ('llama', 'tokenizer.json', b'{}', 'no description of a tokenizer'),
    ('llama', 'tokenizer_config.json', b'{"chat_template": ["x"]}', 'not as the hub has it (AttributeError'),
    ('vit', 'preprocessor_config.json', b'{"image_mean": [0.485]}', 'image_mean is [0.485]'),
    ('gpt2', 'model.safetensors', None, 'No such file')]

@pytest.mark.parametrize('kind, what, value, why', DAMAGED, ids=[f'{row[0]} {row[3]}' for row in DAMAGED])
def test_models_of_the_hub_that_are_damaged_or_others_are_refused(kind, what, value, why, tmp_path, capsys):
    if what == 'tokenizer.json':
        pytest.importorskip('tokenizers')
    path = tmp_path / 'model.safetensors'
    in_hub_layout(tmp_path, kind, **{} if '.' in what else {what: value})
    if isinstance(value, bytes):
        (tmp_path / what).write_bytes(value)
    elif what == path.name:
        path.unlink()
    elif '.' in what:
        tensors = load_file(path)
        del tensors[what]
        save_file(tensors if value is None else tensors | {what: torch.zeros(value)}, path)
    assert why in refused(capsys, convert.main, f'--from={tmp_path}')

@pytest.mark.parametrize('kind, entries, change, why', [
    ('llama', {}, {'lm_head.weight': lambda x: torch.randn(30, 16)}, ''),
    ('llama', {}, {'model.norm.weight': lambda x: x.to(torch.float8_e4m3fn)}, 'error: .*norm.weight is torch'),
    ('gpt2', {}, {'score.weight': lambda x: torch.randn(2, 16)},
     r'note: .*: 2 tensors not used, such as h.0.attn.bias'),
    ('llama', {}, {f'model.layers.{i}.self_attn.q_proj.bias': lambda x: torch.randn(16) for i in (0, 1)},
     r'note: .*: 2 tensors not used, such as model.layers.0.self_attn.q_proj.bias'),
    ('llama', dict(architectures=['LlamaForSequenceClassification']), {}, 'error: .*ForSequenceClassification'),
    ('bert', dict(architectures=['BertForSequenceClassification']), {'classifier.weight': None},
     'error: .*classifier.weight is missing')])
def test_what_lies_in_a_folder_is_used_refused_or_said(kind, entries, change, why, tmp_path, capsys):
    in_hub_layout(tmp_path, kind, **entries)
    path = tmp_path / 'model.safetensors'
    tensors = load_file(path)
    tensors.update({name: make and make(tensors.get(name)) for name, make in change.items()})
    save_file({name: x for name, x in tensors.items() if x is not None}, path)
    flags = f'--init={tmp_path}', '--prompt=7 8', '--tokens=1'
    code, err = sample.main(list(flags)), capsys.readouterr().err
    assert re.search(why, err) and code == 2 * why.startswith('error')
    if not why:                             # an output layer of its own beats what config.json says
        assert torch.equal(load(tmp_path)[0].head.weight, tensors['lm_head.weight'])
        assert 'not used' not in err

def test_which_file_is_the_model(tmp_path):
    """The whole one; else what the index names."""
    tokens = torch.randint(30, (1, 9))
    one = in_hub_layout(tmp_path / 'a', 'gpt2', shards=2)[1]
    with pytest.raises(ValueError, match='--n_layer=1: not what'):      # not the first layer alone
        load(tmp_path / 'a', n_layer=1)
    two = in_hub_layout(tmp_path / 'b', 'gpt2')[1]

    def is_from(logits):
        found = load(tmp_path / 'a')[0](tokens)[0]
        near(found, logits(tokens), 1e-5)
    a, whole = tmp_path / 'a', tmp_path / 'b' / 'model.safetensors'
    shutil.copy(whole, a / 'zz.safetensors')
    is_from(one)
    shutil.copy(whole, a)
    is_from(two)

def test_an_encoder_of_the_hub_learns_the_classes_of_a_task(tmp_path, capsys):
    """Shorter rows than its own; --lr=0 leaves all but the new head as it came."""
    in_hub_layout(tmp_path / 'bert', 'bert', classes=0)
    in_hub_layout(tmp_path / 'three', 'bert', classes=3)
    x, y = np.tile(np.arange(10, 18), (12, 1)), np.full((12, 8), 300)
    y[:, -1] = [0, 1, 2, 3, 0, 1] * 2
    (tmp_path / 'task').mkdir()
    data = made(tmp_path / 'task', x, y, [6, 12], vocab_size=300, ignore=300, pad=3, classes=4)
    run = '--steps=2', '--batch_size=2', '--device=cpu', '--threads=1', f'--out={tmp_path / "out"}'
    assert train.main([f'--init={tmp_path / "bert"}', f'--data={data}', '--lr=0', *run]) == 0
    path = tmp_path / 'out' / 'ckpt.safetensors'
    given, found = load(tmp_path / 'bert')[0], load(path)[0]
    assert found.head.weight.shape == (4, 16) and found.config.block_size == 16
    close({n: x for n, x in found.state_dict().items() if 'head' not in n}, dict(given.state_dict()), 0)
    again = written(capsys, '--resume', '--steps=3', f'--out={tmp_path / "out"}', main=train.main)
    assert f'next: python sample.py --init={path} --prompt="..."' in again[0]
    in_hub_layout(tmp_path / 'four', 'bert', classes=4, id2label={'1': 'rain', '3': 'snow'})
    assert train.main([f'--init={tmp_path / "four"}', f'--data={data}', '--lr=0', *run]) == 0
    for model, named in ('four', True), ('out/ckpt.safetensors', False):    # not those of another task
        said = written(capsys, f'--init={tmp_path}/{model}', '--prompt=7 8')[0]
        assert all((name in said) == named for name in ('LABEL_0', 'rain', 'snow')) and 'class 2' in said
    again = [f'--init={tmp_path}/out/ckpt.safetensors', f'--out={tmp_path}/again', '--steps=1', '--device=cpu']
    assert train.main(again) == 0 and 'not called' not in capsys.readouterr().out
    assert convert.main([f'--from={tmp_path}/four', f'--export={tmp_path / "e"}']) == 0
    raw = json.loads((tmp_path / 'e' / 'config.json').read_text())
    assert list(raw['id2label'].values()) == list(raw['label2id']) == ['LABEL_0', 'rain', 'LABEL_2', 'snow']
    assert 'give --data' in refused(capsys, train.main, f'--init={tmp_path / "bert"}', *run)
    for model, name, why in ('three', data, 'head.weight'), ('bert', 'recall', 'the tokens'):
        assert why in refused(capsys, train.main, f'--init={tmp_path / model}', f'--data={name}', *run)
    flags = f'--init={tmp_path / "bert"}', '--prompt=7 8', '--temperature=0'
    assert 'of lines 0<TAB>text' in refused(capsys, sample.main, *flags)

def folder_of_texts(folder, case):
    """Files that say together what a folder's text is, in one of the ways that there are."""
    raw = json.loads(tokenizer_json('gpt2'))
    del raw['truncation']
    words, about, named = raw['model']['vocab'], dict(tokenizer_class='TokenizersBackend'), {}
    marks = {f'<|{word}|>': len(words) + i for i, word in enumerate(('end', 'turn'))}
    listed = {str(i): dict(content=word, special=i % 2 == 0, lstrip=True) for word, i in marks.items()}
    kind, plain = 'llama', dict(lstrip=True, rstrip=True, normalized=False, single_word=False)
    if case in texts.SPLITS:
        put(folder, 'vocab.json', json.dumps(words))
        put(folder, 'merges.txt', '#version: 0.2\n' + '\n'.join(map(' '.join, raw['model']['merges'])))
        put(folder, 'added_tokens.json', json.dumps(marks))
        about = dict(tokenizer_class=case, add_bos_token=True, bos_token='<s>', add_prefix_space=True)
        named = dict(eos_token='<|end|>')
    elif case == 'bert':
        pieces = '[UNK] [CLS] [SEP] [PAD] [MASK] the The ##se quick Quick e\u0301'.split()
        raw = json.loads(word_pieces(pieces, '[CLS] $A [SEP]', [('[CLS]', 1), ('[SEP]', 2)]))
        raw['normalizer'] = dict(type='BertNormalizer', clean_text=True, handle_chinese_chars=True,
                                 strip_accents=None, lowercase=True)
        kind, about = 'bert', dict(tokenizer_class='BertTokenizer', do_lower_case=False)
        about.update({f'{word[1:-1].lower()}_token': word for word in pieces[:5]})
    elif case == 'no bos':
        about.update(add_bos_token=False, bos_token='<s>', eos_token='</s>')
    elif case == 'listed':              # the named one not as special; and a list of names
        about.update(added_tokens_decoder=listed, eos_token='<|turn|>', extra_special_tokens=dict(image='<|end|>'))
    elif case == 'flags':               # of tokenizer.json hold, where others only name a token
        raw['added_tokens'] += [dict(plain, id=i, content=word, special=True) for word, i in marks.items()]
        about.update(eos_token='<|end|>', extra_special_tokens=['<|turn|>'])
    elif case == 'named':               # a word of the tokenizer, and one that it lacks
        raw['added_tokens'] = raw['added_tokens'][:2]
        named = dict(eos_token=dict(plain, content='</s>', lstrip=False), bos_token='quick')
        named['additional_special_tokens'] = ['<|turn|>']
    for name, content in dict(config=dict(model_type=kind), tokenizer_config=about, special_tokens_map=named,
                              tokenizer=case not in texts.SPLITS and raw).items():
        if content:
            put(folder, f'{name}.json', json.dumps(content))

@pytest.mark.parametrize('case', [*texts.SPLITS, 'bert', 'no bos', 'listed', 'flags', 'named', 'plain'])
def test_the_files_of_a_folder_say_together_what_its_text_is(case, tmp_path):
    """As transformers reads them: special tokens, and what stands around a text."""
    hf = pytest.importorskip('transformers')
    folder_of_texts(tmp_path, case)
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
    data = texts.tokenizer_of(tmp_path, 700)
    texts.add_texts(tmp_path, data, None)
    text = f'The quick fox <|end|>  <|turn|> {STRANGE} </s> e\u0301 99'
    ids = vocabulary.encode(text, data, special=True)
    assert ids == theirs(text, add_special_tokens=False)['input_ids']
    before, behind = vocabulary.frame(data)
    assert before + ids + behind == theirs(text)['input_ids']
    assert data.bos == (before[0] if before else None)
    assert set(theirs.all_special_ids) <= {*data.special.values()} and (data.ends == [theirs.eos_token_id] or case in
                                                                    ('bert', 'plain'))
    assert (data.json == data.files.get('tokenizer.json', data.json)) or case != 'plain'

@pytest.mark.parametrize('kind', ['llama2', 'llama3', 'pieces'])
def test_tokens_beyond_a_models_come_from_no_text(kind, tmp_path):
    """Nor may a template put one around it; fewer tokens are no fault, either."""
    text = word_pieces(['[UNK]', *'abcdefghij']) if kind == 'pieces' else tokenizer_json(kind)
    tokenizer = pytest.importorskip('tokenizers').Tokenizer.from_str(text)
    most = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(['<pad>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    whole = Data('json', most, json=text)
    said = 'w9 w200 w280' if kind == 'pieces' else TEXT[:400] + '<pad>'
    for vocab in most + 9, most:
        found = texts.tokenizer_of(tmp_path, vocab)
        ids = vocabulary.encode(said, found)
        assert ids == vocabulary.encode(said, whole)
        assert kind == 'pieces' or vocabulary.decode(ids, found) == said
    with pytest.raises(ValueError, match='beyond the vocabulary') if kind != 'llama3' else contextlib.nullcontext():
        vocabulary.encode(said, texts.tokenizer_of(tmp_path, most - 40))
    put(tmp_path, 'tokenizer.json', word_pieces(['[UNK]'], '$A [SEP]', [('[SEP]', 291)]))
    with pytest.raises(ValueError, match=r'tokenizer.json: it puts token 291 around a text, the model has 291'):
        texts.tokenizer_of(tmp_path, 291)
    data = Data('json', 300, json=word_pieces(['[UNK]'], '$A [SEP]', [('[SEP]', 9)]))
    assert vocabulary.frame(data) == ([], [9])

def test_a_whole_text_stands_between_the_tokens_of_its_template(tmp_path, monkeypatch, capsys):
    """[CLS] and [SEP] of a WordPiece tokenizer.json, also where the text is cut off."""
    words = '[UNK] [CLS] [SEP] [PAD] quick ##er fox'.split()
    in_hub_layout(tmp_path, 'bert')
    put(tmp_path, 'tokenizer.json', word_pieces(words, '[CLS] $A [SEP]', [('[CLS]', 1), ('[SEP]', 2)]))
    data = load(tmp_path)[1]['data']
    assert data.bos is None                                     # rows of a text are no whole texts
    data.labels = ['sun', 'rain']
    monkeypatch.setattr(answers, 'classes_of', Mock(return_value=[(1, .7081), (0, .2919)]))
    for given, rows, out in (
            ('quicker fox', [[1, 4, 5, 6, 2]], 'class 1 (rain): 70.8%\nclass 0 (sun): 29.2%\n'),
            ('quick\n\n fox\n', [[1, 4, 2], [1, 6, 2]], 'rain\t0.708\tquick\nrain\t0.708\tfox\n')):
        answers.classes_of.reset_mock()
        answers.classify(sample.Args(prompt=given, lines=len(rows) > 1), None, {'data': data})
        assert [call.args[1] for call in answers.classes_of.call_args_list] == rows
        assert capsys.readouterr().out == out
    assert sample.main([f'--init={tmp_path}', '--prompt=fox x fox y']) == 0
    assert 'note: 2 of 6 tokens stand for letters' in capsys.readouterr().err
    assert vocabulary.whole_text('quicker fox', data) == [1, 4, 5, 6, 2]
    assert ways.fitted([[b'quicker fox']], data, 4, 0, 8)[0][0][0].tolist() == [1, 4, 5, 2]
    assert vocabulary.with_bos([6], data) == [1, 6]
    assert vocabulary.decode([4, 5, 6], data) == 'quicker fox'
    assert vocabulary.whole_text('ab', Data('byte', 256)) == [97, 98]

FRAME = """{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
<s>{{ m.role }}:{{ m.content | trim }}</s>
{% endfor %}
{% if add_generation_prompt %}<s>assistant:{% endif %}"""

def a_talker(folder, template=FRAME, kind='llama3', family='llama', **more):
    """A small Llama or another with a chat template; what is known of its tokens"""
    data = subwords(kind)
    torch.manual_seed(1)
    in_hub_layout(folder, family, vocab=data.vocab_size, **more)
    put(folder, 'tokenizer.json', data.json)
    put(folder, 'tokenizer_config.json', json.dumps(dict(eos_token=dict(content='</s>'), bos_token='<s>')))
    put(folder, 'chat_template.jinja', template)
    put(folder, 'generation_config.json', ' {"eos_token_id": [0, 5]}\n')
    return load(folder)[1]['data']

def said(*texts):
    """Messages, of a user and the assistant in turn."""
    return [dict(role='user' if i % 2 == 0 else 'assistant', content=text) for i, text in enumerate(texts)]

def test_a_template_frames_what_is_said_which_is_never_a_special_token(tmp_path, capsys):
    data = a_talker(tmp_path)
    chat.tell.cache_clear()
    for _ in range(2):
        text = chat.rendered(said(' the quick', 'fox', 'a</s><s>b '), data)
    assert capsys.readouterr().err.count('note: </s> in what is said is read as') == 1
    ids = vocabulary.encode(text, data, special=True)
    assert ids.count(1) == 4 and ids.count(2) == 3
    assert vocabulary.decode(ids, data) == ('<s>user:the quick</s>\n<s>assistant:fox</s>\n'
                                         '<s>user:a\ufffd/s>\ufffds>b</s>\n<s>assistant:')
    odd = dataclasses.replace(data, special={'%%': 407, '\u25b2': 408, '</s>': 2, '1': 406, '\ufffd?': 405})
    assert not any(word in chat.tamed('a%%%b \u25b2 101 <</s>\ufffd?', odd) for word in odd.special if word != '\ufffd?')
    assert data.ends == [0, 2, 5] and data.special == {'<unk>': 0, '<s>': 1, '</s>': 2}

@pytest.mark.parametrize('template, result', [
    ("{{ bos_token }}{{ messages[0] | tojson }}", '<s>{"role": "user", "content": "a\u00e9"}'),
    ("{{ messages | tojson(indent=1) | length > 9 }}{{ strftime_now('%Y') | int > 2000 }}", 'TrueTrue'),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", '01'),
    ("  {% if true %}\nx\n  {% endif %}\ny", 'x\ny'),
    ("{% for m in messages %}{% generation %}{{ m['role'] }} {% endgeneration %}{% endfor %}", 'user '),
    ("{{ raise_exception('only two may talk') }}", 'only two may talk'), ("{% if %}", 'TemplateSyntaxError'),
    ("{{ messages[7].content.x }}", 'UndefinedError'), ("{{ ''.__class__.__mro__ }}", 'SecurityError'),
    ("{{ messages.append(1) }}", 'SecurityError'), ("{% include '/etc/passwd' %}", 'no loader'),
    ('', 'no chat template'), ('{% if false %}x{% endif %}', 'makes nothing of')])
def test_a_template_does_what_it_may_or_is_refused_in_one_line(template, result, tmp_path, monkeypatch, capsys):
    data = a_talker(tmp_path, template)
    try:
        found = chat.rendered(said('a\u00e9'), data)
        assert found == result or not found
    except ValueError:
        found = ''
    if not found:
        assert result in refused(capsys, sample.main, f'--init={tmp_path}', '--chat', '--prompt=a\u00e9')

def test_a_text_is_learned_as_its_model_reads_texts(tmp_path, capsys, monkeypatch):
    """Special tokens are tokens, BOS begins each row and the first token after it is a target; letters that
    became <unk> are counted."""
    data = a_talker(tmp_path)
    monkeypatch.setattr(prepare, 'FOLDER', str(tmp_path / 'data'))
    mine = put(tmp_path, 'mine.txt', ''.join(f'<s>user:line {i}</s>\n' for i in range(99)))
    train_side, val, meta = prepare.load_set(mine, like=data)
    assert [*train_side, *val] == vocabulary.encode(Path(mine).read_text(), data, special=True)
    assert meta.marks and meta.bos == data.bos == 1
    model, T = load(tmp_path)[0], 16
    rows_of_text = [val[i:i + T].tolist() for i in range(0, len(val), T)]
    nats = [F.cross_entropy(model(torch.tensor([[1, *row[:-1]]]))[0][0], torch.tensor(row), reduction='none')
            for row in rows_of_text]
    data_rows = made_rows(train_side, val, meta, T, torch.device('cpu'))
    assert train.evaluate(model, data_rows)[0] == pytest.approx(torch.cat(nats).mean().item(), abs=1e-5)
    x, y = data_rows.batch(data_rows.starts(3), 0)
    assert (x[:, 0] == 1).all() and torch.equal(x[:, 1:], y[:, :-1])
    run = f'--init={tmp_path}', f'--data={mine}', '--steps=1', '--device=cpu', f'--out={tmp_path}/o'
    assert train.main([*run, '--block_size=16', '--carry', '--batch_size=1']) == 0
    assert load(tmp_path / 'o' / 'ckpt.safetensors')[1]['data'].bos is None     # rows that go on do not begin
    pieces = Data('json', 293, json=word_pieces(['[UNK]', 'b', 'c']), marks=True)
    prepare.load_set(put(tmp_path, 'lost.txt', 'b c x w1 y b\n' * 50), like=pieces)
    assert '90 of 270 tokens stand for letters' in capsys.readouterr().err

def test_chats_are_learned_in_the_models_template(tmp_path, capsys, monkeypatch):
    """The answers and what ends them are the targets, as by hand; a user's special tokens become letters."""
    hf = pytest.importorskip('transformers')
    data = a_talker(tmp_path, max_position_embeddings=64)
    monkeypatch.setattr(prepare, 'FOLDER', str(tmp_path / 'data'))
    chats = [said(f'the {i}', 'quick', 'and</s>', 'jumps over') for i in range(20)]
    lines = [json.dumps(dict(messages=messages)) for messages in chats]
    mine = put(tmp_path, 'mine.jsonl', '\n'.join(lines))
    train_side, val, meta = prepare.load_set(mine, like=data)
    wide = meta.row
    assert '18 of 18 conversations have answers' in capsys.readouterr().out and len(val) == 2 * 2 * meta.row
    ids, targets = val.reshape(-1, 2, meta.row)[0]
    frames = [f'<s>user:{chats[9][0]["content"]}</s>', '\n<s>assistant:', 'quick</s>', '\n<s>user:and\ufffd/s></s>',
              '\n<s>assistant:', 'jumps over</s>', '\n']
    frames = [vocabulary.encode(part, data, special=True) for part in frames]
    whole = [*itertools.chain(*frames)]
    assert ids[:len(whole)].tolist() == whole
    wanted = [token if i in (2, 5) else meta.ignore for i, part in enumerate(frames) for token in part][1:]
    assert targets[:len(wanted)].tolist() == wanted and set(targets[len(wanted):]) == {meta.ignore}
    plain = said('the quick', 'fox')
    put(tmp_path, 'tokenizer_config.json', '{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert chat.answered(plain, data, -1)[0] == tokenizer.apply_chat_template(plain, return_dict=True)['input_ids']
    out = tmp_path / 'o'
    assert train.main([f'--init={tmp_path}', f'--data={mine}', '--steps=1', '--device=cpu', f'--out={out}']) == 0
    model, meta = load(out / 'ckpt.safetensors')                # and it reads any text, as before
    assert meta['data'].kind == 'text' and meta['data'].template == data.template
    converted(tmp_path, tmp_path / 'c', f'--data={mine}', '--recipe=t2r', '--controls=false')
    short, _, cut = prepare.load_set(mine, like=dataclasses.replace(data, most=24))     # as --block_size=24
    assert cut.row == 24 and (short.reshape(-1, 2, 24)[:, 0] == train_side.reshape(-1, 2, wide)[:, 0, :24]).all()
    for name, text, flags, why in (
            ('mine.jsonl', lines[0], [], 'that has such a template: --init=FOLDER'),
            ('z.jsonl', '\n'.join(lines[:9]), [f'--init={tmp_path}'], 'give at least 10 conversations'),
            ('r.jsonl', '\n'.join(lines).replace('assistant', 'bot'), [f'--init={tmp_path}'], 'too few answers to learn'),
            ('x.jsonl', lines[0] + '\n{"text": "no"}', [f'--init={tmp_path}'], 'line 2: .* is not a conversation'),
            ('y.jsonl', '{"messages": [{"role": "user", "content": ["a"]}]}', [f'--init={tmp_path}'], 'line 1: ')):
        assert re.search(why, refused(capsys, train.main, f'--data={put(tmp_path, name, text)}', *flags))

def test_what_a_folder_says_goes_the_whole_way(tmp_path, capsys):
    """Through training to an export, byte for byte. A model with other layers than softmax cannot be one."""
    mine = put(tmp_path, 'mine.txt', TEXT[:4000])
    converts = f'--from={tmp_path}/a', f'--data={mine}', f'--out={tmp_path}/f'
    samples = f'--init={tmp_path}/a', '--prompt=the quick', '--tokens=1'
    in_hub_layout(tmp_path / 'a', 'llama')                      # without a tokenizer tokens are only numbers
    for main, argv in (convert.main, converts), (sample.main, samples):
        assert re.search('only numbers|not ids', refused(capsys, main, *argv))
    a_talker(tmp_path / 'a', groups=2, bos_token_id=1, pad_token_id=7)
    put(tmp_path / 'a', 'added_tokens.json', '{}')
    for name in 'vocab.json', 'merges.txt':                     # beside tokenizer.json, as many have them
        put(tmp_path / 'a', name, '{}')
    data = load(tmp_path / 'a')[1]['data']
    said = written(capsys, *samples)[1]
    assert f'{1 + len(vocabulary.encode("the quick", data))} tokens read' in said         # BOS, too
    run = f'--data={mine}', '--steps=1', '--batch_size=2', '--device=cpu', '--threads=1'
    assert train.main([f'--init={tmp_path}/a', f'--out={tmp_path}/b', '--lr=0', *run]) == 0
    assert convert.main([f'--from={tmp_path}/b/ckpt.safetensors', f'--export={tmp_path}/c']) == 0
    for file in (tmp_path / 'a').iterdir():
        if file.suffix in ('.jinja', '.json') and file.name not in ('config.json', 'vocab.json'):
            assert (tmp_path / 'c' / file.name).read_bytes() == file.read_bytes()
    before, after = (json.loads((tmp_path / name / 'config.json').read_text()) for name in 'ac')
    assert before == {**before, **{key: after[key] for key in before if key not in folders.OF_WEIGHTS}}
    assert after['bos_token_id'] == 1 and after['pad_token_id'] == 7
    (model, meta), (again, _) = load(tmp_path / 'a'), load(tmp_path / 'c')
    close(dict(again.state_dict()), dict(model.state_dict()), 0)
    found = load(tmp_path / 'b' / 'ckpt.safetensors')[1]['data']
    assert all(getattr(found, name) == getattr(data, name) for name in TRAVELS) and found.has_tokens_of(meta['data'])
    assert train.main([f'--init={tmp_path}/a', f'--out={tmp_path}/d', '--layers=tova,softmax', *run]) == 0
    swapped = tmp_path / 'd' / 'ckpt.safetensors'
    err = refused(capsys, convert.main, f'--from={swapped}', f'--export={tmp_path}/e')
    assert 'sample.py and model.load read others' in err and not (tmp_path / 'e').exists()
    converted(tmp_path / 'a', tmp_path / 'f', f'--data={mine}', '--recipe=t2r', '--controls=false')
    assert f'python sample.py --init={tmp_path}/f/ckpt.safetensors --chat\n' in capsys.readouterr().out
    assert load(tmp_path / 'f' / 'ckpt.safetensors')[1]['data'].has_tokens_of(data)


# ---- Real pretrained models: REAL names the folder in which smollm2 and minilm lie -------------------------

REAL = os.environ.get('REAL', '')
real = pytest.mark.skipif(not REAL, reason='REAL=FOLDER, with smollm2 and minilm in the layout of the hub')
SAID = ('What is the capital of France?', '\n\nHello\n', '  two  blanks ', 'caf\u00e9 \u4f60\u597d \U0001f600',
        '1234567', 'def f(x):\n\treturn x', "it's 'll", 'Write a haiku.', 'a\u00a0b', 'A list of three colours:')

@real
def test_real_answers_are_those_of_transformers():
    """The ids of ten prompts in the model's template, and greedy answers, token by token."""
    hf = pytest.importorskip('transformers')
    theirs = hf.AutoModelForCausalLM.from_pretrained(f'{REAL}/smollm2', dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(f'{REAL}/smollm2')
    model, meta = load(f'{REAL}/smollm2')
    for text in SAID:
        wanted = tokenizer.apply_chat_template(said(text), add_generation_prompt=True, return_dict=True)['input_ids']
        assert vocabulary.encode(chat.rendered(said(text), meta['data']), meta['data'], special=True) == wanted
        row = torch.tensor([wanted])
        theirs_says = theirs.generate(row, do_sample=False, max_new_tokens=16)[0, len(wanted):].tolist()
        says = [token.item() for token, _ in itertools.islice(model.generate(row, temperature=0), len(theirs_says))]
        assert says == theirs_says

@real
def test_real_models_go_back_to_transformers(tmp_path):
    """As they are, and a classifier of MiniLM: logits and greedy text."""
    hf = pytest.importorskip('transformers')
    assert convert.main([f'--from={REAL}/smollm2', f'--export={tmp_path}/s']) == 0
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / 's', dtype=torch.float32)
    model, row = load(f'{REAL}/smollm2')[0], torch.randint(49152, (1, 256))
    with torch.no_grad():
        near(model(row)[0], theirs(row).logits, 1e-3)
    for name in 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'generation_config.json':
        assert (tmp_path / 's' / name).read_bytes() == Path(REAL, 'smollm2', name).read_bytes()
    lines = put(tmp_path, 'x.tsv', ''.join(f'{i % 2}\tsentence {i} of {i * i}\n' for i in range(60)))
    run = f'--data={lines}', '--steps=1', '--batch_size=2', f'--out={tmp_path}/b', '--device=cpu', '--threads=2'
    assert train.main([f'--init={REAL}/minilm', *run]) == 0
    assert convert.main([f'--from={tmp_path}/b/ckpt.safetensors', f'--export={tmp_path}/m']) == 0
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'm', dtype=torch.float32)
    row = torch.randint(1000, 30000, (2, 20))
    with torch.no_grad():
        near(load(tmp_path / 'b' / 'ckpt.safetensors')[0](row)[0], theirs.eval()(row).logits, 1e-3)


# ---- 12. runs/ and train.py --------------------------------------------------------------------------------

def test_training_learns_and_logs(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, 'SAMPLE', 40)
    trained(text, tmp_path, '--log_every=30', '--lr=2e-2', steps=90, eval_every=90)
    first, *rows = log(tmp_path)
    assert first['config']['rule'] == 'delta' and first['args']['steps'] == 90 and first['threads'] == 1
    assert {'commit', 'device'} <= first.keys()
    losses = [row['loss'] for row in rows if 'loss' in row]
    assert losses[0] == pytest.approx(math.log(256), abs=.2)        # a new model guesses
    assert losses[-1] < 3, losses                                   # ln 36 = 3.6 by characters
    printed = capsys.readouterr().out
    assert f'{first["params"] / 1e6:.2f} M parameters' in printed
    steps = [row for row in rows if 'ms' in row]
    last = [0] + [row['step'] for row in steps]
    ms = sum(row['ms'] * (row['step'] - before) for row, before in zip(steps, last))
    assert json.loads((tmp_path / 'result.json').read_text())['minutes'] == pytest.approx(ms / 6e4)
    sampled = printed.partition('--- a sample ---\n')[2].rpartition('\n---\n')[0]
    assert 40 <= len(sampled.encode()) and len(sampled) <= 40   # what is no character takes more bytes
    assert load(tmp_path / 'best.safetensors')[1]['data'].tokenizer == 'byte'

def test_weights_decay_in_matrices_alone():
    model = built(rule='gated', n_layer=1, n_head=2, n_embd=16, block_size=16)
    for group in train.adamw(model, 1e-2, .1).param_groups:
        assert all((p.dim() == 2) == (group['weight_decay'] == .1) for p in group['params'])

def test_a_compiled_model_leaves_the_recurrence_alone(text, tmp_path, monkeypatch):
    plain, seen = torch.compile, []

    def recurrence(*given, **how):
        seen.append(torch.compiler.is_compiling())
        return fastweight.chunked(*given, **how)
    monkeypatch.setattr(starts, 'pick_forms', lambda impl: memory.PLAIN._replace(recurrence=recurrence))
    monkeypatch.setattr(torch, 'compile', lambda model: plain(model, backend='eager'))
    for flags in [], ['--compile']:
        trained(text, tmp_path / str(flags), '--n_layer=1', '--conv=0', *flags, steps=1)
    assert len(seen) > 4 and not any(seen)
    losses = [[row['loss'] for row in log(tmp_path / str(flags)) if 'loss' in row] for flags in ([], ['--compile'])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

def test_carry_hands_the_state_on(text, tmp_path):
    """Four steps in which nothing is learned have the losses of one row of four times the length."""
    trained(text, tmp_path, '--carry', '--lr=0', '--log_every=1')
    stream = torch.from_numpy(prepare.load_set(text)[0].astype(np.int64))
    starts = torch.arange(4) * (len(stream) // 4)
    nats = costs(load(tmp_path / 'ckpt.safetensors')[0], stream[starts[:, None] + torch.arange(4 * 16 + 1)])
    losses = [row['loss'] for row in log(tmp_path) if 'loss' in row]
    assert losses == pytest.approx(nats.unflatten(1, (4, 16)).mean((0, 2)).tolist(), rel=1e-6)

def test_an_evaluation_has_few_tokens_and_logits_in_memory(monkeypatch):
    """Fewer than a gigabyte, whatever the rows and the vocabulary; a row is never split."""
    seen = []
    def predict(model, x, y, *_):
        seen.append(x.shape)
        return torch.zeros(y.numel(), 2), y.flatten().clamp(max=1), None
    monkeypatch.setattr(data_rows_py, 'predict', predict)
    for T, vocab, many in (128, 256, 32), (8192, 256, 4), (65536, 256, 1), (128, 150_000, 3):
        data = np.zeros(33 * T + 1, np.uint8)
        rows = made_rows(data, data, Data('ids', vocab), T, torch.device('cpu'))
        train.evaluate(torch.nn.Identity(), rows)
        assert seen[0] == (many, T) and sum(map(math.prod, seen)) == 33 * T, (T, vocab)
        seen.clear()

def test_bits_per_byte_count_every_token_but_the_first_once(tmp_path, capsys):
    """In blocks, and with the state carried. The bytes are those of the tokens that are read: at first a token has
    one, in the last lines two of four have three."""
    text = put(tmp_path, 'text.txt', 'a b\n' * 950 + '\u6f22 \u5b57\n' * 40)
    folder = prepare.prepare(text, tokenizer='char')
    _, val, meta = prepare.load_set(folder)
    x = torch.from_numpy(val.astype(np.int64))
    model = built(n_layer=1, n_head=1, n_embd=8, block_size=16).eval()
    data = made_rows(None, val, meta, 16, torch.device('cpu'))

    carried = train.evaluate(model, dataclasses.replace(data, T=100), carried=True)
    for (found, _), size in (train.evaluate(model, data), 16), (carried, len(x)):
        pieces = [x[None, i:i + size + 1] for i in range(0, len(x) - 1, size)]
        nats = torch.cat([costs(model, piece)[0] for piece in pieces])
        assert len(nats) == len(x) - 1 and found == pytest.approx(nats.mean().item(), rel=1e-5)
    trained(folder, tmp_path / 'out')
    shown = re.search(r'blocks of 16: ([\d.]+) bits per byte, perplexity ([\d.]+)', capsys.readouterr().out)
    nats = next(row['val_loss'] for row in log(tmp_path / 'out') if row.get('read') == 'blocks')
    bits = nats / math.log(2) * len(val) / len(vocabulary.decode(val, meta).encode())
    assert [float(s) for s in shown.groups()] == pytest.approx([bits, math.exp(nats)], abs=1e-3)
    again = f'--init={tmp_path}/out/ckpt.safetensors', '--steps=0', '--device=cpu'
    assert shown[0] in written(capsys, *again, f'--out={tmp_path}/no', main=train.main)[0]       # only evaluates
    assert not (tmp_path / 'no').exists()
    before = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    assert shown[0] in written(capsys, *again, f'--out={tmp_path}/out', main=train.main)[0]
    assert {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()} == before
    both = built(rule='sink', cache=8, overflow='sum:favor', n_layer=1, n_head=1, n_embd=8, block_size=16,
                 vocab_size=meta.vocab_size)
    save(tmp_path / 'both.safetensors', both, {'data': meta, 'args': {'data': folder}})
    flags = f'--init={tmp_path}/both.safetensors', *again[1:], '--rule=tova', f'--out={tmp_path}/no'
    assert 'validation, blocks of 16' in written(capsys, *flags, main=train.main)[0]    # though it cannot train so
    for n, size in (64, 64), (208, 208 + 29 * 2 * 2):           # 23 lines of one byte a letter come first
        trained(folder, tmp_path / str(n), f'--val_tokens={n}', steps=1)
        result = json.loads((tmp_path / str(n) / 'result.json').read_text())
        assert result['bits per byte'] == pytest.approx(result['val_loss'] * n / size / math.log(2))
        assert f'tion: {result["bits per byte"]:.4f} bits' in capsys.readouterr().out

@pytest.mark.parametrize('flags, number, steps', [
    ('--rule=gated', signal.SIGINT, [3]), ('--rule=tova --carry --dtype=bfloat16', signal.SIGTERM, [1, 5]),
    *(pytest.param(f'--rule={rule}', signal.SIGINT, [1, 2, 3, 4], marks=slow, id=f'soak-{rule}') for rule in VARIED)])
def test_resume_is_bitwise_identical(flags, number, steps, text, tmp_path, monkeypatch, capsys):
    """A run that is asked to stop saves its step, also the last one: a conversion has more stages. It goes on to the
    same bits, and tells each step once: what the log has beyond the checkpoint, as after kill -9, goes. gated
    redraws features."""
    whole, batch, to_come = tmp_path / 'whole' / 'ckpt.safetensors', Rows.batch, []

    def batch_or_stop(self, begin, i):
        if to_come and to_come.pop() == 0:
            os.kill(os.getpid(), number)
        return batch(self, begin, i)

    def told(out):
        return [(row['step'], row.get('loss'), row.get('val_loss')) for row in log(out) if 'step' in row]
    monkeypatch.setattr(Rows, 'batch', batch_or_stop)
    run = partial(trained, text, steps=5, eval_every=2)
    flags = *flags.split(), '--accum=2', '--dropout=0.2', '--log_every=1'
    run(whole.parent, *flags)
    for k in steps:
        again = tmp_path / str(k) / whole.name
        to_come.extend(range(2 * k - 1))                        # batches before the one in which it is asked
        with pytest.raises(AssertionError):
            run(again.parent, *flags)
        assert f'stopped after step {k}, which is saved: --resume with this --out goes on' in capsys.readouterr().err
        assert weights_py.read_tensors(again)[1]['step'] == k and same(again, whole) == (k == 5)
        if k < 5:
            with open(again.with_name('log.jsonl'), 'a') as f:
                f.write(f'{{"step": {k + 1}, "loss": 7.0}}\n{{"step": 1, "lo')
            assert train.main(['--resume', f'--out={again.parent}']) == 0
            assert same(again, whole) and told(again.parent) == told(whole.parent)
            assert weights_py.read_tensors(again)[1]['best'] == weights_py.read_tensors(whole)[1]['best']

def test_what_load_returns_is_saved_whole_and_resumed_but_as_no_other_model(a_model, tmp_path, capsys):
    path, resume = tmp_path / 'ckpt.safetensors', ['--resume', f'--out={tmp_path}']
    save(path, *load(a_model()))
    assert same(path, a_model())
    assert '--n_layer=3' in refused(capsys, train.main, *resume, '--n_layer=3')
    assert 'is not more' in refused(capsys, train.main, *resume)
    assert train.main([*resume, '--steps=6', '--lr=1e-3']) == 0
    tensors, meta = weights_py.read_tensors(path)
    assert meta['step'] == 6 and meta['args']['lr'] == 1e-3
    del meta['args']
    weights_py.write_tensors(path, tensors, meta)
    assert 'holds no training run' in refused(capsys, train.main, *resume)

def test_a_run_goes_on_with_the_text_it_began_with(a_model, characters, tmp_path, capsys):
    """By sha256, not by name."""
    data = shutil.copytree(characters, tmp_path / 'set')
    shutil.copy(a_model('--rule=delta', data=str(data)), tmp_path)
    resume = '--resume', f'--out={tmp_path}', '--steps=5'
    for side in 'train', 'val':
        meta = json.loads((data / 'meta.json').read_text())
        meta[side]['sha256'] = hashlib.sha256((data / f'{side}.bin').read_bytes()[::-1]).hexdigest()
        (data / f'{side}.bin').write_bytes((data / f'{side}.bin').read_bytes()[::-1])
        (data / 'meta.json').write_text(json.dumps(meta))
        assert f'{side}.bin is not what' in refused(capsys, train.main, *resume)
        shutil.copytree(characters, data, dirs_exist_ok=True)
    assert train.main(list(resume)) == 0

def test_a_run_says_what_it_replaces_and_that_an_earlier_step_was_better(text, tmp_path, capsys, monkeypatch):
    loss = itertools.count(1)
    monkeypatch.setattr(train, 'evaluate', lambda *_, **__: (next(loss), {'accuracy': 0}))
    for said in 'saved every 2 steps', f'the run in {tmp_path} is replaced':
        trained(text, tmp_path, steps=4, eval_every=2)
        out = capsys.readouterr().out
        assert said in out and 'best.safetensors, an earlier step' in out

def test_a_folder_is_of_one_run(a_model, text, tmp_path, capsys):
    """Two conversions would mix their stages; one of no steps writes its files, too. The next run removes what
    one that was killed in a save left, and no other file."""
    of_none = f'--from={a_model("--rule=softmax")}', '--controls=false', '--steps=0', '--distil_steps=0'
    runs = (train.main, [f'--data={text}', '--steps=1', *TINY[:-1], f'--out={tmp_path}']), (
        convert.main, [*of_none, '--eval_rows=4', f'--out={tmp_path}'])
    parts = [tmp_path / f'{name}.safetensors.7.part' for name in ('ckpt', 'best', 'stage-1', 'state')]
    with log_py.log_of(train.Args(out=tmp_path)):
        for part in parts:
            part.mkdir()
        for main, flags in runs:
            assert 'another run' in refused(capsys, main, *flags)
            assert {*tmp_path.iterdir()} == {tmp_path / 'log.jsonl', *parts}
    for main, flags in runs:
        assert main(flags) == 0
        assert [*tmp_path.glob('*.part')] == parts[-1:]

def test_files_are_readable_by_whom_the_umask_says(text, tmp_path, monkeypatch):
    """Replacing keeps the old file's mode. ~ is the home folder."""
    monkeypatch.setenv('HOME', str(tmp_path))
    before = os.umask(0o027)
    try:
        path = trained(text, '~/out')
        path = tmp_path / path.removeprefix('~/')
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / 'out').iterdir()} == {0o640}
        path.chmod(0o604)
        assert train.main(['--resume', '--steps=5', f'--out={tmp_path}/out']) == 0
        assert path.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)

def test_a_step_that_is_not_finite_ends_the_run(a_model, tmp_path, capsys, monkeypatch):
    path = Path(shutil.copy(a_model(), tmp_path))
    before = path.read_bytes()
    monkeypatch.setattr(train, 'clip_grad_norm_', lambda *_: torch.tensor(math.nan))
    err = refused(capsys, train.main, '--resume', f'--out={tmp_path}', '--steps=50')
    assert 'step 5: loss or gradient is not finite; try a smaller rate' in err and path.read_bytes() == before

def as_one_of_two(rank, argv, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    assert train.main(argv) == 0

def in_two_processes(argv):
    """train.py as torchrun would start it."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(as_one_of_two, (argv, port), 2, start_method='fork')

@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere a process that has torch in it may not fork')
def test_two_processes_train_like_one(tmp_path, capfd, monkeypatch):
    """They see the same rows together, whose numbers of targets differ, and lines come once. One goes on where
    two stopped, and two where one did. What the first one does alone at the end may take longer than the
    other would wait."""
    def alone(*_):
        assert not processes.dist.is_initialized()
    monkeypatch.setattr(data_rows_py.Task, 'sample', alone)
    tiny = [flag for flag in TINY if 'block_size' not in flag]
    one, two = (['--data=recall', '--val_tokens=5120', *tiny, '--log_every=1', '--eval_every=2',
                 f'--out={tmp_path / name}'] for name in '12')
    for more in ['--steps=3'], ['--resume', '--steps=5'], ['--resume', '--steps=7']:
        assert train.main(one + more) == 0
    in_two_processes([*two, '--steps=3'])
    assert capfd.readouterr().out.count('2 x cpu') == 1
    assert train.main([*two, '--resume', '--steps=5']) == 0
    in_two_processes([*two, '--resume', '--steps=7'])

    def figures(name):
        rows = [row for row in log(tmp_path / name) if row.get('read') != 'carried']
        return [(row['step'], row.get('loss', 0), row.get('val_loss', 0)) for row in rows if 'step' in row]
    assert figures('2') == [pytest.approx(row, abs=1e-6) for row in figures('1')]
    assert {step for step, loss, _ in figures('2') if loss} == {1, 2, 3, 4, 5, 6, 7}
    (a, meta), (b, _) = (weights_py.read_tensors(tmp_path / x / 'ckpt.safetensors') for x in '12')
    assert meta['step'] == 7
    close(b, a, 1e-5)


# ---- 13. sample.py: texts, states, conversations -----------------------------------------------------------

def test_sampling_repeats_streams_and_reports(a_model, capsys, monkeypatch):
    flags = f'--init={a_model("--rule=gated_delta")}', '--tokens=36', '--prompt=the '
    a, err = written(capsys, *flags)
    assert a != written(capsys, *flags, '--seed=1')[0]
    assert 'tokens/s' in err and 'bytes' in err and '36 written' in err
    said = Mock(side_effect=print)
    monkeypatch.setattr(sample, 'print', said, raising=False)
    assert a == written(capsys, *flags)[0]
    pieces = [call for call in said.call_args_list if call.kwargs.get('flush')]
    assert len(pieces) > 36 / 4                                # a character has up to four bytes

@pytest.mark.parametrize('kind', ['gpt2', 'llama2', 'llama3', 'metaspace', 'phrases', 'byte', 'ids'])
def test_text_is_printed_as_it_comes_and_nothing_is_lost(kind, capsys):
    """After a prompt, at any cut; half characters wait; what never is one comes in the end."""
    meta = Data(kind, 256) if kind in ('byte', 'ids') else subwords(kind)
    text = '5 6 77 8 9' if kind == 'ids' else STRANGE + STRANGE
    tokens = vocabulary.encode(text, meta)
    if kind in ('llama2', 'metaspace'):                         # which take one character for a blank
        text = text.replace('\u2581', ' ')
    assert vocabulary.decode(tokens, meta) == text
    for cut in range(0, len(tokens), 7):
        said = vocabulary.decode(tokens[:cut], meta)
        before, held = tokens[:cut][-sample.LOOK_BACK:], []
        for token in tokens[cut:]:
            before, held = sample.show_text(before, held + [token], meta)
            assert len(held) < 8
        shown = capsys.readouterr().out
        assert said + shown == text or said.endswith('\ufffd')

def test_an_output_without_utf8_gets_what_it_can_show(a_model, monkeypatch):
    """A new model's bytes are seldom characters."""
    ascii_only = io.TextIOWrapper(io.BytesIO(), 'ascii')
    monkeypatch.setattr(sys, 'stdout', ascii_only)
    assert sample.main([f'--init={a_model("--rule=delta")}', '--prompt=the', '--tokens=30']) == 0
    assert b'?' in ascii_only.buffer.getvalue()

def test_of_many_texts_the_prompt_is_read_once(a_model, capsys):
    """Greedy, each is what it is alone."""
    for rule in 'delta', 'tova', 'softmax':
        flags = f'--init={a_model(f"--rule={rule}")}', '--temperature=0', '--tokens=9', '--prompt=line 1'
        alone = written(capsys, *flags)[0]
        out, err = written(capsys, *flags, '--samples=3')
        assert out == ''.join(f'--- {i} ---\n{alone}' for i in (1, 2, 3))
        assert '6 tokens read' in err

def test_each_of_several_texts_ends_by_itself(tmp_path, capsys):
    """And what ends it is not printed; without --special a special token's letters are read, and said so."""
    data = a_talker(tmp_path)
    one, end = vocabulary.encode(' the', data)[0], data.ends[0]
    steps = torch.tensor([[one, one], [end, one], [one, one], [one, end], [one, one]])
    model = Mock(generate=lambda *_: ((step[:, None], None) for step in steps))
    args = sample.Args(tokens=9, samples=2)
    _, _, texts, steps, _ = sample.write_texts(args, model, data, torch.zeros(2, 1), None)
    assert texts == [[one], [one] * 3] and steps == 4
    flags = f'--init={tmp_path}', '--tokens=0', '--prompt=a </s>'
    assert 'note: </s> in --prompt is read as letters' in written(capsys, *flags)[1]
    assert '</s>' not in written(capsys, *flags, '--special')[1]
    assert vocabulary.with_bos(vocabulary.encode('<s>a', data, special=True), data) == [1, *vocabulary.encode('a', data)]
    flags, state = flags[:2], f'{tmp_path}/x.st'            # nor is it where a text goes on
    written(capsys, *flags, '--prompt=the quick', f'--save_state={state}')
    said = written(capsys, *flags, '--prompt=</s><s>', '--special', f'--load_state={state}')[1]
    assert '\n2 tokens read' in said

def test_softmax_becomes_an_rnn_without_training(a_model, characters, tmp_path, capsys):
    """With room for all rows the same text; with less, a state of fixed size; and fine-tuning from there."""
    ckpt, state = a_model('--layers=softmax,delta', data=characters), tmp_path / 'state'
    flags = f'--init={ckpt}', '--temperature=0', '--prompt=line 1'
    whole = written(capsys, *flags, '--tokens=20')[0]
    assert whole == written(capsys, *flags, '--tokens=20', '--rule=tova', '--cache=60')[0]
    for tokens in 12, 20:
        few = f'--tokens={tokens}', f'--save_state={state}', '--rule=tova', '--cache=9'
        said = written(capsys, *flags, *few)[1]
        assert 'whatever the length' in said and 'untrained' not in said
        assert weights_py.read_tensors(state)[0]['state.0.mixer.k'].shape == (1, 2, 9, 8)
    assert '--overflow=sum:favor: untrained' in written(capsys, *flags, '--rule=window', '--overflow=sum:favor')[1]
    assert 'made with' in refused(capsys, sample.main, *flags, f'--load_state={state}')
    how = f'--init={ckpt}', '--rule=window', '--cache=9', '--overflow=sum'
    tuned = trained(characters, tmp_path / 'tuned', *how, steps=1)
    tensors, meta = weights_py.read_tensors(tuned)
    assert meta['config']['layers'] == 'window,delta'
    assert any('0.mixer.memory.overflow.phi.R' in name for name in tensors)
    assert len(written(capsys, f'--init={tuned}', '--tokens=9')[0]) > 9

def test_what_matters_is_said(a_model, capsys):
    """A rope beyond its rows."""
    ckpt = a_model('--rule=softmax', '--pos=rope')
    assert 'past 16 tokens, rope meets' in written(capsys, f'--init={ckpt}', '--tokens=20')[1]
    bounded = '--rule=tova', '--cache=8', '--positions=compress'
    assert 'rope meets' not in written(capsys, f'--init={ckpt}', '--tokens=20', *bounded)[1]
    assert 'rope meets' in written(capsys, f'--init={ckpt}', '--tokens=20', *bounded[:2])[1]
    assert 'rope' not in written(capsys, f'--init={ckpt}', '--tokens=15')[1]

@pytest.mark.parametrize('slower', [1, 2])
def test_sampling_takes_the_fastest_number_of_threads(slower, a_model, monkeypatch, capsys):
    """Beside busy programs two threads take up to 15 times as long as one. --threads is kept as it is. On a GPU
    nothing is tried."""
    model = f'--init={a_model("--rule=delta")}'
    monkeypatch.setattr(model_py.GPT, 'first_layer', lambda self, B, T: time.sleep(.004 * (torch.get_num_threads() == slower)))
    try:
        for flags, threads in ([], 3 - slower), ([f'--threads={slower}'], slower):
            torch.set_num_threads(2)
            written(capsys, model, '--tokens=1', *flags)
            assert torch.get_num_threads() == threads
        torch.set_num_threads(2)
        machine.take_threads(None, torch.device('cuda'), lambda: pytest.fail('a trial'))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)

@pytest.mark.parametrize('script', ['train', 'sample', 'convert', 'bench'])
def test_threads_spin_briefly(script):
    """libgomp reads its variables as torch is imported: before, they are set, and a user's own value stands."""
    look = ("import importlib.abc, os, sys\n"
            "class Finder(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            "        if name == 'torch':\n"
            "            print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('KMP_BLOCKTIME'), flush=True)\n"
            "            os._exit(0)\n"
            f"sys.meta_path.insert(0, Finder())\nimport {script}")
    own = {name: value for name, value in os.environ.items() if name not in ('GOMP_SPINCOUNT', 'KMP_BLOCKTIME')}
    for given, said in ({}, '20000 1\n'), ({'GOMP_SPINCOUNT': '7'}, '7 1\n'):
        found = subprocess.run([sys.executable, '-c', look], env=own | given, cwd=HERE, capture_output=True, text=True)
        assert found.stdout == said, found.stderr

@pytest.mark.parametrize('rule', VARIED)
def test_a_saved_state_goes_on_as_if_never_stopped(rule, a_model, characters, tmp_path, capsys):
    """The same text, and, as a model this young may well say one thing whatever its state, the same state:
    saved by itself, in the middle, and by another form."""
    ckpt = a_model(f'--rule={rule}', *['--cache=9'] * RULES[rule].bounded, data=characters)

    def go(tokens, to, *flags):
        flags = f'--tokens={tokens}', f'--save_state={tmp_path / to}', *flags
        return written(capsys, f'--init={ckpt}', '--temperature=0', *flags)[0].removesuffix('\n')
    whole = go(14, 'whole', '--prompt=line 1')
    assert go(14, 'plain', '--prompt=line 1', '--impl=chunk') == whole
    go(0, 'start', '--prompt=line 1')                          # read once, go on often
    half = go(9, 'half', f'--load_state={tmp_path / "start"}')
    assert half + go(5, 'second', f'--load_state={tmp_path / "half"}') == whole
    for to in 'plain', 'second':
        close(by_position(ckpt, tmp_path / to), by_position(ckpt, tmp_path / 'whole'), 1e-5)
    other, half = a_model(f'--rule={rule}', '--seed=1', data=characters), tmp_path / 'half'
    assert 'not a state' in refused(capsys, sample.main, f'--init={other}', f'--load_state={half}')
    assert 'holds no model' in refused(capsys, sample.main, f'--init={half}')

def by_position(ckpt, path):
    """A state file's tensors, with rows in order."""
    last, state = sample.read_state(sample.Args(init=ckpt, load_state=str(path)), *load(ckpt))
    return {**comparable(state), 'last': last}

def test_a_state_belongs_to_weights_not_to_a_path(tmp_path, capsys):
    """Of a folder: read from another place, but not after its weights have changed."""
    in_hub_layout(tmp_path / 'a', 'llama')
    state = f'{tmp_path}/state'
    written(capsys, f'--init={tmp_path}/a', '--prompt=7 8', f'--save_state={state}', '--tokens=2')
    other = f'--init={tmp_path}/a', f'--load_state={state}', '--dtype=bfloat16'
    assert 'with this --dtype' in refused(capsys, sample.main, *other)
    shutil.move(tmp_path / 'a', tmp_path / 'b')
    written(capsys, f'--init={tmp_path}/b', f'--load_state={state}', '--tokens=2')
    weights = tmp_path / 'b' / 'model.safetensors'
    save_file({name: 2 * x for name, x in load_file(weights).items()}, weights)
    err = refused(capsys, sample.main, f'--init={tmp_path}/b', f'--load_state={state}')
    assert 'not a state of the model' in err

def test_what_is_written_takes_no_other_file_away(a_model, text, tmp_path, monkeypatch, capsys):
    """A state no model, nor a model whose weights are lost the good one from before."""
    path, mine = a_model('--rule=delta'), tmp_path / 'ckpt.safetensors'
    shutil.copy(path, mine)
    (tmp_path / 'text').write_text('mine')
    before = {name: (tmp_path / name).read_bytes() for name in ('ckpt.safetensors', 'text')}
    for name, never in ('ckpt.safetensors', 'a state is never written over'), ('text', 'not a whole safetensors'):
        state = f'--save_state={tmp_path}/{name}'
        assert never in refused(capsys, sample.main, f'--init={path}', state, '--tokens=2')
    for _ in range(2):                                          # over a state of its own it may
        written(capsys, f'--init={path}', '--tokens=2', f'--save_state={tmp_path}/out/best.safetensors')
    monkeypatch.setattr(train, 'lr_at', lambda *_: math.nan)    # its weights are lost in the last step
    err = refused(capsys, train.main, '--resume', '--steps=5', f'--out={tmp_path}')
    assert 'embed.weight is not finite' in err
    assert before == {name: (tmp_path / name).read_bytes() for name in before}

@pytest.mark.parametrize('rule', ['softmax', 'tova'])
def test_a_conversation_is_read_as_one_text(rule, tmp_path, capsys, monkeypatch):
    """Each answer is that to the whole text so far; what was said is read once, unless the template changes it.
    The page of --html has all of it since the last /reset."""
    data, read, pages, roles = a_talker(tmp_path), [], [], []
    plain, render = model_py.GPT.read, chat.rendered
    monkeypatch.setattr(model_py.GPT, 'read', lambda self, tokens, state=None, **how: read.append(tokens.shape[1]) or plain(
        self, tokens, state, **how))
    monkeypatch.setattr(chat, 'rendered', lambda messages, data: roles.append(
        [message['role'] for message in messages]) or render(messages, data))
    monkeypatch.setattr(page_py, 'write_page', lambda *given: pages.append([*given[-1]]))

    def type_in(text):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text)))
    flags = [f'--init={tmp_path}', '--chat', '--tokens=6', '--temperature=0', '--html=a.html']
    flags += [f'--rule={rule}', '--cache=200'] * (rule != 'softmax')
    type_in(b'the quick\n\njumps</s> over\n/reset\nthe quick\n/quit\nno')
    out = written(capsys, *flags)[0]
    model, total = load(tmp_path)[0], sum(read)

    def answer(*messages):
        ids = vocabulary.encode(render(said(*messages), data), data, special=True)
        steps = itertools.islice(model.generate(torch.tensor([ids]), temperature=0), 6)
        found = itertools.takewhile(lambda token: token not in data.ends, [token.item() for token, _ in steps])
        return ids, [*found]
    ids, found = answer('the quick')
    first = vocabulary.decode(found, data)
    longer, found_then = answer('the quick', first, 'jumps</s> over')
    assert out.splitlines() == f'{first}\n{vocabulary.decode(found_then, data)}\n{first}'.splitlines()
    assert total < len(ids) + len(longer) + len(ids) * (first != first.strip())
    type_in(b'the quick\n\xff\n')
    assert sample.main(flags) == 2
    with monkeypatch.context() as stopped:
        stopped.setattr(sample, 'write_texts', Mock(side_effect=KeyboardInterrupt))
        assert sample.main([*flags, '--prompt=the quick']) == 130
    page = [(token, False) for token in ids] + [(token, True) for token in found]
    assert pages == [page, page, page[:len(ids)]]               # whatever ends it
    monkeypatch.setattr(sys, 'stdin', None)                     # closed: nobody speaks
    assert not written(capsys, *flags[:2])[0]
    type_in(b'the quick\n/reset\nthe quick\nfox')
    assert 'no place for it' in refused(capsys, sample.main, *flags, '--system=Be brief.')
    put(tmp_path, 'chat_template.jinja', FRAME.replace("{% if m.role == 'system' %}{% continue %}{% endif %}", ''))
    roles.clear()
    written(capsys, *flags, '--system=Be brief.')
    assert roles[2:] == [['system', 'user']] * 2 + [['system', 'user', 'assistant', 'user']]

@pytest.mark.parametrize('where, name, calls', [
    (model_py.GPT, 'hidden', 1), (model_py.GPT, 'hidden', 4), (sample, 'show_text', 3)])
def test_ctrl_c_ends_an_answer_and_then_the_chat(where, name, calls, tmp_path, capsys, monkeypatch):
    """While it reads or writes, at a terminal. The next answer is that to all so far, with what there was."""
    a_talker(tmp_path)
    pages, count, plain = [], itertools.count(1), getattr(where, name)
    typed = [b'the quick\n', b'/help\n', b'jumps over\n', KeyboardInterrupt]
    terminal = Mock(isatty=lambda: True, **{'buffer.readline.side_effect': typed})
    monkeypatch.setattr(sys, 'stdin', terminal)
    monkeypatch.setattr(page_py, 'write_page', lambda *given: pages.append(given[-1]))

    def stopped(*given, **how):
        result = plain(*given, **how)
        if next(count) == calls:
            raise KeyboardInterrupt
        return result
    monkeypatch.setattr(where, name, stopped)
    _, err = written(capsys, f'--init={tmp_path}', '--chat', '--tokens=6', '--temperature=0', '--html=a.html')
    [heard], model = pages, load(tmp_path)[0]
    parts = [[token for token, _ in group] for _, group in itertools.groupby(heard, key=lambda pair: pair[1])]
    tokens = torch.tensor([[token for token, _ in heard[:-len(parts[-1])]]])
    steps = itertools.islice(model.generate(tokens, temperature=0), 6)
    assert [token.item() for token, _ in steps] == parts[-1] and len(parts) == (2 if calls == 1 else 4)
    for said in ('> past 16 tokens, rope meets', f'\n(cut off)\n> {talk.HELP}\n',
                 '\n> (cut off; --tokens=6 is the most that an answer may have)\n> \n'):
        assert err.count(said) == 1, (said, err)
    assert re.search(rf'\n{len(heard) - 1} tokens read and written, .* tokens/s in answers; state of', err)


# ---- 14. students/ and convert.py --------------------------------------------------------------------------

@pytest.fixture
def teacher(a_model):
    return a_model('--rule=softmax')

def converted(teacher, out, *flags):
    """convert.py's report on a short conversion."""
    short = [flag for flag in SHORT if not any(flag.split('=')[0] in given for given in flags)]
    assert convert.main([f'--from={teacher}', f'--out={out}', *short, *flags]) == 0
    return json.loads((Path(out) / 'convert.json').read_text())

def test_softmax_alone_is_swapped():
    """Where it stands among others, and in the places of a translator that are named."""
    mixed = built(layers='delta,softmax', n_layer=2, n_head=2, n_embd=16)
    student, new = convert.swap(mixed, dict(rule='gla-beta'))
    assert student.config.rules == ['delta', 'gla-beta'] and all('blocks.1' in name for name in new)
    with pytest.raises(ValueError, match='fast weights already'):
        convert.swap(mixed, dict(layers='gla-beta,gla-beta'))
    teacher = small(**PAIRS, rule='softmax', encoder_rule='delta').float()
    student, new = convert.swap(teacher, dict(rule='sum', phi='silu', norm='l2'))
    assert student.config.every_rule() == ['sum', 'sum', 'delta', 'sum']
    assert not any(name.startswith('encoder.') for name in new)
    student, _ = convert.swap(teacher, dict(rule='delta'), ['cross'])
    assert student.config.every_rule() == ['softmax', 'softmax', 'delta', 'delta']
    with pytest.raises(ValueError, match='encoder.0.mixer of the teacher has fast weights already'):
        convert.swap(teacher, dict(rule='sum', phi='t2r', norm='l2'))

@pytest.mark.parametrize('changes, memory', [
    (dict(rule='gla', phi='hedgehog'), 6), (dict(rule='decay'), 6), (dict(rule='gated_delta'), 6),
    (dict(rule='sink', cache=4, sinks=1, overflow='gla:hedgehog'), 16),
    (dict(rule='sink', cache=4, sinks=1, overflow='gated:slots:4'), 16)])
def test_gates_begin_with_the_memory_of_their_heads(changes, memory, a_model, monkeypatch):
    """Heads look 5 steps back: f^5 is there after 6 steps. Beside a cache, a row is remembered. The first slot
    begins as the first key."""
    teacher, x = load(a_model('--rule=softmax'))[0], torch.randint(256, (2, 16))
    far = torch.zeros(16, 16)
    far[5:, :-5] = torch.eye(11)
    monkeypatch.setattr(watch.Seen, 'weights', lambda *_: far.expand(2, 2, 16, 16))
    student, new = convert.swap(teacher, changes)
    before = student.state_dict()[next(name for name in new if 'bias_f' in name)].clone()
    convert.begin_as(teacher, student, x)
    for seen, block in zip(through(teacher, x), student.blocks):
        matrix = getattr(block.mixer.memory, 'overflow', None) or block.mixer.memory
        if 'slots' in matrix.spec:
            near(F.cosine_similarity(matrix.phi.weight[:, 0], seen.k[0, :, 0], dim=-1), torch.ones(2), 1e-5)
        gates = matrix.gates
        assert not gates.proj.weight.any() and not torch.equal(gates.bias_f, before)
        found = gates(torch.randn(2, 16, 16))
        for name in {'log_f', 'log_z'} & found.keys():
            near(found[name].exp(), torch.full_like(found[name], 1 - 1 / memory), 1e-5)

@pytest.mark.parametrize('rule, first, reach, positions', [
    ('window', 0, 4, 'true'), ('sink', 1, 3, 'true'), ('sink', 1, 3, 'compress')])
def test_a_matrix_beside_rows_begins_with_the_weight_of_what_it_holds(rule, first, reach, positions, a_model):
    """4 rows, of which a sink keeps the first: by keys and features one by one; a ridge regression over steps, as
    least squares with a row more per channel."""
    teacher, x = load(a_model('--rule=softmax', '--pos=rope'))[0].double(), torch.randint(256, (1, 9))
    changes = dict(rule=rule, cache=4, sinks=1, overflow='sum:hedgehog', positions=positions)
    student = convert.swap(teacher, changes)[0].double()
    convert.begin_as(teacher, student, x)
    for seen, block in zip(through(teacher, x), student.blocks):
        q, k, memory = seen.q, seen.k, block.mixer.memory       # with the rope of true positions
        features = memory.overflow.phi
        logs = []
        for t in range(first + reach, 9):
            held = k[0, :, first:t - reach + 1]
            wanted = (q[0, :, t, None] * held / q.shape[-1] ** .5).sum(-1).exp().sum(1)
            found = (features(q)[0, :, t, None] * features(held[None])[0]).sum(-1).sum(1)
            logs.append((wanted / found).log())
        u, logs = seen.u[0, first + reach:], torch.stack(logs)
        far, spread = u - u.mean(0), logs - logs.mean(0)
        more = (begin.RIDGE * far.square().sum(0).mean()).sqrt() * torch.eye(16).double()
        W = torch.linalg.lstsq(torch.cat([far, more]), torch.cat([spread, 0 * more[:, :2]])).solution
        near(memory.log_mass(u), logs.mean(0) + far @ W, 1e-6)

@pytest.mark.parametrize('kind', ['ce', 'hidden'])
def test_stage_1_trains_what_it_may_and_never_the_teacher(kind, a_model, tmp_path, monkeypatch):
    """Parameters that are new; for `hidden`, all of the mixers that have some. Of a teacher that has gates
    itself, which stay as they are."""
    teacher = a_model('--layers=gla,softmax', '--norm=attn', '--phi=hedgehog')
    distil, whole = convert.distil, load(teacher)[0].state_dict()

    def watched(run, model, student, names, *rest):
        before = {name: x.detach().clone() for name, x in student.named_parameters()}
        distil(run, model, student, names, *rest)
        close(dict(model.state_dict()), dict(whole), 0)
        moved = {name for name, x in student.named_parameters() if not torch.equal(x, before[name])}
        mixer = {name for name in before if name.startswith('blocks.1.mixer.')}
        assert moved == names == (mixer if kind == 'hidden' else before.keys() - whole.keys())
        assert names <= mixer
    monkeypatch.setattr(convert, 'distil', watched)
    converted(teacher, tmp_path, f'--distil={kind}', '--layers=gla,gla', '--controls=false')

@pytest.mark.parametrize('kind', ['ce', 'mse', 'hidden'])
def test_stage_1_passes_over_padding(kind):
    """What it says of rows that end in padding is what it says of them without."""
    shape = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=10, pad=9, rule='softmax', block_size=20)
    for more in dict(causal=False, classes=2), dict(encoder=1, source=8):
        teacher = built(**shape | more).double().eval()
        student = convert.swap(teacher, dict(rule='sum', phi='hedgehog'))[0].double()
        for p in student.parameters():
            p.data = p.data + 0.1 * torch.randn_like(p)
        x = torch.randint(9, (3, 20))
        x[:, 17:] = 9
        if 'encoder' in more:
            x[:, 8] = 9                                         # with which a text begins: it counts
            assert [*through(teacher, x)][-1].real.tolist() == 3 * [9 * [True]]
        padded, cut = ([convert.mismatch(kind, seen, student) for seen in through(teacher, tokens)]
                       for tokens in (x, x[:, :17]))
        near(padded, cut, 1e-9)
        if kind != 'ce':                                        # whose least value is an entropy
            itself = [convert.mismatch(kind, seen, teacher) for seen in through(teacher, x)]
            assert max(itself) < 1e-12

HYBRID = dict(distil='mse', faster=5)
WINDOWED = dict(rule='sink', cache=9, overflow='sum:slots')

@pytest.mark.parametrize('given, way, changes', [
    ('', {}, dict(rule='gla-beta')), ('--phi=t2r --lr=1e-4', dict(lr=1e-4), dict(rule='gla-beta', phi='t2r')),
    ('--recipe=hybrid --cache=9', HYBRID, WINDOWED),
    ('--recipe=t2r', dict(distil='none', faster=1), dict(rule='sum', phi='t2r')),
    ('--recipe=hybrid --overflow=', HYBRID, WINDOWED | dict(cache=64, overflow='')),
    ('--recipe=cache', dict(distil='auto', faster=1, steps=1300), dict(rule='sink', cache=157)),
    ('--rule=delta --distil=mse', dict(distil='mse'), dict(rule='delta')),
    ('--recipe=hybrid --rule=window', HYBRID, WINDOWED | dict(rule='window', cache=64)),
    ('--layers=softmax,gla', {}, dict(rule='sum', layers='softmax,gla'))])
def test_flags_beside_a_recipe_win_and_another_rule_keeps_its_way_of_training(given, way, changes, a_model,
                                                                               monkeypatch):
    teacher = load(a_model('--rule=softmax'))[0]
    given, found = convert.by_recipe(*convert.flags_of(given.split()), teacher)
    args = convert.Args(**given)
    lr = (.03 if 'cache' in found else .25) / 16
    expected = dict(distil='hidden', faster=5, lr=lr, steps=1000, batch_size=4, row=16) | way
    assert found == changes and {name: getattr(args, name) for name in expected} == expected
    monkeypatch.setattr(starts, 'SMALL', 0)
    given, found = convert.by_recipe(dict(steps=7), dict(cache=3), teacher)
    expected = dict(distil='mse', faster=20, lr=1e-4, steps=7, batch_size=1, eval_rows=16, row=16)
    assert {name: given[name] for name in expected} == expected
    assert found == dict(rule='gla-beta', gate_rank=16, cache=3)
    assert starts.is_large(teacher)
    teacher.task = 'classify'
    assert convert.by_recipe({}, {}, teacher)[0]['eval_rows'] == 500                # one target a row
    for pos, positions in ('rope', 'compress'), ('learned', None):                  # only rope can be turned otherwise
        teacher.config.pos = pos
        assert convert.by_recipe(dict(recipe='hybrid'), {}, teacher)[1].get('positions') == positions
    given, _ = convert.by_recipe(dict(recipe='hybrid', lora=8), {}, teacher)        # new ones: as without LoRA
    assert (given['lr'], given['faster']) == (pytest.approx(.3 / 16), 2)

def tells_its_steps(said, stage, steps):
    return all(f'{stage} | step {i:5d}/{steps} | loss' in said for i in range(1, steps + 1))

def stage_1_came_nearer(found):
    """In each layer the divergence of attention fell; the query that is shown has weights, by ascending scores."""
    first, last = ([row['KL to teacher'] for row in found['layers'] if row['model'] == stage]
                   for stage in ('swapped', 'distilled'))
    assert first and all(0 < b < .95 * a for a, b in zip(first, last, strict=True))
    query = found['query']
    assert query['scores'] == sorted(query['scores']) and len(query['scores']) == 16
    for name in 'softmax', 'swapped', 'distilled':
        assert sum(query[name]) == pytest.approx(1, abs=1e-4)
    near(torch.tensor(query['softmax']), torch.tensor(query['scores']).softmax(0), 1e-5)

@pytest.mark.parametrize('flags', [
    '--recipe=pure', '--recipe=hybrid --cache=6', '--recipe=decay --out_norm=false',
    '--layers=softmax,gla --distil=auto --dtype=bfloat16', '--recipe=hedgehog --lora=2 --distil_steps=15'])
def test_conversion_recovers_and_says_how_much(flags, teacher, tmp_path, monkeypatch, capsys):
    """Shares are perplexities over others'; every model but the caches, of as many bytes as what was swapped, had as
    many tokens as it should. Stage 1 lowers the divergence of attention. It is never silent for long."""
    monkeypatch.setattr(stages, 'SLOW', 0)
    found = converted(teacher, tmp_path, *flags.split())
    said, lines = capsys.readouterr().out, {row['model']: row for row in found['table']}
    assert tells_its_steps(said, 'fine-tune', 3)
    if 'pure' in flags:
        assert tells_its_steps(said, 'distil (hidden)', 4) and tells_its_steps(said, 'control: from scratch', 7)
        assert sum('tok_s' in row for row in log(tmp_path)) == 4 + 3 + 3 * 7
        assert [lines[name]['tokens'] for name in ('distilled (hidden)', 'fine-tuned')] == [4 * 2 * 16, 7 * 2 * 16]
    names = [name for name in lines if not re.search('cached|same', name)]
    rates = ('0.01', '0.001') if 'lora' in flags else ('0.001', '0.0001')      # LoRA bears ten times as much
    controls = [f'control: teacher, {lr}' for lr in rates] + ['control: student from scratch']
    assert names[:2] == ['teacher', 'swapped'] and names[-4:] == ['fine-tuned', *controls]
    *student, first, second, anew = [lines[name]['tokens'] for name in names]
    assert student[-1] == first == second == anew and student == sorted(student)
    tuned = min(lines[name]['perplexity'] for name in controls[:2])
    for row in found['table']:
        assert row['recovered'] == pytest.approx(lines['teacher']['perplexity'] / row['perplexity'])
        assert row['of the tuned'] == pytest.approx(tuned / row['perplexity'])
        assert row['low'] <= row['recovered'] <= row['high']
    result = json.loads((tmp_path / 'result.json').read_text())
    assert result['steps'] == 3 and result['recovered'] == lines['fine-tuned']['recovered']
    assert lines['teacher']['state bytes'] == 2 * (2 * 16 + 2 * 3) * 4 * 16 + 8      # and conv
    swapped = sum(rule != 'softmax' for rule in load(tmp_path / 'ckpt.safetensors')[0].config.rules)
    fewer = [lines['swapped']['state bytes'] - lines[name]['state bytes'] for name in lines if 'as many bytes' in name]
    assert len(fewer) == 3 and all(0 <= few < swapped * 2 * (2 * 4 * 8 + 12) for few in fewer)
    assert any(name.startswith('the same') for name in lines) == flags.startswith('--recipe=hybrid')
    if found['distil'] == 'ce':
        stage_1_came_nearer(found)

def test_what_is_recovered_is_told_by_position_with_an_interval():
    gain = torch.linspace(-.1, 0, 3)[:, None].repeat(1, 600).double()
    gain[:, 256:512] -= 1
    row = judge.recovered(gain)
    means = gain.mean(1).numpy()
    half = 1.96 * np.std(means, ddof=1) / 3 ** .5
    assert row['high'] == pytest.approx(math.exp(means.mean() + half))
    assert row['low'] * row['high'] == pytest.approx(row['recovered'] ** 2)
    found = [row[name] for name in ('to 256', 'to 512', 'to 600')]
    assert found == pytest.approx(np.exp([-.05, -1.05, -.05]))

def test_a_student_is_judged_under_other_policies_and_beside_other_models(teacher, a_model, tmp_path):
    """Policies that it was not trained with: the same weights, as many tokens. KL is the teacher's, over all words."""
    delta = a_model('--rule=delta')
    found = converted(teacher, tmp_path, '--rule=sink', '--cache=6', '--distil=none', '--controls=false', f'--beside={delta}')
    lines = {row['model']: row for row in found['table']}
    assert [name for name in lines if name.startswith('the same')] == [f'the same, {p}' for p in ('tova', 'h2o')]
    data = prepare.load_set(load(teacher)[1]['args']['data'])
    n = len(data[1]) - 1
    of_text = made_rows(*data, 16, torch.device('cpu'))
    x, y = of_text.rows(data[1], of_text.blocks(4, n - n % 16 + 1))
    log_p = {}
    with torch.no_grad():
        for name, source, rule in [
                ('teacher', teacher, ''), ('fine-tuned', tmp_path / 'ckpt.safetensors', ''), (delta, delta, ''),
                *[(f'the same, {p}', tmp_path / 'ckpt.safetensors', p) for p in ('tova', 'h2o')]]:
            log_p[name] = load(source, **{'rule': rule} if rule else {})[0](x)[0].log_softmax(-1)
            right = log_p[name].gather(-1, y[..., None])
            assert lines[name]['perplexity'] == pytest.approx(math.exp(-right.mean()), rel=1e-5)
            far = (log_p['teacher'].exp() * (log_p['teacher'] - log_p[name])).sum(-1).mean()
            assert lines[name]['KL'] == pytest.approx(far.item(), rel=1e-4, abs=1e-7)
    others = [name for name in lines if name == delta or '6 cached by' in name or 'as many' in name]
    best, ratio, low, high = found['over the best other']
    assert best == min(others, key=lambda name: lines[name]['perplexity']) and low <= ratio <= high
    assert ratio == pytest.approx(lines['fine-tuned']['perplexity'] / lines[best]['perplexity'])
    tokens = torch.from_numpy(data[1][:65].astype(int))         # and in one text of four rows
    rows = costs(load(teacher)[0], tokens.unfold(0, 17, 16))
    for name, source in (str(tmp_path), tmp_path / 'ckpt.safetensors'), (delta, delta):
        student = costs(load(source)[0], tokens[None])[0].view(4, 16)
        near((student - rows).mean(1).exp(), torch.tensor(found['in one text'][name]), 1e-5)

def test_rows_are_judged_alike_in_pieces_of_6_tokens(monkeypatch):
    model, x = small(rule='sink', cache=6, overflow='sum:slots'), torch.randint(256, (2, 5, 16))
    whole = judge.nats_along(model, *x, '')
    monkeypatch.setattr(machine, 'LOGITS', 6 * 256)
    seen = Mock(wraps=data_rows_py.predict)
    monkeypatch.setattr(judge, 'predict', seen)
    near(judge.nats_along(model, *x, ''), whole, 1e-5)
    assert max(call.args[1].numel() for call in seen.call_args_list) == 6

def test_layers_that_stay_softmax_are_spread_over_the_depth(a_model, tmp_path):
    converted(a_model('--rule=softmax', '--n_layer=4'), tmp_path, '--keep=2', '--rule=retention', '--controls=false')
    assert load(tmp_path / 'ckpt.safetensors')[0].config.rules == ['retention', 'softmax'] * 2

@pytest.mark.parametrize('more', [[], ['--lora=2']], ids=['all', 'lora'])
def test_a_model_of_texts_is_converted_on_pairs(more, teacher, tmp_path, monkeypatch, capsys):
    """The teacher stays as it is; with LoRA the student has no weights of its own but what learns."""
    pairs = ':'.join(put(tmp_path, x, '\n'.join(x * (1 + i % 4) for i in range(40))) for x in 'ab')
    found, swap, loaded = [], convert.swap, load(teacher)[0].state_dict()

    def watched(*given):
        found.extend([given[0], *swap(*given)])
        return found[1:]
    monkeypatch.setattr(convert, 'swap', watched)
    how = f'--data={pairs}', '--recipe=hedgehog', '--loss=kl', '--controls=false', *more
    why = refused(capsys, convert.main, f'--from={teacher}', *how, '--row=8', f'--out={tmp_path / "no"}')
    assert 'rows have 16 tokens, more than 8; give --row=16 if' in why
    row = converted(teacher, tmp_path / 'rnn', *how)['table'][-1]
    model, student, _ = found
    close(dict(model.state_dict()), dict(loaded), 0)
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in student.parameters()}
    adapted = 2 * len(model.blocks)                             # qkv and proj, into which LoRA is merged
    assert len(shared) == (len(loaded) - adapted if more else 0)
    assert row['model'] == 'fine-tuned' and 0 <= row['accuracy'] <= 1 and 'bits per byte' not in row

def test_a_large_teacher_is_looked_at_only_for_new_parameters(a_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(starts, 'SMALL', 0)
    for overflow, begins in ('', 0), ('sum:slots', 1):
        begin = Mock()
        monkeypatch.setattr(convert, 'begin_as', begin)
        run = f'--from={a_model("--rule=softmax")}', '--recipe=hybrid', '--cache=6', f'--overflow={overflow}'
        how = '--keep=1', '--steps=0', '--distil_steps=0', '--eval_rows=2', f'--out={tmp_path}'
        assert convert.main([*run, *how]) == 0 and begin.call_count == begins
        assert ('new parameters begin' in capsys.readouterr().out) == (begins > 0)
    flags = f'--init={a_model("--rule=softmax")}', '--steps=1', f'--out={tmp_path}/tuned', '--device=cpu'
    assert '\n1 row of 16 a step, about 0.00' in written(capsys, *flags, main=train.main)[0]   # and fine-tuned by one
    monkeypatch.setattr(machine, 'whole_memory', lambda device: 10 ** 6)
    assert 'take a smaller one' in refused(capsys, train.main, *flags, '--batch_size=64')

@pytest.mark.parametrize('at', [4, 9])
def test_stopped_conversion_goes_on_bit_for_bit(at, teacher, a_model, tmp_path, monkeypatch, capsys):
    """Stopped in stage 1, where all of the mixer learns, and in the controls, after a stage 2 with everything
    that is drawn. No step is saved twice: each stage goes on from its last save."""
    mine, cut, batch = tmp_path / 'teacher.safetensors', f'--out={tmp_path / "cut"}', Rows.batch
    shutil.copy(teacher, mine)
    flags = [f'--from={mine}', *'--steps=4 --distil_steps=6 --eval_rows=4 --eval_every=2 --seed=3'.split()]
    flags += '--lora=2 --phi=favor --layers=softmax,sum'.split() if at == 9 else ['--controls=false']

    def found(name):
        told = json.loads((tmp_path / name / 'convert.json').read_text())
        steps = [(row['stage'], row['step'], 'tokens' in row) for row in log(tmp_path / name) if 'stage' in row]
        return told['table'], told['layers'], steps
    calls = iter(range(at))

    def stop(*args):
        if next(calls, None) is None:
            if at < 9:
                raise KeyboardInterrupt                         # at once
            os.kill(os.getpid(), signal.SIGINT)                 # after the step
        return batch(*args)
    assert convert.main([*flags, f'--out={tmp_path / "whole"}']) == 0
    with monkeypatch.context() as m:
        m.setattr(Rows, 'batch', stop)
        assert convert.main([*flags, cut]) == 130
    assert len(stages.checkpoints(tmp_path / 'cut')) == 1 + 2 * (at == 9)
    assert 'began' in refused(capsys, convert.main, '--resume', '--steps=5', cut)
    shutil.copy(a_model('--rule=softmax', '--pos=rope'), mine)
    assert 'the teacher is not' in refused(capsys, convert.main, '--resume', cut)
    shutil.copy(teacher, mine)
    assert convert.main(['--resume', cut]) == 0
    assert found('cut') == found('whole') and same(*tmp_path.glob('*/ckpt.safetensors'))
    assert 'was stopped' in refused(capsys, convert.main, '--resume', cut)

def test_a_model_does_not_diverge_from_itself(teacher, tmp_path):
    """In what it says: --loss=kl."""
    model, meta = load(teacher)
    *sides, of_data = prepare.load_set(meta['args']['data'])
    data = made_rows(*sides, of_data, 16, torch.device('cpu'), 4)
    run = stages.Conversion(convert.Args(from_=teacher, out=str(tmp_path), eval_rows=4), model, data, {})
    run.judge.add_line('teacher', model)
    convert.finetune(run, 'itself', model, 2, 0.0, teacher=model)
    assert abs(log(tmp_path)[-1]['loss']) < 1e-6

PADDED = dict(source=4, pad=255)

@pytest.mark.parametrize('phi, more', [
    ('t2r', dict(n_kv_head=1)), ('t2r:5', dict(bias=True)), ('t2r-scaled:11', dict(layers='sum,softmax', pos='none')),
    ('t2r-scaled:3', dict(encoder=1, **PADDED))])
def test_folding_t2r_is_an_identity(phi, more, tmp_path):
    """For as many features as channels, fewer and more; also of what was written and read again."""
    how = dict(rule='sum', phi=phi, pos='learned') | more
    model, tokens = small(**how), torch.randint(255, (2, 9))
    folded = fold.fold(model)
    m = model.blocks[0].mixer.memory.phi.feature_dim
    assert len(folded.blocks[0].mixer.qkv.weight) == 2 * m + more.get('n_kv_head', 2) * (m + 8)
    data = Data('byte', 256, **{name: more[name] for name in more if name in PADDED})
    save(tmp_path / 'folded.safetensors', folded, dict(data=data))
    for one in folded, load(tmp_path / 'folded.safetensors')[0]:
        near(one(tokens)[0], model(tokens)[0], 1e-12)
    near(model_in_parts(folded, tokens, [5])[0], model(tokens)[0], 1e-12)
    with pytest.raises(ValueError, match='no rope'):
        fold.fold(small(**how | dict(pos='rope')))

@pytest.mark.parametrize('more', [{}, dict(n_kv_head=1, pos='rope', bias=True),
                                  dict(encoder=1, **PADDED)], ids=['plain', 'grouped', 'cross'])
def test_lora_begins_as_nothing_and_ends_in_the_weights(more):
    """Each of q, k, v and o has an A and a B of its own; beside them only what is new learns."""
    model, tokens = small(rule='sum', phi='hedgehog', conv=0, **more), torch.randint(255, (2, 9))
    before, weights = model(tokens)[0], set(model.state_dict())
    new = {name for name in weights if 'phi.' in name}
    adapted = lora.adapt(model, 3, new)
    model.double()
    near(model(tokens)[0], before, 0)
    model(tokens)[0].square().sum().backward()
    learn = {name: p for name, p in model.named_parameters() if p.grad is not None}
    adapters = {name: p for name, p in learn.items() if name.split('.')[-2] in 'AB'}
    assert learn.keys() - adapters.keys() == new
    shared = 16 if 'n_kv_head' not in more else 8
    many = sum(3 * (16 + out) for out in (16, shared, shared, 16)) * len(model.mixers())
    assert sum(p.numel() for p in adapters.values()) == many
    for p in adapters.values():
        p.data.normal_()
    after = model(tokens)[0].detach()
    assert (after - before).abs().max() > .1
    lora.merge_lora(adapted)
    near(model(tokens)[0], after, 1e-12)
    assert set(model.state_dict()) == weights


# ---- 15. look/: what layers do, and the page: assets/memory.html, and a run in it --------------------------

@pytest.mark.parametrize('flags', [dict(), dict(post_norm=True), dict(causal=False, pad=0, conv=3),
                                   dict(norm_after=True, qk_norm=True, qk_norm_all=True)])
def test_through_tells_what_forward_computes(flags):
    m = built(layers='delta,softmax', n_layer=2, n_head=2, n_embd=16, **flags).double()
    tokens = torch.randint(1, 256, (2, 9))
    if 'pad' in flags:
        tokens[1, 6:] = 0
    for seen in through(m, tokens):
        block = m.get_submodule(seen.layer)
        u = seen.x if getattr(block, 'norm_after', False) else block.norm1(seen.x)
        u = block.convolve(0, u, *(seen.rest or ({},)))
        near(seen.u, u)
        found = seen.mixer.proj(seen.mixer.merge(seen.outputs(seen.mixer)))
        near(found, watch.first(seen.mixer(u, *seen.rest)))
        last = watch.first(block(seen.x, *seen.rest))
        near(seen.y, last)
    near(m.norm(last), m.hidden(tokens)[0])

def test_a_mixer_of_your_own_is_passed_over_by_what_watches_layers(tmp_path):
    """Here a running mean, in the second of two layers. --html and convert.py see the first alone."""
    class Mean(torch.nn.Module):
        def forward(self, x, state=None, t=0):
            total = x.cumsum(1) + (0 if state is None else state['total'])
            steps = t + torch.arange(1, x.shape[1] + 1)
            return total / steps[:, None], {'total': total[:, -1:]}
    m, tokens = small(rule='sum'), torch.randint(256, (1, 9))
    m.blocks[1].mixer = Mean()
    whole, state = m(tokens)
    parts, last = model_in_parts(m, tokens, [4])
    near(parts, whole)
    close(pack(last), pack(state))
    assert [seen.name for seen in through(m, tokens)] == ['blocks.0.mixer']
    assert [given['rule'] for given in page_py.given_to_memories(m, tokens)] == ['sum']

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)

def in_browser(page, code, tmp_path):
    """What a page says, as JSON in its body, after this code, too, has run in it."""
    page = Path(page).read_text().replace('</body>', f'<script>{code}</script></body>')
    path = put(tmp_path, 'page.html', page)
    run = [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom', f'file://{path}']
    said = subprocess.run(run, capture_output=True, text=True, timeout=60).stdout
    return json.loads(re.search(r'\[\[.*\]\]', said, re.S)[0])

@pytest.mark.skipif(not BROWSER, reason='no browser here: chromium or google-chrome')
def test_the_page_computes_the_equation(tmp_path):
    """With each gate absent, a number, or one per channel: S, what is read, its weights, and those in D (e k),
    which the last write erases. How long half of a write is left: with f = 1 - 1/32 for 22 steps."""
    T, K, V = 7, 4, 3
    absent = dict(w=1, e=0, f=1, z=1)
    rows, expected = [], []
    for widths in (0, 0, 0, 0), (V, K, K, V), (1, 1, 1, 1), (1, K, 0, V), (V, 1, K, 0):
        given = dict(q=torch.randn(T, K), k=torch.randn(T, K), v=torch.randn(T, V))
        given.update({name: 1 - torch.rand(T, d) / 2 for name, d in zip('wefz', widths) if d})
        rows.append([absent | {name: x[t].tolist() for name, x in given.items()} for t in range(T)])
        whole = {name: torch.full((T, 1), value) for name, value in absent.items()} | given
        q, k, v, w, e, f, z = (whole[name].double()[None, None] for name in 'qkvwefz')
        o, S = recurrent(q, k, v, w, e, f.log(), z.log())
        q, k, e, f = (x.repeat(V, 1, 1, K // x.shape[-1]) for x in (q, k, e, f))    # each channel of the values by itself
        w, z = (x.expand(1, 1, T, V).permute(3, 0, 2, 1) for x in (w, z))
        A = weights(q, k, write=w, erase=e, log_f=f.log(), log_z=z.log()).mean(0)
        q[..., -2, :] = (f * e * k)[..., -1, :]                         # D_t (e k) = z (S_{t-1} (f * e * k))
        before = weights(q, k, write=w, erase=e, log_f=f.log(), log_z=z.log())[..., -2, :]
        erased = (z[..., -1, :] * before)[..., :-1].mean(0)
        expected.append([S[0, 0], o[0, 0], A[0, -1], erased[0]])
    code = f'''const found = {json.dumps(rows)}.map(row => {{
        let S = zeros({V}, {K});
        const o = row.map(x => {{ S = step(S, x); return read(S, x.q); }});
        return [S, o, weights(row, row.length - 1, row.at(-1).q), erasedBy(row, row.length - 1)];
    }});
    const alike = more => halfLife(Array(60).fill({{k: [.6, .8], v: [1], e: 0, f: 1, z: 1, ...more}}), 1);
    found.push([[alike({{f: 1 - 1 / 32}}), alike({{e: .5}}), alike({{z: [.8], f: [.9, .9]}}), alike({{}}) === Infinity]]);
    document.body.textContent = JSON.stringify(found);'''
    *found, [lives] = in_browser(page_py.PAGE, code, tmp_path)
    assert lives == [22, 1, 3, True]
    for mine, theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            near(torch.tensor(x, dtype=torch.double), y, 1e-9)

def run_in(path):
    """The recording in a page, with its numbers as tensors (1, H, T, d)."""
    page = Path(path).read_text()
    run = json.loads(re.search(r'<script id="recording" type="application/json">(.*)</script>', page)[1])
    for layer in run['layers']:
        for name, x in [*layer['arrays'].items()]:
            flat = np.frombuffer(base64.b64decode(x['data']), np.float16).astype(np.float32)
            steps = layer['n'] * len(run['tokens'])
            layer['arrays'][name] = torch.from_numpy(flat).view(1, -1, steps, x['d'])      # heads may share keys
            if name in ('log_q', 'log_k'):
                layer['arrays'][name[-1]] = layer['arrays'][name].exp()
    return run

def page_of(model, tokens, folder):
    """The recording in the page of a text."""
    args = sample.Args(html=f'{folder}/run.html')
    page_py.write_page(args, model, {'data': Data('byte', 256)}, page_py.by_whom(tokens[0].tolist(), []))
    return run_in(args.html)

@pytest.mark.parametrize('flags', [
    dict(rule='sum'), dict(rule='delta', norm='attn', phi='elu'), dict(rule='gdn2', writes=2),
    dict(layers='decay,gla-beta'), dict(layers='tova,softmax', cache=8),
    dict(rule='window', cache=8, overflow='sum:hedgehog')], ids=str)
def test_a_page_holds_what_each_memory_was_given(flags, tmp_path):
    """From which the equation makes what the layer read; or which keys and values it has in the end."""
    model, tokens = small(**flags), torch.randint(97, 122, (1, 23))
    run = page_of(model, tokens, tmp_path)
    with torch.no_grad():
        for layer, seen in zip(run['layers'], through(model, tokens), strict=True):
            x = layer['arrays']
            o, state = seen.mixer.memory(seen.u, seen.q, seen.k, seen.v)
            if 'gone' in layer:
                near(x['k'], seen.k, 2e-3)
                kept = torch.tensor(layer['gone']) == 23
                expected = torch.ones_like(kept)
                if 'pos' in state:
                    expected = torch.zeros_like(kept).scatter(1, state['pos'][0], True)
                assert torch.equal(kept, expected)
                continue
            gates = [x.get(name) for name in ('w', 'e', 'log_f', 'log_z')]
            found, _ = recurrent(x['q'], x['k'], x['v'], *gates, normalise=layer['normalise'],
                                 floor=layer['floor'] or 0)
            if 'norm' in flags:                                 # divided behind the recurrence
                found = found / (x['q'] * x['k'].cumsum(2)).sum(-1, keepdim=True)
            near(found[:, :, layer['n'] - 1::layer['n']], o, 1e-2)

@pytest.mark.parametrize('overflow, positions', [
    ('gla-beta:hedgehog', 'true'), ('delta:taylor', 'true'), ('gated:slots', 'compress')])
def test_a_page_shows_what_a_hybrid_reads_from_cache_and_matrix(overflow, positions, tmp_path):
    """Each token is in one of them; weights times values are what the layer reads. A browser finds the same,
    hides the matrix of a layer that has none, and opens with the last token in sight."""
    model = small(layers='softmax,sink', cache=6, sinks=2, overflow=overflow, positions=positions, n_kv_head=1)
    T = 40
    tokens = torch.full((1, T), 10).index_fill(1, torch.arange(0, T, 2), 97)
    [_, given], [_, seen] = page_py.given_to_memories(model, tokens), through(model, tokens)
    matrix, gone, step = given['matrix'], given['gone'], torch.arange(T)[:, None]
    names = {'k', 'write', 'erase', 'log_f'} & matrix.keys()
    spilled = weights(matrix['q'], **{name: matrix[name].expand(-1, 2, -1, -1) for name in names})
    if overflow != 'delta:taylor':
        spilled = spilled / spilled.sum(-1, keepdim=True).clamp(min=1e-30)
    spilled = F.pad(spilled, (0, 1)).gather(-1, gone[:, :, None].expand(-1, 2, T, -1))      # by the token written
    left = (torch.arange(T) > step) | (gone <= step)
    scores = caches.cached_scores(given['q'], given['k']).flatten(1, 2)
    if positions == 'compress':
        scores[..., :2] = caches.cached_scores(given['q_first'], given['k']).flatten(1, 2)[..., :2]
    cached = scores.masked_fill(left, -math.inf).softmax(-1)
    A = matrix['share'] * cached + (1 - matrix['share']) * spilled
    near(A @ seen.v, seen.o, 1e-5)
    if overflow != 'delta:taylor':
        near(A.sum(-1), torch.ones(1, 2, T, dtype=A.dtype), 1e-5)
    page_of(model, tokens, tmp_path)
    if BROWSER:
        said = in_browser(tmp_path / 'run.html', '''
            const first = [getComputedStyle($('matrix')).display, $('tokens').scrollTop > 0];
            $('layer').value = 1;
            const row = t => { go(t); return attention(run.layers[1]); };
            const rows = () => run.tokens.map((_, t) => [...row(t), ...Array(run.tokens.length - 1 - t).fill(0)]);
            const found = [0, 1].map(head => { $('head').value = head; selectHead(); return rows(); });
            document.body.textContent = JSON.stringify([first, found]);''', tmp_path)
        assert said[0] == ['none', True]
        near(torch.tensor(said[1]), A[0].float(), 1e-2)

def test_a_page_takes_any_text_as_text(a_model, tmp_path, monkeypatch, capsys):
    """As subwords would have it; bytes are letters of their own."""
    hostile = '</script><!-- "\'&<b>\u2028\U0001f600 \\u003c ${x}'
    monkeypatch.setattr(page_py, 'added', lambda before, tokens, data: hostile)
    flags = f'--init={a_model("--rule=delta")}', '--prompt=line', '--tokens=2'
    assert 'run.html' in written(capsys, *flags, f'--html={tmp_path / "run.html"}')[1]
    page = (tmp_path / 'run.html').read_text()
    empty = Path(page_py.PAGE).read_text()
    run = run_in(tmp_path / 'run.html')
    assert run['tokens'] == 6 * [hostile] and run['written'] == 4 * [False] + 2 * [True]
    assert all(page.count(mark) == empty.count(mark) for mark in ('</script', '<!--', '<b>'))


# ---- 16. bench.py and papers/ ------------------------------------------------------------------------------

TINY_SUITES = dict(train=('--heads=1 --head_dim=8 --lengths=40', 10),        # flags; at least so many rows
              decode=('--heads=1 --head_dim=8 --lengths=8,40', 20), batch=('--lengths=16 --budget=1', 6),
              cache=('--init=ROPE --lengths=4,8', 13), keys=('--init=ROPE --lengths=4,800', 34),
              answers=('--steps=1 --full --seeds=1 --data=facts --only=softmax,tova', 4 + 8),
              kept=('--init=ROPE --lengths=4', 4), far=('--init=ROPE --lengths=40', 15),
              transfer=('--init=ROPE --steps=1 --only="hedgehog other" --data=WORDS', 6),
              layer=('--heads=1 --head_dim=8 --lengths=8,40 --dtype=bfloat16', 10),
              capacity=('--lengths=4 --steps=5 --only=elu,softmax', 4),
              update=('--lengths=4 --steps=5 --only=gated,delta', 4),
              monotone=('--init=ROPE --steps=1 --only=elu,hedgehog', 4),
              recall=('--steps=1 --only=elu,delta', 2),
              grid=('--data=TEXT --steps=4 --only="sum t2r:4,delta rfa"', 6),
              mqar=('--steps=1 --only=tova --lengths=8', 1), tracking=('--steps=1 --only=sum', 2 + 512),
              language=('--data=TEXT --steps=1 --only=sum', 1),
              lra=('--steps=1 --only=softmax,hedgehog', 2),
              glue=('--steps=2 --only="elu,hedgehog,trained on"', 4),
              translate=('--steps=2 --only="elu,hedgehog converted"', 2),
              vit=('--steps=2 --only=t2r', 3), real=('--init=ROPE --lengths=40 --beside=GATED_DELTA', 3 + 6))

@pytest.fixture
def in_process(monkeypatch):
    """Commands that bench.py runs are run here, with fewer tokens to evaluate."""
    elsewhere, scripts = subprocess.run, dict(train=train, convert=convert)

    def run(command, **how):
        script = scripts.get(Path(command[1]).stem)
        if script is None:
            return elsewhere(command, **how)
        flags = command[2:]
        if script is train:
            flags = [flag for flag in flags if 'val_tokens' not in flag] + ['--val_tokens=2048', '--threads=1']
        err = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = script.main(flags)
        return subprocess.CompletedProcess(command, code, '', err.getvalue())
    monkeypatch.setattr(subprocess, 'run', run)

    def once_each(cells, *_):
        for _, call in cells:
            call()
        return [(*cell, 1e-3 / n) for n, cell in enumerate(cells, 1)]
    monkeypatch.setattr(bench, 'timed', once_each)

@pytest.fixture
def changed(monkeypatch):
    """changed('lra', ways=...): a suite with other fields."""
    return lambda name, **fields: monkeypatch.setitem(
        bench.SUITES, name, dataclasses.replace(bench.SUITES[name], **fields))

@pytest.fixture
def small_pairs(turned_around, changed):
    """The suite translate, small."""
    model = '--encoder=1 --n_layer=1 --n_head=2 --n_embd=32 --conv=0 --lr=1e-2 --encoder_rule=softmax'
    way = bench.SUITES['translate'].ways['multi30k']
    changed('translate', ways={'pairs': way._replace(data=turned_around, train=f'{model} --batch_size=64')})
    return turned_around

def ran(folder, suite, *flags):
    """The table of a suite."""
    assert bench.main([suite, *flags, f'--out={folder}']) == 0
    return list(csv.DictReader((Path(folder) / f'{suite}.csv').open()))

@pytest.mark.parametrize('suite', TINY_SUITES)
def test_bench_writes_table_and_picture(suite, places, small_pairs, tmp_path, capsys, changed, monkeypatch,
                                        in_process, request):
    model = '--n_layer=1 --n_head=2 --n_embd=16'
    way = Way(places['THREES'], f'--causal=false {model}', how='--lr=1e-3', convert='--eval_rows=99', more=.5)
    for name in 'lra', 'glue', 'vit':
        changed(name, ways={'threes': way})
    for name in 'grid', 'tracking':
        ways = bench.SUITES[name].ways
        changed(name, ways={part: w._replace(train=f'--conv=0 {model}') for part, w in ways.items()})
    flags, rows = TINY_SUITES[suite]
    if suite == 'answers':                              # the model of long rows is made from one of short
        few_facts = request.getfixturevalue('few_facts')
        short = prepare.DATASETS['facts']._replace(length=512, rows=(20, 16))
        monkeypatch.setitem(prepare.DATASETS, 'facts', short)
        for name in 'facts-256', 'facts':
            prepare.prepare(name, file=few_facts)
    if suite == 'translate':
        pytest.importorskip('sacrebleu')
    if suite != 'decode':                   # all are drawn; to lay letters out takes longest
        monkeypatch.setattr('matplotlib.figure.Figure.savefig', lambda figure, path, dpi: Path(path).touch())
    found = ran(tmp_path, suite, *(filled(flag, places) for flag in shlex.split(flags)))
    picture = tmp_path / f'{suite}.png'
    assert f'\npicture: {picture}\n' in capsys.readouterr().out
    assert picture.exists()
    assert len(found) >= rows
    if suite == 'grid':
        forms = itertools.product(('from scratch', 'converted'), ('softmax', 'sum t2r:4', 'delta rfa'))
        assert [(row['part'], row['form']) for row in found] == list(forms)
        assert [bool(row['recovered']) for row in found] == [False] * 4 + [True] * 2

@pytest.mark.parametrize('suite, way, form, made', [
    ('recall', 'one layer', 'hedgehog', [('train.py', 60)]),
    ('recall', 'from softmax', 'hedgehog', [('train.py', 60), ('convert.py', 2, 4)]),
    ('recall', 'from softmax', 'elu', [('train.py', 60), ('convert.py', 0, 6)]),
    ('grid', 'converted', 'softmax', [('train.py', 240)]),
    ('glue', 'cola', 't2r-hh', [('train.py', 60), ('convert.py', 6, 12)]),
    ('glue', 'cola', 'trained on', [('train.py', 60), ('train.py', 18)]),
    ('answers', 'facts', 'softmax', [('train.py', 60), ('train.py', 60)])])
def test_a_line_says_from_what_its_model_is_made(suite, way, form, made, monkeypatch):
    """By train.py, or of the softmax model by convert.py, with so many steps of stage 1 and 2."""
    runs = []

    def a_run(args, suite, form, file, flags, seed):
        assert not runs or re.search('--(init|from)=P ', flags)
        runs.append((file, *map(int, re.findall('(?<=steps=)[0-9]+', flags))))
        return {'path': 'P', 'accuracy': 1}
    monkeypatch.setattr(harness, 'a_run', a_run)
    suite = bench.SUITES[suite]
    harness.a_line(bench.Args(steps=60), suite, suite.ways[way], form, 0)
    assert runs == made

def test_bench_runs_are_remembered(tmp_path, in_process):
    """A long suite that was stopped goes on. Another seed or flag is another run; a broken file is none."""
    args, suite = bench.Args(out=str(tmp_path)), bench.SUITES['recall']
    small = '--n_layer=1 --n_head=1 --n_embd=8 --steps=1 --eval_every=1'
    flags = f'--data=recall-kept {small}'
    run = partial(harness.a_run, args, suite, 'softmax', 'train.py')
    first = run(flags, 0)
    assert run(flags, 0) == first
    path, = tmp_path.glob('recall/*.json')
    for broken in '3', '{}', '{"key": ':
        path.write_text(broken)
        assert run(flags, 0)['val_loss'] == first['val_loss'] and len(path.read_text()) > 99
    run(flags, 1)
    assert len(list(tmp_path.glob('recall/*.json'))) == 2
    with pytest.raises(ValueError, match='no such flag'):
        run(flags + ' --nope=1', 0)
    figures = []
    for content in TEXT, TEXT[::-1]:                        # another text in the same file
        path = put(tmp_path, 'text', content)
        figures.append(run(f'{small} --block_size=16 --data={path}', 0)['val_loss'])
    for groups in 1, 2:                                     # another model in the same folder
        a_talker(tmp_path / 'hub', groups=groups)
        flags = f'--init={tmp_path}/hub --block_size=16 --steps=1 --eval_every=1 --data={path}'
        figures.append(run(flags, 0)['val_loss'])
    assert len(set(figures)) == 4

@pytest.mark.skipif(os.name == 'nt', reason='no signals')
def test_a_suite_that_is_terminated_ends_its_training(characters, tmp_path):
    """As with Ctrl-C. Otherwise it would train on, and hold the folder that the next suite needs."""
    words = 'bench.py', 'language', '--only=delta', f'--data={characters}', '--steps=1000000', f'--out={tmp_path}'
    suite = subprocess.Popen([sys.executable, *words], cwd=HERE, stderr=subprocess.PIPE, text=True,
                             start_new_session=True)
    try:
        assert 'train.py' in suite.stderr.readline()
        suite.terminate()
        assert 'stopped' in suite.communicate()[1] and suite.returncode == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(suite.pid, signal.SIGKILL)

def test_bench_leaves_out_what_fails_and_compares_with_attention_alone(capsys):
    """If attention itself fails, the others are not compared with the next line."""
    def fails(args, T):
        raise RuntimeError('no memory')
    args = bench.Args(device=torch.device('cpu'))
    args.lengths = [2]
    suite = Mock(lines={'attention': fails, 'sum': lambda args, T: partial(time.sleep, .01)})
    row, = bench.over_lengths(args, suite)
    assert row['form'] == 'sum' and math.isnan(row['of attention'])
    assert 'attention is left out from T = 2 on: RuntimeError: no memory' in capsys.readouterr().err

@pytest.mark.parametrize('rule', ['softmax', 'tova', 'delta'])
def test_bench_goes_on_from_states_of_their_true_size(rule):
    """As if it had read all these tokens."""
    model = built(rule=rule, cache=3, n_layer=2, n_head=2, n_embd=16).eval()
    true = pack(model.read(torch.randint(256, (2, 9))))
    token, state = bench.far_along(model, 2, 9)
    found = pack(state)
    assert token.shape == (2, 1)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    assert found['state.t'] == true['state.t'] == 9

@pytest.mark.parametrize('rule, phi, norm', [
    ('sum', 'elu', 'attn'), ('sum', 'dpfp:1', 'sum'), ('gated', 'elu', 'attn'), ('delta', 'dpfp:2', 'sum')])
def test_associations_are_read_from_the_recurrence(rule, phi, norm):
    """Against the definition, in which a query is a further step whose key is 0."""
    model, keys = schlag.Associative(5, rule, phi, norm, d=8).double().eval(), torch.randint(5, (2, 7))
    layer, values = model.memory, torch.randint(5, (2, 7))
    v = F.one_hot(values, 5).double()
    x = torch.cat([model.embed[keys], v], -1)
    wrote = layer.to_write(x, model.k(x)[:, None], v[:, None])
    later = {name: F.pad(y, (0, 0, 0, 7) if y.dim() == 4 else (0, 7)) for name, y in wrote.items()}
    q = layer.to_read(model.q(model.embed[keys])[:, None])
    q = torch.cat([torch.zeros_like(q), q], 2)
    o, _ = recurrent(q, **later, normalise=norm == 'attn', floor=layer.phi.floor)
    near(model(keys, values), o[:, 0, 7:], 1e-9)

def test_associations_of_softmax_are_attention():
    """No matrix can stand for it."""
    model, keys = schlag.Associative(5, 'softmax', '', '', d=8), torch.randint(5, (2, 7))
    values = F.one_hot(torch.randint(5, (2, 7)), 5).float()
    q, k = model.q(model.embed[keys]), model.k(torch.cat([model.embed[keys], values], -1))
    near(model(keys, values.argmax(-1)), (q @ k.mT / 8 ** .5).softmax(-1) @ values, 1e-6)
    with pytest.raises(ValueError, match='--rule=tova keeps keys and values'):
        FastWeights('tova', 8, 2, 4)

def test_bench_reads_keys_back_by_the_equation():
    k = torch.randn(2, 3, 5, 8)
    features, values, ones = F.elu(k) + 1, torch.eye(5).expand(2, 3, 5, 5), torch.ones(2, 3, 5)
    weights = features @ features.mT
    near(schlag.read_back(k, 'sum', 'elu', 'attn'), weights / weights.sum(-1, keepdim=True), 1e-6)
    near(schlag.read_back(k, 'softmax', '', ''), (k @ k.mT / 8 ** .5).softmax(-1), 1e-6)
    features = features / features.sum(-1, keepdim=True)
    _, S = recurrent(features, features, values, ones, ones)
    near(schlag.read_back(k, 'delta', 'elu', 'sum'), features @ S.mT, 1e-6)

def test_bench_a_carried_window_reads_on(text, tmp_path, in_process, changed):
    way = bench.SUITES['language'].ways['quick']
    changed('language', ways={'quick': way._replace(train=f'{way.train} --n_layer=1 --n_head=2 --n_embd=16')})
    row, = ran(tmp_path, 'language', f'--data={text}', '--steps=2', '--only=window carry')
    found = {cache: float(row[f'with {cache}']) for cache in (8, 128)}
    path, = (tmp_path / 'language').glob('window-*/ckpt.safetensors')
    val = torch.from_numpy(prepare.load_set(text)[1].astype('int64'))[None, :2048]
    for cache, carried in found.items():                        # all at once
        nats = costs(load(path, cache=cache)[0], val).mean().item()
        assert carried == pytest.approx(nats / math.log(2), rel=1e-4)
    assert found[8] != found[128]

def test_bench_bleu_is_that_of_what_sample_says_of_the_test_side(small_pairs, tmp_path, in_process, capsys):
    """By greedy and by beam search, of a model that was trained and of one that was converted."""
    package = pytest.importorskip('sacrebleu')
    run = 'translate', '--steps=30', '--only=elu,t2r converted'
    rows = np.fromfile(Path(small_pairs) / 'test.bin', np.uint8).reshape(-1, 2, 13)
    sources = [[str(token) for token in row if token < 10] for row in rows[:, 0, :6]]
    lines = put(tmp_path, 'lines', '\n'.join(map(' '.join, sources)))
    wanted = [' '.join(source[::-1]) for source in sources]
    for beam, more in (1, []), (4, ['--full', '--seeds=1']):
        found = [row for row in ran(tmp_path, *run, *more) if row['ours']]
        for row, folder in zip(found, ('elu-*', 't2r-converted-*'), strict=True):
            path, = (tmp_path / 'translate').glob(f'{folder}/ckpt.safetensors')
            assert row['sentences'] == '50'
            assert load(path)[0].config.source_rules[0] == 'softmax'
            said = written(capsys, f'--init={path}', f'--source=@{lines}', f'--beam={beam}')[0].splitlines()
            score = package.corpus_bleu(said, [wanted]).score
            assert float(row['ours']) == pytest.approx(score)

def test_bench_fine_tunes_a_pretrained_model(monkeypatch, tmp_path):
    monkeypatch.setattr(zhang, 'runs', lambda args, suite: (suite, harness.ways_of(args, suite)))
    monkeypatch.setattr(prepare, 'load_set', lambda name: (None, None, Data(row=8)))
    flags = dict(data='cola', init='M', dtype=torch.bfloat16)
    args = bench.Args(**flags, out=str(tmp_path))
    glue = dataclasses.replace(bench.SUITES['glue'])
    suite, ways = zhang.classifiers(args, glue)
    assert suite.figure == 'matthews' and list(ways) == ['cola'] and ways['cola'].data == 'cola'
    assert '--init=M ' in ways['cola'].train
    assert all('--lr=5e-5 --dtype=bfloat16' in how for how in (ways['cola'].train, ways['cola'].how))
    report.draw(args, glue, [dict(form='a', part='cola', ours=3, least=3, most=3)])
    assert sys.modules['matplotlib.pyplot'].gca().get_xlabel() == 'matthews, %'
    with pytest.raises(ValueError, match='choose from polarity, trec, cola'):
        zhang.classifiers(bench.Args(**{**flags, 'data': 'mnist'}), bench.SUITES['glue'])

def test_bench_transfers_maps_to_another_text(a_model, text, tmp_path, in_process):
    """A map alone learns, by Hedgehog's recipe, on the text that its form names; divergences are those of
    convert.json on the same rows."""
    path = a_model('--rule=softmax', '--pos=rope')
    other = put(tmp_path, 'other.txt', TEXT[::-1])
    run = f'--init={path}', '--steps=2', f'--data={other}', '--only=hedgehog,hedgehog other'
    rows = ran(tmp_path / 'out', 'transfer', *run)
    widths = itertools.product(('own', 'other'), ('16', '64', '256'))
    assert [(row['part'], row['tokens a row']) for row in rows[::2]] == [*widths]
    used = set()
    for found in tmp_path.glob('out/transfer/*/convert.json'):
        found = json.loads(found.read_text())
        args = found['args']
        assert [args[name] for name in ('loss', 'faster')] == ['next', 1]
        used.add(args['data'])
        val = torch.from_numpy(prepare.load_set(args['data'])[1].astype(int))
        begin = made_rows(None, val, Data(), 16, None).blocks(4, len(val) - (len(val) - 1) % 16)
        tokens = torch.stack([val[i:i + 16] for i in begin])
        wanted = [layer['KL to teacher'] for layer in found['layers'][-2:]]         # of the last stage
        models = load(path)[0].eval(), load(Path(args['out']) / 'ckpt.safetensors')[0].eval()
        assert zhang.divergence(*models, tokens) == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
        assert min(wanted) > 0
    assert used == {text, other}

def test_bench_looks_at_the_maps_of_an_encoder(a_model, tmp_path, in_process, capsys):
    """Labelled sentences are read one after the other, without padding. Those of the others have a label that the
    teacher does not know."""
    def sentences(name, power):
        lines = [f'{i % (power + 1)}\t{i ** power} and {i}\n' for i in range(300)]
        return put(tmp_path, name, ''.join(lines))
    path = a_model('--rule=softmax', '--causal=false', data=sentences('own.tsv', 2))
    rows = ran(tmp_path, 'monotone', f'--init={path}', '--steps=2', '--only=hedgehog,elu')
    forms = {row['form'] for row in rows if row['entropy']}
    assert forms == {'softmax', 'elu', 'hedgehog', 'hedgehog, distilled'}
    other = sentences('others.tsv', 3)
    only = '--only=hedgehog,hedgehog other,elu'
    rows = ran(tmp_path, 'transfer', f'--init={path}', '--steps=2', f'--data={other}', only)
    assert {row['form'] for row in rows} == {'hedgehog', 'elu'}
    refusal = refused(capsys, convert.main, f'--from={path}', f'--data={other}')
    assert f'--data={other}: 4 classes, but {path} knows 3' in refusal
    x, _, data, _ = harness.a_text(bench.Args(device='cpu'), path, load(path)[1], 32, 2, other)
    val = prepare.load_set(other, like=load(path)[1]['data'])[1].reshape(-1, 2, data.row)[:, 0]
    read = ''.join(vocabulary.decode(row[row != data.pad].tolist(), data) for row in val)
    assert vocabulary.decode(x[0].tolist(), data) == read[:32] and ' and ' in read[:32]

def test_bench_cache_counts_every_token_and_with_room_for_all_is_softmax(a_model, text, tmp_path):
    ckpt = a_model('--rule=softmax')
    rows = ran(tmp_path, 'cache', f'--init={ckpt}', '--lengths=5,16', '--only=tova,h2o,sink 1,cut')
    val = torch.from_numpy(prepare.load_set(text)[1].astype('int64'))
    pieces = torch.stack([val[i:i + 16] for i in torch.linspace(0, len(val) - 17, 16).long().tolist()])
    model = load(ckpt)[0]
    base = costs(model, pieces)
    cut = torch.cat([costs(model, pieces[:, i:i + 6]) for i in (0, 5, 10)], 1)
    found = {(row['form'], row['cached']): row for row in rows}
    assert len(found) == 1 + 2 * 4 and {*POLICIES} < {*bench.SUITES['cache'].lines}
    for (form, cached), row in found.items():
        if cached == '16':
            near(torch.tensor(float(row['perplexity'])), base.mean().exp(), 1e-5)
    tova = costs(oren.with_cache(model, 'tova', 5), pieces)            # the first line
    for names, gain in (('of full', 'low', 'high'), cut - base), (('of first', 'from', 'to'), cut - tova):
        gain = gain.mean(1)
        half = 1.96 * gain.std() / len(gain) ** .5
        wanted = torch.stack([gain.mean(), gain.mean() - half, gain.mean() + half]).exp()
        near(torch.tensor([float(found['cut', '5'][name]) for name in names]), wanted, 1e-5)

def test_bench_reads_far_with_few_rows_and_says_what_that_costs(a_model, text, tmp_path):
    """Each form is the model it names, as it is read from the first token on, and against rows of 16."""
    path, delta = a_model('--rule=softmax', '--pos=rope'), a_model('--rule=delta')
    run = '--lengths=70', f'--init={path}', '--only=softmax,tova compressed,sink', f'--beside={delta}'
    rows = ran(tmp_path, 'far', *run)
    tokens = torch.from_numpy(prepare.load_set(text)[1][:71].astype(int))[None]
    models = {'softmax': load(path)[0], f'delta: {delta}': load(delta)[0]}
    models['sink'] = load(path, rule='sink', cache=2, sinks=1)[0]
    models['tova compressed'] = load(path, rule='tova', cache=2, positions='compress')[0]
    assert {row['form'] for row in rows} == {'softmax, in rows', *models}
    for form, model in models.items():
        mine = [row for row in rows if row['form'] == form]
        for row, (start, end) in zip(mine, ((0, 16), (16, 32), (32, 64), (64, 70)), strict=True):
            assert int(row['position']) == end
            nats = costs(model, tokens[:, :end + 1])[0, start:].mean()
            assert float(row['nats']) == pytest.approx(nats.item(), rel=1e-5)
    base = math.exp(costs(models['softmax'], tokens[:, 16:33]).mean())
    assert float(rows[1]['perplexity']) == pytest.approx(base, rel=1e-5)
    more = float(rows[5]['perplexity']) - base                  # of two large numbers, in fp32
    assert float(rows[5]['more than in rows']) == pytest.approx(more, abs=1e-5 * base)

OF_WORDS = {        # a token, _ for a blank in front
    '_the': 'article', 'the': 'piece of a word', '_he': 'pronoun', 'he': 'piece of a word', '_over': 'preposition',
    '_quick': 'rest', '_25': 'digit', 'I': 'capital', 'a': 'piece of a word'}

@pytest.mark.parametrize('kind, mark', [('gpt2', '\u0120'), ('llama2', '\u2581')])
def test_bench_knows_words_from_pieces_of_words(kind, mark, monkeypatch):
    """Also where the tokenizer drops the first word's blank; bytes have no words."""
    meta = subwords(kind)
    ids = vocabulary.subwords(meta.json)
    for token, wanted in OF_WORDS.items():
        assert oren.kind_of_token(ids.token_to_id(token.replace('_', mark)), meta) == wanted
    for character, wanted in ('a', 'rest'), (' ', 'rest'), ('I', 'capital'), ('.', 'punctuation'):
        assert oren.kind_of_token(ord(character), Data('byte', 256)) == wanted
    for word, wanted in ('ing', '-ing'), ('walked', '-ed'):
        monkeypatch.setattr(vocabulary, 'decode', lambda tokens, _, word=word: word * len(tokens))
        assert oren.kind_of_token(0, meta) == wanted

class FromTheEnd(torch.nn.Module):
    """Answers a row of facts where the fact is among the last `near` tokens, else it says token 0."""
    def __init__(self, near, vocab):
        super().__init__()
        self.near, self.vocab = near, vocab

    def forward(self, x, state, at):
        seen = x if state is None else torch.cat([state['seen'], x], 1)
        said = torch.zeros(int(at.sum()), self.vocab)
        for i, (row, t) in enumerate(at.nonzero().tolist()):
            read = seen[row, :seen.shape[1] - x.shape[1] + t + 1]
            place = tasks.asked_fact(read[None].numpy())[0]
            said[i, read[place + 5] if len(read) - place <= self.near else 0] = 1
        return said, {'seen': seen}

def test_bench_answers_are_told_apart_by_the_place_of_the_fact(few_facts, monkeypatch):
    """Of a model of which it is known what it answers, read in segments, and of one with few rows."""
    folder = prepare.prepare('facts-256', file=few_facts)
    vocab = prepare.load_set(folder)[2].vocab_size
    model, few = FromTheEnd(128, vocab), Mock(side_effect=[FromTheEnd(128, vocab), FromTheEnd(192, vocab)])
    monkeypatch.setattr(oren, 'load', lambda *_: (model, {}))
    monkeypatch.setattr(oren, 'with_cache', few)
    half, most = (oren.right_answers_of('', rule, 4, folder, 100, 'out', 'cpu') for rule in ('softmax', 'tova'))
    assert [half[f'quarter {i}'] for i in range(4)] == [0, 0, 100, 100] and 35 < half['accuracy'] < 65
    assert [most[f'quarter {i}'] for i in range(4)] == [0, 100, 100, 100]
    assert few.call_args[0] == (model, 'tova', 64)

def test_bench_tracking_looks_beyond_the_rows_of_training():
    """At a model that knows parity up to 100 elements."""
    def knows(x):
        right = x.cumsum(1) % 2
        right[:, 100:] ^= 1
        return F.one_hot(right, 2).float(), None
    args = bench.Args(device='cpu', seeds=[0])
    found = beyond.products(args, {'data': 'group:Z2'}, knows, {})
    assert found['right'] == [100] * 100 + [0] * 156
    assert math.isclose(found['beyond'], 100 * 60 / 216, rel_tol=1e-6)

def test_a_model_that_talks_is_judged_beside_caches_of_as_many_bytes(tmp_path, few_words, monkeypatch):
    """By its rows of a text, and by facts."""
    a_talker(tmp_path / 'folder', max_position_embeddings=64)
    flags = f'--from={tmp_path}/folder', f'--data={few_words}', f'--out={tmp_path}/out'
    assert convert.main([*flags, *'--recipe=hybrid --cache=6 --row=32 --steps=2 --distil_steps=2 --controls=false '
                                  '--eval_rows=2 --overflow=sum:slots:4 --threads=1'.split()]) == 0
    path = f'{tmp_path}/out/ckpt.safetensors'
    table = ran(tmp_path, 'real', f'--init={tmp_path}/folder', f'--data={few_words}', f'--beside={path}',
                '--lengths=20')
    lines = [row for row in table if not row['part']]
    forms = [row['form'] for row in lines]
    assert forms[:2] == ['softmax', '6 cached, no matrix'] and forms[-3:] == [path, f'{path}, tova', f'{path}, h2o']
    assert float(lines[0]['recovered']) == 1 and float(lines[1]['recovered']) != 1
    assert int(lines[1]['state bytes']) < int(lines[-1]['state bytes'])
    facts = [row for row in table if row['part'] == 'facts']
    assert [row['facts'] for row in facts] == [n for n in ('4', '16') for _ in lines]
    assert {round(32 * float(row['accuracy']) / 100, 9) for row in facts} <= set(range(33))
    data = load(path)[1]['data']                                # one that knows the next token, one the token behind it
    monkeypatch.setattr(data_rows_py, 'predict', lambda ahead, x, *_: (F.one_hot(x[0].roll(-ahead), data.vocab_size), 0, 0))
    found = beyond.accuracy_on_facts(bench.Args(out=str(tmp_path), device='cpu'), data, {'right': 1, 'wrong': 2})
    assert [row['accuracy'] for row in found] == 2 * [100, 0]
    written = [json.loads(line)['messages'] for line in (tmp_path / 'facts-4.jsonl').read_text().splitlines()]
    for messages in written:
        told = messages[0]['content'].split('. ')
        for asked, answer in zip(messages[::2], messages[1::2]):
            assert answer['content'][:-1] in told and asked['content'].endswith(f"What is {answer['content'].split()[0]} number?")
    assert len(written) == 10 and len({str(messages) for messages in written}) == 10


# ---- 17. All scripts: refusals and flags; one line that says why, exit code 2, nothing half-written --------

DEFAULTS = {train: ['--data=TEXT', '--out=out', *TINY, '--steps=1'], sample: ['--init=SOFTMAX'],
            convert: ['--from=SOFTMAX', '--out=out'], bench: [], prepare: []}
ENCODER = '--causal=false --n_layer=1 --n_head=2 --n_embd=16 --data=THREES '
REFUSED = {     # script: flags: what is said of them, as a regular expression; one row for each refusal
    train: {
        '--ruel=delta': '--rule', '--rule=dleta': r'mean delta\?', '--steps=1.5': 'whole number',
        '--lr=nan': 'a number', '--dropout=1': r'at most 0\.99', '--carry=maybe': 'true or false',
        '--steps': '--steps: expected one', '--out=': '--out', '--device=tpu9': '--device',
        '--n_embd=33': 'n_head', '--n_embd=12 --n_head=4 --pos=rope': 'even',
        '--layers=delta,sum --rule=sum': '--rule=sum --layers=delta,sum: give one of them',
        '--layers=delta,window --sinks=2': 'no layer of delta,window uses it; leave it out, or take sink',
        '--rule=decay --norm=attn': 'denominator of its own', '--rule=kda --phi=elu --norm=attn': 'negative',
        '--rule=sum --phi=identity --norm=attn': 'zero or negative', '--norm=sum': 'sum of the features',
        '--phi=elu --norm=none': 'diverges', '--rule=h2o --overflow=sum': '--overflow',
        '--phi=nope': 'no such feature map; choose',
        '--phi=elu:3': 'takes nothing', '--phi=dpfp:16': r'1\.\.15', '--phi=hedgehog:x': 'forms',
        '--n_embd=2 --n_head=2': 'the one channel of a head', '--phi=favor:many': 'a whole number above 0',
        '--phi=exp:nan': 'a number above 0',
        '--resume': 'no such file', '--out=TEXT': 'File exists',
        '--carry --pos=learned': 'learned positions', '--carry --phi=favor --rule=sum': 'redrawn',
        '--carry --data=recall': 'nothing to do with each other', '--carry --batch_size=999': 'than a row',
        '--block_size=100000': 'longer text',
        '--data=stdlib --val_tokens=9': 'more --val_tokens',
        '--init=SOFTMAX --out=FOLDER': 'it holds the model',
        '--init=SOFTMAX --layers=sum,softmax': 'convert.py --from=.* --layers=sum,softmax',
        '--init=SOFTMAX --conv=0': '--conv=0: not what the weights of .* are for',
        '--init=SOFTMAX --data=CHARACTERS': 'not in the tokens wanted .*a set that can be made in',
        '--init=LEARNED --block_size=17': 'rows of 17 .* learned 16 positions; take a smaller --block_size',
        '--tokenizer=bpe:65537': '257 to 65,536',
        ENCODER + '--rule=tova': 'step by step', ENCODER + '--rule=delta --norm=attn': 'keys so far',
        '--causal=false --data=recall': 'lines 0<TAB>text', '--encoder=1 --data=recall': 'such as multi30k',
        '--encoder=1 --causal=false': '--causal is for .with classes., --encoder is for .with pairs.',
        '--published --pool=first': '--published: .*--pool is for .with classes',
        '--data=PAIRS --overflow=sum --rule=sink': 'classes or translations',
        ENCODER + '--writes=2': '--writes is for .several writes', '--writes=2 --pos=rope': 'rope',
        '--writes=2 --phi=elu --norm=attn': 'one key'},
    sample: {
        '--rule=tova --cache=0': 'at least 1', '--system=x': 'means nothing',
        '--model=x': r'mean --init\?', '--temp=1': r'mean --temperature\?',
        '--rule=sink --cache=4': '--sinks=4', '--rule=window --overflow=sum:elu': 'hedgehog',
        '--positions=compress': 'bounded cache',
        '--beam=2': '--beam means nothing', '--source=a': 'knows no pairs',
        '--init=TALKER --prompt=\u20ac': '\u20ac',
        '--tokens=0 --save_state=x.st': 'nothing is read yet',
        '--init=GATED_DELTA --rule=tova': 'no softmax layers, only 2 x gated_delta',
        '--rule=delta': 'python convert.py --from=.* --rule=delta',
        '--init=READER --prompt="1 2 3 4 1 2 3 4"': 'at most 7',
        '--init=READER --tokens=9': '--tokens means nothing', '--lines': '--lines is for classifiers',
        '--init=TRANSLATOR --source="1 2\n\n3"': 'text 2 has 0',
        '--init=TRANSLATOR --source=@EMPTY': 'there is no text', '--init=TRANSLATOR': 'there is no text to translate',
        '--init=TRANSLATOR --source=1 --save_state=x': '--save_state means nothing',
        '--html=x.html --samples=2': 'shows one text', '--init=READER': 'no text to classify',
        '--html=x.html --rule=tova --cache=8 --positions=compress': 'of window and sink alone',
        '--save_state=TEXT/x.st': 'File exists', '--html=FOLDER': 'a folder; give the name'},
    convert: {
        '--from=GATED_DELTA': 'has softmax layers', '--rule=delta --distil=ce': 'none: take mse',
        '--data=SCRAP': '--row', '--phi=t2r --fold': '--fold', '--from=WINDOW': 'no other cache',
        '--from=LINK --out=FOLDER': 'it holds the teacher', '--rule=softmax': 'would change',
        '--recipe=hybrid --cache=16': 'never leave',
        '--rule=tova --cache=8 --overflow=sum:slots': 'train with --rule=sink',
        '--keep=2': 'fewer than the 2 softmax', '--row=17': 'rows of 16',
        '--from=FOLDER': 'give the file ckpt', '--from=a/b/c': 'no such file or folder',
        '--from=TRANSLATOR --swap=decoder': 'choose from self', '--export=': '--export=: give a folder',
        '--export=x --steps=3': 'means nothing', '--export=FOLDER': 'holds the model of --from',
        '--eval_rows=1': 'at least 2'},
    bench: {
        'decode --only=sum': 'means nothing', '--seed=1 decode': 'decode: no such flag',
        'batch --lengths=3,4': 'takes one',
        'batch --budget=1 --lengths=8192': '--budget', 'language --data=recall': 'a task',
        'recall --only=elu,elo': 'choose from softmax',
        'capasity': r'mean capacity\?; choose from decode', 'decode --lengths=4k': '--lengths',
        'lra --data=nope': 'choose from listops',
        'cache --init=GATED_DELTA': 'softmax layers', 'monotone --init=TRANSLATOR': 'this suite wants a text',
        'transfer --init=ROPE --steps=2 --data=TEXT': 'give another text',
        'far --lengths=70 --init=ROPE --beside=TALKER': 'are not those of',
        'real --init=ROPE': '--beside= is missing',
        'far --lengths=70 --init=LEARNED': '16 positions'},
    prepare: {
        'mnist-9': "no data set or file 'mnist-9'", '': "no data set or file ''; choose from",
        'listops-63': '64 to 8,192',
        'mnist --file=WORDS': 'not the file of mnist: sha256 is',
        'recall --tokenizer=byte': 'can be ids', 'WORDS --file=x': 'means nothing',
        'facts-127 --file=WORDS': '127 tokens: facts needs 128 or more$',
        'facts-128 --file=FEW_WORDS': '4 different words',
        'group:Q8': "no .*'group'.* group:Z2, group:S3, group:A5",
        'WORDS --tokeniser=byte': r'mean --tokenizer\?'}}

@pytest.mark.parametrize('script, flags', [(script, flags) for script in REFUSED
                                           for flags in REFUSED[script]],
                         ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_what_cannot_be_is_refused_in_one_line(script, flags, places, tmp_path, monkeypatch, capsys):
    given = shlex.split(flags)
    named = {flag.split('=')[0] for flag in given}
    argv = [flag for flag in DEFAULTS[script] if flag.split('=')[0] not in named]
    argv = [filled(flag, places) for flag in argv + given]
    monkeypatch.chdir(tmp_path)
    if script is prepare:
        monkeypatch.setattr(prepare, 'FOLDER', str(tmp_path))
    assert re.search(REFUSED[script][flags], refused(capsys, script.main, *argv))
    assert not list(tmp_path.rglob('*' if script is train else '*.*'))

def test_memory_that_cannot_be_had_is_told_in_one_line(capsys):
    """2^50 entries: no machine has as many addresses. Another RuntimeError is a fault, and stays one."""
    for make in torch.empty, np.empty:
        assert 'take fewer or shorter rows' in refused(capsys, errors.script(make), 2 ** 50)
    for text in 'CUDA out of memory', "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes":
        assert text in refused(capsys, errors.script(Mock(side_effect=RuntimeError(text))))
    with pytest.raises(RuntimeError, match='shapes'):
        errors.script(Mock(side_effect=RuntimeError('shapes do not match')))([])

def test_a_package_that_is_missing_is_named_before_any_work(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)        # as if it were not installed
    for main, argv in (train.main, [f'--data={text}', f'--out={tmp_path}/no']), (prepare.main, [text]):
        assert 'pip install tokenizers' in refused(capsys, main, *argv, '--tokenizer=bpe:302')
    assert not os.listdir(tmp_path)

def test_help_lists_every_flag(capsys):
    """Once, the often needed ones first. And no number of a flag is without bounds."""
    for script, classes in (train, [train.Args, model_py.Config, *models.flags()]), (sample, [sample.Args]), (convert, [convert.Args]):
        with pytest.raises(SystemExit) as e:
            script.main(['--help'])
        assert not e.value.code
        listed = re.findall(r'^  --(\w+)', capsys.readouterr().out, re.M)
        often = script.OFTEN.split()
        assert listed[:len(often)] == often and len(listed) == len({*listed})
        fields = [field for c in classes for field in dataclasses.fields(c) if field.metadata.get('help')]
        assert {field.name.rstrip('_') for field in fields} <= {*listed}
        for field in fields:
            assert field.type not in (int, float) or all(map(math.isfinite, field.metadata['range']))

@pytest.mark.parametrize('run, stream, code', [
    ('data/prepare.py nowhere', '2>&-', 2), ('data/prepare.py --help', '>&-', 0),
    ('data/prepare.py SET', '2>&1 | true', 141)])
def test_closed_streams_end_in_silence(run, stream, code, characters):
    """A pipe's reader has gone before anything is written."""
    run = f'{sys.executable} {run}'.replace('SET', characters)
    command = f'{{ sleep .3; {run}; }} {stream}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(['bash', '-c', command], cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, '', '')


# ---- 18. The repository itself -----------------------------------------------------------------------------

ROOMS = [               # a file imports only from rows above its own; papers do not import each other
    'fastweight', 'caches', 'fast.caches fast.chunks fast.convolution', 'kernels',
    'common.errors common.files common.flags common.terminal', 'common.checks common.machine common.weights data.kinds',
    'memory', 'model',                                                          # the ground floor
    'data.vocabulary data.special', 'data.chat data.sources data.tasks data.rows', 'data.sets data.ways', 'data.prepare',
    'hub.families hub.texts', 'hub.folders',
    'models.slots models.encoder', 'models.hybrid', 'models.pretrained models.translator',
    'models.ablation models.writes models.classifier',
    'models.__init__', 'models.files',
    'runs.log runs.processes runs.answers runs.states runs.talk look.watch', 'runs.starts look.page',
    'train sample', 'students.begin students.fold students.judge students.lora students.rivals', 'students.stages', 'convert', 'papers.suites', 'papers.harness papers.report',
    'papers.schlag papers.kasai papers.mao papers.oren papers.zhang papers.beyond', 'bench', 'test_all']
UP = {'model': {'models.files'}}        # what kind of model a file holds
LAYER = {name: row for row, names in enumerate(ROOMS) for name in names.split()}
BANNED = set('eval exec __import__ torch.load np.load os.system pickle marshal shelve dill'.split())

@functools.cache
def sources():
    """Name and syntax tree of every file."""
    paths = [*HERE.glob('*.py'), *HERE.glob('[a-z]*/*.py')]
    return {'.'.join(path.relative_to(HERE).with_suffix('').parts): ast.parse(path.read_text()) for path in paths}

def imported(node):
    """What a statement imports, as dotted names."""
    if isinstance(node, ast.ImportFrom):
        return [f'{node.module}.{name.name}' for name in node.names]
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return []

def test_imports_only_point_down():
    """The ground floor names a room in one place. Only memory.pick_forms imports the fast forms, apart
    from what measures them."""
    for name, row in LAYER.items():
        used = {dotted for node in ast.walk(sources()[name]) for dotted in imported(node)}
        used = {other for dotted in used for other in (dotted, dotted.rpartition('.')[0], f'{dotted}.__init__')}
        upward = {other for other in used & LAYER.keys() if LAYER[other] >= row}
        assert upward == UP.get(name, set()), f'{name} imports {upward}'
        fast_ones = {other for other in used if other.partition('.')[0] in ('fast', 'kernels')}
        assert not fast_ones or name in ('kernels', 'memory', 'bench', 'test_all')
    missing = [name for name in sources().keys() - LAYER.keys() if not name.endswith('.__init__')]
    assert not missing, f'{missing}: give each a place in ROOMS'
    pick_forms, = (node for node in sources()['memory'].body if getattr(node, 'name', '') == 'pick_forms')
    assert {'kernels', 'fast.caches'} <= {dotted for node in ast.walk(pick_forms) for dotted in imported(node)}

def test_nothing_is_unpickled_or_evaluated():
    for name, tree in sources().items():
        for node in ast.walk(tree):
            used = [ast.unparse(node.func)] if isinstance(node, ast.Call) else imported(node)
            assert not BANNED & {*used, *(u.split('.')[0] for u in used)}, f'{name}: {used}'

def test_without_the_fast_forms_all_but_speed_works(text, tmp_path, monkeypatch, capsys):
    """Train, sample and convert where there is neither kernels.py nor fast/. One of them alone is not used."""
    for absent in 'kernels', 'fast':
        with monkeypatch.context() as only:
            only.setitem(sys.modules, absent, None)
            assert pick_forms() is model_py.PLAIN
    for absent in 'kernels', 'fast':
        monkeypatch.setitem(sys.modules, absent, None)
    delta, softmax = [trained(text, tmp_path / rule, f'--rule={rule}', '--pos=learned', steps=1)
                      for rule in ('gated_delta', 'softmax')]
    assert 'recurrence: chunk' in capsys.readouterr().out
    assert '40 written' in written(capsys, f'--init={delta}', '--tokens=40')[1]
    written(capsys, f'--init={softmax}', '--tokens=9', '--rule=tova', '--cache=4')
    assert convert.main([f'--from={softmax}', f'--out={tmp_path / "sum"}', '--controls=false', *SHORT]) == 0

def commands(text):
    """Script, suite and flags of every command in a text. In backquotes a line end is a blank."""
    parts = text.split('```')
    parts[::2] = [re.sub('`[^`]+`', lambda found: ' '.join(found[0].split()), part) for part in parts[::2]]
    suites = '|'.join(bench.SUITES)
    command = (rf'(?:python|torchrun --\S+) (train|sample|bench|convert)\.py(?: ({suites})\b)?'
               r'((?: (?:"[^"]*"|[^\s"`|&>#)])+)*)')
    return re.findall(command, '```'.join(parts))

def test_readme_is_true_of_the_code():
    """Its equation and tables are those of the code, its commands are accepted, the files it names exist."""
    text = (HERE / 'README.md').read_text()
    equation = re.search(r'    (D_t = .*\n)    (S_t = .*\n)    (o_t = .*\n)', fastweight.__doc__)
    assert ''.join(equation.groups()) in text
    results = (HERE / 'assets' / 'RESULTS.md').read_text()
    caches = re.search(r'\*\*Caches\.\*\*.*?\n\n', results, re.S)[0]
    for name, rule in RULES.items():
        assert f'`{name}`' in (text if rule.matrix else caches), name
    for name in (*FEATURE_MAPS, *NORMALISERS):
        assert re.search(rf'`{name}[`:]', results), name
    assert {*bench.SUITES} == {*TINY_SUITES}
    docs = [text, results, train.__doc__, sample.__doc__, bench.__doc__, convert.__doc__]
    found = commands('\n'.join(docs))
    assert {script for script, *_ in found} == {'train', 'sample', 'bench', 'convert'}
    classes = dict(train=(train.Args, model_py.Config, *models.flags()),
                   sample=(sample.Args, models.cache_flags(), *models.hybrid_flags()), bench=(bench.Args,),
                   convert=(convert.Args, convert.StudentFlags))
    for script, suite, flags in found:
        flags = shlex.split(flags)
        if suite:
            bench.settings([suite, *flags])             # which also refuses what means nothing to the suite
        for given, c in zip(flags_py.parse(flags, '', *classes[script]), classes[script]):
            c(**given)
    for words in re.findall(r'pytest[^`\n]* -k (\w+)', '\n'.join(docs)):
        assert any(words in name for name in globals()), words
    files_of_ours = [path.read_text() for path in HERE.glob('*.py')]
    # not those of another file: prepare.test_side
    named = re.findall(r'(?<!\.)\btest_[a-z]\w+[a-z0-9]\b', '\n'.join([*docs, *files_of_ours]))
    assert set(named) - {'test_all'} <= globals().keys()
    for path in re.findall(r'\]\(([\w./-]+)[)#]', text) + re.findall(r'\b[a-z]\w*\.py\b', text):
        assert (HERE / path).exists() or (HERE / 'data' / path).exists(), path

def test_claims_have_sources_verdicts_and_commands():
    results = (HERE / 'assets' / 'RESULTS.md').read_text()
    head = '| claim | source | paper | ours | verdict | command |\n|---|---|---|---|---|---|\n'
    for table in results.split(head)[1:]:
        for row in table.partition('\n\n')[0].splitlines():
            _, source, _, _, verdict, command = row.strip('| ').split(' | ')
            known = re.match(r'\*(agrees|similar|differs|undecided|not comparable|not run)\*', verdict)
            assert known and source.strip('-'), row
            assert re.search('`(python|pytest) [^`]+`', command) or known[1] == 'not run', row

def test_the_python_of_readme_and_how_to_runs(a_model, tmp_path, monkeypatch, capsys):
    shutil.copytree(Path(a_model()).parent, tmp_path / 'out')
    monkeypatch.chdir(tmp_path)
    text = ''.join((HERE / name).read_text() for name in ('README.md', 'assets/RESULTS.md'))
    blocks = re.findall('```\n((?:import|from) .*?)```', text, re.S)
    (tmp_path / 'example.py').write_text('\n'.join(blocks))
    found = runpy.run_path(tmp_path / 'example.py')
    assert len(found['new']) == len(found['both']) == 20 and capsys.readouterr().out
    assert len(found['hidden']) == 2 and len(blocks) == 2
    q, k, v, beta = (found[name] for name in ('q', 'k', 'v', 'beta'))
    near(found['o'], recurrent(q, l2(k), v, beta, beta)[0], 1e-5)

def test_every_exercise_has_an_answer():
    answers = (HERE / 'assets' / 'ANSWERS.md').read_text()
    tests = [name for name in globals() if name.startswith('test_exercise_')]
    assert re.findall(r'^`(test_exercise_\w+)`', answers, re.M) == tests
    assert 'assets/ANSWERS.md' in (HERE / 'README.md').read_text()
