"""How new parameters begin: from the teacher's attention on some text, so that less is left to learn.

    remember(seen, gates, beside_cache)     the gates: a head remembers as far back as its teacher looks
    balance(seen, twin)                     beside a cache: the weight of the keys that only the matrix has

`seen` is what look/watch.py yields of a layer of the teacher. convert.begin_as goes through all layers.
"""
import math

import torch
import torch.nn.functional as F

from memory import bias_of

RIDGE = 1e-2                                            # share of the mean square, see `balance`


def remember(seen, gates, beside_cache):
    """Set the gates so that the matrix remembers as far back as the teacher's head looks. A channel with
    f = 1 - 1/tau remembers about tau steps. The n channels of a head get different tau: for channel i it is
    the distance within which a share (i + 1/2) / n of the head's attention falls. Beside a cache, tau is the
    length of a row, so that a long text leaves states like those of training. W, which makes gates depend on
    the token, begins as 0. seen: what `through` yields for the teacher"""
    biases = [getattr(gates, name) for name in ('bias_f', 'bias_z') if hasattr(gates, name)]    # (H, 1, n)
    if not biases:
        return
    _, H, T, _ = seen.q.shape
    weight = seen.q.new_zeros(H, T)                         # attention per distance
    if beside_cache:
        weight[:, -1] = 1
    else:
        a = seen.weights(seen.mixer)                        # (B, H, T, T)
        if seen.real is not None:
            a = a * seen.real[:, None, :, None]
        t = torch.arange(T, device=a.device)
        distance = (t[:, None] - t).abs()
        weight.index_add_(1, distance.flatten(), a.sum(0).flatten(1))
    weight = weight.unflatten(0, (len(biases[0]), -1)).sum(1)           # heads that share a matrix: (G, T)
    nearer = weight.cumsum(1) / weight.sum(1, keepdim=True).clamp(min=1e-30)
    for bias in biases:
        n = bias.shape[-1]
        wanted = (torch.arange(n, device=weight.device) + 0.5) / n
        tau = torch.searchsorted(nearer, wanted.expand(len(nearer), n).contiguous()) + 1
        bias.copy_(bias_of(tau.clamp(min=1.2), gates.rule.rate or 1.0)[:, None])
    gates.proj.weight.zero_()


def balance(seen, twin):
    """Give the matrix beside a cache the weight that the teacher gives to the keys in it: the sum of their
    e^(q.k_s / sqrt(d)). The matrix itself computes another mass for them. log_mass, which is linear in the
    layer's input, begins as the least-squares fit to the log of the ratio, with a small penalty (ridge).
    twin: the student's layer, whose cache evicts by position; seen: as for `remember`"""
    memory = twin.memory
    q, k = seen.seen_by(twin)
    _, _, went, _ = memory.attend_and_evict(q, k, seen.v)
    pos = went['pos'][0, 0]                                 # per step, what goes; -1: nothing. Heads agree
    in_matrix = F.one_hot(pos + 1, len(pos) + 1)[:, 1:].cumsum(0) > 0           # (T, T): key s at step t
    scores = seen.scores.masked_fill(~in_matrix, -math.inf)
    wanted = scores.logsumexp(-1)                           # (B, H, T)
    _, mass, _ = memory.overflow.write_evicted(*memory.at_true_positions(q, went), {})
    steps = in_matrix.any(-1)                               # those with keys in the matrix
    log_mass = mass.mean(-1)[:, :, steps].clamp(min=1e-30).log()
    ratio = (wanted[:, :, steps] - log_mass).mT.flatten(0, 1)           # (steps, H)
    x = seen.u[:, steps].flatten(0, 1)                      # (steps, n_embd)
    middle = x.mean(0)
    x = x - middle
    squares = x.mT @ x
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    W = torch.linalg.solve(squares, x.mT @ ratio)           # (n_embd, H)
    memory.log_mass.weight.copy_(W.mT)
    memory.log_mass.bias.copy_(ratio.mean(0) - middle @ W)
