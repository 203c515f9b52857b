"""What a student is compared with: models that need no training, or had another.

    cached_by(model, rules, cache=64)           the same weights, with rules that cache few tokens
    limited_caches(teacher, student)            the teacher, with caches of as many bytes as the student keeps
    under_policies(name, student)               the student, with policies that it was not trained with
    models_beside(paths, of, data, device)      other models of the same tokens, those of --beside
    rivals_of(teacher, student, beside)         all that stands in a student's table before it

Softmax attention keeps its weights with any policy that evicts (caches.py), so most of these cost nothing.
"""
import torch

import models
from fastweight import RULES
from model import load
from models.files import Undrawn, fill, overflow_of

COMPARED = 'sink', 'tova', 'h2o'                        # policies to compare with


def can_become_an_rnn(rules):
    """Whether there is softmax among these rules, and beside it only rules with a matrix."""
    keeps = {RULES[rule].keeps for rule in rules}
    return {'all'} <= keeps <= {'all', None}


def cached_by(model, rules, **changes):
    """The same weights with other rules, which cache, and other flags of Config"""
    with Undrawn():
        other = models.changed(model, layers=','.join(rules), **changes)
    fill(other, model.state_dict(), 'other weights', assign=True)
    return other.to(model.embed.weight.device).eval()       # buffers, too


def limited_caches(teacher, student):
    """The teacher with limited caches -> names, models: the cache that stands beside the student's matrix
    alone, and caches of as many bytes as all that the student keeps."""
    c = student.config
    if student.task != 'complete':
        return
    near = {}
    if getattr(c, 'positions', 'true') != 'true':
        near['positions'] = c.positions
    new = [rule != before for rule, before in zip(c.rules, teacher.config.rules)]
    # the tokens that a cache has room for, in the bytes of the largest swapped layer
    state = student.read(torch.zeros(1, 1, dtype=torch.long, device=student.embed.weight.device))
    kept = [sum(x.nbytes for x in layer['mixer'].values()) for layer in state['layers']]
    heads = getattr(c, 'n_kv_head', 0) or c.n_head
    a_token = heads * (2 * 4 * c.width_of_head() + 12)      # key, value, position, sum of weights
    size = max((bytes for bytes, swapped in zip(kept, new) if swapped), default=0) // a_token
    # the cache without its matrix, then each policy
    if overflow_of(c) and c.cache:
        alone = cached_by(teacher, c.rules, cache=c.cache, sinks=c.sinks, **near)
        yield f'{c.cache} cached, no matrix', alone
    if size == 0:
        return
    for policy in COMPARED:
        rules = [policy if swapped else rule for rule, swapped in zip(c.rules, new)]
        if (size, rules) != (c.cache, c.rules):
            given = near if policy == 'sink' else {}        # others would be read step by step
            model = cached_by(teacher, rules, cache=size, sinks=min(4, size - 1), **given)
            yield f'{size} cached by {policy}: as many bytes', model


def under_policies(name, student):
    """A student by its name and, if its cache is limited, under the policies that it was not trained with, as
    'NAME, h2o' -> {name: model}"""
    rules = student.config.rules
    found = {name: student}
    for policy in COMPARED:
        others = [policy if RULES[rule].bounded else rule for rule in rules]
        if others != rules:
            found[f'{name}, {policy}'] = cached_by(student, others)
    return found


def models_beside(paths, of, data, device):
    """Yield path and model of each of --beside. ValueError if its tokens are not those of `data`, the tokens
    of the model in `of`."""
    for source in filter(None, paths.split(',')):
        model, meta = load(source, device)
        if not data.has_tokens_of(meta['data']):
            tokens = meta['data'].summary()
            raise ValueError(f'--beside={source}: its tokens ({tokens}) are not those of {of}; train both '
                             'on the same data')
        yield source, model


def rivals_of(teacher, student, beside):
    """Yield name and model of all that the student is compared with. beside: what `models_beside` yields"""
    yield from limited_caches(teacher, student)
    for source, model in beside:
        yield from under_policies(source, model).items()
