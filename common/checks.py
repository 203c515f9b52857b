"""What cannot be, or would have no effect: each in one sentence for the user. Nothing here computes anything.

    refuse(contradictions(config))      # ValueError with the first sentence that is true

Each function yields pairs for `refuse`: whether the mistake was made, and the sentence.
"""
import dataclasses

from fastweight import RULES


def contradictions(c):
    """Of a Config: what would fail far from its cause, be ignored, or be silently wrong."""
    for rule in c.every_rule():
        yield rule not in RULES, (
            f'--layers={c.layers}: {rule!r} is no rule; choose from {", ".join(RULES)}')
    d = c.width_of_head()
    yield c.has_rope() and d % 2, (
        f'--n_embd={c.n_embd} --n_head={c.n_head}: rope rotates pairs, so it takes an even number '
        f'of channels of a head, not {d}; or --pos=none')
    norms = {c.norm or RULES[rule].norm for rule in c.every_rule() if RULES[rule].matrix}
    yield c.out_norm and d == 1 and norms - {'attn'}, (
        f'--n_embd={c.n_embd} --n_head={c.n_head}: LayerNorm makes the one channel of a head 0; '
        'take fewer heads, or --out_norm=false')
    yield c.layers.count(',') >= c.n_layer, (
        f'--layers={c.layers}: more rules than --n_layer={c.n_layer} layers')
    kept = [RULES[rule] for rule in c.rules if RULES[rule].bounded]
    yield kept and c.cache < c.fewest_cached(), (
        '--cache=0: give at least 1, or --overflow takes them all')
    yield any(rule.keeps_first for rule in kept) and c.sinks >= max(1, c.cache), (
        f'--sinks={c.sinks}: at most {max(0, c.cache - 1)} with --cache={c.cache}, or no new '
        'token is kept')


def mistakes_together(name, phi, norm):
    """A rule, map (a module) and normaliser that do not go together."""
    rule = RULES[name]
    mean = norm == 'attn'
    yield not rule.matrix, f'--rule={name} keeps keys and values, no matrix: that is memory.Cache'
    yield rule.write in ('1-f', 'dt') and rule.f not in ('head', 'fixed'), (
        f'--rule={name}: f is along the keys, w along the values: write={rule.write} needs f=head')
    yield mean and (rule.z or rule.write == 'channel'), (
        f'--norm=attn with --rule={name}: each value channel is apart and needs a denominator of its own')
    yield mean and rule.erases, (
        f'--norm=attn with --rule={name}: erasing makes weights negative, so their sum n.q may be 0 or '
        'below; use --norm=l2')
    yield mean and not phi.mean, (
        '--norm=attn divides by n.q, which this map can make zero or negative: use a map >= 0, as --phi=elu, '
        'or --norm=l2')
    yield norm == 'sum' and not phi.positive, (
        f'--norm={norm} divides by the sum of the features, here maybe zero or negative: use --norm=l2')
    yield norm == 'none' and rule.erases, (
        f'--rule={name} with --norm=none diverges: the delta rule needs normalised keys, --norm=l2 or sum')


def idle(given, config):
    """Flags that were given but have no effect on this model. What a file says is ignored."""
    yield given.get('layers') and 'rule' in given, (
        f'--rule={given.get("rule")} --layers={given.get("layers")}: give one of them')
    rules = dict.fromkeys(config.every_rule())
    for field in dataclasses.fields(config):
        value = given.get(field.name, '')           # an empty text takes back what a model or recipe has
        yield value != '' and not config.uses(field), (
            f'--{field.name}={value}: no layer of {",".join(rules)} uses it; leave it out, or take '
            f'{", ".join(config.users(field))}')
