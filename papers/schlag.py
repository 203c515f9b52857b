"""Schlag 2021, Linear Transformers Are Secretly Fast Weight Programmers (arXiv:2102.11174).

Attention without softmax is a matrix of fast weights, to which each token adds v k^T. It holds no more
associations than keys have features. Remedies: more features (DPFP), and the delta rule, which first takes
away what the key finds.
- Figure 2 (`capacity`): keys that all differ; maps fail by their features, ELU + 1 at 60 keys. Section 4.1
  (`keys`) says why, here on the keys of a trained model.
- Figure 5 (`update`): values that change; only delta follows. Figures 3, 4: learning curves of both.
- Tables 2 to 5 (`language`), WikiText-103: delta is between sum and softmax. It needs no positions, and can
  carry its state over the whole text, where sum breaks down. Section 6.3: its speed (`train` in bench.py).
- Table 1: translation (`translate` in kasai.py).
"""
import itertools
import math
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from look.watch import through
from memory import pick_forms
from models import encoder
from papers.harness import bits, model_and_rows, once, over_seeds, runs
from papers.suites import DELTA, Panel, Suite, Way, column, from_nothing, only, over
from students import rivals


# ---- suites capacity, update: how much a matrix of fast weights holds. Section 6.1 -------------------------
GOOD = 0.001        # with at most this loss, associations count as held (as in the paper)
OVERFULL = 0.1      # above this loss, a matrix is not tried with more associations


class Associative(nn.Module):
    """Read pairs of keys and values, then answer with the value of each of S keys. d = 64. x = [embed(key);
    one-hot of value], k = W_k x, q = W_q embed(key), and v is the one-hot itself. There is no output layer:
    the answer is what the memory returns."""
    def __init__(self, S, rule, phi, norm, d=64):
        super().__init__()
        e = int(1.1 * 2 * S)
        self.embed = nn.Parameter(torch.randn(S, e))
        self.k = nn.Linear(e + S, d)
        self.q = nn.Linear(e, d)
        bound = d ** -0.5
        for w in self.k.weight, self.q.weight:
            nn.init.uniform_(w, -bound, bound)
        kind = encoder.WholeCache
        if rule != 'softmax':
            kind = partial(encoder.WholeWeights, n_embd=e + S, n_head=1, head_dim=d, phi=phi, norm=norm)
        self.memory = kind(rule)
        self.memory.forms = pick_forms()

    def forward(self, keys, values):
        """Write all keys, values (B, L), then read with all keys -> answers (B, L, S)"""
        v = F.one_hot(values, len(self.embed)).to(self.embed.dtype)
        x = torch.cat([self.embed[keys], v], -1)
        q = self.q(self.embed)[keys]
        state = self.memory.write_all(x, self.k(x)[:, None], v[:, None])
        return self.memory.read_all(q[:, None], state)[:, 0]


def associations(S, L, rows, replace, draw, device):
    """-> random keys, values: (rows, L), drawn with replacement, or (rows, S), each of S once, shuffled"""
    if replace:
        x = torch.randint(S, (2, rows, L), generator=draw)
    else:
        x = torch.rand(2, rows, S, generator=draw).argsort(-1)
    return x.to(device)


def miss(model, keys, values, by_key):
    """Mean of 1/2 |v - answer|^2 over keys; v is the last value of a key. by_key: each key counts once; else
    as often as it occurs, since the authors train on a random position"""
    same = keys[:, :, None] == keys[:, None, :]
    weight = (~same.triu(1).any(-1)).float()                    # 0 if the key comes again later
    if not by_key:
        weight = weight * same.sum(-1)
    o = model(keys, values)
    v = F.one_hot(values, o.shape[-1])
    loss = 0.5 * (o - v).square().sum(-1)
    return (loss * weight).sum() / weight.sum()


def associate(_, S, rule, phi, norm, replace, seed, most, device):
    """Train -> the lowest loss 1/2 |v - answer|^2 on new sequences; 0.5 means nothing was learned. As in the
    authors' code: Adam, 1e-3, an evaluation on 20 sequences every 100 steps, a stop at 0.001 or after 11
    evaluations without progress. Unlike theirs, a step has 4 sequences with all their keys as queries, not 32
    with one query each."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = Associative(S, rule, phi, norm).to(device)
    opt = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    looks = []                                                  # (step, loss)
    for step in range(1, most + 1):
        keys, values = associations(S, 2 * S, 4, replace, draw, device)
        miss(model, keys, values, by_key=False).backward()
        opt.step()
        opt.zero_grad()
        if step % 100 != 0 and step != most:
            continue
        model.eval()
        with torch.no_grad():           # always S pairs, even if it trains on 2 S, as in their code
            keys, values = associations(S, S, 20, replace, draw, device)
            looks.append([step, miss(model, keys, values, by_key=True).item()])
        model.train()
        losses = [loss for _, loss in looks]
        vain = len(losses) - 1 - losses.index(min(losses))
        if min(losses) <= GOOD or vain > 10 or not math.isfinite(losses[-1]):
            break
    return {'loss': min(losses), 'curve': looks}


def associative(args, suite):
    """Losses over the number of associations S, and learning curves for the smallest S: figure 3 and, with
    `capacity --lengths=600`, figure 4."""
    for form, (rule, phi, norm) in only(args, suite.lines).items():
        key = {'rule': rule, 'phi': phi, 'norm': norm, 'replace': suite.name == 'update', 'most': args.steps}
        theirs = suite.paper.get(form, {})
        fills = rule == 'delta' or suite.name == 'capacity'
        for S in args.lengths:
            results = [once(args, suite, form, associate, **key, S=S, seed=seed) for seed in args.seeds]
            if S == args.lengths[0]:
                yield from curve(form, results)
            row = {'form': form, 'S': S, **over_seeds(results, suite.figure), 'paper': theirs.get(S)}
            yield row
            if row['ours'] > OVERFULL and fills:
                break


def curve(form, results):
    """Rows of a learning curve: the median over seeds, up to the shortest run."""
    for points in zip(*column(results, 'curve')):               # the points of one step, per seed
        steps, losses = zip(*points)
        yield {'form': form, 'part': 'curve', 'step': steps[0], 'loss': statistics.median(losses)}


# ---- suite keys: how many keys of a trained model a matrix tells apart. Section 4.1 ------------------------
def read_back(k, rule, phi, norm):
    """Write keys k (B, H, S, d) with one-hot values and beta 1, then read with each -> (B, H, S, S)"""
    B, H, S, d = k.shape
    v = torch.eye(S, device=k.device).expand(B, H, S, S)
    if rule == 'softmax':
        return F.scaled_dot_product_attention(k, k, v)
    memory = encoder.WholeWeights(rule, 1, H, d, phi, norm).to(k.device)         # its gates are not used
    features = memory.normaliser(memory.phi(k, 'k'))
    erase = torch.ones_like(k[..., 0]) if memory.rule.erase else None
    written = encoder.write_all(features, v, erase=erase, normalise=memory.normalise)
    return memory.read_all(k, {'S': written})


@torch.inference_mode()
def keys_found(args, suite):
    """A matrix cannot tell more keys apart than it has features. Each head of a trained model writes the
    first S keys of a row, or all, and is asked for each. A key is found if its own value is the largest in
    the answer."""
    teacher, x, _ = model_and_rows(args, 4, 16)
    print('rows:', len(x))
    sizes = sorted({min(S, x.shape[1]) for S in args.lengths})
    cells = {}                                      # per line and S: (rows,) for each layer
    for seen in through(teacher, x):
        for (form, line), S in itertools.product(only(args, suite.lines).items(), sizes):
            rule, phi, norm = line
            answers = read_back(seen.k[:, :, :S].float(), rule, phi, norm)
            found = answers.argmax(-1) == torch.arange(S, device=x.device)
            cells.setdefault((form, S), []).append(100 * found.float().mean((1, 2)))
    for (form, S), of_layers in cells.items():
        found = torch.stack(of_layers).mean(0)
        half = 1.96 * found.std().item() / len(x) ** 0.5
        yield {'form': form, 'keys': S, 'found': found.mean().item(), 'to either side': half}


# ---- suite language ----------------------------------------------------------------------------------------
WINDOWS = 8, 64, 128        # cached tokens: 1, 8, 16 times the size of the state of delta elu


def windows(args, result, model, meta):
    """Bits per byte with windows of WINDOWS cached tokens, carried over the validation text like
    Transformer-XL's memory. As in the paper, the model was trained with a long window."""
    if result.get('rule') != 'window':
        return {}
    found = {}
    for cache in WINDOWS:
        shorter = rivals.cached_by(model, model.config.rules, cache=cache)
        found[f'with {cache}'] = bits(args, result, shorter, 512, carried=True)
    return found


# ---- the suites, and what the paper found ------------------------------------------------------------------
TO_600 = 20, 40, 60, 80, 100, 120, 140, 160, 200, 240, 260, 300, 340, 360, 400, 500, 600
TO_200 = 20, 40, 60, 80, 100, 120, 140, 160, 180, 200
OF_SIZES = 'elu', 'favor:32', 'dpfp:1', 'favor:64', 'dpfp:2', 'favor:128'        # d, d, 2d, 2d, 4d, 4d

ASSOCIATIONS = (
    Panel('S', 'ours', '1/2 |v - answer|^2; hollow: the paper'),
    Panel('step', 'loss', 'learning curves of the least S', 'curve'))
NUMBERED = '--conv=0 --pos=learned'
DELTA_ELU = f'{DELTA} --phi=elu'

SUITES = {suite.name: suite for suite in [
    Suite(
        'capacity', 'how many associations a matrix holds', associative, 'lengths seeds steps only',
        {'steps': 1000, 'lengths': '20,60,100,140', 'only': 'softmax,elu,dpfp:1,favor:64'},
        {'steps': 20000, 'lengths': ','.join(map(str, TO_600))},
        {'softmax': ('softmax', '', ''),            # rule, phi, norm
         **{phi: ('sum', phi, 'attn') for phi in (
             'elu', 'dpfp:1', 'dpfp:2', 'dpfp:3', 'favor:64', 'favor:128', 'favor:512')}},
        figure='loss', panels=ASSOCIATIONS,
        source="Schlag 2021, figure 2: least evaluation loss of one run, from the authors' logs",
        paper={
            'softmax': over(TO_600, .0006, .0003, .0001, 0, 0, 0, 0, 0, 0, .0004, 0, 0, 0, .0045, 0, .0089,
                            .03),
            'elu': over(TO_600, .0009, .0008, .0245, .108, .164, .232, .271, .301, .342, .363, .378, .397,
                        .409, .417, .422, .429, .451),
            'dpfp:1': over(TO_600, .0008, .0003, .0004, .0002, .0002, .0083, .051, .102, .173, .225, .27,
                           .286, .343, .336, .342, .386, .411),
            'dpfp:2': over(TO_600, .0003, .0006, .001, .0006, .0005, .0003, .0005, .0004, .0004, .0005, .0084,
                           .068, .129, .159, .164, .276, .323),
            'dpfp:3': over(TO_600, .0005, .0009, .0005, .0007, .0005, .0005, .0009, .0002, .0009, .0005,
                           .0004, .0003, .0001, .0034, .036, .169, .198),
            'favor:64': over(TO_600, .117, .274, .483, .5, .496, *[.5] * 12),
            'favor:128': over(TO_600, .074, .175, .484, .49, *[.5] * 13),
            'favor:512': over(TO_600, .024, .075, .407, .49, .5, .5, .492, *[.5] * 10)}),
    Suite(
        'update', 'associations whose values change: sum, gated, delta', associative,
        'lengths seeds steps only',
        {'steps': 1000, 'lengths': '20,60', 'only': 'sum,gated,delta,sum sum-norm'},
        {'steps': 20000, 'lengths': '20,40,60,80,100,140,200'},
        {'sum': ('sum', 'dpfp:1', 'attn'), 'gated': ('gated', 'dpfp:1', 'attn'),
         'delta': ('delta', 'dpfp:1', 'sum'), 'delta dpfp:2': ('delta', 'dpfp:2', 'sum'),
         'delta elu': ('delta', 'elu', 'sum'), 'delta l2': ('delta', 'dpfp:1', 'l2'),
         'delta favor:64': ('delta', 'favor:64', 'sum'), 'delta favor:128': ('delta', 'favor:128', 'sum'),
         'sum sum-norm': ('sum', 'dpfp:1', 'sum')},
        figure='loss', panels=ASSOCIATIONS,
        source="Schlag 2021, figure 5: least evaluation loss of one run, from the authors' logs",
        paper={
            'sum': over(TO_200, .097, .104, .103, .113, .111, .128, .155, .18, .201, .231),
            'delta': over(TO_200, .0008, .001, .0049, .0063, .0001, .0141, .0475, .104, .133, .171),
            'delta dpfp:2': over(TO_200, .001, .0005, .0005, .0008, .0854, .0007, .0003, .0004, .0004, .0008),
            'delta elu': over(TO_200, .0008, .0007, .0005, .094, .15, .215, .257, .276, .315, .342)}),
    Suite(
        'keys', 'how many keys of a softmax model a matrix tells apart, no training', keys_found,
        'init data lengths row only', {'lengths': '16,64,512'}, {'lengths': '16,32,64,128,256,512'},
        {'softmax': ('softmax', '', ''),            # rule, phi, norm
         **{f'sum {phi}': ('sum', phi, 'attn') for phi in OF_SIZES},
         **{f'delta {phi}': ('delta', phi, 'sum') for phi in OF_SIZES},
         **{f'delta {phi} l2': ('delta', phi, 'l2') for phi in ('silu', 'elu', 'dpfp:1', 'dpfp:2')}},
        panels=(Panel('keys', 'found', 'keys found, %'),),
        note='found: % of the keys whose own value is the largest in the answer, with a 95 % interval over '
             'rows',
        source='Schlag 2021, section 4.1: at most as many keys as features can be orthogonal'),
    Suite(
        'language', 'rules, positions, normalisation, carried states and windows', runs,
        'data seeds steps only',
        {'steps': 100, 'only': 'softmax,sum,delta elu,window carry,delta'}, {'steps': 2000},
        lines=from_nothing({                        # convolutions only where the name says so
            'softmax': f'--rule=softmax {NUMBERED}', 'softmax rope': '--rule=softmax --n_head=4 --conv=0',
            'sum': f'--rule=sum {NUMBERED}', 'sum hedgehog': f'--rule=sum --phi=hedgehog {NUMBERED}',
            'gated': f'--rule=gated --phi=elu {NUMBERED}', 'delta elu': f'{DELTA_ELU} --norm=sum {NUMBERED}',
            'sum favor:8': f'--rule=sum --phi=favor:8 {NUMBERED}',
            'delta favor:8': f'{DELTA} --phi=favor:8 --norm=sum {NUMBERED}',
            'sum dpfp:1': f'--rule=sum --phi=dpfp:1 {NUMBERED}',
            'delta dpfp:1': f'{DELTA} --phi=dpfp:1 --norm=sum {NUMBERED}',
            'sum favor:16': f'--rule=sum --phi=favor:16 {NUMBERED}',
            'delta favor:16': f'{DELTA} --phi=favor:16 --norm=sum {NUMBERED}',
            'sum dpfp:2': f'--rule=sum --phi=dpfp:2 {NUMBERED}',
            'delta dpfp:2': f'{DELTA} --phi=dpfp:2 --norm=sum {NUMBERED}',
            'delta elu no-out-norm': f'{DELTA_ELU} --norm=sum --out_norm=false {NUMBERED}',
            'delta elu attn-norm': f'{DELTA_ELU} --norm=attn {NUMBERED}',
            'delta favor:8 attn-norm': f'{DELTA} --phi=favor:8 --norm=attn {NUMBERED}',
            'sum no-positions': '--rule=sum --conv=0',
            'sum no-positions carry': '--rule=sum --conv=0 --carry',
            'sum no-norm carry': '--rule=sum --norm=none --conv=0 --carry',
            'delta elu no-positions': f'{DELTA_ELU} --norm=sum --conv=0',
            'delta elu no-positions attn-norm': f'{DELTA_ELU} --norm=attn --conv=0',
            'delta elu no-positions carry': f'{DELTA_ELU} --norm=sum --conv=0 --carry',
            'window carry': '--rule=window --cache=128 --conv=0 --carry', 'delta': f'{DELTA} --conv=0',
            'decay': '--rule=decay --conv=0', 'gated_delta': '--rule=gated_delta --beta_max=1 --conv=0',
            'delta convolutions': f'{DELTA} --conv=4',
            'delta convolutions carry': f'{DELTA} --conv=4 --carry'}),
        ways={'quick': Way('', '--val_tokens=16384', full=False),         # all on the same part of the text
              'full': Way('', '--val_tokens=262144', full=True)}, figure='bits per byte',
        beside=('bits per byte carried', *[f'with {cache}' for cache in WINDOWS]), from_checkpoint=windows,
        note='bits per byte after {steps} steps of 4 rows of 128; carried: with the state handed on; with 8, '
             '64, 128: tokens of a window that is carried',
        source='Schlag 2021, tables 2 to 5: test perplexity of WikiText-103, small models (40 M parameters) '
               'and medium ones (90 M); small ones with attn-norm from lines that are not printed; attn-norm '
               "without positions has 32.2 in their log; window: Transformer-XL of 1, 8, 16 times delta's "
               'state; sum with a carried state is above 260; delta without sum normalisation diverges',
        paper={'softmax': 'small 34.1, medium 29.6', 'sum': 'small 38.3, medium 33.0',
               'delta elu': 'small 35.5, medium 31.5', 'sum favor:8': 'small 39.6, medium 33.8',
               'delta favor:8': 'small 37.2, medium 31.8', 'sum dpfp:1': 'small 38.8',
               'delta dpfp:1': 'small 35.0', 'sum favor:16': 'small 38.8', 'delta favor:16': 'small 37.0',
               'delta elu attn-norm': 'small 37.2, medium 32.1',
               'delta favor:8 attn-norm': 'small 37.5, medium 32.4',
               'delta elu no-positions': 'medium 31.1', 'delta elu no-positions attn-norm': 'medium 31.2',
               'delta elu no-positions carry': 'medium 29.4',
               'window carry': 'medium, with 8: 65.5, 64: 30.1, 128: 27.4'})]}
