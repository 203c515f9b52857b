"""Kinds of models, a file each, and which of them is asked for: by flags, by data, by a file.

    GPT               model.py: a decoder with fast weights or a cache
    slots.py          fast weights as hybrids have them: shared by heads, with the map slots
    hybrid.py         a matrix beside a cache; cached positions brought nearer
    pretrained.py     the layers of Llama, Qwen, Olmo and of the rules' papers: built on hybrid.py
    writes.py         several writes per token (DeltaProduct), and
    ablation.py       delta divided by the sum of keys (Schlag 2021): both built on pretrained.py
    classifier.py     a decoder that says classes (--causal=true), built on pretrained.py
    encoder.py        each step reads the whole text: classifiers, BERT, ViT
    translator.py     an encoder, and a decoder that reads what it has written
    files.py          models in files: save, load

A file of a kind is read after model.py, and what it is built on. A new kind is a file, a line in KINDS, three
in `named`, and a word in ROOMS of test_all.py. Its own flags (fields of its Config that have a help, and that
no kind above has) appear in --help under its title, and any of them asks for it, whatever its value.
"""
import dataclasses

from common.flags import by_layer, flag, subset
from fastweight import RULES

KINDS = {           # in the order in which they are built on each other: title of their flags in --help
    'GPT': '', 'Hybrid': 'a matrix beside a cache', 'Pretrained': 'layers as in papers and on the hub',
    'DividedByKeys': '', 'ManyWrites': 'several writes per token', 'Encoder': 'with classes',
    'Translator': 'with pairs', 'Classifier': ''}


def named(name):
    """The class of a model, by its name in a checkpoint. Only what it needs is imported."""
    if name == 'GPT':
        from model import GPT
        return GPT
    if name == 'Hybrid':
        from models.hybrid import Hybrid
        return Hybrid
    if name == 'Pretrained':
        from models.pretrained import Pretrained
        return Pretrained
    if name == 'DividedByKeys':
        from models.ablation import DividedByKeys
        return DividedByKeys
    if name == 'ManyWrites':
        from models.writes import ManyWrites
        return ManyWrites
    if name == 'Classifier':
        from models.classifier import Classifier
        return Classifier
    if name == 'Encoder':
        from models.encoder import Encoder
        return Encoder
    if name == 'Translator':
        from models.translator import Translator
        return Translator
    raise ValueError(f'{name}: a model of another version, which is not known here')


def fields_of(cls):
    """The names of the fields of this class's Config"""
    return {field.name for field in dataclasses.fields(cls.config_class)}


def own_flags(name):
    """The flags that this kind has, and those before it have not"""
    before = set()
    for kind in KINDS:
        cls = named(kind)
        if kind == name:
            return [field.name for field in dataclasses.fields(cls.config_class)
                    if field.name not in before and field.metadata.get('help')]
        before |= fields_of(cls)


def flags():
    """For `parse`: the flags of all kinds but the GPT, a dataclass for each kind"""
    for name, title in KINDS.items():
        own = own_flags(name)
        if own and name != 'GPT':
            group = subset(named(name).config_class, *own)
            group.title = title
            yield group


def cache_flags():
    """What a trained model can change: softmax keeps its weights with any policy."""
    rule = flag('', 'what softmax layers become: h2o, tova, sink, window keep --cache tokens; a matrix needs '
                    'convert.py', RULES)
    return subset(named('GPT').config_class, 'cache', 'sinks', rule=rule)


def hybrid_flags():
    """For `parse`: what else a model with a cache can change"""
    return [subset(named('Hybrid').config_class, 'overflow', 'positions')]


def merged(parts):
    """Dicts of flags, one of each kind -> one of all"""
    return {name: value for part in parts for name, value in part.items()}


def asked_for(given, like=None, told=''):
    """The first class that has all these flags of a model, a dict, and what they ask for. like: a class on
    which it has to be built. ValueError, with what each flag is for, if there is none. told: begins it"""
    names = [*KINDS]                        # from which on a kind can do it, where that depends on a value
    rules = by_layer(given.get('layers', ''), given.get('rule', 'delta'), 64)
    least = 'GPT'
    if given.get('phi', '').partition(':')[0] == 'slots':
        least = 'Hybrid'
    if given.get('norm') == 'attn' and any(RULES[rule].erases for rule in rules if rule in RULES):
        least = 'DividedByKeys'
    if given.get('causal'):
        least = 'Classifier'
    for name in names[names.index(least):]:
        cls = named(name)
        if given.keys() <= fields_of(cls) and issubclass(cls, like or named('GPT')):
            return cls
    owners = [f'--{own} is for {title or name!r}' for name, title in KINDS.items() if name != 'GPT'
              for own in own_flags(name) if own in given]
    begins = f'{told}: ' if told else ''
    raise ValueError(f'{begins}{", ".join(owners)}: no model has all of that; leave one out '
                     '(--help lists them)')


def for_data(cls, data):
    """The class for such data, a data.kinds.Data, if no other is asked for than the GPT: pairs are for a
    translator, classes for an encoder."""
    if cls is not named('GPT'):
        return cls
    if data.source:
        return named('Translator')
    if data.classes:
        return named('Encoder')
    return cls


def changed(like, **flags):
    """A new model like this one, with other flags: of its class, or of one built on it that has them"""
    given = {**dataclasses.asdict(like.config), **flags}
    cls = asked_for(given, type(like))
    return cls(cls.config_class(**given))
