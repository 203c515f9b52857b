"""Fold: T2R's feature map is linear before its relu, so it can be a part of W_q and W_k. Kasai 2021,
arXiv:2103.13076.

    can_fold(model)             # ValueError if something stands between W_q and the map
    folded = fold(model)        # the same function, with phi = relu and wider queries and keys
"""
import torch

import models


def can_fold(model):
    """-> the features per head. ValueError unless a T2R map directly follows W_q and W_k in every layer
    without softmax."""
    c = model.config
    folding = [mixer.memory for mixer in model.mixers().values() if mixer.memory.rule.keeps != 'all']
    is_t2r = c.phi.partition(':')[0] in ('t2r', 't2r-scaled')
    between = c.has_rope() or getattr(c, 'qk_norm', False) or getattr(c, 'qkv_conv', 0)
    if not is_t2r or between or {memory.rule.keeps for memory in folding} != {None}:
        raise ValueError('--fold needs --phi=t2r where softmax was, and no rope, norm or convolution between '
                         'W_q and phi')
    return folding[0].phi.feature_dim


def composed(phi, linear):
    """A linear layer followed by T2R's W x + b, as one linear layer. phi has W (G, m, d) and b (G, 1, m).
    linear (H d, n_embd + 1), with its bias as the last column  ->  (H m, n_embd + 1)"""
    heads = linear.unflatten(0, (-1, phi.head_dim))
    product = phi.of_heads(phi.weight, heads[None]) @ heads
    product[..., -1:] += phi.of_heads(phi.bias, heads[None]).mT
    return product.flatten(0, 1)


@torch.no_grad()
def fold(model):
    """Multiply T2R's map phi(x) = relu(W x + b) into the projections -> a model with phi = relu. The features
    of q are relu((W W_q) x + (W b_q + b)), those of k likewise. This is exact. A head then has m channels of
    q and k, its features, and d of v. Kasai 2021. t2r-scaled reads q / sqrt(d), so we also scale
    W_q and b_q by d^(-1/2)."""
    m = can_fold(model)
    tensors = model.state_dict()
    for name, mixer in model.mixers().items():
        if mixer.memory.rule.keeps:
            continue
        phi = mixer.memory.phi
        W = mixer.qkv.weight
        bias = mixer.qkv.bias
        if bias is None:
            bias = W.new_zeros(len(W))
        q, k, v = torch.cat([W, bias[:, None]], 1).split(mixer.sizes)
        if phi.scaled:
            q = q * phi.head_dim ** -0.5
        linear = torch.cat([composed(phi, q), composed(phi, k), v])
        tensors[f'{name}.qkv.weight'] = linear[:, :-1]
        tensors[f'{name}.qkv.bias'] = linear[:, -1]
    folded = models.changed(model, phi='relu', bias=True, key_dim=m).to(model.embed.weight).eval()
    for name, x in folded.state_dict().items():             # shares memory with the parameters
        if name.endswith('.bias'):
            x.zero_()
    folded.load_state_dict(tensors, strict=False)
    return folded
