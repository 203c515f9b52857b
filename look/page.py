"""sample.py --html: a page that shows what each memory is given while a text is read, for assets/memory.html
to compute with."""
import base64
import json
import os

import torch

from caches import nearer
from common import files
from common.errors import aside
from data.vocabulary import LOOK_BACK, added
from fastweight import FLOOR, RULES
from look.watch import through
from models.ablation import ByKeys, seen_by_k
from models.files import overflow_of
from models.slots import Slotted
from models.writes import spread

PAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'assets', 'memory.html')
ON_A_PAGE = 2048    # tokens at most
RECORDED = {'q': 'q', 'k': 'k', 'v': 'v', 'write': 'w', 'erase': 'e',      # ours: the page's name
            'log_f': 'log_f', 'log_z': 'log_z',     # logs, as 16 bits cannot tell a decay near 1 from 1
            'log_q': 'log_q', 'log_k': 'log_k', 'share': 'share', 'q_first': 'q_first'}


def cannot_be_shown(args, config):
    """For `refuse`: what is not on a page."""
    yield args.samples > 1 or args.load_state, (
        '--html shows one text from its beginning: leave --samples and --load_state out')
    positions = getattr(config, 'positions', 'true')
    yield positions != 'true' and config.keeps() - {'window', 'sink', None}, (
        f'--html shows --positions={positions} of window and sink alone: leave --html out, or --positions if '
        'you gave it')


@torch.no_grad()
def given_to_memories(model, tokens):
    """What the memory of each layer is given while a text is read, tokens (1, T) -> one dict per layer: its
    rule; q, k, v and the gates that it has, as `recurrent` takes them (1, H or G, n T, .), with n writes per
    token. A layer with a cache has `gone` (1, G, T) instead of v and gates, see Seen.evicted_at; with a
    matrix beside it `matrix`, such a dict again."""
    layers = []
    for seen in through(model, tokens):
        memory = seen.mixer.memory
        n = getattr(memory, 'n', 1)
        rule = model.config.rules[int(seen.layer.rpartition('.')[2])]
        layer = {'rule': rule, 'n': n, 'q': seen.q, 'normalise': False, 'floor': None}
        if memory.rule.keeps:
            layer |= given_to_cache(memory, seen)
            if getattr(memory, 'overflow', None) is not None:
                layer['matrix'] = given_to_overflow(memory, seen)
        else:
            layer |= given_to_matrix(memory, seen)
            layer['q'] = spread(layer['q'], n, n - 1)                   # read after the last write
        layers.append(layer)
    return layers


def given_to_matrix(memory, seen):
    """q, k, v, the gates, and how o is divided"""
    given = memory.to_write(seen.u, seen.k, seen.v)
    if isinstance(memory, Slotted):
        q, _ = memory.asked(seen.q, seen.k, given, {})
        given['q'] = memory.normaliser(q)
    else:
        given['q'] = memory.to_read(seen.q)
    given.update(normalise=memory.normalise, floor=memory.phi.floor)
    if isinstance(memory, ByKeys):
        before = seen_by_k(given['k'], given['k'].cumsum(2))
        erase = given['erase'] / before.clamp(min=FLOOR)
        given['erase'] = erase.where(before > FLOOR, 0)     # at first S is empty; 16 bits end early
        given['normalise'] = False
    return given


def given_to_cache(memory, seen):
    """q, k and `gone` of a cache. If it shortens positions, its window has the true ones, and the `first`
    tokens are asked by `q_first`, from nearer (fast.caches.scores_from_nearer)."""
    given = {'q': seen.q, 'k': seen.k, 'gone': seen.evicted_at()}
    if getattr(memory, 'rotate', None) is not None:
        own = torch.arange(seen.q.shape[2], device=seen.q.device)
        given |= {'q': memory.rope(seen.q, own), 'k': memory.rope(seen.k, own)}
        if memory.rule.keeps == 'sink':
            gap = (own - memory.cache).clamp(min=0) + 1         # from the last of these to the window
            near = nearer(own, gap, memory.rotate.keywords['positions'])
            given |= {'first': memory.sinks, 'q_first': memory.rope(seen.q, near)}
    return given


def given_to_overflow(memory, seen):
    """What the matrix beside a cache is given: at each step the token that the cache evicts, if there is one.
    `share` (1, H, T, 1) of what is read comes from the cache, the rest from the matrix."""
    matrix = memory.overflow
    _, log_cache, went, _ = memory.attend_and_evict(seen.q, seen.k, seen.v)
    q, went = memory.at_true_positions(seen.q, went)
    _, mass, _ = matrix.write_evicted(q, went, {})
    share = memory.cache_share(seen.u, log_cache, mass).mean(-1, keepdim=True)
    q, k, _, gates, _ = matrix.evicted_features(q, went, {})
    return {'n': 1, 'q': matrix.normaliser(q), 'k': matrix.normaliser(k), 'v': went['v'], **gates,
            'share': share, 'normalise': not matrix.rule.erases, 'floor': 1e-30}


def on_page(given):
    """What a memory was given, as JSON for assets/memory.html."""
    found = {name: given[name] for name in ('n', 'normalise', 'floor')}
    found['heads'] = given['q'].shape[1]
    for name in 'q', 'k':
        if (given[name] >= 0).all():                        # features may be e^40 or e^-40, not so in 16 bits
            given[f'log_{name}'] = given.pop(name).log()
    found['arrays'] = {name: as_base64(given[ours]) for ours, name in RECORDED.items() if ours in given}
    if 'first' in given:
        found['first'] = given['first']
    if 'gone' in given:
        found['gone'] = given['gone'][0].tolist()
    if 'matrix' in given:
        found['matrix'] = on_page(given['matrix'])
    return found


def as_base64(x):
    """x (1, H, T, d) -> d, and all numbers as 16-bit floats in base64."""
    data = x[0].detach().cpu().half().numpy().tobytes()
    return {'d': x.shape[-1], 'data': base64.b64encode(data).decode()}


def by_whom(read, written):
    """Two lists of tokens -> one of pairs: a token, and whether the model wrote it."""
    return [(token, False) for token in read] + [(token, True) for token in written]


def write_page(args, model, meta, heard):
    """Write a copy of assets/memory.html with this run inside. heard: pairs as of `by_whom`"""
    if len(heard) > ON_A_PAGE:
        aside(f'--html: a page shows {ON_A_PAGE:,} tokens, so the end is not on it')
    tokens, written = map(list, zip(*heard[:ON_A_PAGE]))
    layers = []
    row = torch.tensor([tokens], device=model.embed.weight.device)
    for given in given_to_memories(model, row):
        rule = given['rule']
        about = {'rule': rule, 'what': RULES[rule].about, 'overflow': overflow_of(model.config)}
        layers.append(about | on_page(given))
    texts = [added(tokens[max(0, i - LOOK_BACK):i], [token], meta['data']) for i, token in enumerate(tokens)]
    run = json.dumps({'about': args.init, 'tokens': texts, 'written': written, 'layers': layers})
    run = run.replace('<', '\\u003c')           # no text ends the script in which it stands
    with open(PAGE, encoding='utf-8') as f:
        page = f.read().replace('>null</script>', f'>{run}</script>', 1).encode()     # its empty recording
    files.write_file(args.html, [page])
    aside(f'{args.html}: {len(page) / 1e6:.1f} MB, open it in a browser')
